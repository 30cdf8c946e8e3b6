"""`/flockstep/dialback/1`: a bootstrap reports a peer's observed address, and dials it back.

Theory of operation. On one long-lived stream the peer asks, as often as it likes, for its observed address. If it names
the port that it listens on, the bootstrap also dials that port at the observed address, and at no other, so that nobody
can aim it at a third party (AutoNAT's amplification rule). It dials public addresses alone: behind a proxy or a container's
bridge a stranger seems to come from this computer or its own network, whose ports it must not probe. It dials from another
port than the one that the peer is connected to, so that a NAT with address- and port-dependent filtering blocks it; it
completes the handshake to verify the peer id, and closes. Every answer holds the bootstrap's time, by which a peer detects
that its clock is wrong: rounds do not depend on clocks, but downloads over https and logs do. The library's AutoNAT needs
four servers, and nothing starts it.
"""

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated

import trio

from ..address import rung_of
from ..base.errors import NetworkError, StreamClosed
from ..base.transport import Address, PeerId, Rung, Stream
from ..libp2p.stream import Libp2pStream
from ..quota.origins import Origins
from ..quota.shares import Shares
from ..quota.turns import Turns
from ..wire.framing import FrameBuffer, frame
from ..wire.schema import Between, Size, decode, encode

DIALBACK_PROTOCOL = "/flockstep/dialback/1"
MAX_DIALBACK_BYTES = 1024
MAX_CAUSE_BYTES = 300

DIALBACK_DIAL_TIMEOUT = 3.0
"""The timeout of a dialback in seconds: a lost first packet is retransmitted after one."""

DIAL_PERIOD = 10.0
DIALS_PER_PERIOD = 10
"""The rate limit of dials to one address: enough for the peers of one home, and useless for amplification."""
ALL_DIALS = 32
"""Dials of all, in those of one address: 32 a second, each a handshake of 5 ms."""

QUESTIONS_PER_PERIOD = 200
"""Of one address, also those that ask for no dial: a thousand peers behind one carrier's router ask fewer."""

MAX_DIALS, MAX_DIALS_OF_NETWORK, MAX_DIALS_OF_ADDRESS = 16, 8, 4
"""Concurrent dials; further requests wait."""

MAX_TIME = 1e11
"""Unix seconds: the year 5138."""

Probe = Callable[[PeerId, Address, float], Awaitable[str]]
"""Dials a peer at an address with a timeout in seconds, shakes hands, closes; returns why that failed, or ""."""


@dataclass(frozen=True, slots=True)
class Question:
    """Asks for my observed address and, with a port that is not 0, for a dialback to it."""

    port: Annotated[int, Between(0, 65535)]


@dataclass(frozen=True, slots=True)
class DialbackAnswer:
    """The answer: `address` is the observed source of the connection, `cause` why the dial failed, if one was made."""

    address: Annotated[Address, Size(256)]
    dialled: bool
    cause: Annotated[str, Size(MAX_CAUSE_BYTES)]
    time: Annotated[float, Between(0.0, MAX_TIME)]
    """The bootstrap's clock, in Unix seconds."""


class Dialback:
    """The server side, at a bootstrap."""

    def __init__(self, probe: Probe, clock: Callable[[], float] = time.time) -> None:
        self._probe = probe
        self._clock = clock
        self._origins = Origins(())
        self._turns = Turns(MAX_DIALS, MAX_DIALS_OF_ADDRESS, MAX_DIALS_OF_NETWORK)
        self._questions = Shares(QUESTIONS_PER_PERIOD / DIAL_PERIOD, DIAL_PERIOD)
        self._dials = Shares(DIALS_PER_PERIOD / DIAL_PERIOD, DIAL_PERIOD, all_share=ALL_DIALS)

    async def serve(self, stream: Stream) -> None:
        """Answer the questions of one stream until it ends."""
        assert isinstance(stream, Libp2pStream)
        buffer = FrameBuffer(limit=MAX_DIALBACK_BYTES)
        while data := await stream.receive_some(MAX_DIALBACK_BYTES):
            buffer.feed(data)
            while (payload := buffer.next_frame()) is not None:
                question = decode(Question, payload, max_bytes=MAX_DIALBACK_BYTES)
                await stream.send_all(frame(encode(await self._answer(stream, question.port))))

    async def _answer(self, stream: Libp2pStream, port: int) -> DialbackAnswer:
        ip, seen_port = stream.remote_socket()
        origin, now = self._origins.of(ip), trio.current_time()
        if whose := self._questions.exceeded(origin, now):
            most = f"{QUESTIONS_PER_PERIOD} of an address in {DIAL_PERIOD:g} s"
            raise NetworkError(f"too many questions from {whose}: more than {most}, or an equal part of the others'")
        host = f"/ip6/{ip}" if ":" in ip else f"/ip4/{ip}"
        seen = f"{host}/tcp/{seen_port}"
        if not port or rung_of(seen) is not Rung.DIRECT or self._dials.exceeded(origin, now):
            return DialbackAnswer(seen, False, "", self._clock())
        async with self._turns.turn(origin):
            cause = await self._probe(stream.remote, f"{host}/tcp/{port}", DIALBACK_DIAL_TIMEOUT)
        return DialbackAnswer(seen, True, cause.encode()[:MAX_CAUSE_BYTES].decode(errors="ignore"), self._clock())


async def ask(stream: Stream, port: int) -> DialbackAnswer:
    """Ask a bootstrap for my observed address. Raises `StreamClosed`, or `RemoteError` for an invalid answer."""
    await stream.send_all(frame(encode(Question(port))))
    buffer = FrameBuffer(limit=MAX_DIALBACK_BYTES)
    while (payload := buffer.next_frame()) is None:
        if not (data := await stream.receive_some(MAX_DIALBACK_BYTES)):
            raise StreamClosed(f"{stream.remote} ended the stream before its dialback answer")
        buffer.feed(data)
    return decode(DialbackAnswer, payload, max_bytes=MAX_DIALBACK_BYTES)
