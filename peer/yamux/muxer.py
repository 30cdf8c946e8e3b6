"""A connection and its streams as py-libp2p wants them: the driver of `machine`.

Theory of operation. One task reads: what the cipher has opened goes to the machine, and what that says wakes readers and
writers; where the machine's meter is due, the task sleeps as long as the budget of the connection's origin says. One task
writes: the frames that wait are encrypted and handed to the socket in one call. Nobody else touches the socket, so that a
frame is written whole or not at all, whoever is cancelled. The reading task never waits for the writing one: two ends that
both do would wait for each other.

The cost is not the cipher (3 GB/s) but Python: so frames are as long as a packet of the cipher, and bodies go to readers in
the very bytes that it has written. The size of a batch follows the line.

A connection inside of another one (a circuit through a relay) has its part of that one's budgets, and so has one inside of
a circuit.
"""

import contextlib
import math
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import trio
from libp2p.abc import IMuxedConn, IMuxedStream
from libp2p.connection_types import ConnectionType
from libp2p.exceptions import BaseLibp2pError
from libp2p.io.exceptions import ConnectionClosedError
from libp2p.peer.id import ID
from libp2p.stream_muxer.exceptions import MuxedConnUnavailable, MuxedStreamEOF, MuxedStreamError, MuxedStreamReset
from multiaddr import Multiaddr

from ..base.errors import sole_error
from ..strangers.frames import ALL_UNREAD, ALL_WINDOWS, WINDOWS_OF_ONE, WindowBudget, carrier, own_budget
from .machine import Event, Machine, Opened, Readable, Stream

PROTOCOL = "/yamux/1.0.0"

FIRST_BATCH_BYTES = 1 << 18
"""The first batch of a connection: as much as the first window of a stream allows."""

LEAST_BATCH_BYTES, MOST_BATCH_BYTES = 1 << 16, 1 << 20
"""Measured: a transfer in batches of 64 kB costs 1.8 times the CPU of one in batches of 1 MiB."""

FAST_SECONDS, SLOW_SECONDS = 0.025, 0.05
"""A batch holds up a heartbeat behind it. It may take as long as the round trip of a long line, not more."""

MAX_PIECES_WAITING = 1 << 14
"""Answers to a remote that asks and does not read may fill a megabyte; a slow line delays some thousand frames at most."""

GOODBYE_TIMEOUT = 0.5
"""Seconds; less than the timeout of those that close a connection, since a close that is cancelled halfway leaks it."""

PING_VALUE = 0xD0B7
"""Carried by a ping and sent back; nothing reads it."""

Pieces = Sequence[bytes | memoryview]


