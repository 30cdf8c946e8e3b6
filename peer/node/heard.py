"""When each peer was last heard, for as many peers as a table holds. Pure."""

import math
from collections.abc import Callable

from ..base.transport import PeerId

HEARD_PERIOD = 5.0
"""Seconds in which the messages of one peer are notified once: the slowest heartbeat."""


class HeardPeers:
    """Remembers when peers sent anything, up to `HEARD_PERIOD` s too early; the one that is silent for longest goes first."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._at: dict[PeerId, float] = {}
        self.handlers: list[Callable[[PeerId], None]] = []

    def at(self, peer: PeerId) -> float:
        """Return when a peer was heard; −∞ if it was not, or was lost since."""
        return self._at.get(peer, -math.inf)

    def note(self, peer: PeerId, now: float) -> None:
        """A peer has sent something: the handlers are called now and then."""
        if now < self._at.get(peer, -math.inf) + HEARD_PERIOD:
            return
        self.forget(peer)  # The one that is silent for the longest stands first.
        self._at[peer] = now
        if len(self._at) > self._most:
            del self._at[next(iter(self._at))]
        for handler in self.handlers:
            handler(peer)

    def forget(self, peer: PeerId) -> None:
        """A peer is lost."""
        self._at.pop(peer, None)
