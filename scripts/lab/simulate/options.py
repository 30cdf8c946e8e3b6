"""Options of a simulation: numbers with units, ranges, partitions and strikes.

A text that cannot be parsed is a `UsageError` with a valid example.
"""

import math
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from ....collectives.robust.rules import rule_named
from ....dht.run.manifest import MOST_FRAGMENTS
from ....peer.base.errors import UsageError
from ....peer.wire import MAX_PARTS
from ..attacks.gradients import Attackers
from ..attacks.protocol import TOGETHER

SECONDS: Mapping[str, float] = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
RATES: Mapping[str, float] = {"bit": 1 / 8, "kbit": 1e3 / 8, "Mbit": 1e6 / 8, "Gbit": 1e9 / 8}
"""Bytes per second; line rates are stated in bits."""

MEETING_TRIPS = 10
"""One-way trips until founders have met: a dial, a stream, a request. With a faster phase a founder begins alone."""

CONVENER_MESSAGES = frozenset({"Roster", "Cut", "Outputs", "Propose"})
"""Sent by the proposer alone: a strike after one of these happens when the proposer sends it, whoever the victim is."""
MESSAGES = (
    *("Ready", "Roster", "Commit", "Have", "Cut", "Sketch", "Result", "Outputs", "Second", "Propose", "Prevote", "Precommit"),
    "Void",
)
BLOWS = ("kill", "stall", "cut", "leave")
LASTING = ("stall", "cut")
ROLES = ("proposer", "owner", "sender")


@dataclass(frozen=True, slots=True)
class Span:
    """A uniform or log-uniform distribution from `low` to `high`."""

    low: float
    high: float
    logarithmic: bool = False

    @classmethod
    def parse(cls, text: str, units: Mapping[str, float], *, logarithmic: bool = False) -> Self:
        """Parse `20ms`, or `20ms..100ms`. Raises `UsageError`."""
        ends = [_quantity(end, text, units) for end in text.split("..")]
        if len(ends) > 2 or ends[0] > ends[-1] or (logarithmic and not ends[0]):
            raise UsageError(f"{text!r} is not a range", remedy=f"write it as in {_example(units)}")
        return cls(ends[0], ends[-1], logarithmic)

    def draw(self, source: random.Random) -> float:
        """Draw one value."""
        if self.logarithmic:
            return math.exp(source.uniform(math.log(self.low), math.log(self.high)))
        return source.uniform(self.low, self.high)


@dataclass(frozen=True, slots=True)
class Partition:
    """A network partition into groups of founders, from round `first` until round `last` has ended, or for some `seconds`."""

    groups: tuple[int, ...]
    first: int
    last: int
    seconds: float = 0.0
    """Its duration, where no round may end in it; 0: it ends with round `last`."""

    @classmethod
    def parse(cls, text: str, peers: int) -> Self:
        """Parse `5+3@round=2..7` or `5+3@round=2,for=60s`: the first five peers, and the next three. Raises `UsageError`."""
        found = re.fullmatch(r"(\d+(?:\+\d+)+)@round=(\d+)(?:\.\.(\d+)|,for=(\w+))?", text)
        if found is None:
            raise UsageError(
                f"{text!r} is not a partition", remedy="write it as in 5+3@round=2..7 or 5+3@round=2,for=60s"
            )
        groups = tuple(int(size) for size in found[1].split("+"))
        first = int(found[2])
        last = int(found[3] or first)
        if sum(groups) > peers or not all(groups) or last < first:
            raise UsageError(
                f"the partition {text!r} does not fit {peers} peers", remedy="write it as in 5+3@round=2..7"
            )
        return cls(groups, first, last, _quantity(found[4], text, SECONDS) if found[4] else 0.0)


