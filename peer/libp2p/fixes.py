"""Works around bugs of py-libp2p 0.8.1: one small function per bug, all applied by `apply_fixes`.

Each fix replaces or wraps functions of the library, names the lines that it mends, and was written for one version,
which pyproject.toml pins. On another version they are still applied (a library without keepalive is no better than a
patched unknown one), and an event reports it.
"""

import functools
import importlib.metadata
import logging
import math
import socket
import struct
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import libp2p.network.auto_connector
import libp2p.network.connection.swarm_connection
import libp2p.network.swarm
import libp2p.stream_muxer.yamux.yamux
import libp2p.transport.tcp.tcp
import trio
from libp2p.io.exceptions import ConnectionClosedError
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.stream_muxer.exceptions import MuxedStreamEOF, MuxedStreamError, MuxedStreamReset

from ..telemetry import Telemetry
from . import fast_pipe
from .fast_pipe import FrameWriter, Unread
from .listen import ACCEPT_QUEUE, SelectiveListener
from .packets import PlainBytes
from .tcp import TunedStream

# A type checker forbids an assignment to a class, which is all that this file does.
auto_connector: Any = libp2p.network.auto_connector
swarm_connection: Any = libp2p.network.connection.swarm_connection
swarm: Any = libp2p.network.swarm
yamux: Any = libp2p.stream_muxer.yamux.yamux
tcp: Any = libp2p.transport.tcp.tcp

WRITTEN_FOR = "0.8.1"

MAX_FRAMES_WAITING = 1 << 14
"""Answers to a remote that asks and does not read may fill 4 MB; a slow line delays some thousand frames at most."""

GOODBYE_TIMEOUT = 0.5
"""Seconds; less than the timeout of those that close a connection, since a close that is cancelled halfway leaks it."""

_fixes: list[Callable[[], None]] = []


def _fix(patch: Callable[[], None]) -> Callable[[], None]:
    _fixes.append(patch)
    return patch


def apply_fixes(telemetry: Telemetry) -> None:
    """Apply every fix, once per process; emits an event if the library is not the version that they were written for."""
    version = importlib.metadata.version("libp2p")
    if version != WRITTEN_FOR:
        names = ", ".join(patch.__name__ for patch in _fixes)
        telemetry.emit("libp2p.unknown_version", reason=f"libp2p {version}, fixes are for {WRITTEN_FOR}: {names}")
    _apply_once()


@functools.cache
def _apply_once() -> None:
    for patch in _fixes:
        patch()
    fast_pipe.apply_fast_pipe()


@_fix
def tune_sockets() -> None:
    """`io/trio.py:28`: no keepalive, no user timeout, so that a silent drop is never noticed."""
    tcp.TrioTCPStream = TunedStream


@_fix
def keep_quiet() -> None:
    """`utils/logging.py:98`: no handler, so Python prints warnings on stderr; `swarm_connection.py` logs to the root."""
    logging.getLogger("libp2p").addHandler(logging.NullHandler())
    swarm_connection.logging = logging.getLogger(swarm_connection.__name__)


@_fix
def listen_alone() -> None:
    """`transport/tcp/tcp.py:60`: SO_REUSEPORT before bind lets two peers share a port, each getting half the dials.

    Bound without it, the second peer gets "address in use"; set afterwards it still lets hole punching dial from
    this port, because the system looks at the flag of both sockets at the time of the later bind.
    """

    async def open_listeners(host: str | None, port: int) -> Sequence[SelectiveListener]:
        opened = await trio.open_tcp_listeners(port, host=host, backlog=ACCEPT_QUEUE)
        listeners = [SelectiveListener(each.socket) for each in opened]
        if hasattr(socket, "SO_REUSEPORT"):
            for listener in listeners:
                listener.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        return listeners

    tcp._open_reuseport_listeners = open_listeners


@_fix
def free_inbound_slots() -> None:
    """`network/swarm.py:2061`: an accepted connection holds its slot and its task until the host ends, not its own end.

    After `max_connections` accepted connections a host refuses every further one, until it is restarted.
    """

    async def handle(self: Any, stream: Any, maddr: Any, _event: Any) -> None:
        raw = RawConnection(stream, False)
        try:
            muxed = await self.upgrade_inbound_raw_conn(raw, maddr)
            stream.upgraded = True
            await muxed.event_closed.wait()
        finally:
            with trio.CancelScope(deadline=trio.current_time() + 1, shield=True):
                await raw.close()

    swarm.Swarm._do_handle_inbound_connection = handle


