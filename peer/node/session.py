"""A session over a long-lived control stream: send, ask with a timeout, answer.

Theory of operation. Each side opens one control stream to the other and keeps it, since opening costs two round trips.
My stream carries my messages and requests, and the answers to these requests. A sent message is queued and never blocks
the caller, so that one stopped peer cannot delay a broadcast. A full queue or a broken stream ends the session, and
with it all pending requests; the next message starts a new session. All queued messages go in one write; on a stream
that can send at once nothing is queued.

A frame is one byte of its kind, four bytes of the request that it belongs to, and a packed message.
"""

from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

import trio

from .. import wire
from ..base.errors import (
    DeadlineExceeded,
    MalformedMessage,
    NetworkError,
    RemoteError,
    RequestRefused,
    StreamClosed,
    sole_error,
)
from ..base.transport import EagerStream, PeerId, Stream, Transport, is_eager
from ..wire.framing import HEADER_BYTES, FrameBuffer, frame
from .backlog import Backlog

SESSION_PROTOCOL = "/flockstep/control/1"
MESSAGE, ASK, ANSWER, FAULT = range(4)
HEAD_BYTES = 5
QUEUE_MESSAGES = 2048
"""A round of 64 peers has about 9 messages to each: a longer queue means a dead peer."""
QUEUE_BYTES = 8 << 20
"""A peer that beats and does not read takes no more: more than twice the 3 MB that a round of 64 has from each."""
READ_BYTES = 1 << 16
MAX_OPEN_ASKS = 16
"""Concurrent requests on one stream: further ones wait in it (backpressure)."""

SESSION_WRITE_BYTES = 1 << 16
"""The size of one write, unless one packet is longer: the longest frame of Noise."""

Open = Callable[[], Awaitable[Stream]]
MessageHandler = Callable[[PeerId, Any, int], None]
"""Takes a message, and the bytes that came with it alone; 0 where `on_bytes` has counted them."""
AnswerHandler = Callable[[PeerId, Any], Awaitable[Any]]
Unpack = Callable[[bytes], Any]
"""Decodes the message of a packet; returns None for any other bytes."""


def message_packet(message: object) -> bytes:
    """Build the packet of a message, the same for every peer."""
    return _packet(MESSAGE, 0, wire.pack(message))


def unpack_message(packet: bytes) -> Any:
    """Decode a packet of `message_packet`; None for anything but one whole packet. Raises `MalformedMessage`."""
    frame_end = HEADER_BYTES + int.from_bytes(packet[:HEADER_BYTES], "big")
    if len(packet) != frame_end or frame_end < HEADER_BYTES + HEAD_BYTES or packet[HEADER_BYTES] != MESSAGE:
        return None
    return wire.unpack(packet[HEADER_BYTES + HEAD_BYTES :])


def _packet(kind: int, request: int, payload: bytes) -> bytes:
    return frame(bytes((kind,)) + request.to_bytes(4, "big") + payload)


def _unpacket(payload: bytes) -> tuple[int, int, bytes]:
    if len(payload) < HEAD_BYTES or payload[0] > FAULT:
        raise MalformedMessage("a control frame without a valid head")
    return payload[0], int.from_bytes(payload[1:HEAD_BYTES], "big"), payload[HEAD_BYTES:]


