"""Moves bytes between a socket and Yamux in fewer steps than py-libp2p 0.8.1; for speed alone.

Theory of operation. The cost is not the cipher (3 GB/s) but Python: the library makes two system calls, ten copies
and some forty function calls for every 64 kB. Here

    reading    one call to the socket takes all bytes that are there; every whole message in them is decrypted; and plain
               data frames of open streams go to their readers at once, in the very bytes that the cipher has written.
               The library handles all other frames
    writing    the frames that wait are encrypted and handed to the socket in one call: as one packet (`packets`), or with
               a peer that has only libp2p's Noise in messages of 64 kB. The size of such a batch follows the line

Measured: half the CPU of a transfer through Noise, in which batches alone had saved a third (`docs/log.md`).
"""

import contextlib
import math
import struct
from collections import deque
from collections.abc import Sequence
from typing import Any

import libp2p.security.noise.io
import libp2p.security.secure_session
import libp2p.stream_muxer.yamux.yamux
import trio
from libp2p.exceptions import BaseLibp2pError
from libp2p.io.exceptions import ConnectionClosedError, IncompleteReadError
from libp2p.io.utils import read_exactly
from libp2p.security.noise.io import MAX_PLAINTEXT_LENGTH, SIZE_NOISE_MESSAGE_LEN

from ..strangers.frames import FrameMeter, own_budget
from .packets import MAX_PACKET_BYTES, PacketChannel, PlainBytes

# A type checker forbids an assignment to a class, which is what `apply_fast_pipe` does.
_noise: Any = libp2p.security.noise.io
_secure_session: Any = libp2p.security.secure_session
_yamux: Any = libp2p.stream_muxer.yamux.yamux

SOCKET_BYTES = 1 << 18
"""Read from a socket at a time on a connection with libp2p's Noise: four messages. More gains nothing there."""

FIRST_BATCH_BYTES = 1 << 18
"""The first batch of a connection: as much as the first window of a Yamux stream allows."""

LEAST_BATCH_BYTES, MOST_BATCH_BYTES = 1 << 16, MAX_PACKET_BYTES
"""Measured: a transfer in batches of 64 kB costs 1.8 times the CPU of one in batches of 1 MiB."""

FAST_SECONDS, SLOW_SECONDS = 0.025, 0.05
"""A batch holds up a heartbeat behind it. It may take as long as the round trip of a long line, not more."""

FRAME_PAYLOAD = MAX_PLAINTEXT_LENGTH - _yamux.HEADER_SIZE
"""The library's 65 524 bytes overflow one Noise message by 17 bytes, which costs a second one for every frame."""

JOINED_BYTES = 1 << 12
"""Unread pieces below this are joined: a remote that sends single bytes must not make an object of each."""

BODY_TIMEOUT = 30.0
"""The timeout in seconds for the rest of a frame that has begun: the library's own default."""


def apply_fast_pipe() -> None:
    """Replace the library's functions by the faster ones, once per process."""
    _noise.NoiseTransportReadWriter.read_msg = read_message
    _secure_session.SecureSession.read = read
    _yamux.read_exactly = next_header
    _yamux.Yamux._read_data_body = read_body
    handle_incoming = _yamux.Yamux.handle_incoming

    async def handle(self: Any) -> None:
        below = getattr(self.secured_conn.conn.read_writer.read_write_closer, "stream", None)
        spend = getattr(below, "spend_frames", None) or own_budget()
        self.secured_conn.__dict__.update(muxer=self, meter=FrameMeter(str(self.peer_id), spend))
        await handle_incoming(self)

    _yamux.Yamux.handle_incoming = handle


async def read_message(self: Any, prefix_encoded: bool = False) -> bytes:
    """Receive the next Noise message, decrypted. Replaces `NoiseTransportReadWriter.read_msg`."""
    arrived: bytearray = self.__dict__.setdefault("arrived", bytearray())
    while True:
        size = SIZE_NOISE_MESSAGE_LEN
        if len(arrived) >= size:
            end = size + int.from_bytes(arrived[:size], "big")
            if len(arrived) >= end:
                with memoryview(arrived) as view:
                    message = bytes(view[size:end])
                del arrived[:end]
                return bytes(self.decrypt(message[len(self.prefix) :] if prefix_encoded else message))
        data = await self.read_writer.read_write_closer.read(SOCKET_BYTES)
        if not data:
            raise IncompleteReadError("the connection was closed", size, len(arrived))
        arrived += data


async def read(self: Any, n: int | None = None) -> bytes:
    """Read exactly `n` bytes, less only at the end; without `n` those of one message. Replaces `SecureSession.read`."""
    pieces: list[bytes] = []
    missing = n
    while missing != 0:
        if not (piece := take(self, missing)):
            message = await self.conn.read_msg()
            if not message and not pieces:
                raise ConnectionClosedError("Connection closed")
            if not message:
                break
            self.__dict__["rest"] = message, 0
            continue
        pieces.append(piece)
        if missing is None:
            break
        missing -= len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def take(session: Any, n: int | None) -> bytes:
    """Return at most `n` bytes of the message that was decrypted last, if any are left."""
    message: bytes
    message, start = session.__dict__.get("rest", (b"", 0))
    end = len(message) if n is None else min(start + n, len(message))
    session.__dict__["rest"] = (message, end) if end < len(message) else (b"", 0)
    return message[start:end]


