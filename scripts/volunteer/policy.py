"""Decides from readings of a computer whether a peer may train, must rest, or must leave. Pure: the caller has the clock.

Theory of operation. A user who comes back gets the computer back: other processes on the GPU, or a
battery, and the peer leaves at the next reading; processors are judged over 20 s, since a page that
loads needs them, too. A limit of temperature or power is met by resting between inner steps: a slow
peer keeps its place in the run. One that has rested for a minute without a step leaves instead,
since the others should not count on it.
"""

from dataclasses import dataclass

from .idle import CALM_SHARE, IdleWatch

MAX_CELSIUS, MAX_WATTS = 120.0, 2000.0
"""Limits beyond these are typing errors: a GPU shuts down near 100 °C, and no socket of a home gives 2 kW to a card."""
GPU_BUSY_SECONDS = 1.0
"""The mean of two readings: a game is noticed by its first, a window that moves by neither."""
WATTS_SECONDS = 10.0
"""The time over which the power is averaged: many inner steps, and shorter than any fuse or fan needs."""
COOLER = 5.0
"""Degrees below the limit at which training goes on: less, and it would rest after every step."""
MOST_REST_SECONDS = 60.0
"""The rest after which a peer leaves: about the time of an inner phase."""


@dataclass(frozen=True, slots=True)
class Readings:
    """What a computer says now; None where it says nothing, or nothing new."""

    processors: float | None = None
    """The share of all processors that other programs had since the last one, 0 to 1."""
    gpu: float | None = None
    """The share of the GPU's time that other processes had, 0 to 1."""
    celsius: float | None = None
    watts: float | None = None
    on_battery: bool = False


@dataclass(frozen=True, slots=True)
class Verdict:
    """What follows for a peer; both empty: it trains."""

    away: str = ""
    """Why it must not be in a run."""
    rest: str = ""
    """Why it must not begin an inner step now."""


class Policy:
    """What a user allows; limits in degrees Celsius and watts, 0 for none."""

    def __init__(self, *, when_idle: bool = False, max_temp: float = 0.0, max_watts: float = 0.0) -> None:
        self.when_idle = when_idle
        self.max_temp, self.max_watts = max_temp, max_watts
        self._processors = IdleWatch()
        self._gpu = IdleWatch(busy_seconds=GPU_BUSY_SECONDS)
        self._power: list[tuple[float, float]] = []
        self._hot = False
        self._rests_since: float | None = None

    def judge(self, now: float, readings: Readings) -> Verdict:
        """Return what follows from the readings at `now`, in seconds of a monotonic clock, and from those before."""
        rest = self._why_hot(readings.celsius) or self._why_hungry(now, readings.watts)
        if not rest:
            self._rests_since = None
        elif self._rests_since is None:
            self._rests_since = now
        away = self._why_busy(now, readings) if self.when_idle else ""
        if not away and self._rests_since is not None and now - self._rests_since >= MOST_REST_SECONDS:
            away = rest
        return Verdict(away, rest)

    def _why_busy(self, now: float, readings: Readings) -> str:
        if readings.on_battery:
            return "this computer runs on its battery; it waits for the mains"
        for watch, share in ((self._gpu, readings.gpu), (self._processors, readings.processors)):
            if share is not None:
                watch.add(now, share)
        until = f"it waits until they take less than {CALM_SHARE:.0%} of"
        if self._gpu.is_busy:
            return f"other programs use the GPU; {until} its time"
        return f"other programs use this computer; {until} its processors" if self._processors.is_busy else ""

    def _why_hot(self, celsius: float | None) -> str:
        if not self.max_temp or celsius is None:
            return ""
        self._hot = celsius > self.max_temp - (COOLER if self._hot else 0)
        return f"the GPU has {celsius:.0f} °C, of {self.max_temp:g} at most" if self._hot else ""

    def _why_hungry(self, now: float, watts: float | None) -> str:
        if not self.max_watts or watts is None:
            return ""
        self._power = [*(one for one in self._power if one[0] > now - WATTS_SECONDS), (now, watts)]
        mean = sum(watts for _, watts in self._power) / len(self._power)
        return f"the GPU draws {mean:.0f} W, of {self.max_watts:g} at most" if mean > self.max_watts else ""