@_fix
def contain_errors() -> None:
    """`network/swarm.py:2638`: an unexpected error in one connection's task ends the whole host."""

    def contained(start: Callable[[Any], Awaitable[None]]) -> Callable[[Any], Awaitable[None]]:
        async def run(self: Any) -> None:
            try:
                await start(self)
            except Exception as error:  # noqa: BLE001  The boundary of one peer: only its connection may end.
                logging.getLogger(__name__).debug("connection ends: %r", error)
                await self.close()

        return run

    yamux.Yamux.start = contained(yamux.Yamux.start)
    swarm_connection.SwarmConn.start = contained(swarm_connection.SwarmConn.start)


@_fix
def dial_nobody_unasked() -> None:
    """`network/auto_connector.py:313`: below half of `max_connections` it dials every peer that it knows of."""

    async def stay_put(self: Any) -> None:
        pass

    auto_connector.AutoConnector.maybe_connect = stay_put


@_fix
def dial_again() -> None:
    """`network/swarm.py:109`: a failed dial blocks the peer for 60 s, though its next address might answer."""
    swarm._NegativePeerCache.mark_failed = lambda self, peer_id: None


@_fix
def wait_for_window() -> None:
    """`yamux.py:281`: a stream breaks when its reader pauses for more than 5 s. Heartbeats detect failures, not this."""

    def get_window(self: Any) -> int:
        size: int = self.__dict__["send_window"]
        return size

    def set_window(self: Any, size: int) -> None:
        self.__dict__["send_window"] = size
        if size > 0 and (opened := self.__dict__.pop("window_opened", None)) is not None:
            opened.set()

    async def write(self: Any, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while len(view):
            if self.send_closed or self.closed:
                raise MuxedStreamError("Stream is closed for sending")
            if self.send_window <= 0:
                opened = self.__dict__.setdefault("window_opened", trio.Event())
                with trio.move_on_after(0.25):  # The end of a stream sets no event of ours: check its flags again.
                    await opened.wait()
                continue
            writer = _writer_of(self.conn)
            batch, view = view[: (room := min(self.send_window, writer.batch_bytes))], view[room:]
            self.send_window -= len(batch)
            frames: list[PlainBytes] = []
            for start in range(0, len(batch), writer.frame_bytes):
                chunk = batch[start : start + writer.frame_bytes]
                header = struct.pack(yamux.YAMUX_HEADER_FORMAT, 0, yamux.TYPE_DATA, 0, self.stream_id, len(chunk))
                # The frame is written even if I am cancelled, and then nobody keeps a buffer from changing.
                frames += (header, chunk if chunk.readonly else bytes(chunk))
            await self.conn._write_frames(frames)

    yamux.YamuxStream.send_window = property(get_window, set_window)
    yamux.YamuxStream.write = write


class _WindowExceeded(trio.TooSlowError):
    """The one kind of error that makes the library's reading loop end the connection."""


@_fix
def hold_to_window() -> None:
    """`yamux.py:1588`: a sender that ignores its window is only warned about, and fills the memory."""

    def get_window(self: Any) -> int:
        size: int = self.__dict__["recv_window"]
        return size

    def set_window(self: Any, size: int) -> None:
        self.__dict__["recv_window"] = size
        if size < 0:
            raise _WindowExceeded

    yamux.YamuxStream.recv_window = property(get_window, set_window)


@_fix
def update_window_by_halves() -> None:
    """`yamux.py:410`: nearly every read sends a window update, and the window stays at 256 kB where no ping was measured.

    Here one is sent when half of the window was read, and doubles it up to the library's limit. Measured: a round of 25M
    costs 6 to 12 % less CPU, since each of these 12 bytes wakes four tasks and makes two system calls.
    """

    async def update(self: Any, *, bytes_read: int = 0) -> None:
        self._pending_recv_release += bytes_read
        window = self.target_recv_window
        if self._pending_recv_release < window // 2:
            await trio.lowlevel.cancel_shielded_checkpoint()  # The reader has taken its bytes, which must not be lost.
            return
        self.target_recv_window = min(2 * window, yamux.MAX_WINDOW_SIZE)
        increment = self._pending_recv_release + self.target_recv_window - window
        self._pending_recv_release = 0
        self.recv_window += increment
        await self.send_window_update(increment)

    yamux.YamuxStream._auto_tune_and_send_window_update = update


@_fix
def keep_what_arrived() -> None:
    """`yamux.py:1700`: when a connection ends, bytes that had arrived are thrown away, and a broken stream reads as EOF.

    Here the bytes are still read, then EOF if the other side had finished its stream, else a reset.
    """

    def ending(end: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
        async def wrapped(self: Any, *args: Any) -> None:
            for stream in self.streams.values():
                stream.__dict__.setdefault("arrived", self.stream_buffers.get(stream.stream_id))
                stream.__dict__.setdefault("finished", stream.recv_closed and not stream.reset_received)
                stream.reset_received = True
            await end(self, *args)

        return wrapped

    async def read(self: Any, n: int | None = None) -> bytes:
        while True:
            buffer = self.__dict__.get("arrived") or self.conn.stream_buffers.get(self.stream_id)
            if buffer:
                most = len(buffer) if n is None or n < 0 else n
                if isinstance(buffer, Unread):
                    data = buffer.take(most)
                else:
                    data = bytes(buffer[:most])
                    del buffer[:most]
                if not self.recv_closed and not self.reset_received:
                    await self._auto_tune_and_send_window_update(bytes_read=len(data))
                return data
            if self.__dict__.get("finished") or (self.recv_closed and not self.reset_received):
                if self.closed:
                    await self.conn._finalize_stream(self, fully_closed=True)
                raise MuxedStreamEOF("Stream is closed for receiving")
            arrival = self.conn.stream_events.get(self.stream_id)
            if self.reset_received or self.closed or arrival is None:
                raise MuxedStreamReset("Stream was reset")
            await arrival.wait()
            if self.conn.stream_events.get(self.stream_id) is arrival:
                self.conn.stream_events[self.stream_id] = trio.Event()

    yamux.YamuxStream.read = read
    yamux.Yamux.close = ending(yamux.Yamux.close)
    yamux.Yamux._cleanup_on_error = ending(yamux.Yamux._cleanup_on_error)


@_fix
def write_whole_frames() -> None:
    """`yamux.py:812`: a sender that is cancelled in mid-frame leaves half of it on the wire, which ends every stream.

    Here a frame is written whole or not at all. Window updates are not waited for (there are no more of them than
    frames received), so that a reader can be cancelled without losing the bytes that it has taken from the buffer.
    """

    async def write_frames(self: Any, frames: Sequence[PlainBytes]) -> None:
        writer = _writer_of(self)
        gone = writer.post(frames)
        # Type, and the low byte of the flags: no FIN, no RST.
        if (frames[0][1], frames[0][3]) == (yamux.TYPE_WINDOW_UPDATE, 0):
            await trio.lowlevel.cancel_shielded_checkpoint()
            return
        await gone.wait()
        if writer.ended:
            raise ConnectionClosedError("the connection is closed")

    async def write_frame(self: Any, frame: bytes) -> None:
        await write_frames(self, [frame])

    yamux.Yamux._write_frames = write_frames
    yamux.Yamux._write_frame = write_frame


def _writer_of(muxer: Any) -> FrameWriter:
    """Return the writer of a connection, which starts at its first frame. Raises `ConnectionClosedError`."""
    if "writer" not in muxer.__dict__:
        muxer.__dict__["writer"] = FrameWriter(muxer.secured_conn)
        muxer._nursery.start_soon(muxer.__dict__["writer"].run)
    writer: FrameWriter = muxer.__dict__["writer"]
    if writer.ended:
        raise ConnectionClosedError("the connection is closed")
    return writer


class _AnswersUnread(trio.TooSlowError):
    """Ends the connection, like `_WindowExceeded`."""


@_fix
def read_on_while_answering() -> None:
    """`yamux.py:1377,1487`: the reading loop waits until its answer (a pong, an ACK) is written, which can deadlock.

    While both ends send more than their sockets hold, each loop waits for the other one to read.
    """
    handle_incoming = yamux.Yamux.handle_incoming
    write_frame = yamux.Yamux._write_frame

    async def read_frames(self: Any) -> None:
        self.__dict__["reader"] = trio.lowlevel.current_task()
        await handle_incoming(self)

    async def write(self: Any, frame: bytes) -> None:
        if trio.lowlevel.current_task() is not self.__dict__.get("reader"):
            await write_frame(self, frame)
            return
        writer = _writer_of(self)
        if writer.num_waiting >= MAX_FRAMES_WAITING:
            raise _AnswersUnread
        writer.post([frame])
        await trio.lowlevel.checkpoint()

    yamux.Yamux.handle_incoming = read_frames
    yamux.Yamux._write_frame = write


@_fix
def bound_goodbye() -> None:
    """`yamux.py:794`: closing waits until its GO_AWAY is written, for a remote that reads nothing as long as TCP does."""
    write_frame = yamux.Yamux._write_frame

    async def write(self: Any, frame: bytes) -> None:
        with trio.move_on_after(GOODBYE_TIMEOUT if frame[1] == yamux.TYPE_GO_AWAY else math.inf):
            await write_frame(self, frame)

    yamux.Yamux._write_frame = write
