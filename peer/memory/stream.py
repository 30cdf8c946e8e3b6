"""One end of a stream on the network in memory: flow control, delivery, and how it ends.

Theory of operation. A stream has two ends that refer to each other; each signals the other by packets of its transport.
An end is open until it is closed or broken, for one stated reason, and every wait on it ends then. A long message is
sent in segments, which wait for the uplink and for the other end's window (backpressure). Most frames of a round are
small, and waking a task for each costs more than the frame. So a frame that fits into the window can be sent without a
wait (`send_now`), and be consumed at the other end without a receiving task (`divert`).
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import trio

from ..base.errors import StreamClosed
from ..base.transport import PeerId

if TYPE_CHECKING:
    from .peer import MemoryTransport

Packet: TypeAlias = Callable[[], None]
"""The function that a packet runs on arrival."""

STREAM_WINDOW = 1 << 20
"""The window: bytes in flight or unread on one stream. Yamux starts at 256 KiB and grows with the round trip."""
REPORTED = STREAM_WINDOW // 2
"""Bytes read before a window update, as Yamux does, instead of a packet for every read."""
SEGMENT = 1 << 16
"""The longest segment, that of Noise's frames: it bounds how long one stream blocks another on the uplink."""


class MemoryStream:
    """One end of a stream. Implements `transport.Stream`. Made by `open_stream`, or handed to a handler."""

    def __init__(self, transport: "MemoryTransport", remote: PeerId, twin: "MemoryStream | None" = None) -> None:
        self._transport = transport
        self.remote = remote
        """The peer at the other end."""
        self._lane = transport.lane(remote)
        self._twin: MemoryStream | None = None
        self._deliver: Callable[[bytes], None]
        """The `deliver` of the twin."""
        if twin is not None:
            self._join(twin)
        self._inbox = bytearray()
        self._credit = STREAM_WINDOW
        self._unreported = 0
        self._sink: Callable[[bytes], bool] | None = None
        self._over = ""
        self._finished = False
        self._changed = trio.lowlevel.ParkingLot()

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Send all bytes. Raises `StreamClosed`, also if the other end has closed, since it would not read them."""
        await trio.lowlevel.checkpoint()
        rest = memoryview(data).cast("B")
        self._check_sendable()
        while rest:
            size = min(len(rest), SEGMENT, self._credit)
            if size:
                self._credit -= size
                segment, rest = bytes(rest[:size]), rest[size:]
                if leaves := self._transport.through_uplink(size):
                    await trio.sleep_until(leaves)
            else:
                await self._changed.park()
            self._check_sendable()
            if size:
                self._transport.send(self._lane, partial(self._deliver, segment), size)

    def send_now(self, data: bytes) -> bool:
        """Queue a small frame on the uplink; returns False if it would wait for the window. Raises `StreamClosed`."""
        if self._over or self._finished:
            self._check_sendable()
        size = len(data)
        if size > self._credit or size > SEGMENT:
            return False
        self._credit -= size
        transport = self._transport
        leaves = transport.through_uplink(size) if transport.has_uplink else 0.0
        transport.send(self._lane, partial(self._deliver, data), size, leaves)
        return True

    def divert(self, sink: Callable[[bytes], bool]) -> None:
        """Offer arriving bytes to `sink` first, as long as none are buffered."""
        self._sink = sink

    async def receive_some(self, max_bytes: int) -> bytes:
        """Receive buffered bytes; `b""` at the end of the stream. Raises `StreamClosed`."""
        if self._inbox or self._finished or self._over:
            await trio.lowlevel.checkpoint()
        while not self._inbox and not self._finished:
            self._check_open()
            await self._changed.park()
        self._check_open()
        chunk = bytes(self._inbox[:max_bytes])
        del self._inbox[: len(chunk)]
        self._unreported += len(chunk)
        if self._unreported >= REPORTED:
            self._report_read()
        return chunk

    async def aclose(self) -> None:
        """Close the stream gracefully."""
        if not self._over:
            self._transport.post(self.remote, self._far.finish)
            self.break_off("closed at this end")
        await trio.lowlevel.checkpoint()

    async def reset(self) -> None:
        """Reset the stream at both ends."""
        if not self._over:
            self._transport.post(
                self.remote, partial(self._far.break_off, f"{self._transport.peer_id} reset the stream")
            )
            self.break_off("reset at this end")
        await trio.lowlevel.checkpoint()

    async def established(self) -> None:
        """Wait until the other end has accepted the stream. Raises `StreamClosed`."""
        try:
            while self._twin is None:
                self._check_open()
                await self._changed.park()
        except trio.Cancelled:
            self.break_off("given up at this end")
            raise

    def establish(self, twin: "MemoryStream") -> None:
        """Join the twin, now that the other end has accepted the stream."""
        self._join(twin)
        if self._over:
            self._transport.post(self.remote, partial(twin.break_off, self._over))
        self._changed.unpark_all()

    def deliver(self, segment: bytes) -> None:
        """Deliver bytes that have arrived to the sink, or to the buffer."""
        self._transport.received += len(segment)
        if self._over:
            return
        if self._sink is not None and not self._inbox and self._sink(segment):
            self._unreported += len(segment)
            if self._unreported >= REPORTED:
                self._report_read()
        else:
            self._inbox += segment
            self._changed.unpark_all()

    def grant(self, num_bytes: int) -> None:
        """Add window credit for bytes that the other end has read."""
        self._credit += num_bytes
        self._changed.unpark_all()

    def finish(self) -> None:
        """Mark the end of the stream: the other end has closed, and all that it sent is here."""
        self._finished = True
        self._changed.unpark_all()

    def break_off(self, reason: str) -> None:
        """End this side for a reason, and wake every wait on it."""
        if not self._over:
            self._over = reason
            self._inbox.clear()
            self._transport.forget(self)
            self._changed.unpark_all()

    def _join(self, twin: "MemoryStream") -> None:
        self._twin, self._deliver = twin, twin.deliver

    def _report_read(self) -> None:
        self._transport.post(self.remote, partial(self._far.grant, self._unreported))
        self._unreported = 0

    @property
    def _far(self) -> "MemoryStream":
        assert self._twin is not None, "only an established stream leaves this file"
        return self._twin

    def _check_open(self) -> None:
        if self._over:
            raise StreamClosed(f"the stream to {self.remote} is gone: {self._over}")

    def _check_sendable(self) -> None:
        self._check_open()
        if self._finished:
            raise StreamClosed(f"{self.remote} has closed the stream")
