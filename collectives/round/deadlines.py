"""Adaptive timeouts for the phases of a round, estimated from measured durations. Pure.

The estimator is TCP's retransmission timer (RFC 6298): a smoothed mean and a smoothed deviation of the measurements. A
deadline is the mean plus four deviations, within the floor and the ceiling of the manifest. It backs off exponentially:
each timeout doubles it. Before the first measurement, the bandwidth gives the expected time of a transfer.

Of a transfer the time is measured in which two thirds of it had come, of exchanges that of the last one of a vote, from the
proof to the certificate; a deadline has room for four times that. So no deadline follows from an earlier wait: fewer than a
third, however slow, lengthen none.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from ..allreduce.actions import Phase, Timing

MEAN_GAIN, DEVIATION_GAIN, DEVIATIONS = 1 / 8, 1 / 4, 4.0
"""α, β and K of RFC 6298."""
DEADLINE_SLACK = 4.0
"""The slowest member's transfer, in those of two thirds. Before the first measurement bandwidth is a guess."""


@dataclass(slots=True)
class Estimate:
    """A smoothed mean and deviation in seconds; no mean before the first measurement."""

    slack: float
    """The factor on the mean: for those that are slower than what is measured."""
    mean: float | None = None
    deviation: float = 0.0
    backoff: int = 0

    def add(self, seconds: float) -> None:
        """Add one measurement; it also resets the backoff."""
        if self.mean is None:
            self.mean, self.deviation = seconds, seconds / 2
        else:
            self.deviation += DEVIATION_GAIN * (abs(seconds - self.mean) - self.deviation)
            self.mean += MEAN_GAIN * (seconds - self.mean)
        self.backoff = 0

    def deadline(self, guess: float) -> float:
        """Return the timeout in seconds; `guess` replaces the mean before the first measurement."""
        mean = guess if self.mean is None else self.mean
        return float((self.slack * mean + DEVIATIONS * self.deviation) * 2**self.backoff)


class Deadlines:
    """One peer's estimates of how long the phases of its run's rounds take."""

    def __init__(self, floor: float, ceiling: float) -> None:
        self._floor = floor
        self._ceiling = ceiling
        self._control, self._transfer = Estimate(DEADLINE_SLACK), Estimate(DEADLINE_SLACK)

    def timing(self, *, grace: float, transfer: float) -> Timing:
        """Return the timeouts of the next attempt. `grace`: for slower members to get ready; `transfer`: expected seconds."""
        control = self._bounded(self._control.deadline(0.0))
        return Timing(
            gather=self._bounded(grace + control),
            control=control,
            transfer=self._bounded(self._transfer.deadline(transfer)),
            patience=self._ceiling,
        )

    def stated(self) -> tuple[float, float]:
        """Return the deadlines of an exchange and of a transfer, in seconds; zero for what I have not measured."""
        both = (self._control, self._transfer)
        control, transfer = (0.0 if it.mean is None else self._bounded(it.deadline(0.0)) for it in both)
        return control, transfer

    def learn(self, lengths: Mapping[Phase, float]) -> None:
        """Add what was measured in a successful round: `Round.lengths`."""
        for phase, seconds in lengths.items():
            if phase is Phase.CONFIRM:
                self._control.add(seconds)
            elif phase in (Phase.COLLECT, Phase.REDUCE):
                self._transfer.add(seconds)

    def give_more_time(self, phase: Phase) -> None:
        """Back off after a timeout in this phase: its next timeout doubles."""
        estimate = self._control if phase is Phase.CONFIRM else self._transfer
        if self._bounded(estimate.deadline(self._floor)) < self._ceiling:
            estimate.backoff += 1

    def _bounded(self, seconds: float) -> float:
        return min(self._ceiling, max(self._floor, seconds))
