"""Utilization, peak rates and round times from what was recorded. Pure.

Times are Unix seconds, as in event logs. Counters are the bytes of an interface, sampled some times a second.
"""

import bisect
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


@dataclass(frozen=True, slots=True)
class PeerFigures:
    """One peer between its first and its last boundary; rates in bytes/s."""

    utilization: float
    rounds: int
    seconds: float
    trained: float
    sent: int
    received: int
    peak_up: float
    peak_down: float


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


def utilization_of(boundaries: Sequence[Boundary]) -> float:
    """Return the share of time in inner steps from the first to the last boundary. Raises `ValueError` for less than two."""
    if len(boundaries) < 2:
        raise ValueError(f"{len(boundaries)} boundaries, and it takes two")
    first, last = boundaries[0], boundaries[-1]
    return (last.trained - first.trained) / (last.time - first.time)


def peak_rate(samples: Sequence[tuple[float, float]], window: float = RATE_WINDOW) -> float:
    """Return the greatest rate over any `window` seconds, of (time, bytes so far) in order; the mean of a shorter time.

    Between two samples the counter is taken to grow evenly. The bytes in a window are then linear in its position as long
    as no edge of it passes a sample, so the greatest one has an edge at a sample.
    """
    if len(samples) < 2 or samples[-1][0] <= samples[0][0]:
        return 0.0
    first, last = samples[0][0], samples[-1][0]
    if last - first <= window:
        return (samples[-1][1] - samples[0][1]) / (last - first)
    starts = {time for time, _ in samples if time <= last - window}
    starts |= {time - window for time, _ in samples if time >= first + window}
    return max(counter_at(samples, start + window) - counter_at(samples, start) for start in starts) / window


def counter_at(samples: Sequence[tuple[float, float]], time: float) -> float:
    """Return a counter at a point in time, interpolated; outside of the samples it stands still."""
    index = bisect.bisect_right(samples, time, key=lambda sample: sample[0])
    if index in (0, len(samples)):
        return samples[min(index, len(samples) - 1)][1]
    (before, low), (after, high) = samples[index - 1], samples[index]
    return low + (high - low) * (time - before) / (after - before)


def peer_figures(boundaries: Sequence[Boundary], samples: Sequence[LineSample]) -> PeerFigures:
    """Return one peer's figures between its first and its last boundary. Raises `ValueError` for less than two."""
    share = utilization_of(boundaries)
    first, last = boundaries[0], boundaries[-1]
    sent = within([(sample.time, sample.sent) for sample in samples], first.time, last.time)
    received = within([(sample.time, sample.received) for sample in samples], first.time, last.time)
    return PeerFigures(
        utilization=share,
        rounds=last.round - first.round,
        seconds=last.time - first.time,
        trained=last.trained - first.trained,
        sent=round(sent[-1][1] - sent[0][1]),
        received=round(received[-1][1] - received[0][1]),
        peak_up=peak_rate(sent),
        peak_down=peak_rate(received),
    )


def stalled_between(stalls: Iterable[tuple[float, float]], start: float, end: float) -> float:
    """Return the seconds of these waits that lie between two points in time."""
    return sum(max(0.0, min(over, end) - max(begun, start)) for begun, over in stalls)


def within(samples: Sequence[tuple[float, float]], start: float, end: float) -> list[tuple[float, float]]:
    """Return a counter from `start` to `end`, with interpolated values at both."""
    inner = [sample for sample in samples if start < sample[0] < end]
    return [(start, counter_at(samples, start)), *inner, (end, counter_at(samples, end))]


def interface_counters(table: str, device: str) -> tuple[int, int]:
    """Return the bytes sent and received by a device, from the text of `/proc/<pid>/net/dev` (proc(5))."""
    for line in table.splitlines():
        name, colon, figures = line.partition(":")
        if colon and name.strip() == device:
            numbers = figures.split()
            return int(numbers[8]), int(numbers[0])
    raise ValueError(f"no device {device}")


def rounds_ended(logs: Iterable[Iterable[Event]], first: int, last: int) -> tuple[int, int, int]:
    """Count what became of rounds `first` to `last` over all peers: certified rounds, void attempts, missed results."""
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
