"""Whom to ask for which leaf: many givers of one state, some of them slow, lying, or gone. Pure.

Theory of operation. A leaf that fewest givers can still give is asked for first, and whoever is done is asked for the
next one, so the fastest give most. Who is late holds up nothing: once nothing else is left to ask a giver for, it gets
what others were asked for much longer ago than a leaf takes, and the first to come counts. A leaf that a giver did not
give is not asked of it again; who fails several times in a row is asked for nothing more.
"""

import math
import statistics
from collections import deque
from collections.abc import Iterable, Sequence

from ...peer.transport import PeerId

LATE = 3.0
"""Times the median of what leaves have taken: as a road's times scatter, one in a hundred honest ones is later."""
MAX_FAILURES = 3
"""In a row; one or two may be a connection that broke and is made anew."""
REMEMBERED = 32


class Taking:
    """The leaves that I lack, by their hashes, and who gives them."""

    def __init__(self, wanted: Iterable[bytes], givers: Sequence[PeerId]) -> None:
        self._refused: dict[bytes, set[PeerId]] = {key: set() for key in wanted}
        self._asked: dict[bytes, dict[PeerId, float]] = {}
        self._failures = dict.fromkeys(givers, 0)
        self._seconds: deque[float] = deque(maxlen=REMEMBERED)

    @property
    def givers(self) -> tuple[PeerId, ...]:
        """Who is still asked."""
        return tuple(self._failures)

    @property
    def done(self) -> bool:
        """Whether all leaves have come."""
        return not self._refused

    @property
    def busy(self) -> bool:
        """Whether somebody has been asked for something that has not come."""
        return bool(self._asked)

    @property
    def num_left(self) -> int:
        """How many have not come."""
        return len(self._refused)

    def next(self, giver: PeerId, now: float) -> bytes | None:
        """The leaf to ask a giver for; None if there is none for it now."""
        if giver not in self._failures:
            return None
        can_give = [key for key, refused in self._refused.items() if giver not in refused]
        unasked = (key for key in can_give if key not in self._asked)
        chosen = min(unasked, key=lambda key: -len(self._refused[key] & self._failures.keys()), default=None)
        if chosen is None:
            late = [key for key in can_give if giver not in self._asked[key] and self._late_at(key) <= now]
            chosen = min(late, key=self._late_at, default=None)
        if chosen is not None:
            self._asked.setdefault(chosen, {})[giver] = now
        return chosen

    def look_again(self, giver: PeerId) -> float:
        """When a leaf that others were asked for may be asked of this giver too; infinity if never."""
        times = (
            self._late_at(key)
            for key, asked in self._asked.items()
            if giver not in asked and giver not in self._refused[key]
        )
        return min(times, default=math.inf)

    def came(self, giver: PeerId, key: bytes, now: float) -> bool:
        """A giver has given a leaf, and it is right; whether it is the first to."""
        if giver in self._failures:
            self._failures[giver] = 0
        if key not in self._refused:
            return False
        asked = self._asked.pop(key, {})
        if giver in asked:  # Else it has been excluded meanwhile, and has still kept this word.
            self._seconds.append(now - asked[giver])
        del self._refused[key]
        return True

    def failed(self, giver: PeerId, key: bytes) -> None:
        """A giver could not give a leaf."""
        self._withdraw(giver, key)
        if key in self._refused:
            self._refused[key].add(giver)
        if giver in self._failures:
            self._failures[giver] += 1
            if self._failures[giver] == MAX_FAILURES:
                self.exclude(giver)

    def exclude(self, giver: PeerId) -> None:
        """Ask a giver for nothing more."""
        self._failures.pop(giver, None)
        for key in list(self._asked):
            self._withdraw(giver, key)

    def _withdraw(self, giver: PeerId, key: bytes) -> None:
        asked = self._asked.get(key, {})
        asked.pop(giver, None)
        if not asked:
            self._asked.pop(key, None)

    def _late_at(self, key: bytes) -> float:
        """When a leaf that was asked for is late."""
        if not self._seconds:
            return math.inf
        return max(self._asked[key].values()) + LATE * statistics.median(self._seconds)
