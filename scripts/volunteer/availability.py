"""Looks whether a peer may train now: its user's pause, the hours, and what `policy` makes of the readings.

Theory of operation. A peer that may not train leaves the run in order and waits: its members wait for nobody who does not
train, a voter that is away stalls no round, and the memory of the device is free for its user. It comes back by itself,
restored from its disk, and takes what it missed from the others. What it trained since its last round is lost.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ...optim.models.machine import OthersLoad, on_battery
from .control import pause_file
from .gpu import GpuReading
from .hours import Hours
from .policy import Policy, Readings, Verdict

WATCH_PERIOD = 0.5
"""Seconds: a user who is back, or pauses a peer, wants the computer within one."""
REST_PERIOD = 0.1
"""Seconds between two looks of a training that rests."""
LOAD_SECONDS = 5.0
"""Seconds between two samples of the processors' use: that of all child processes takes 3 ms to read."""


def minute_of_day() -> int:
    """Return the minutes since midnight, local time."""
    now = time.localtime()
    return 60 * now.tm_hour + now.tm_min


@dataclass(slots=True)
class Availability:
    """What a user allows. `judge` looks at the computer now."""

    home: Path
    hours: Hours | None = None
    policy: Policy = field(default_factory=Policy)
    clock: Callable[[], float] = time.monotonic
    minute: Callable[[], int] = minute_of_day
    load: Callable[[], float] = field(default_factory=OthersLoad)
    """The share of all processors that other programs had since the last call."""
    battery: Callable[[], bool] = on_battery
    gpu: Callable[[], GpuReading] | None = None
    """None if there is none that can be looked at."""
    note: Callable[[str, str], None] = lambda event, reason: None
    """Called with an event's name and reason."""
    _looked: float | None = None
    _is_unseen: bool = False

    def judge(self) -> Verdict:
        """Return whether this peer has to leave, or to rest, and why."""
        if pause_file(self.home).exists():
            return Verdict("its user has paused it; `flockstep resume` lets it go on")
        if self.hours is not None and not self.hours.hold(self.minute()):
            return Verdict(f"it is outside of its hours, {self.hours}")
        now = self.clock()
        return self.policy.judge(now, self._readings(now))

    def _readings(self, now: float) -> Readings:
        gpu = self.gpu() if self.gpu is not None else GpuReading(None, None, None)
        if self.policy.when_idle and self.gpu is not None and gpu.others is None and not self._is_unseen:
            self._is_unseen = True
            self.note("device.unseen", "the driver does not tell this process what others use of the GPU, as in a container")
        processors = None
        if self.policy.when_idle and (self._looked is None or now - self._looked >= LOAD_SECONDS):
            processors, self._looked = self.load(), now
        return Readings(processors, gpu.others, gpu.celsius, gpu.watts, self.policy.when_idle and self.battery())


@dataclass(slots=True)
class Shift:
    """A time in which a peer trains: `over` is set when it has to leave, for `reason` or because its user stops it."""

    over: threading.Event = field(default_factory=threading.Event)
    reason: str = ""
    resting: str = ""
    """Why no inner step may begin now."""

    def rest(self) -> str:
        """Wait until an inner step may begin or the shift is over; return why that took time, empty if it did not."""
        reason = self.resting
        while self.resting and not self.over.wait(REST_PERIOD):
            pass
        return reason


@contextlib.contextmanager
def shift(availability: Availability, stop: threading.Event) -> Iterator[Shift]:
    """Yield a shift that ends when the peer may not train any more, or `stop` is set."""
    running, done = Shift(), threading.Event()

    def watch() -> None:
        while not done.is_set() and not stop.wait(WATCH_PERIOD):
            verdict = availability.judge()
            running.reason, running.resting = verdict.away, verdict.rest
            if verdict.away:
                break
        running.over.set()

    watcher = threading.Thread(target=watch, name="availability", daemon=True)
    watcher.start()
    try:
        yield running
    finally:
        done.set()
        watcher.join(2 * WATCH_PERIOD)


def await_shift(availability: Availability, stop: threading.Event) -> None:
    """Wait until the peer may train or `stop` is set; note an event and its reason for each change."""
    told = ""
    while reason := availability.judge().away:
        if reason != told:
            availability.note("peer.paused", reason)
            told = reason
        if stop.wait(WATCH_PERIOD):
            return
    if told:
        availability.note("peer.resumed", "nothing keeps it from training any more")