async def next_header(session: Any, n: int) -> bytes:
    """Return the header of the next frame that the library must handle; deliver the plain data frames before it.

    Replaces `read_exactly` in Yamux's reading loop. The library handles a frame with a flag, for an unknown stream, or
    past its window; of some kinds without giving other tasks a turn, while a packet may hold a hundred thousand of them.
    """
    while True:
        if len(header := take(session, n)) < n:
            header += await read_exactly(session, n - len(header))
        muxer = session.__dict__.get("muxer")
        if muxer is None:
            return header
        _, kind, flags, stream_id, length = struct.unpack(_yamux.YAMUX_HEADER_FORMAT, header)
        stream = muxer.streams.get(stream_id)
        meter: FrameMeter = session.__dict__["meter"]
        if meter.count(length if kind == _yamux.TYPE_DATA else 0):
            await meter.rest()
        if kind == _yamux.TYPE_DATA and length > MAX_PACKET_BYTES:  # The library would read 16 MiB before it looks whose.
            raise ConnectionClosedError(f"a frame of {length} bytes")
        if kind != _yamux.TYPE_DATA or flags or stream is None or length > stream.recv_window:
            return header
        body = take(session, length)
        if len(body) < length:
            body += await read_body(muxer, length - len(body))
            if muxer.streams.get(stream_id) is not stream:
                continue  # It was reset meanwhile.
        buffer = muxer.stream_buffers[stream_id]
        if not isinstance(buffer, Unread):
            buffer = muxer.stream_buffers[stream_id] = Unread(buffer)
        buffer.extend(body)
        stream.recv_window -= length
        muxer.stream_events[stream_id].set()


class Unread:
    """A stream's unread bytes in the pieces in which they came, in the place of Yamux's bytearray: nothing is copied."""

    def __init__(self, first: bytes | bytearray = b"") -> None:
        self._pieces = deque[bytes]()
        self._start = 0
        """Bytes of the first piece that were taken."""
        self._size = 0
        self.extend(first)

    def __len__(self) -> int:
        return self._size

    def extend(self, piece: bytes | bytearray) -> None:
        """Append bytes."""
        if len(piece) < JOINED_BYTES and self._pieces and len(self._pieces[-1]) < JOINED_BYTES:
            self._pieces[-1] += piece
        elif piece:
            self._pieces.append(bytes(piece))
        self._size += len(piece)

    def take(self, most: int) -> bytes:
        """Remove and return some of the bytes, in order: at least one if there are any, and at most `most`."""
        if not self._pieces or most <= 0:
            return b""
        piece = self._pieces[0][self._start : self._start + most]
        self._start += len(piece)
        if self._start == len(self._pieces[0]):
            self._pieces.popleft()
            self._start = 0
        self._size -= len(piece)
        return piece


async def read_body(self: Any, length: int) -> bytes:
    """Read the body of a frame. Replaces `Yamux._read_data_body`, which looks its timeout up every time."""
    with trio.fail_after(BODY_TIMEOUT):
        return await read_exactly(self.secured_conn, length)


def next_batch(batch: int, num_bytes: int, seconds: float) -> int:
    """Return how many bytes the next batch may have, after one of `num_bytes` took that long to be handed to the system."""
    if seconds > SLOW_SECONDS:
        return max(batch // 2, LEAST_BATCH_BYTES)
    return min(batch * 2, MOST_BATCH_BYTES) if seconds < FAST_SECONDS and num_bytes >= batch else batch


class FrameWriter:
    """The one task that writes a connection's frames; those that wait go to the socket in one write."""

    def __init__(self, session: Any) -> None:
        self.ended = False
        self.batch_bytes = FIRST_BATCH_BYTES
        """How much a stream should post at a time; other streams' frames go between."""
        self.frame_bytes = MAX_PACKET_BYTES if isinstance(session.conn, PacketChannel) else FRAME_PAYLOAD
        """The most bytes of one frame."""
        self._session = session
        self._posted, self._waiting = trio.open_memory_channel[tuple[Sequence[PlainBytes], trio.Event]](math.inf)

    @property
    def num_waiting(self) -> int:
        """The number of posts that were not taken yet."""
        return self._posted.statistics().current_buffer_used

    def post(self, frames: Sequence[PlainBytes]) -> trio.Event:
        """Queue frames, in whatever pieces; the event is set when they are written, or never will be."""
        gone = trio.Event()
        self._posted.send_nowait((frames, gone))
        return gone

    async def run(self) -> None:
        """Write until the connection ends."""
        going: list[trio.Event] = []
        try:
            async for frames, gone in self._waiting:
                going, batch, num_bytes = [gone], list(frames), sum(map(len, frames))
                with contextlib.suppress(trio.WouldBlock):
                    while num_bytes < self.batch_bytes:
                        frames, gone = self._waiting.receive_nowait()
                        going.append(gone)
                        batch += frames
                        num_bytes += sum(map(len, frames))
                began = trio.current_time()
                await self._send(batch)
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

    async def _send(self, frames: Sequence[PlainBytes]) -> None:
        channel = self._session.conn
        await channel.read_writer.read_write_closer.write(
            channel.sealed(frames) if isinstance(channel, PacketChannel) else _noise_messages(channel, b"".join(frames))
        )


def _noise_messages(channel: Any, plain: bytes) -> bytes:
    pieces: list[bytes] = []
    for start in range(0, len(plain), MAX_PLAINTEXT_LENGTH):
        cipher = channel.encrypt(plain[start : start + MAX_PLAINTEXT_LENGTH])
        pieces += (len(cipher).to_bytes(SIZE_NOISE_MESSAGE_LEN, "big"), cipher)
    return b"".join(pieces)
