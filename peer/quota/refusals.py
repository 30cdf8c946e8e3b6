"""What a host refused, and why: counted for the metrics, and told as one event now and then.

A flood must not fill the disk that holds the event log. So the first refusal for a reason leaves an event at once, and
those that follow leave one every `REFUSAL_PERIOD` that says how many they were and where the last came from.
"""

import math
from collections import Counter
from collections.abc import Callable

from ..telemetry import Telemetry
from .origins import UNKNOWN, Origin

REFUSAL_PERIOD = 15.0


class Refusals:
    """One host's, emitted as `event`; steps and reasons are a handful of fixed texts, so that nobody makes this grow."""

    def __init__(self, telemetry: Telemetry, clock: Callable[[], float], event: str) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()
        """By step and reason."""
        self._telemetry = telemetry
        self._clock = clock
        self._event = event
        self._told_at: dict[tuple[str, str], float] = {}
        self._untold: Counter[tuple[str, str]] = Counter()
        self._last: dict[tuple[str, str], tuple[str, Origin]] = {}

    def add(self, step: str, reason: str, origin: Origin = UNKNOWN, peer: str = "") -> None:
        """Count one, and tell it if the last of its kind is told long enough ago."""
        kind = step, reason
        self.counts[kind] += 1
        self._untold[kind] += 1
        self._last[kind] = peer, origin
        if self._clock() - self._told_at.get(kind, -math.inf) >= REFUSAL_PERIOD:
            self._tell(kind)

    def report(self) -> None:
        """Tell what is untold."""
        for kind in list(self._untold):
            self._tell(kind)

    def _tell(self, kind: tuple[str, str]) -> None:
        self._told_at[kind] = self._clock()
        peer, origin = self._last[kind]
        count = self._untold.pop(kind)
        self._telemetry.emit(self._event, peer=peer, step=kind[0], reason=kind[1], origin=origin.address, count=count)
