"""`/flockstep/dialback/1`: a bootstrap tells a peer what it sees of it, and whether it gets through to it.

Theory of operation. On one long-lived stream the peer asks, as often as it likes, where its connection comes from; with
the number of the port that it listens on the bootstrap also dials that port at the address that the connection comes
from, at no other, so that nobody can aim it at a third party (AutoNAT's amplification rule). It dials from another port
than the one the peer is connected to, so that a router which lets in only those who were spoken to keeps it out, shakes
hands to be sure that it met this peer, and hangs up. Every answer carries the bootstrap's time, by which a peer learns
that its clock is wrong: rounds do not depend on clocks, but downloads over https and logs do. The library's AutoNAT needs
four servers, and nothing starts it.
"""

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated

import trio

from ..allowance import Allowance
from ..errors import StreamClosed
from ..libp2p.stream import Libp2pStream
from ..transport import Address, PeerId, Stream
from ..wire.framing import FrameBuffer, frame
from ..wire.schema import Between, Size, decode, encode

PROTOCOL = "/flockstep/dialback/1"
MAX_MESSAGE_BYTES = 1024
MAX_CAUSE_BYTES = 300

DIAL_TIMEOUT = 3.0
"""Seconds to get through: a first packet that is lost is sent again after one."""

DIAL_PERIOD = 10.0
DIALS_PER_PERIOD = 10
"""Dials to one IP address: the peers of one home, or what somebody can make a bootstrap send to its own address."""

MAX_DIALS = 16
"""Dials at a time; who asks while all are busy waits."""

MAX_TIME = 1e11
"""Unix seconds: the year 5138."""

Probe = Callable[[PeerId, Address, float], Awaitable[str]]
"""Dial a peer at an address for that many seconds, shake hands, hang up; why that failed, empty if it did not."""


@dataclass(frozen=True, slots=True)
class Question:
    """What do you see of me? And, with a port that is not 0: do you get through to it?"""

    port: Annotated[int, Between(0, 65535)]


@dataclass(frozen=True, slots=True)
class Answer:
    """`address` is where the connection comes from; `cause` says why the dial failed, if one was made."""

    address: Annotated[Address, Size(256)]
    dialled: bool
    cause: Annotated[str, Size(MAX_CAUSE_BYTES)]
    time: Annotated[float, Between(0.0, MAX_TIME)]
    """Unix seconds by the bootstrap's clock."""


class Dialback:
    """A bootstrap's side."""

    def __init__(self, probe: Probe, clock: Callable[[], float] = time.time) -> None:
        self._probe = probe
        self._clock = clock
        self._dials = trio.CapacityLimiter(MAX_DIALS)
        self._allowance = Allowance(DIALS_PER_PERIOD, DIAL_PERIOD)

    async def serve(self, stream: Stream) -> None:
        """Answer the questions of one stream until it ends."""
        assert isinstance(stream, Libp2pStream)
        buffer = FrameBuffer(limit=MAX_MESSAGE_BYTES)
        while data := await stream.receive_some(MAX_MESSAGE_BYTES):
            buffer.feed(data)
            while (payload := buffer.next_frame()) is not None:
                question = decode(Question, payload, max_bytes=MAX_MESSAGE_BYTES)
                await stream.send_all(frame(encode(await self._answer(stream, question.port))))

    async def _answer(self, stream: Libp2pStream, port: int) -> Answer:
        ip, seen_port = stream.remote_socket()
        host = f"/ip6/{ip}" if ":" in ip else f"/ip4/{ip}"
        seen = f"{host}/tcp/{seen_port}"
        if not port or not self._allowance.take(ip, trio.current_time()):
            return Answer(seen, False, "", self._clock())
        async with self._dials:
            cause = await self._probe(stream.remote, f"{host}/tcp/{port}", DIAL_TIMEOUT)
        return Answer(seen, True, cause.encode()[:MAX_CAUSE_BYTES].decode(errors="ignore"), self._clock())


async def ask(stream: Stream, port: int) -> Answer:
    """What the bootstrap at the other end sees of me. Raises `StreamClosed`, or `RemoteError` where that is no answer."""
    await stream.send_all(frame(encode(Question(port))))
    buffer = FrameBuffer(limit=MAX_MESSAGE_BYTES)
    while (payload := buffer.next_frame()) is None:
        if not (data := await stream.receive_some(MAX_MESSAGE_BYTES)):
            raise StreamClosed(f"{stream.remote} ended the stream instead of telling what it sees")
        buffer.feed(data)
    return decode(Answer, payload, max_bytes=MAX_MESSAGE_BYTES)
