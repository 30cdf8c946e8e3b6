"""Moves bytes between a socket and Yamux in fewer steps than py-libp2p 0.8.1; for speed alone.

Theory of operation. The cost is not the cipher (3 GB/s) but Python: the library makes two system calls, ten copies
and some forty function calls for every 64 kB. Here

    reading    one call to the socket takes all bytes that are there; every whole Noise message in them is decrypted;
               and plain data frames of open streams go to their buffers at once. The library handles all other frames
    writing    the frames that wait are encrypted one by one and handed to the socket in one call

Measured: a third less CPU for a whole round (`docs/log.md`). On the wire nothing changes.
"""

import contextlib
import math
import struct
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

# A type checker forbids an assignment to a class, which is what `apply_fast_pipe` does.
_noise: Any = libp2p.security.noise.io
_secure_session: Any = libp2p.security.secure_session
_yamux: Any = libp2p.stream_muxer.yamux.yamux

SOCKET_BYTES = 1 << 18
"""Read from and written to a socket at a time: four frames. More gains nothing, and holds up the frames behind it."""

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
        self.secured_conn.__dict__["muxer"] = self
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
    past its window.
    """
    while True:
        header = await read_exactly(session, n)
        muxer = session.__dict__.get("muxer")
        if muxer is None:
            return header
        _, kind, flags, stream_id, length = struct.unpack(_yamux.YAMUX_HEADER_FORMAT, header)
        stream = muxer.streams.get(stream_id)
        if kind != _yamux.TYPE_DATA or flags or stream is None or length > stream.recv_window:
            return header
        body = take(session, length)
        if len(body) < length:
            body += await read_body(muxer, length - len(body))
            if muxer.streams.get(stream_id) is not stream:
                continue  # It was reset meanwhile.
        muxer.stream_buffers[stream_id] += body
        stream.recv_window -= length
        muxer.stream_events[stream_id].set()


async def read_body(self: Any, length: int) -> bytes:
    """Read the body of a frame. Replaces `Yamux._read_data_body`, which looks its timeout up every time."""
    with trio.fail_after(BODY_TIMEOUT):
        return await read_exactly(self.secured_conn, length)


class FrameWriter:
    """The one task that writes a connection's frames; those that wait go to the socket in one write."""

    def __init__(self, session: Any) -> None:
        self.ended = False
        self._session = session
        self._posted, self._waiting = trio.open_memory_channel[tuple[Sequence[bytes], trio.Event]](math.inf)

    @property
    def num_waiting(self) -> int:
        """The number of posts that were not taken yet."""
        return self._posted.statistics().current_buffer_used

    def post(self, frames: Sequence[bytes]) -> trio.Event:
        """Queue frames; the event is set when they are written, or never will be."""
        gone = trio.Event()
        self._posted.send_nowait((frames, gone))
        return gone

    async def run(self) -> None:
        """Write until the connection ends."""
        going: list[trio.Event] = []
        try:
            async for frames, gone in self._waiting:
                going, batch = [gone], list(frames)
                with contextlib.suppress(trio.WouldBlock):
                    while sum(map(len, batch)) < SOCKET_BYTES:
                        frames, gone = self._waiting.receive_nowait()
                        going.append(gone)
                        batch += frames
                await self._send(batch)
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

    async def _send(self, frames: Sequence[bytes]) -> None:
        channel = self._session.conn
        pieces: list[bytes] = []
        for frame in frames:
            for start in range(0, len(frame), MAX_PLAINTEXT_LENGTH):
                cipher = channel.encrypt(frame[start : start + MAX_PLAINTEXT_LENGTH])
                pieces += (len(cipher).to_bytes(SIZE_NOISE_MESSAGE_LEN, "big"), cipher)
        await channel.read_writer.read_write_closer.write(b"".join(pieces))
