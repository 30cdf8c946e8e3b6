"""`/flockstep/rate/1`: a peer measures the throughput to a bootstrap, in both directions.

Theory of operation. On one stream the peer requests pieces, each four times as large as the one before, until one takes
long enough to measure or has `MAX_PIECE`. So a measurement takes two seconds on a slow line, and 5.4 MB on a fast one.
The bootstrap grants each piece before it flows, under a rate limit per IP address, so that nobody can use up its line.
"""

from dataclasses import dataclass
from typing import Annotated

import trio

from ..base.errors import NetworkError, StreamClosed
from ..base.transport import Stream
from ..libp2p.stream import Libp2pStream
from ..quota.origins import Origin, Origins
from ..quota.shares import Shares
from ..quota.turns import Turns
from ..wire.framing import FrameBuffer, frame
from ..wire.schema import Between, decode, encode

SPEED_PROTOCOL = "/flockstep/rate/1"
MAX_SPEED_MESSAGE_BYTES = 64

FIRST_PIECE = 1 << 16
MAX_PIECE = 1 << 22
GROWTH = 4
ANSWERING_SECONDS = 0.5
"""The duration that makes a measurement valid: several round trips, after TCP's slow start."""

ALLOWANCE_BYTES = 64 << 20
ALLOWANCE_PERIOD = 600.0
"""The rate limit of one address: six measurements both ways in ten minutes, 0.9 Mbit/s on average."""
ALL_ALLOWANCES = 32
"""That of all, in those of one address: 29 Mbit/s on average."""

LEAST_COST = FIRST_PIECE
"""What a question takes of it, however short its piece: 1,024 questions in ten minutes, where a measurement has four."""

MAX_MEASUREMENTS, MAX_MEASUREMENTS_OF_NETWORK, MAX_MEASUREMENTS_OF_ADDRESS = 4, 2, 1
"""Concurrent pieces; further ones wait."""

PIECE_SECONDS = 20.0
"""The timeout of one piece; a slower peer would block others."""

SPEED_CHUNK = 1 << 16


@dataclass(frozen=True, slots=True)
class Piece:
    """Requests to send so many bytes (`up`), or to receive so many."""

    up: bool
    size: Annotated[int, Between(1, MAX_PIECE)]


@dataclass(frozen=True, slots=True)
class PieceAnswer:
    """Grants or refuses a piece; also acknowledges one that was received."""

    yes: bool


class RateServer:
    """The server side, at a bootstrap."""

    def __init__(self) -> None:
        self._origins = Origins(())
        self._turns = Turns(MAX_MEASUREMENTS, MAX_MEASUREMENTS_OF_ADDRESS, MAX_MEASUREMENTS_OF_NETWORK)
        self._allowance = Shares(ALLOWANCE_BYTES / ALLOWANCE_PERIOD, ALLOWANCE_PERIOD, all_share=ALL_ALLOWANCES)

    async def serve(self, stream: Stream) -> None:
        """Serve pieces until the stream ends."""
        assert isinstance(stream, Libp2pStream)
        buffer = FrameBuffer(limit=MAX_SPEED_MESSAGE_BYTES)
        while data := await stream.receive_some(MAX_SPEED_MESSAGE_BYTES):
            buffer.feed(data)
            while (payload := buffer.next_frame()) is not None:
                piece = decode(Piece, payload, max_bytes=MAX_SPEED_MESSAGE_BYTES)
                origin = self._origins.of(stream.remote_socket()[0])
                async with self._turns.turn(origin):
                    if not await self._flow(stream, origin, piece):
                        return  # Who was refused asks no more on this stream.

    async def _flow(self, stream: Libp2pStream, origin: Origin, piece: Piece) -> bool:
        """Move a piece if its address may; returns whether it may."""
        cost = max(piece.size, LEAST_COST)
        allowed = not self._allowance.exceeded(origin, trio.current_time(), cost)
        if allowed and piece.up:
            stream.hold_at_most(piece.size)
        with trio.move_on_after(PIECE_SECONDS) as scope:
            await stream.send_all(frame(encode(PieceAnswer(allowed))))
            if allowed and piece.up:
                await _discard(stream, piece.size)
                stream.hold_at_most(MAX_SPEED_MESSAGE_BYTES)
                await stream.send_all(frame(encode(PieceAnswer(True))))
            elif allowed:
                await stream.send_all(bytes(piece.size))
        if scope.cancelled_caught:
            raise NetworkError(f"a piece of {piece.size} bytes took longer than {PIECE_SECONDS:g} s")
        return allowed


async def measure_speed(stream: Stream, *, up: bool) -> float:
    """Measure bytes/s to a bootstrap (`up`), or from it. Raises `NetworkError` or `RemoteError`."""
    buffer = FrameBuffer(limit=MAX_SPEED_MESSAGE_BYTES)
    size = FIRST_PIECE
    while True:
        await stream.send_all(frame(encode(Piece(up, size))))
        if not await _receive_answer(stream, buffer):
            raise NetworkError("the bootstrap rate limits measurements of this network: try again in ten minutes")
        began = trio.current_time()
        if up:
            await stream.send_all(bytes(size))
            await _receive_answer(stream, buffer)
        else:
            await _discard(stream, size - len(buffer.rest()))
        seconds = max(trio.current_time() - began, 1e-6)
        if seconds >= ANSWERING_SECONDS or size == MAX_PIECE:
            return size / seconds
        size *= GROWTH


async def _receive_answer(stream: Stream, buffer: FrameBuffer) -> bool:
    while (payload := buffer.next_frame()) is None:
        if not (data := await stream.receive_some(SPEED_CHUNK)):
            raise StreamClosed(f"{stream.remote} ended the stream in the middle of a measurement")
        buffer.feed(data)
    return decode(PieceAnswer, payload, max_bytes=MAX_SPEED_MESSAGE_BYTES).yes


async def _discard(stream: Stream, size: int) -> None:
    """Receive and discard exactly so many bytes."""
    while size > 0:
        if not (data := await stream.receive_some(min(size, SPEED_CHUNK))):
            raise StreamClosed(f"{stream.remote} ended the stream in the middle of a measurement")
        size -= len(data)