class Session:
    """My half of a session with `peer`; `open_stream` connects when the session starts."""

    def __init__(self, peer: PeerId, open_stream: Open, on_bytes: Callable[[PeerId], None]) -> None:
        self.peer = peer
        self._open = open_stream
        self._on_bytes = on_bytes
        self._outbox: deque[bytes] = deque()
        self._queued = 0
        """The bytes in it."""
        self._filled = trio.Event()
        self._eager: EagerStream | None = None
        self._pending: dict[int, trio.Event] = {}
        self._answers: dict[int, Any] = {}
        self._next_request = 0
        self._broken: str | None = None
        self._drained = trio.Event()
        self._retired = False
        self._scope: trio.CancelScope | None = None

    def send(self, packet: bytes) -> None:
        """Send a packet. Raises `StreamClosed` when the session has ended or its queue is full."""
        if self._broken is not None:
            raise StreamClosed(f"the session with {self.peer} has ended: {self._broken}")
        if self._eager is not None and self._eager.send_now(packet):
            return
        self._eager = None  # From here on `_write` sends, until it has caught up.
        if len(self._outbox) >= QUEUE_MESSAGES:
            raise StreamClosed(f"{QUEUE_MESSAGES} messages wait for {self.peer}, which does not read")
        if self._outbox and self._queued + len(packet) > QUEUE_BYTES:
            raise StreamClosed(f"{self._queued} bytes wait for {self.peer}, which does not read")
        if not self._outbox:
            self._drained = trio.Event()
        self._outbox.append(packet)
        self._queued += len(packet)
        self._filled.set()

    async def ask(self, message: object, *, timeout: float) -> Any:
        """Send a request and wait for its answer. Raises `DeadlineExceeded`, `StreamClosed`, or the peer's `NetworkError`."""
        self._next_request = request = (self._next_request + 1) & 0xFFFFFFFF
        self._pending[request] = answered = trio.Event()
        try:
            self.send(_packet(ASK, request, wire.pack(message)))
            with trio.move_on_after(timeout):
                await answered.wait()
            if request in self._answers:
                answer = self._answers.pop(request)
                if isinstance(answer, NetworkError):
                    raise answer
                return answer
            if self._broken is not None:
                raise StreamClosed(f"the session with {self.peer} has ended: {self._broken}")
            raise DeadlineExceeded(f"{self.peer} did not answer {type(message).__name__} within {timeout:g} s")
        finally:
            self._pending.pop(request, None)
            self._answers.pop(request, None)

    async def run(self) -> str:
        """Run this session until it ends; returns the reason. A `RemoteError` propagates, for the caller to charge."""
        reason = "closed by us"
        try:
            stream = await self._open()
            try:
                async with trio.open_nursery() as nursery:
                    self._scope = nursery.cancel_scope
                    nursery.start_soon(self._write, stream)
                    await self._read(stream)
                    reason = "the peer closed its control stream"
                    nursery.cancel_scope.cancel()
            finally:
                with trio.CancelScope(shield=True, deadline=trio.current_time() + 0.5):
                    await (stream.aclose() if self._retired else stream.reset())
        except* NetworkError as group:
            reason = str(sole_error(group))
        except* RemoteError as group:
            raise sole_error(group) from None
        finally:
            self._end(reason)
        return reason

    async def drain(self, timeout: float) -> None:
        """Wait until the queue has been written to the stream, at most `timeout` seconds."""
        with trio.move_on_after(timeout):
            await self._drained.wait()

    async def retire(self, timeout: float) -> None:
        """End this session, which another one replaces, once its queue is written and its requests are answered."""
        with trio.move_on_after(timeout):
            await self._drained.wait()
            while self._pending:
                await next(iter(self._pending.values())).wait()
                await trio.lowlevel.checkpoint()  # The asker removes its answer.
        self._retired = True
        if self._scope is not None:
            self._scope.cancel()

    async def _write(self, stream: Stream) -> None:
        while True:
            while self._outbox:
                await stream.send_all(self._next_write())
            self._drained.set()
            self._filled = trio.Event()
            self._eager = stream if is_eager(stream) else None
            await self._filled.wait()

    def _next_write(self) -> bytes:
        batch = [self._outbox.popleft()]
        size = len(batch[0])
        while self._outbox and size + len(self._outbox[0]) <= SESSION_WRITE_BYTES:
            size += len(self._outbox[0])
            batch.append(self._outbox.popleft())
        self._queued -= size
        return b"".join(batch)

    async def _read(self, stream: Stream) -> None:
        buffer = FrameBuffer()
        while data := await stream.receive_some(READ_BYTES):
            self._on_bytes(self.peer)
            buffer.feed(data)
            while (payload := buffer.next_frame()) is not None:
                kind, request, body = _unpacket(payload)
                if kind not in (ANSWER, FAULT):
                    raise MalformedMessage("a request on the stream of answers")
                if (answered := self._pending.get(request)) is None:
                    continue  # The request has timed out.
                refusal = body.decode(errors="replace")[:300]
                self._answers[request] = wire.unpack(body) if kind == ANSWER else RequestRefused(refusal)
                answered.set()

    def _end(self, reason: str) -> None:
        if self._broken is None:
            self._broken = reason
            self._outbox.clear()
            self._queued = 0
            self._drained.set()
            for answered in self._pending.values():
                answered.set()


