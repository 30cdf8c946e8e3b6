"""Chaos as a script: victim, fault, message and round; the same seed strikes the same peers.

    chaos = Chaos(seed=7).kill(peer="proposer", at="Cut", round=3).stop(peer=2, at="Have", round=5).resume(after=6)
    reports = chaos.fly(group, rounds=8)

A peer is an index or a role: `proposer` (the voter whose turn it is), `owner` or `sender` (one of the others, drawn from the
seed: in a butterfly every peer is both, and the message of the strike decides which role it hits).
A strike comes at a message of a round, or at `Serve`: another peer has just requested the output of a part.
"""

import os
import random
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace

from chaos.group import Event, Group, Peer, Report

ROLES = ("proposer", "owner", "sender")
WORDS = (
    *("Ready", "Roster", "Commit", "Have", "Cut", "Sketch", "Result", "Outputs", "Serve"),
    *("Propose", "Prevote", "Precommit"),
)


@dataclass(frozen=True, slots=True)
class Strike:
    """One line of the script."""

    kind: str
    peer: int | str
    at: str
    round: int
    until: int | None = None
    """The round after which a stopped or cut off peer is let go; None: never."""

    def __post_init__(self) -> None:
        if self.at not in WORDS or (isinstance(self.peer, str) and self.peer not in ROLES):
            raise ValueError(f"no peer {self.peer!r}, or nobody says {self.at!r}")


class Chaos:
    """A script of strikes. Every method returns the script with one more line."""

    def __init__(self, seed: int = 0, strikes: tuple[Strike, ...] = ()) -> None:
        self.seed = seed
        self.strikes = strikes

    def kill(self, *, peer: int | str, at: str, round: int) -> "Chaos":  # noqa: A002
        """SIGKILL."""
        return self._with(Strike("kill", peer, at, round))

    def stop(self, *, peer: int | str, at: str, round: int) -> "Chaos":  # noqa: A002
        """SIGSTOP."""
        return self._with(Strike("stop", peer, at, round))

    def drop(self, *, peer: int | str, at: str, round: int) -> "Chaos":  # noqa: A002
        """No packet from or to this peer arrives any more; for groups whose peers have networks of their own."""
        return self._with(Strike("drop", peer, at, round))

    def resume(self, *, after: int) -> "Chaos":
        """Let the peer of the last line go on once the survivors have ended that round."""
        *before, last = self.strikes
        return Chaos(self.seed, (*before, replace(last, until=after)))

    def run_rounds(
        self,
        group: Group,
        rounds: int,
        *,
        cut_off: Callable[[int, bool], None] | None = None,
    ) -> list[Report]:
        """Run the script against a group; `cut_off(index, whether)` is what drops a peer's packets."""
        reports: list[Report] = []
        held: dict[int, Strike] = {}
        for number in range(1, rounds + 1):
            victims = self._victims(group, number)
            signals = {
                index: (strike.at, signal.SIGKILL if strike.kind == "kill" else signal.SIGSTOP)
                for index, strike in victims.items()
            }
            for index, strike in victims.items():
                if strike.kind == "drop":
                    assert cut_off is not None, "to drop packets, the peers need networks of their own"
                    group.peers[index].on_event = _cutting(cut_off)
            reports.append(group.round(signals))
            held |= {index: strike for index, strike in victims.items() if strike.until is not None}
            for index in [index for index, strike in held.items() if strike.until == number]:
                if held.pop(index).kind == "drop":
                    assert cut_off is not None
                    cut_off(index, False)
                    group.peers[index].on_event = None
                group.resume(index)
        return reports

    def _with(self, strike: Strike) -> "Chaos":
        return Chaos(self.seed, (*self.strikes, strike))

    def _victims(self, group: Group, number: int) -> dict[int, Strike]:
        order = group.order()
        draw = random.Random(f"{self.seed} {number}")
        others = [peer.index for peer in order[1:]]
        draw.shuffle(others)
        victims: dict[int, Strike] = {}
        for strike in self.strikes:
            if strike.round == number:
                role = order[0].index if strike.peer == "proposer" else others.pop() if others else -1
                victims[strike.peer if isinstance(strike.peer, int) else role] = strike
        return victims


def _cutting(cut_off: Callable[[int, bool], None]) -> Callable[[Peer, Event], None]:
    """Stops the peer only for the moment in which it is cut off, so that this, too, falls at the same place."""

    def hear(peer: Peer, event: Event) -> None:
        if event["event"] == "struck":
            os.waitid(os.P_PID, peer.popen.pid, os.WSTOPPED | os.WNOWAIT)
            cut_off(peer.index, True)
            peer.popen.send_signal(signal.SIGCONT)

    return hear
