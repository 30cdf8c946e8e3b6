"""The schedule of a multi-source download: which leaf to request from which provider. Pure.

Theory of operation. Providers may be slow, lying or lost. Rarest first: the leaf that fewest providers can still
provide is requested first. A provider that has delivered gets the next request, so the fastest provide most. A overdue
provider blocks nothing: an otherwise idle one is sent its overdue requests again (hedged requests, as in BitTorrent's
endgame), and the first answer counts. A leaf is not requested again from a provider that failed to provide it. A
provider that fails several times in a row is excluded.
"""

import math
import statistics
from collections import deque
from collections.abc import Iterable, Sequence

from ...peer.base.transport import PeerId

LATE_FACTOR = 3.0
"""The factor on the median time of a leaf: with usual jitter, one in a hundred honest transfers is later."""
FIRST_LATE_SECONDS = 20.0
"""When a leaf is overdue while none has arrived yet; twice as many seconds for each further provider that was asked. Else
a state of few leaves would wait for ever for one that serves a byte now and then."""
MAX_LEAF_FAILURES = 3
"""Failures in a row; one or two may be a connection that broke and was redialled."""
REMEMBERED_TIMES = 32


class LeafSchedule:
    """The missing leaves by hash, and the requests to their providers."""

    def __init__(self, wanted: Iterable[bytes], providers: Sequence[PeerId]) -> None:
        self._refused: dict[bytes, set[PeerId]] = {key: set() for key in wanted}
        self._asked: dict[bytes, dict[PeerId, float]] = {}
        self._failures = dict.fromkeys(providers, 0)
        self._seconds: deque[float] = deque(maxlen=REMEMBERED_TIMES)

    @property
    def providers(self) -> tuple[PeerId, ...]:
        """The providers that are not excluded."""
        return tuple(self._failures)

    @property
    def done(self) -> bool:
        """True if all leaves have arrived."""
        return not self._refused

    @property
    def busy(self) -> bool:
        """True if a request is pending."""
        return bool(self._asked)

    @property
    def num_left(self) -> int:
        """The number of missing leaves."""
        return len(self._refused)

    def next(self, provider: PeerId, now: float) -> bytes | None:
        """Return the leaf to request from a provider; None if there is none for it now."""
        if provider not in self._failures:
            return None
        available = [key for key, refused in self._refused.items() if provider not in refused]
        unasked = (key for key in available if key not in self._asked)
        chosen = min(unasked, key=lambda key: -len(self._refused[key] & self._failures.keys()), default=None)
        if chosen is None:
            overdue = [key for key in available if provider not in self._asked[key] and self._late_at(key) <= now]
            chosen = min(overdue, key=self._late_at, default=None)
        if chosen is not None:
            self._asked.setdefault(chosen, {})[provider] = now
        return chosen

    def look_again(self, provider: PeerId) -> float:
        """Return when a leaf requested from others will be overdue, and may be requested here too; infinity if never."""
        times = (
            self._late_at(key)
            for key, asked in self._asked.items()
            if provider not in asked and provider not in self._refused[key]
        )
        return min(times, default=math.inf)

    def came(self, provider: PeerId, key: bytes, now: float) -> bool:
        """Record a verified leaf of a provider. Return True if it is the first to arrive."""
        if provider in self._failures:
            self._failures[provider] = 0
        if key not in self._refused:
            return False
        asked = self._asked.pop(key, {})
        if provider in asked:  # Else it was excluded meanwhile, and delivered nevertheless.
            self._seconds.append(now - asked[provider])
        del self._refused[key]
        return True

    def failed(self, provider: PeerId, key: bytes) -> None:
        """Record that a provider failed to provide a leaf."""
        self._withdraw(provider, key)
        if key in self._refused:
            self._refused[key].add(provider)
        if provider in self._failures:
            self._failures[provider] += 1
            if self._failures[provider] == MAX_LEAF_FAILURES:
                self.exclude(provider)

    def exclude(self, provider: PeerId) -> None:
        """Exclude a provider from further requests."""
        self._failures.pop(provider, None)
        for key in list(self._asked):
            self._withdraw(provider, key)

    def _withdraw(self, provider: PeerId, key: bytes) -> None:
        asked = self._asked.get(key, {})
        asked.pop(provider, None)
        if not asked:
            self._asked.pop(key, None)

    def _late_at(self, key: bytes) -> float:
        """Return when a requested leaf is overdue."""
        asked = self._asked[key].values()
        if not self._seconds:
            return max(asked) + FIRST_LATE_SECONDS * (1 << (len(asked) - 1))
        return max(asked) + LATE_FACTOR * statistics.median(self._seconds)
