"""One end of a stream on the network in memory: what is sent, what has arrived, and how it ends.

Theory of operation. A stream has two ends that point at each other; each tells the other by packets of its transport.
An end is open until it is closed or broken, for one stated reason, and every wait on it ends then. A long message goes
in segments which wait for the uplink and for the other end's window. Most frames of a round are small, and waking a
task for each costs more than the frame: so one that fits into the window can go without a wait (`send_now`), and be
taken at the other end before it is anybody's to receive (`divert`).
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import trio

from ..errors import StreamClosed
from ..transport import PeerId

if TYPE_CHECKING:
    from .peer import MemoryTransport

Action: TypeAlias = Callable[[], None]
"""What a packet does when it arrives."""

WINDOW = 1 << 20
"""Bytes in flight or unread on one stream. Yamux starts at 256 KiB and grows with the round trip; this is between."""
REPORTED = WINDOW // 2
"""Bytes read until the other end is told, as Yamux does, instead of a packet for every read."""
SEGMENT = 1 << 16
"""Bytes that leave in one go, the longest frame of Noise: how long one stream can keep another from the uplink."""


class MemoryStream:
    """One end of a stream. Implements `transport.Stream`. Made by `open_stream`, or handed to a handler."""

    def __init__(self, transport: "MemoryTransport", remote: PeerId, twin: "MemoryStream | None" = None) -> None:
        self._transport = transport
        self._remote = remote
        self._lane = transport.lane(remote)
        self._twin: MemoryStream | None = None
        self._deliver: Callable[[bytes], None]
        """Of the twin."""
        if twin is not None:
            self._join(twin)
        self._inbox = bytearray()
        self._credit = WINDOW
        self._unreported = 0
        self._sink: Callable[[bytes], bool] | None = None
        self._over = ""
        self._finished = False
        self._changed = trio.lowlevel.ParkingLot()

    @property
    def remote(self) -> PeerId:
        """The peer at the other end."""
        return self._remote

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Send everything. Raises `StreamClosed`, also once the other end has closed, since nobody would read it."""
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
        """Queue a small frame on the uplink; False where it would have to wait for the window. Raises `StreamClosed`."""
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
        """Offer what arrives to `sink` first, as long as nothing waits to be received."""
        self._sink = sink

    async def receive_some(self, max_bytes: int) -> bytes:
        """What has arrived; `b""` at the end. Raises `StreamClosed`."""
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
        """Close in order."""
        if not self._over:
            self._transport.post(self._remote, self._far.finish)
            self.break_off("closed at this end")
        await trio.lowlevel.checkpoint()

    async def reset(self) -> None:
        """Drop the stream at both ends."""
        if not self._over:
            self._transport.post(
                self._remote, partial(self._far.break_off, f"{self._transport.peer_id} reset the stream")
            )
            self.break_off("reset at this end")
        await trio.lowlevel.checkpoint()

    async def established(self) -> None:
        """Wait until the other end has taken the stream. Raises `StreamClosed`."""
        try:
            while self._twin is None:
                self._check_open()
                await self._changed.park()
        except trio.Cancelled:
            self.break_off("given up at this end")
            raise

    def establish(self, twin: "MemoryStream") -> None:
        """The other end has taken the stream."""
        self._join(twin)
        if self._over:
            self._transport.post(self._remote, partial(twin.break_off, self._over))
        self._changed.unpark_all()

    def deliver(self, segment: bytes) -> None:
        """Bytes have arrived."""
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
        """The other end has read so many bytes."""
        self._credit += num_bytes
        self._changed.unpark_all()

    def finish(self) -> None:
        """The other end has closed, and all that it sent is here."""
        self._finished = True
        self._changed.unpark_all()

    def break_off(self, reason: str) -> None:
        """This end is over."""
        if not self._over:
            self._over = reason
            self._inbox.clear()
            self._transport.forget(self)
            self._changed.unpark_all()

    def _join(self, twin: "MemoryStream") -> None:
        self._twin, self._deliver = twin, twin.deliver

    def _report_read(self) -> None:
        self._transport.post(self._remote, partial(self._far.grant, self._unreported))
        self._unreported = 0

    @property
    def _far(self) -> "MemoryStream":
        assert self._twin is not None, "only an established stream leaves this file"
        return self._twin

    def _check_open(self) -> None:
        if self._over:
            raise StreamClosed(f"the stream to {self._remote} is gone: {self._over}")

    def _check_sendable(self) -> None:
        self._check_open()
        if self._finished:
            raise StreamClosed(f"{self._remote} has closed the stream")
