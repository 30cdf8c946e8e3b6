"""Utilization, peak rates and round times from what was recorded. Pure.

Times are Unix seconds, as in event logs. Counters are the bytes of an interface, sampled some times a second.
"""

import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ....peer.log.telemetry import Event

RATE_WINDOW = 1.0
"""Seconds over which a rate counts: shorter bursts are what queues are for."""


@dataclass(frozen=True, slots=True)
class Boundary:
    """A peer has the result of a round, and goes on with its training."""

    time: float
    trained: float
    """Seconds in inner steps since the peer's start."""
    round: int


class StepClock:
    """When steps of a given length end. A wait that ended late shortens the next one.

    A GPU has its next kernels queued, so that a trainer that the system wakes up late costs nothing; on the bench's
    machine, where all peers share the cores, that would else count against every peer.
    """

    def __init__(self, seconds: float, now: float) -> None:
        self._seconds = seconds
        self._due = now

    def wait(self, now: float) -> float:
        """Begin a step. Returns the seconds to wait for its end."""
        self._due += self._seconds
        return max(0.0, self._due - now)

    def blocked(self, seconds: float) -> None:
        """Count seconds between two steps, in which the trainer did something else."""
        self._due += seconds


@dataclass(frozen=True, slots=True)
class LineSample:
    """The bytes that have passed an interface since it exists."""

    time: float
    sent: int
    received: int


ROUND_PARTS = ("measure", "gather", "contributions", "reduce", "outputs", "check", "votes", "restart")
"""What a peer does in a round while it does not train, in order. `measure`: Δ is computed. `gather`: until it commits to
its contribution. `contributions`: until it holds its part of all contributions, and has said so. `reduce`: until the
cut is known, the contributions are judged, and its own part is reduced. `outputs`: until it has those of the others.
`check`: until it accepts. `votes`: until the round is certified. `restart`: outer step and new parameters, until the next
inner step.
"""
_SAID = ("Commit", "Have", "Result", "Sketch", "Prevote")
"""The messages with which those from `gather` to `check` end: the first Have, and of two Sketches the second one."""


def measured(boundaries: Sequence[Boundary], cycle: int) -> tuple[Boundary, ...]:
    """Return the boundaries from the end of the first `cycle` rounds on: then each fragment was averaged once."""
    return tuple(boundary for boundary in boundaries if boundary.round >= cycle)


def peak_rate(samples: Sequence[tuple[float, float]], window: float = RATE_WINDOW) -> float:
    """Return the greatest rate from a sample to the first one that is a `window` of seconds later, of (time, bytes so far).

    The mean of a shorter time; 0 without time.
    """
    rates, later = [0.0], 0
    for time, size in samples:
        while later < len(samples) - 1 and samples[later][0] < time + window:
            later += 1
        passed = samples[later][0] - time
        if passed >= window or (passed > 0 and time == samples[0][0]):
            rates.append((samples[later][1] - size) / passed)
    return max(rates)


def stalled_between(stalls: Iterable[tuple[float, float]], start: float, end: float) -> float:
    """Return the seconds of these waits that lie between two points in time."""
    return sum(max(0.0, min(over, end) - max(begun, start)) for begun, over in stalls)


def interface_counters(table: str, device: str) -> tuple[int, int] | None:
    """Return the bytes sent and received by a device, from the text of `/proc/<pid>/net/dev` (proc(5)); None without it."""
    found = re.search(rf"^\s*{device}:\s*(\d+)(?:\s+\d+){{7}}\s+(\d+)", table, re.MULTILINE)
    return None if found is None else (int(found[2]), int(found[1]))


def rounds_ended(logs: Iterable[Iterable[Event]], first: int, last: int) -> tuple[int, int, int]:
    """Count certified rounds, void attempts and missed results of rounds `first` to `last`, over all peers."""
    certified: set[int] = set()
    void: set[tuple[int, int]] = set()
    missed: set[tuple[int, int]] = set()
    for peer, log in enumerate(logs):
        for event in log:
            number, attempt = event.get("round"), event.get("attempt")
            if not isinstance(number, int) or not first <= number <= last:
                continue
            if event["event"] == "round.done":
                certified.add(number)
            elif event["event"] == "round.void" and isinstance(attempt, int):
                void.add((number, attempt))
            elif event["event"] in ("round.missed", "round.behind"):
                missed.add((peer, number))
    return len(certified), len(void), len(missed)


def round_parts(log: Iterable[Event], stalls: Sequence[tuple[float, float]], first: int, last: int) -> list[list[float]]:
    """Return the seconds of the `ROUND_PARTS` for each of these rounds that a peer has waited for from end to end.

    `stalls` are the peer's calls of `Swarm.step` that took long, (start, end). Rounds with void attempts, and those that
    a peer does not wait for, are left out.
    """
    found: list[list[float]] = []
    phase = 0.0
    said: dict[str, float] = {}
    for event in log:
        number, moment = event.get("round"), event["time"]
        if not isinstance(number, int) or not first <= number <= last or not isinstance(moment, float):
            continue
        if event["event"] == "phase.end":
            phase, said = moment, {}
        elif event["event"] == "round.said":
            step = str(event["step"])
            said[step] = said.get(step, moment) if step == "Have" else moment
        elif event["event"] == "round.done":
            stall = next((one for one in stalls if one[0] <= phase <= moment <= one[1]), None)
            if stall and event["attempt"] == 0:
                ends = [stall[1], moment]
                for step in reversed(_SAID):  # One that was overtaken by the certificate is not sent, and has no part.
                    ends.append(said.get(step, ends[-1]))
                ends += [phase, stall[0]]
                found.append([after - before for before, after in pairwise(reversed(ends))])
    return found


def means_of(rounds: Sequence[Sequence[float]]) -> dict[str, float]:
    """Return the mean of each of the `ROUND_PARTS`, so that they add up; nothing of no rounds."""
    return {name: statistics.fmean(values) for name, values in zip(ROUND_PARTS, zip(*rounds, strict=True), strict=False)}
