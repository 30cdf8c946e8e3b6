"""CPU seconds of a simulation by purpose: rounds, membership, and the rest.

Theory of operation. A mark charges all CPU time since the mark before to one purpose, so that the loop and the network in
memory count for the purpose that they serve. A task marks at the end of each of its steps, for the purpose of its context,
which the tasks that it starts inherit. A block of one purpose, such as the reaction to a message, marks at its end.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import trio

from ....peer.node.bulk import BULK_PROTOCOL

ROUNDS, MEMBERSHIP, REST = ("rounds", "membership", "rest")
"""REST: the peers' faults, contributions and checks, and the time in which the network in memory serves no message."""
_purpose: ContextVar[str] = ContextVar("purpose", default=REST)


class Meter(trio.abc.Instrument):
    """Charges the seconds of a clock of CPU time."""

    def __init__(self, clock: Callable[[], float] = time.process_time) -> None:
        self.seconds = dict.fromkeys((ROUNDS, MEMBERSHIP, REST), 0.0)
        """CPU seconds by purpose."""
        self._clock = clock
        self._last = clock()

    def mark(self, purpose: str) -> None:
        """Charge the time since the last mark."""
        last, self._last = self._last, self._clock()
        self.seconds[purpose] += self._last - last

    @contextmanager
    def of(self, purpose: str) -> Iterator[None]:
        """Charge a block, and the tasks that it starts, to a purpose."""
        before = _purpose.set(purpose)
        try:
            yield
        finally:
            _purpose.reset(before)
            self.mark(purpose)

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        """Charge a step of a task, and the loop's work before it; bulk bytes are those of rounds."""
        self.mark(ROUNDS if task.name.endswith(BULK_PROTOCOL) else task.context.get(_purpose, REST))