class Visitor:
    """Asks single questions of connected peers, in a session for each: what has no node, and serves none."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def ask(self, peer: PeerId, message: object, *, timeout: float) -> Any:
        """Send a request over an open connection; returns the answer. Raises `NetworkError`, or `RemoteError` for junk."""
        session = Session(peer, lambda: self._transport.open_stream(peer, SESSION_PROTOCOL), lambda _: None)
        junk: list[RemoteError] = []

        async def run() -> None:
            try:
                await session.run()
            except RemoteError as error:
                junk.append(error)

        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(run)
                try:
                    return await session.ask(message, timeout=timeout)
                finally:
                    nursery.cancel_scope.cancel()
        except* (NetworkError, RemoteError) as group:
            raise (junk[0] if junk else sole_error(group)) from None


async def serve_session(
    stream: Stream,
    on_message: MessageHandler,
    on_ask: AnswerHandler,
    on_bytes: Callable[[PeerId, int], None],
    unpack: Unpack,
    backlog: Backlog,
) -> None:
    """Serve the peer's half until the stream ends: its messages go to `on_message`, its requests to `on_ask`.

    Answers that the peer has not read are counted in `backlog`, and keep their slot among `MAX_OPEN_ASKS`.
    """
    remote = stream.remote
    buffer = FrameBuffer()
    writing = trio.Lock()
    slots = trio.Semaphore(MAX_OPEN_ASKS)
    refused: list[NetworkError | RemoteError] = []

    async def answer(request: int, question: object) -> None:
        try:
            try:
                packet = _packet(ANSWER, request, wire.pack(await on_ask(remote, question)))
            except NetworkError as error:
                packet = _packet(FAULT, request, str(error).encode()[:300])
            with backlog.unread(remote, len(packet)):
                async with writing:
                    await stream.send_all(packet)
        finally:
            slots.release()

    def take(data: bytes) -> bool:
        """Consume `data` if it is one whole message; the loop below handles anything else, and raises the errors."""
        if not buffer.empty:
            return False
        try:
            message = unpack(data)
            if message is not None:
                on_message(remote, message, len(data))
        except (NetworkError, RemoteError) as error:
            refused.append(error)  # The loop must not deliver the message again: its handler may count.
            return False
        return message is not None

    if is_eager(stream):
        stream.divert(take)
    try:
        async with trio.open_nursery() as nursery:
            while data := await stream.receive_some(READ_BYTES):
                if refused:
                    raise refused[0]
                on_bytes(remote, len(data))
                buffer.feed(data)
                while (payload := buffer.next_frame()) is not None:
                    kind, request, body = _unpacket(payload)
                    message = wire.unpack(body)
                    if kind == MESSAGE:
                        on_message(remote, message, 0)
                    elif kind == ASK:
                        await slots.acquire()
                        nursery.start_soon(answer, request, message)
                    else:
                        raise MalformedMessage("an answer on the stream of requests")
            nursery.cancel_scope.cancel()
    except* (NetworkError, RemoteError) as group:
        raise sole_error(group) from None