class Yamux(IMuxedConn):
    """One connection. py-libp2p makes it of a `SecureSession`, runs `start` in a task, and sets `on_close`."""

    def __init__(self, conn: Any, peer_id: ID) -> None:
        self.secured_conn = conn
        self.peer_id = peer_id
        self.event_started = trio.Event()
        self.event_closed = trio.Event()
        self.on_close: Callable[[], Awaitable[Any]] | None = None
        below = getattr(self.secured_conn.conn.read_writer.read_write_closer, "stream", None)
        self.spend_frames = getattr(below, "spend_frames", None) or own_budget(trio.current_time)
        windows = WindowBudget(WINDOWS_OF_ONE, ALL_WINDOWS)
        self.inner_windows = WindowBudget(WINDOWS_OF_ONE, ALL_WINDOWS)
        """What the windows of all connections in this one may grow by."""
        if (outer := carrier(self)) is not None:
            windows = self.inner_windows = outer.inner_windows
            if carrier(outer) is not None:
                self.spend_frames = outer.spend_frames
        self.machine = Machine(is_initiator=conn.is_initiator, budget=windows, make=partial(YamuxStream, self))
        self.writer = FrameWriter(self.secured_conn)
        self.gave_way = False
        """True once it was ended for what it had unread."""
        ALL_UNREAD.add(self)
        self._reading = trio.CancelScope()
        self._opened, self._accepted = trio.open_memory_channel[YamuxStream](math.inf)

    @property
    def is_initiator(self) -> bool:
        """True if this side opened the connection."""
        return bool(self.secured_conn.is_initiator)

    @property
    def is_established(self) -> bool:
        """True while streams can be opened."""
        return self.event_started.is_set() and not self.machine.end

    @property
    def is_closed(self) -> bool:
        """True once the socket is closed."""
        return self.event_closed.is_set()

    @property
    def unread_bytes(self) -> int:
        """The bytes that arrived and were not read."""
        return self.machine.unread_bytes

    async def start(self) -> None:
        """Serve the connection to its end."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.writer.run)
                self.event_started.set()
                with self._reading:
                    await self._read()
                await self.close()
                nursery.cancel_scope.cancel()
        except Exception as error:  # noqa: BLE001  The boundary of one peer: only its connection may end.
            self._pass_on(self.machine.lose(str(sole_error(error)) or repr(sole_error(error))))
            await self.close()

    async def close(self) -> None:
        """Say goodbye and close the socket. What has arrived can still be read."""
        self._pass_on(self.machine.close())
        with trio.move_on_after(GOODBYE_TIMEOUT):
            await self.writer.flushed.wait()
        self._opened.close()
        with contextlib.suppress(BaseLibp2pError, OSError, trio.BrokenResourceError, trio.ClosedResourceError):
            await self.secured_conn.close()
        self.event_closed.set()
        if self.on_close is not None:
            await self.on_close()

    async def open_stream(self) -> "YamuxStream":
        """Open a stream. Raises `ConnectionClosedError`."""
        stream = self.machine.open()
        await self.written()
        assert isinstance(stream, YamuxStream)
        return stream

    async def accept_stream(self) -> "YamuxStream":
        """Wait for a stream of the remote. Raises `MuxedConnUnavailable` at the end of the connection."""
        try:
            return await self._accepted.receive()
        except trio.EndOfChannel:
            raise MuxedConnUnavailable(self.machine.end) from None

    async def ping(self) -> None:
        """Send a ping, and wait until it is on its way. Raises `ConnectionClosedError`."""
        self.machine.ping(PING_VALUE)
        await self.written()

    async def written(self) -> None:
        """Wait until all that the machine has to send is with the system. Raises `ConnectionClosedError`."""
        await self.post().wait()
        if self.machine.end or self.writer.ended:
            raise ConnectionClosedError(self.machine.end or "the connection is closed")

    def post(self) -> trio.Event:
        """Hand the writer what the machine has to send."""
        pieces, self.machine.outbox = self.machine.outbox, []
        return self.writer.post(pieces)

    def give_way(self) -> None:
        """End the connection, and drop what was not read."""
        self.gave_way = True
        self._pass_on(self.machine.give_way("too many bytes are unread here, and most of them are of this connection"))
        self._reading.cancel()

    def get_transport_addresses(self) -> list[Multiaddr]:
        """Return the addresses of the other end."""
        addresses: list[Multiaddr] = self.secured_conn.get_transport_addresses()
        return addresses

    def get_connection_type(self) -> ConnectionType:
        """Return whether the connection is direct or relayed."""
        kind: ConnectionType = self.secured_conn.get_connection_type()
        return kind

    def get_remote_address(self) -> tuple[str, int] | None:
        """Return IP and port of the other end; of a relayed connection the relay's."""
        address: tuple[str, int] | None = self.secured_conn.get_remote_address()
        return address

    async def _read(self) -> None:
        machine = self.machine
        while not machine.end:
            data = await self.secured_conn.read()
            self._pass_on(machine.receive(data))
            if (crowded := ALL_UNREAD.arrive(len(data))) is not None:
                crowded.give_way()
            while machine.meter.is_due and not machine.end:
                await trio.sleep(self.spend_frames(str(self.peer_id), machine.meter.bill()))
                self._pass_on(machine.receive())

    def _pass_on(self, events: Sequence[Event]) -> None:
        for event in events:
            stream = event.stream
            assert isinstance(stream, YamuxStream)
            if isinstance(event, Opened):
                self._opened.send_nowait(stream)
            else:
                (stream.readers if isinstance(event, Readable) else stream.writers).unpark_all()
        if self.machine.outbox:
            self.post()
            if self.writer.num_waiting > MAX_PIECES_WAITING:
                self._pass_on(self.machine.refuse("it asks and does not read the answers"))


