"""The story of a run, folded from its peers' event logs: `status`, the live table and the demo show it.

Events in, facts out: a figure without an event stays None.
"""

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ...peer.base.plain import SHORT_ID, plain_text
from ...peer.base.transport import PeerId, Rung
from ...peer.log.telemetry import Event

ROOT_DIGITS = 8
"""Hex digits of a state root that a person compares by eye: a chance of 1 in 4 billion to miss a difference."""
RESTORED_START = "begins with the state of the run's start that this computer's disk holds"
"""The text of a restored state of round 0: it continues no round."""
PACE_ROUNDS = 20
"""Rounds from which the time that is left follows: enough for a mean, few enough to follow who comes and goes."""
KEEPER_DEVICE = "keeper"
"""What a keeper states in place of the device that it trains on."""


def count_of(things: object, name: str) -> str:
    """Return how many there are in an event's list, in words: 1 peer, 3 peers."""
    count = len(things) if isinstance(things, (list, tuple)) else 0
    return f"{count} {name}{'' if count == 1 else 's'}"


@dataclass(frozen=True, slots=True)
class RoundSeen:
    """One finished round as one peer saw it; `sent` and `received` are its bytes, those of void attempts included."""

    round: int
    time: float
    """Its end in Unix seconds."""
    roster: tuple[PeerId, ...]
    cut: tuple[PeerId, ...]
    root: str
    loss: float | None
    seconds: float
    sent: int
    received: int