@dataclass(frozen=True, slots=True)
class Strike:
    """A fault after the message `after` of `round`: the victim is killed, stalled, cut off, or leaves."""

    round: int
    after: str
    blow: str
    victim: str | int
    """A role, or the number of a peer."""
    seconds: float
    """Duration of a stall or a cut."""

    @classmethod
    def parse(cls, text: str, peers: int) -> Self:
        """Parse `round=3,after=Cut,kill=proposer`; `for=20s` may follow. Raises `UsageError`."""
        remedy = f"write it as in round=3,after=Cut,kill=proposer; after is one of {', '.join(MESSAGES)}"
        parts = [part.strip().partition("=")[::2] for part in text.split(",")]
        fields = dict(parts)
        blows = [blow for blow in BLOWS if blow in fields]
        known = {"round", "after", "for", *BLOWS}
        if (
            len(blows) != 1
            or len(fields) != len(parts)
            or not fields.keys() <= known
            or fields.get("after") not in MESSAGES
        ):
            raise UsageError(f"{text!r} is not a strike", remedy=remedy)
        if "for" in fields and blows[0] not in LASTING:
            raise UsageError(f"{text!r}: {blows[0]}= has no duration", remedy=f"for= goes with {' and '.join(LASTING)}")
        victim = fields[blows[0]]
        number = int(victim) if victim.isdecimal() else None
        if not fields.get("round", "").isdecimal() or (victim not in ROLES and (number is None or number >= peers)):
            raise UsageError(f"{text!r} names no valid victim or round", remedy=remedy)
        seconds = _quantity(fields.get("for", "10s"), text, SECONDS)
        return cls(int(fields["round"]), fields["after"], blows[0], victim if number is None else number, seconds)

    def __str__(self) -> str:
        whom = f"peer {self.victim}" if isinstance(self.victim, int) else f"the {self.victim}"
        return f"{self.blow} {whom} after {self.after} of round {self.round}"


@dataclass(frozen=True, slots=True)
class Kill:
    """The last `count` founders are killed when `round` begins, and start again after some `seconds`; 0: never."""

    count: int
    round: int
    seconds: float = 0.0

    @classmethod
    def parse(cls, text: str, peers: int) -> Self:
        """Parse `4@round=3` or `4@round=3,for=60s`. Raises `UsageError`."""
        found = re.fullmatch(r"(\d+)@round=(\d+)(?:,for=(\w+))?", text)
        if found is None:
            raise UsageError(
                f"{text!r} does not say who is killed", remedy="write it as in 4@round=3 or 4@round=3,for=60s"
            )
        if not 0 < int(found[1]) < peers:
            raise UsageError(f"{text!r}: 1 to {peers - 1} of {peers} peers can be killed")
        return cls(int(found[1]), int(found[2]), _quantity(found[3], text, SECONDS) if found[3] else 0.0)