class YamuxStream(Stream, IMuxedStream):
    """One stream of a connection."""

    def __init__(self, muxer: Yamux, number: int) -> None:
        super().__init__(number)
        self.muxed_conn: Yamux = muxer
        self.readers, self.writers = trio.lowlevel.ParkingLot(), trio.lowlevel.ParkingLot()

    async def read(self, n: int | None = None) -> bytes:
        """Return some bytes, at most `n`. Raises `MuxedStreamEOF` or `MuxedStreamReset` once there are no more."""
        while not self.unread:
            if self.received_all:
                raise MuxedStreamEOF("the remote has finished the stream")
            if self.is_reset:
                raise MuxedStreamReset(self._why_reset())
            await self.readers.park()
        data = self.muxed_conn.machine.read(self, len(self.unread) if n is None or n < 0 else n)
        self.muxed_conn.post()
        await trio.lowlevel.cancel_shielded_checkpoint()  # The bytes are taken, and must not be lost.
        return data

    async def write(self, data: bytes | memoryview) -> None:
        """Send all bytes, however long the remote takes to read. Raises `MuxedStreamError` or `ConnectionClosedError`."""
        view, muxer = memoryview(data), self.muxed_conn
        while len(view):
            if self.sent_all:
                raise MuxedStreamError("the stream was closed on this side")
            if self.is_reset:
                raise MuxedStreamReset(self._why_reset())
            if self.send_window <= 0:
                await self.writers.park()
                continue
            size = min(self.send_window, muxer.writer.batch_bytes)
            muxer.machine.send(self, view[:size], muxer.writer.frame_bytes)
            view = view[size:]
            await muxer.written()

    async def close(self) -> None:
        """Leave the stream: what was sent still arrives, what comes is dropped."""
        self.muxed_conn._pass_on(self.muxed_conn.machine.leave(self))
        self.writers.unpark_all()
        await trio.lowlevel.checkpoint()

    def hold_at_most(self, num_bytes: int) -> None:
        """Reset the stream once it has more unread bytes than that."""
        self.muxed_conn._pass_on(self.muxed_conn.machine.hold(self, num_bytes))

    async def reset(self) -> None:
        """End both directions, and drop what was not read."""
        self.muxed_conn._pass_on(self.muxed_conn.machine.reset(self))
        await trio.lowlevel.checkpoint()

    def set_deadline(self, ttl: int) -> None:
        """Never: callers have cancel scopes."""
        raise NotImplementedError

    async def __aenter__(self) -> "YamuxStream":
        return self

    @property
    def is_closed(self) -> bool:
        """True if nothing more is sent in either direction."""
        return self.is_over

    def get_remote_address(self) -> tuple[str, int] | None:
        """Return IP and port of the other end of the connection."""
        return self.muxed_conn.get_remote_address()

    def _why_reset(self) -> str:
        return self.muxed_conn.machine.end or "the stream was reset"


class FrameWriter:
    """The one task that writes a connection's frames; those that wait go to the socket in one write."""

    def __init__(self, session: Any) -> None:
        self.ended = False
        self.batch_bytes = FIRST_BATCH_BYTES
        """How much a stream should post at a time; other streams' frames go between."""
        self.frame_bytes: int = session.conn.frame_bytes
        """The most bytes of one frame."""
        self.num_waiting = 0
        """The pieces that were not taken yet."""
        self.flushed = trio.Event()
        """Set once all that was posted is written, or never will be."""
        self.flushed.set()
        self._session = session
        self._posted, self._waiting = trio.open_memory_channel[tuple[Pieces, trio.Event]](math.inf)

    def post(self, pieces: Pieces) -> trio.Event:
        """Queue frames, in whatever pieces; the event is set when they are written, or never will be."""
        if pieces and not self.ended:
            self.flushed = trio.Event()
            self.num_waiting += len(pieces)
            self._posted.send_nowait((pieces, self.flushed))
        return self.flushed

    async def run(self) -> None:
        """Write until the connection ends."""
        going: list[trio.Event] = []
        try:
            async for pieces, gone in self._waiting:
                going, batch, num_bytes = [gone], list(pieces), sum(map(len, pieces))
                with contextlib.suppress(trio.WouldBlock):
                    while num_bytes < self.batch_bytes:
                        pieces, gone = self._waiting.receive_nowait()
                        going.append(gone)
                        batch += pieces
                        num_bytes += sum(map(len, pieces))
                self.num_waiting -= len(batch)
                began = trio.current_time()
                channel = self._session.conn
                await channel.read_writer.read_write_closer.write(channel.sealed(batch))
                self.batch_bytes = next_batch(self.batch_bytes, num_bytes, trio.current_time() - began)
                for gone in going:
                    gone.set()
        except (BaseLibp2pError, OSError, trio.BrokenResourceError):
            await self._session.close()  # Wakes the reading side, which then cleans up.
        finally:
            self.ended = True
            with contextlib.suppress(trio.WouldBlock):
                while True:
                    going.append(self._waiting.receive_nowait()[1])
            for gone in going:
                gone.set()
            self._waiting.close()


def next_batch(batch: int, num_bytes: int, seconds: float) -> int:
    """Return how many bytes the next batch may have, after one of `num_bytes` took that long to be handed to the system."""
    if seconds > SLOW_SECONDS:
        return max(batch // 2, LEAST_BATCH_BYTES)
    return min(batch * 2, MOST_BATCH_BYTES) if seconds < FAST_SECONDS and num_bytes >= batch else batch
