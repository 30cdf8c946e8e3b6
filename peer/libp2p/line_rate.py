"""The rate limits of this computer's line: every byte on every socket of the host, as its user allows them.

Theory of operation. A token bucket that may be overdrawn, one for each direction. Bytes that were sent or received are
spent at once and move `free_at`, the time at which they are paid; who sends or reads more waits for that time, for as many
bytes as a slice has. All connections share the rate by slices. What arrives faster stays in the system's buffer, which is
kept small, and TCP slows its sender down.

A message of a few kB is no reason to lose a peer: it goes at once, unless more than `AHEAD_SECONDS` are unpaid. So in any
time T the bytes are at most rate × (T + `AHEAD_SECONDS`), and a slice for each connection. TCP's and IP's headers, some 3 %,
come on top.
"""

import math

import trio

SLICES_PER_SECOND = 50.0
LEAST_SLICE_BYTES, MOST_SLICE_BYTES = 1 << 12, 1 << 20
MESSAGE_BYTES = 1 << 12
"""A write up to this is a message or a heartbeat, not a piece of a vector."""
AHEAD_SECONDS = 1.0
"""A heartbeat's period: a peer that misses three is lost."""
QUEUE_SECONDS = 0.05
LEAST_QUEUE_BYTES = 1 << 14
"""The system's buffer of a limited socket: a heartbeat waits behind all that is in it."""


class LineRate:
    """A limit of `rate` bytes/s over all connections, in one direction; 0 sets none."""

    def __init__(self, rate: float = 0.0) -> None:
        self.rate = rate
        self._free_at = -math.inf

    @property
    def slice_bytes(self) -> int:
        """The most bytes to send or to read at once."""
        if not self.rate:
            return MOST_SLICE_BYTES
        return min(MOST_SLICE_BYTES, max(LEAST_SLICE_BYTES, int(self.rate / SLICES_PER_SECOND)))

    @property
    def queue_bytes(self) -> int:
        """The size of the system's buffer for what was not read yet; 0: as the system decides."""
        return max(LEAST_QUEUE_BYTES, int(self.rate * QUEUE_SECONDS)) if self.rate else 0

    async def ready(self, num_bytes: int = MOST_SLICE_BYTES) -> None:
        """Wait until so many bytes may go, or be read."""
        ahead = AHEAD_SECONDS if num_bytes <= MESSAGE_BYTES else 0.0
        if self.rate and self._free_at - ahead > trio.current_time():
            await trio.sleep_until(self._free_at - ahead)

    def spend(self, num_bytes: int) -> None:
        """Count bytes that go, or were read."""
        if self.rate:
            self._free_at = max(self._free_at, trio.current_time()) + num_bytes / self.rate
