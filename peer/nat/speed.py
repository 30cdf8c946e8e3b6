"""`/flockstep/rate/1`: a bootstrap lets a peer measure how fast bytes go between the two, either way.

Theory of operation. On one stream the peer asks for pieces, each four times as large as the one before, until one takes
long enough to tell or has `MAX_PIECE`; so a measurement takes two seconds on a slow line, and 5.4 MB on a fast one. The
bootstrap agrees to each piece before it flows, and keeps an allowance for each IP address, so that it cannot be made to
spend its line on somebody.
"""

from dataclasses import dataclass
from typing import Annotated

import trio

from ..allowance import Allowance
from ..errors import NetworkError, StreamClosed
from ..libp2p.stream import Libp2pStream
from ..transport import Stream
from ..wire.framing import FrameBuffer, frame
from ..wire.schema import Between, decode, encode

PROTOCOL = "/flockstep/rate/1"
MAX_MESSAGE_BYTES = 64

FIRST_PIECE = 1 << 16
MAX_PIECE = 1 << 22
GROWTH = 4
TELLING_SECONDS = 0.5
"""A piece that takes so long is measured well: several round trips, and TCP's slow start is over."""

ALLOWANCE_BYTES = 64 << 20
ALLOWANCE_PERIOD = 600.0
"""To one IP address: six measurements both ways in ten minutes, 0.9 Mbit/s on average."""

MAX_MEASUREMENTS = 4
"""Pieces that flow at a time; who comes while all do waits."""

PIECE_SECONDS = 20.0
"""For one piece; whoever takes longer holds the place of others."""

CHUNK = 1 << 16


@dataclass(frozen=True, slots=True)
class Piece:
    """May I send you so many bytes (`up`), or will you send me so many?"""

    up: bool
    size: Annotated[int, Between(1, MAX_PIECE)]


@dataclass(frozen=True, slots=True)
class Word:
    """Whether a piece may flow; and, once one has come up, that it is here."""

    yes: bool


class RateServer:
    """A bootstrap's side."""

    def __init__(self) -> None:
        self._places = trio.CapacityLimiter(MAX_MEASUREMENTS)
        self._allowance = Allowance(ALLOWANCE_BYTES, ALLOWANCE_PERIOD)

    async def serve(self, stream: Stream) -> None:
        """Let pieces flow until the stream ends."""
        assert isinstance(stream, Libp2pStream)
        buffer = FrameBuffer(limit=MAX_MESSAGE_BYTES)
        while data := await stream.receive_some(MAX_MESSAGE_BYTES):
            buffer.feed(data)
            while (payload := buffer.next_frame()) is not None:
                piece = decode(Piece, payload, max_bytes=MAX_MESSAGE_BYTES)
                async with self._places:
                    await self._flow(stream, piece)

    async def _flow(self, stream: Libp2pStream, piece: Piece) -> None:
        allowed = self._allowance.take(stream.remote_socket()[0], trio.current_time(), piece.size)
        with trio.move_on_after(PIECE_SECONDS) as scope:
            await stream.send_all(frame(encode(Word(allowed))))
            if allowed and piece.up:
                await _take(stream, piece.size)
                await stream.send_all(frame(encode(Word(True))))
            elif allowed:
                await stream.send_all(bytes(piece.size))
        if scope.cancelled_caught:
            raise NetworkError(f"a piece of {piece.size} bytes took longer than {PIECE_SECONDS:g} s")


async def measure(stream: Stream, *, up: bool) -> float:
    """Bytes/s to the bootstrap at the other end (`up`), or from it. Raises `NetworkError` or `RemoteError`."""
    buffer = FrameBuffer(limit=MAX_MESSAGE_BYTES)
    size = FIRST_PIECE
    while True:
        await stream.send_all(frame(encode(Piece(up, size))))
        if not await _word(stream, buffer):
            raise NetworkError("the bootstrap has measured enough with this network for the moment")
        began = trio.current_time()
        if up:
            await stream.send_all(bytes(size))
            await _word(stream, buffer)
        else:
            await _take(stream, size - len(buffer.rest()))
        seconds = max(trio.current_time() - began, 1e-6)
        if seconds >= TELLING_SECONDS or size == MAX_PIECE:
            return size / seconds
        size *= GROWTH


async def _word(stream: Stream, buffer: FrameBuffer) -> bool:
    while (payload := buffer.next_frame()) is None:
        if not (data := await stream.receive_some(CHUNK)):
            raise StreamClosed(f"{stream.remote} ended the stream in the middle of a measurement")
        buffer.feed(data)
    return decode(Word, payload, max_bytes=MAX_MESSAGE_BYTES).yes


async def _take(stream: Stream, size: int) -> None:
    """Receive exactly so many bytes and keep none."""
    while size > 0:
        if not (data := await stream.receive_some(min(size, CHUNK))):
            raise StreamClosed(f"{stream.remote} ended the stream in the middle of a measurement")
        size -= len(data)