@dataclass(slots=True)
class PeerStory:
    """One peer's story, from its own events."""

    name: str
    peer_id: PeerId
    state: str = "starting"
    device: str = ""
    step: int = 0
    round: int | None = None
    """The last round whose result it holds."""
    tokens: int = 0
    """The tokens of its finished inner phases."""
    tokens_per_s: float | None = None
    loss: float | None = None
    waits_for: str = ""
    """Why it does not train now, or rests between its steps."""
    sent: int = 0
    received: int = 0
    root: str = ""
    taking: tuple[int, int, int] | None = None
    """During a state transfer: the bytes received, all bytes, and the number of its providers."""
    rung: Rung | None = None
    """The worst rung of a connection to a neighbour: the one that a user may want to improve."""
    called: str = ""
    """What it calls itself, as `--name` of `join`; made plain."""
    num_rounds: int = 0
    """All rounds of the run; 0 where it is not known."""
    peers_here: int = 0
    """The peers that train in the run now, itself among them; 0 before it trains."""
    awaits: str = ""
    """Why no round can be tried, or no step made, at the moment."""
    awaits_since: float = 0.0
    """When that began, in Unix seconds."""
    seen_at: float = 0.0
    """The time of the last event."""
    work: str = ""
    """What became of its contribution to the last round, in words; empty for a keeper."""
    counted: int = 0
    """The rounds since its start in which its contribution counted."""
    credit: int = 0
    """The tokens of these contributions."""
    rounds: dict[int, RoundSeen] = field(default_factory=dict)
    voids: list[tuple[int, tuple[PeerId, ...], str]] = field(default_factory=list)
    """(round, roster, reason) of each attempt that ended without effect."""
    _phase_tokens: int = 0
    _spent: tuple[int, int] = (0, 0)
    """Bytes sent and received in void attempts at the current round."""
    _flaw: tuple[int, str] = (0, "")
    """(round, reason) why the run's rule gave its last contribution no weight."""

    @property
    def seconds_left(self) -> float | None:
        """How long the rest of the run takes at the pace of the last rounds; None before three of them."""
        times = [seen.time for seen in self.rounds.values()][-PACE_ROUNDS:]
        if self.round is None or not self.num_rounds or len(times) < 3:
            return None
        return max(0, self.num_rounds - self.round) * (times[-1] - times[0]) / (len(times) - 1)

    @property
    def keeps(self) -> bool:
        """True if this peer is a keeper: it votes and trains nothing."""
        return self.device == KEEPER_DEVICE

    @property
    def gone(self) -> bool:
        """True if this peer does not take part any more."""
        return self.state in ("finished", "left", "killed")

    def apply(self, event: Event) -> None:
        """Apply the next event of this peer's log; one of an unknown name changes nothing."""
        self.seen_at = time = _number(event, "time") or 0.0
        match event.get("event"):
            case "peer.start":
                self.state, self.device = "joining", _text(event, "device")
                self.peer_id = self.peer_id or _text(event, "peer")
            case "log.continued" if self.state == "starting":  # The events before it are no longer there.
                self.state, self.device = "joining", _text(event, "device")
            case "run.joined":
                self.state, self.num_rounds = "joined", _whole(event, "rounds")
            case "run.revised":
                self.num_rounds = _whole(event, "rounds") or self.num_rounds
            case "state.taking":
                self.taking = _whole(event, "bytes"), _whole(event, "total"), _whole(event, "providers")
            case "state.synced":
                self.taking = None
                self.state, self.round, self.root = "synced", _whole(event, "round"), _text(event, "root")
            case "step":
                self._step(event)
            case "run.votes":
                self.state = "keeping"
            case "phase.end":
                self._phase_tokens = _whole(event, "tokens")
            case "round.done":
                self._finish(event, time)
            case "round.void":
                self._fail(event)
            case "round.awaited" | "state.awaited" | "file.awaited" | "data.awaited":
                self.awaits_since = self.awaits_since if self.awaits else time
                self.awaits = _text(event, "reason")
            case "round.possible":
                self.awaits = ""
            case "peer.flagged" if self.peer_id and event.get("peer") == self.peer_id:
                self._flaw = _whole(event, "round"), _text(event, "reason")
            case "run.finished":
                self.state = "finished"
            case "peer.leave" if not self.gone:
                self.state = "left"
            case "peer.paused":
                self.state, self.waits_for = "paused", _text(event, "reason")
            case "device.rests":
                self.waits_for = _text(event, "reason")
            case "peer.resumed":
                self.waits_for = ""

    def kill(self) -> None:
        """Mark it as killed from outside, which its own log cannot show."""
        self.state, self.tokens_per_s, self.rung = "killed", None, None

    def _step(self, event: Event) -> None:
        if self.state != "training":  # What it waited for before is here.
            self.state, self.awaits = "training", ""
        self.peers_here = _whole(event, "peers")
        self.step = _whole(event, "step")
        self.tokens_per_s, self.loss = _number(event, "tokens_per_s"), _number(event, "loss")
        self.sent, self.received = _whole(event, "sent"), _whole(event, "received")
        self.rung = Rung(rung) if (rung := _text(event, "rung")) else None

    def _fail(self, event: Event) -> None:
        self.voids.append((_whole(event, "round"), _peers(event, "roster"), _text(event, "reason")))
        self._spent = (self._spent[0] + _whole(event, "sent"), self._spent[1] + _whole(event, "received"))

    def _finish(self, event: Event, time: float) -> None:
        self.round, self.root = _whole(event, "round"), _text(event, "root")
        self.rounds[self.round] = RoundSeen(
            round=self.round,
            time=time,
            roster=_peers(event, "roster"),
            cut=_peers(event, "cut"),
            root=self.root,
            loss=_number(event, "loss"),
            seconds=_number(event, "seconds") or 0.0,
            sent=self._spent[0] + _whole(event, "sent"),
            received=self._spent[1] + _whole(event, "received"),
        )
        self.tokens += self._phase_tokens
        self._phase_tokens, self._spent, self.awaits = 0, (0, 0), ""
        self.work = self._judged(self.rounds[self.round], event)

    def _judged(self, seen: RoundSeen, event: Event) -> str:
        """Return what became of its contribution to a round, in words; empty where the event does not say so."""
        credit = event.get("credit")
        if not isinstance(credit, int):
            return ""
        if credit > 0:
            self.counted, self.credit = self.counted + 1, self.credit + credit
            return f"yours counts with {credit:,} tokens"
        if self.peer_id in seen.cut:
            flaw = self._flaw[1] if self._flaw[0] == seen.round else "the run's rule gave it no weight"
            return f"yours does not count: {flaw}"
        if self.peer_id in seen.roster:
            return "yours came too late"
        return "none of it is yours, since you were not ready when it began"