VOTERS = ("founders", "honest", "keepers")
MORE_RANGES = (("session", 0.0, 1e6), ("orderly", 0.0, 1.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions:
    """The options of one simulation. Raises `UsageError` if one is out of its range."""

    peers: int
    """Number of founders."""

    rounds: int
    """Number of rounds to train."""

    seed: int
    """Seed of all randomness."""

    bandwidth: Span | None
    """Up- and downlink of each peer in bytes/s; None is unlimited."""

    latency: Span
    """Seconds from one peer to another; each end adds half."""

    loss: float
    """Probability of a packet to be retransmitted."""

    churn: float
    """Expected joins, and as many leaves, in a round."""

    stall: float
    """Expected stalls in a round."""

    stall_time: Span
    """Duration of a stall in seconds."""

    partitions: tuple[Partition, ...]
    """Network partitions, one after the other."""

    strikes: tuple[Strike, ...]
    """Faults at moments of the protocol."""

    attacks: tuple[Attackers, ...]
    """Attacks of the last founders, in this order."""

    rule: str
    """The aggregation rule."""

    tensors: bool
    """Average real vectors and check every bit; else parts are empty, and only the protocol runs."""

    steps_time: Span
    """Seconds of a peer's inner phase, drawn for each phase."""

    min_peers: int
    """The fewest members of a round."""

    out: Path | None
    """Folder for the event log."""

    voters: str = "founders"
    """Who votes on the first round: the `founders`, at most 64, or the `honest` ones of them. With `keepers` the founders
    do, in all rounds."""

    session: float = 0.0
    """Average rounds that a peer stays, another one comes for each that leaves; 0: as long as the run."""

    orderly: float = 0.5
    """Share of those that leave in order; the others are killed."""

    kills: tuple[Kill, ...] = ()
    """Founders killed at once."""

    fragments: int = 1
    """Fragments of the vector; with more than one, peers train on while a round averages the next of them."""

    def __post_init__(self) -> None:
        for name, low, high in (
            *(("peers", 1, 4096), ("rounds", 1, 1_000_000)),
            *(("min_peers", 1, MAX_PARTS), ("fragments", 1, MOST_FRAGMENTS)),
        ):
            if not low <= getattr(self, name) <= high:
                raise UsageError(f"{name} must be {low} to {high}, got {getattr(self, name)}")
        if self.voters not in VOTERS:
            raise UsageError(f"{self.voters!r} are no voters", remedy=f"name {', '.join(VOTERS[:-1])} or {VOTERS[-1]}")
        for name, least, most in (("loss", 0.0, 0.9), ("churn", 0.0, 1000.0), ("stall", 0.0, 1000.0), *MORE_RANGES):
            if not least <= getattr(self, name) <= most:
                raise UsageError(f"{name} must be {least:g} to {most:g}, got {getattr(self, name):g}")
        if self.min_peers > self.peers:
            raise UsageError(f"{self.peers} peers are fewer than --min-peers {self.min_peers}")
        if self.steps_time.low < MEETING_TRIPS * self.latency.high:
            raise UsageError(
                f"inner phases of {self.steps_time.low:g} s are too short for peers {self.latency.high:g} s apart to meet",
                remedy=f"--steps-time must be at least {MEETING_TRIPS} times --latency",
            )
        for kill in self.kills:
            if not 1 <= kill.round <= self.rounds:
                raise UsageError(f"{kill.count} peers killed in round {kill.round}: the rounds are 1 to {self.rounds}")
        for strike in self.strikes:
            if not 1 <= strike.round <= self.rounds:
                raise UsageError(f"{strike}: the rounds are 1 to {self.rounds}")
        self._check_attacks()
        before = 0
        for split in sorted(self.partitions, key=lambda split: split.first):
            if not before < split.first <= split.last < self.rounds:
                raise UsageError(
                    f"a partition from round {split.first} to {split.last} of {self.rounds}",
                    remedy="partitions follow one another, and the last one ends before the last round",
                )
            before = split.last

    def _check_attacks(self) -> None:
        if not rule_named(self.rule).blind and not self.tensors:
            raise UsageError(f"without tensors the rule {self.rule} has nothing to judge", remedy="add --rule mean")
        if sum(attackers.count for attackers in self.attacks) >= self.peers:
            named = ", ".join(map(str, self.attacks))
            raise UsageError(
                f"{named}: none of {self.peers} peers is honest", remedy="lower the count, or raise --peers"
            )
        if self.attacks and not self.tensors:
            raise UsageError("without tensors there is nothing to attack", remedy="leave out --no-tensors")
        for attackers in self.attacks:
            if attackers.scale is not None:
                remedy = f"write {attackers.name}:COUNT"
                raise UsageError(f"{attackers}: an attack on the protocol has no scale", remedy=remedy)
            if attackers.name in TOGETHER and attackers.count == 1:
                remedy = f"use two: {attackers.name}:2"
                raise UsageError(f"{attackers}: one attacker has no fellow to collude with", remedy=remedy)


def _quantity(text: str, whole: str, units: Mapping[str, float]) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)", text)
    if found is None or found[2] not in units:
        raise UsageError(f"{whole!r} has no number with a unit", remedy=f"write it as in {_example(units)}")
    return float(found[1]) * units[found[2]]


def _example(units: Mapping[str, float]) -> str:
    example = "20ms or 20ms..100ms" if units is SECONDS else "20Mbit or 10Mbit..100Mbit"
    return f"{example}; units are {', '.join(units)}"
