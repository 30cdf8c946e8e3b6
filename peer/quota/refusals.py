"""The refusals of a host: counted for the metrics, and emitted as one event a period.

A flood must not fill the disk that holds the event log. So the first refusal for a reason emits an event at once, and
those that follow emit one every `REFUSAL_PERIOD`, with their count and the origin of the last.
"""

import math
from collections import Counter
from collections.abc import Callable

from ..log.telemetry import Telemetry
from .origins import UNKNOWN, Origin

REFUSAL_PERIOD = 15.0
"""Between two events of one kind: a flood fills no log."""


class Refusals:
    """One host's refusals, emitted as `event`. Steps and reasons are a few fixed texts, so no stranger makes this grow."""

    def __init__(self, telemetry: Telemetry, clock: Callable[[], float], event: str) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()
        """The counts, by step and reason."""
        self._telemetry = telemetry
        self._clock = clock
        self._event = event
        self._emitted_at: dict[tuple[str, str], float] = {}
        self._pending: Counter[tuple[str, str]] = Counter()
        self._last: dict[tuple[str, str], tuple[str, Origin]] = {}

    def add(self, step: str, reason: str, origin: Origin = UNKNOWN, peer: str = "") -> None:
        """Count a refusal; emit an event if the last one of its kind is long enough ago."""
        kind = step, reason
        self.counts[kind] += 1
        self._pending[kind] += 1
        self._last[kind] = peer, origin
        if self._clock() - self._emitted_at.get(kind, -math.inf) >= REFUSAL_PERIOD:
            self._emit(kind)

    def report(self) -> None:
        """Emit an event for every kind with pending refusals."""
        for kind in list(self._pending):
            self._emit(kind)

    def _emit(self, kind: tuple[str, str]) -> None:
        self._emitted_at[kind] = self._clock()
        peer, origin = self._last[kind]
        count = self._pending.pop(kind)
        self._telemetry.emit(self._event, peer=peer, step=kind[0], reason=kind[1], origin=origin.address, count=count)
