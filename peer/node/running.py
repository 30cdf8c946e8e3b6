"""A clock that stands still while this process does: rounds are timed by it.

Theory of operation. A process that was stopped (a suspended laptop, SIGSTOP, a busy machine) finds its deadlines over when
it goes on, before it has read what the others sent meanwhile. By this clock they are not: a stop is not the others'
silence. The event loop states when it will run next (`expect`). Whoever reads the clock first after that has passed takes
the delay off, so that no task acts on time that did not run.
"""

import math
from collections.abc import Callable

MAX_LATE_BEATS = 0.25
"""In beats, for my own timer: a beat that is later than this was delayed by more than the jitter of a running loop."""


class RunningClock:
    """The running time of one process; `real` is the clock that does not stand still."""

    def __init__(self, real: Callable[[], float]) -> None:
        self._real = real
        self._expected = self._latest = math.inf
        self._stopped = self._before = 0.0
        """Seconds that the process has stood still, in all and until the last `expect`."""

    def expect(self, moment: float, beat: float) -> None:
        """State that the event loop runs at this moment of the real clock; `beat` is what lateness is measured in."""
        self._expected, self._latest, self._before = moment, moment + MAX_LATE_BEATS * beat, self._stopped

    def now(self) -> float:
        """Return the running time."""
        real = self._real()
        if real > self._latest:
            self._stopped += real - self._expected
            self._expected = self._latest = math.inf  # Until the loop has run.
        return real - self._stopped

    def overslept(self) -> float:
        """Return for how many seconds the process has stood still since the last `expect`."""
        self.now()
        return self._stopped - self._before

    def at(self, moment: float) -> float:
        """Return when, by the real clock, this running time comes unless the process stands still before.

        Never a rounding earlier: who is woken then would find that it has not come, and ask to be woken at once.
        """
        real = moment + self._stopped
        return real if real - self._stopped >= moment else math.nextafter(real, math.inf)
