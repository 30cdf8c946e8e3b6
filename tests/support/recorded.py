"""Telemetry whose events a test reads."""

import time
from collections.abc import Callable
from pathlib import Path

from flockstep.peer.log.telemetry import Event, Telemetry


def recorded(path: Path | None = None, *, clock: Callable[[], float] = time.time) -> tuple[Telemetry, list[Event]]:
    """Return telemetry, and the list to which each event of it is added."""
    telemetry, events = Telemetry(path, clock=clock), list[Event]()
    telemetry.subscribe(events.append)
    return telemetry, events
