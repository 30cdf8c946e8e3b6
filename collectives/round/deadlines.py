"""How long the steps of a round may take, learned from how long they took.

TCP's retransmission timer (RFC 6298): a smoothed mean and a smoothed deviation of what was measured; a deadline is the
mean plus four deviations, within the floor and the ceiling of the manifest, and doubles after it has passed for
nothing. Before anything was measured, a transfer is expected to take what the bandwidth says. Pure.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from .actions import Phase, Timing

MEAN_GAIN, DEVIATION_GAIN, DEVIATIONS = 1 / 8, 1 / 4, 4.0
"""α, β and K of RFC 6298."""
SLACK = 4.0
"""Times the expected time of a transfer of which nothing has been measured yet: bandwidth is a guess at first."""


@dataclass(slots=True)
class Estimate:
    """A smoothed mean and deviation in seconds; no mean before the first measurement."""

    mean: float | None = None
    deviation: float = 0.0
    backoff: int = 0

    def add(self, seconds: float) -> None:
        """Count one measurement; it also ends any doubling."""
        if self.mean is None:
            self.mean, self.deviation = seconds, seconds / 2
        else:
            self.deviation += DEVIATION_GAIN * (abs(seconds - self.mean) - self.deviation)
            self.mean += MEAN_GAIN * (seconds - self.mean)
        self.backoff = 0

    def deadline(self, guess: float) -> float:
        """Seconds to wait; `guess` stands in for the mean where nothing has been measured."""
        seconds = guess if self.mean is None else self.mean + DEVIATIONS * self.deviation
        return float(seconds * 2**self.backoff)


class Deadlines:
    """What one peer has learned about the rounds of its run."""

    def __init__(self, floor: float, ceiling: float) -> None:
        self._floor = floor
        self._ceiling = ceiling
        self._control = Estimate()
        self._transfer = Estimate()

    def timing(self, *, grace: float, transfer: float) -> Timing:
        """The limits of the next attempt. `grace`: what slower members get to become ready; `transfer`: expected seconds."""
        control = self._bounded(self._control.deadline(0.0))
        return Timing(
            gather=self._bounded(grace + control),
            control=control,
            transfer=self._bounded(self._transfer.deadline(SLACK * transfer)),
            patience=self._ceiling,
        )

    def learn(self, durations: Mapping[Phase, float]) -> None:
        """Count the phases of a round that ended well."""
        for phase, seconds in durations.items():
            if phase in (Phase.AGREE, Phase.CONFIRM):
                self._control.add(seconds)
            elif phase in (Phase.COLLECT, Phase.REDUCE):
                self._transfer.add(seconds)

    def give_more_time(self, phase: Phase) -> None:
        """A deadline passed in this phase: the next one is twice as far."""
        estimate = self._control if phase in (Phase.AGREE, Phase.CONFIRM) else self._transfer
        if self._bounded(estimate.deadline(self._floor)) < self._ceiling:
            estimate.backoff += 1

    def _bounded(self, seconds: float) -> float:
        return min(self._ceiling, max(self._floor, seconds))
