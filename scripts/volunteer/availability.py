"""Decides whether a peer may train now: its user's pause, the hours, the load of other programs.

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

from ...optim.models.machine import OthersLoad
from .control import pause_file
from .hours import Hours
from .idle import BUSY_SHARE, CALM_SHARE, IdleWatch

WATCH_PERIOD = 0.5
"""Seconds: a user who pauses a peer looks whether it stops."""
LOAD_SECONDS = 5.0
"""Seconds between two samples of the processors' use: that of all child processes takes 3 ms to read."""


def minute_of_day() -> int:
    """Return the minutes since midnight, local time."""
    now = time.localtime()
    return 60 * now.tm_hour + now.tm_min


@dataclass(slots=True)
class Availability:
    """What a user allows. `why_away` is the decision."""

    home: Path
    hours: Hours | None = None
    when_idle: bool = False
    clock: Callable[[], float] = time.monotonic
    minute: Callable[[], int] = minute_of_day
    load: Callable[[], float] = field(default_factory=OthersLoad)
    """The share of all processors that other programs had since the last call."""
    _idle: IdleWatch = field(default_factory=IdleWatch)
    _looked: float | None = None

    def why_away(self) -> str:
        """Return why this peer may not train now; empty if it may."""
        if pause_file(self.home).exists():
            return "its user has paused it; `flockstep resume` lets it go on"
        if self.hours is not None and not self.hours.hold(self.minute()):
            return f"it is outside of its hours, {self.hours}"
        return self._why_busy() if self.when_idle else ""

    def _why_busy(self) -> str:
        now = self.clock()
        if self._looked is None or now - self._looked >= LOAD_SECONDS:
            self._idle.add(now, self.load())
            self._looked = now
        if not self._idle.is_busy:
            return ""
        limit = CALM_SHARE if self._idle.is_busy else BUSY_SHARE
        return f"other programs use this computer; it waits until they take less than {limit:.0%} of its processors"


@dataclass(slots=True)
class Shift:
    """A time in which a peer trains: `over` is set when it has to leave, for `reason` or because its user stops it."""

    over: threading.Event = field(default_factory=threading.Event)
    reason: str = ""


@contextlib.contextmanager
def shift(availability: Availability, stop: threading.Event) -> Iterator[Shift]:
    """Yield a shift that ends when the peer may not train any more, or `stop` is set."""
    running, done = Shift(), threading.Event()

    def watch() -> None:
        while not done.is_set() and not stop.wait(WATCH_PERIOD):
            running.reason = availability.why_away()
            if running.reason:
                break
        running.over.set()

    watcher = threading.Thread(target=watch, name="availability", daemon=True)
    watcher.start()
    try:
        yield running
    finally:
        done.set()
        watcher.join(2 * WATCH_PERIOD)


def await_shift(availability: Availability, stop: threading.Event, note: Callable[[str, str], None]) -> None:
    """Wait until the peer may train or `stop` is set; `note` an event and its reason for each change."""
    told = ""
    while reason := availability.why_away():
        if reason != told:
            note("peer.paused", reason)
            told = reason
        if stop.wait(WATCH_PERIOD):
            return
    if told:
        note("peer.resumed", "nothing keeps it from training any more")