@dataclass(frozen=True, slots=True)
class RoundFacts:
    """One round as all peers together saw it; peers by name."""

    round: int
    outcome: str
    """`done`, or `void` if no attempt succeeded."""
    roster: tuple[str, ...]
    """Those that train: keepers, as far as they are among the peers, are left out."""
    cut: tuple[str, ...]
    state_roots: Mapping[str, str]
    loss: float | None
    seconds: float
    voids: tuple[str, ...]
    """Why attempts at this round were void."""

    @property
    def agreed(self) -> bool:
        """True if all peers that finished it hold the same state."""
        return len(set(self.state_roots.values())) <= 1


def rounds_of(peers: Sequence[PeerStory]) -> list[RoundFacts]:
    """Return every round that any of these peers finished or that failed for it, in order."""
    names = {peer.peer_id: peer.name for peer in peers}
    seen = {number for peer in peers for number in peer.rounds} | {void[0] for peer in peers for void in peer.voids}
    return [_facts(number, peers, names) for number in sorted(seen)]


def _facts(number: int, peers: Sequence[PeerStory], names: Mapping[PeerId, str]) -> RoundFacts:
    done = {peer.name: peer.rounds[number] for peer in peers if number in peer.rounds}
    voids = [(roster, reason) for peer in peers for void, roster, reason in peer.voids if void == number]
    losses = [seen.loss for seen in done.values() if seen.loss is not None]
    first = next(iter(done.values()), None)
    keepers = {peer.peer_id for peer in peers if peer.keeps}
    roster = first.roster if first else voids[0][0]
    return RoundFacts(
        round=number,
        outcome="done" if done else "void",
        roster=_named([peer for peer in roster if peer not in keepers], names),
        cut=_named(first.cut if first else (), names),
        state_roots={name: seen.root for name, seen in done.items()},
        loss=statistics.fmean(losses) if losses else None,
        seconds=max((seen.seconds for seen in done.values()), default=0.0),
        voids=tuple(Counter(reason for _, reason in voids)),
    )


def bits_per_parameter(peers: Sequence[PeerStory], parameters: float) -> tuple[float, float] | None:
    """Return the bits sent and received per parameter and round, for an infinite roster; None before the first.

    `parameters` is how many a round averages.

    Among n peers each sends its work to n - 1 others, so a measured figure is divided by (n - 1)/n. Every byte on the
    sockets during a round counts, including encryption, heartbeats and void attempts. The median over peers and rounds.
    """
    rounds = [seen for peer in peers for seen in peer.rounds.values() if len(seen.roster) > 1]
    if not rounds:
        return None
    share = [8 / parameters * len(seen.roster) / (len(seen.roster) - 1) for seen in rounds]
    return (
        statistics.median(seen.sent * bits for seen, bits in zip(rounds, share, strict=True)),
        statistics.median(seen.received * bits for seen, bits in zip(rounds, share, strict=True)),
    )


def _named(peers: Iterable[PeerId], names: Mapping[PeerId, str]) -> tuple[str, ...]:
    return tuple(names.get(peer, peer[-SHORT_ID:]) for peer in peers)


def _text(event: Event, name: str) -> str:
    value = event.get(name, "")
    return plain_text(value) if isinstance(value, str) else ""  # A log is a file, in which anything may stand.


def _number(event: Event, name: str) -> float | None:
    value = event.get(name)
    return float(value) if isinstance(value, (int, float)) else None


def _whole(event: Event, name: str) -> int:
    return int(_number(event, name) or 0)


def _peers(event: Event, name: str) -> tuple[PeerId, ...]:
    value = event.get(name)
    return tuple(plain_text(str(peer)) for peer in value) if isinstance(value, list) else ()
