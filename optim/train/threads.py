"""How many processor threads train fastest beside what else runs on this computer.

Theory of operation. The threads of one operation wait for the slowest of them. Where other programs hold cores, that
one waits for its turn and the others for it, in busy loops: a step of many threads takes far longer than one of few. So
the first steps try all threads, half of them, a quarter and so on, and stop where fewer take much longer. They are steps
of the training, so no work is wasted. All is tried again where steps have been much slower for a while, since other
programs have started or ended.
"""

import statistics
import time
from collections.abc import Callable
from functools import cache

import torch

from ...peer.log.telemetry import Telemetry
from ..step.micro_batches import FASTER

TRIED_STEPS = 4
"""Steps of each number of threads; the first one is not counted: it starts threads, and fills caches."""
TOO_FEW = 1.5
"""Where half the threads take so many times as long, a quarter of them takes longer still."""
SLOW = 2.0
SLOW_STEPS = 20
"""Steps in a row of so many times the chosen seconds, after which all is tried again: a short burst costs no trial."""
TRIAL_PERIOD = 300.0
"""Seconds between two trials, at least: with half of the threads a step may take twice as long."""


@cache
def all_threads() -> int:
    """Return the threads that torch began with: an earlier membership may have left fewer."""
    return torch.get_num_threads()


class Threads:
    """Chooses the threads of torch by the seconds of each step, which its owner tells."""

    def __init__(
        self,
        telemetry: Telemetry,
        *,
        most: int,
        use: Callable[[int], None] = torch.set_num_threads,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.count = most
        self._telemetry = telemetry
        self._most = most
        self._use = use
        self._clock = clock
        self._tried: dict[int, float] = {}
        """The seconds of a step by the number of threads."""
        self._times: list[float] = []
        self._trying = most > 1
        self._ended = clock()
        self._num_slow = 0

    def judge(self, seconds: float) -> None:
        """Take the seconds of a step, and choose the threads of the next one."""
        if self._trying:
            self._times.append(seconds)
            if len(self._times) == TRIED_STEPS:
                self._tried[self.count] = statistics.median(self._times[1:])
                self._choose()
        elif self._most > 1:
            self._num_slow = self._num_slow + 1 if seconds > SLOW * self._tried[self.count] else 0
            if self._num_slow >= SLOW_STEPS and self._clock() >= self._ended + TRIAL_PERIOD:
                self._trying, self._tried = True, {}
                self._try(self._most)

    def _choose(self) -> None:
        """Try half of the threads next, or end the trial with the most of those that take as long as the fastest."""
        fastest = min(self._tried.values())
        if self.count > 1 and self._tried[self.count] < TOO_FEW * fastest:
            self._try(self.count // 2)
            return
        best = max(count for count, seconds in self._tried.items() if seconds <= FASTER * fastest)
        self._trying, self._ended, self._num_slow = False, self._clock(), 0
        self._try(best)
        took = ", ".join(f"{seconds:.3g} s with {count}" for count, seconds in self._tried.items())
        self._telemetry.emit("device.threads", step="train", threads=best, most=self._most, reason=f"a step takes {took}")

    def _try(self, count: int) -> None:
        self.count, self._times = count, []
        self._use(count)
