"""Decides whether this computer is busy with other programs: two thresholds, two times. Pure.

The hysteresis keeps a peer from leaving for a page that loads and from coming back between two clicks: leaving a run and
returning costs a newcomer's minute.
"""

from collections import deque

BUSY_SHARE, BUSY_SECONDS = 0.25, 20.0
"""Busy: other programs had more than a quarter of all processors over so many seconds. A video call takes about that."""
CALM_SHARE, CALM_SECONDS = 0.10, 180.0
"""Idle again: less than a tenth over three minutes, about what an open browser takes."""
GAP_SECONDS = 30.0
"""Samples further apart are not of one time: the computer slept in between."""


class IdleWatch:
    """Whether a computer is busy, from samples of the share of its processors, or of its GPU, that other programs had."""

    def __init__(self, busy_seconds: float = BUSY_SECONDS) -> None:
        self._busy_seconds = busy_seconds
        self.is_busy = False
        self.share = 0.0
        """The share over the time that decides."""
        self._samples: deque[tuple[float, float]] = deque()
        self._since = 0.0

    def add(self, now: float, share: float) -> None:
        """Add a sample, the share since the last one."""
        if self._samples and now - self._samples[-1][0] > GAP_SECONDS:
            self._samples.clear()
        if not self._samples:
            self._since = now
        self._samples.append((now, share))
        seconds = CALM_SECONDS if self.is_busy else self._busy_seconds
        while self._samples[0][0] <= now - seconds:
            self._samples.popleft()
        self.share = sum(share for _, share in self._samples) / len(self._samples)
        if now - self._since < seconds:
            return
        if self.is_busy and self.share < CALM_SHARE:
            self.is_busy = False
        elif not self.is_busy and self.share > BUSY_SHARE:
            self.is_busy, self._since = True, now
