"""Talk with one peer over one long-lived control stream: tell, ask with a deadline, answer.

Theory of operation. Each side opens one control stream to the other and keeps it (opening costs two round trips): on
my stream go what I tell and ask, and the answers to what I asked come back on it. What I tell is queued and never
blocks the caller, so that one stopped peer cannot hold up what is said to all; a queue that is full or a stream that
breaks ends the session, and with it everything that was pending. A new session is made by the next word. What has
gathered in the queue goes in one write; on a stream that can send at once nothing is queued at all.

A frame is one byte of its kind, four bytes of the request that it belongs to, and a packed message.
"""

from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

import trio

from .. import wire
from ..errors import DeadlineExceeded, MalformedMessage, NetworkError, RemoteError, StreamClosed, sole_error
from ..transport import EagerStream, PeerId, Stream
from ..wire.framing import HEADER_BYTES, FrameBuffer, frame

PROTOCOL = "/flockstep/control/1"
TELL, ASK, ANSWER, FAULT = range(4)
HEAD_BYTES = 5
QUEUE_MESSAGES = 2048
"""A round of 64 peers is about 9 messages to each: what waits in a longer queue waits for a dead peer."""
READ_BYTES = 1 << 16
MAX_OPEN_ASKS = 16
"""Questions of one peer that are answered at a time: the next ones wait in its stream."""

WRITE_BYTES = 1 << 16
"""What goes in one write at most, unless one packet is longer: the longest frame of Noise."""

Open = Callable[[], Awaitable[Stream]]
Tell = Callable[[PeerId, Any], None]
Answer = Callable[[PeerId, Any], Awaitable[Any]]
Unpack = Callable[[bytes], Any]
"""The message of a packet that tells one; None for any other bytes."""


def told(message: object) -> bytes:
    """The packet that tells a message, the same for every peer."""
    return _packet(TELL, 0, wire.pack(message))


def unpack_tell(packet: bytes) -> Any:
    """The message that `told` packed; None for anything but one whole packet of it. Raises `MalformedMessage`."""
    frame_end = HEADER_BYTES + int.from_bytes(packet[:HEADER_BYTES], "big")
    if len(packet) != frame_end or frame_end < HEADER_BYTES + HEAD_BYTES or packet[HEADER_BYTES] != TELL:
        return None
    return wire.unpack(packet[HEADER_BYTES + HEAD_BYTES :])


def _packet(kind: int, request: int, payload: bytes) -> bytes:
    return frame(bytes((kind,)) + request.to_bytes(4, "big") + payload)


def _unpacket(payload: bytes) -> tuple[int, int, bytes]:
    if len(payload) < HEAD_BYTES or payload[0] > FAULT:
        raise MalformedMessage("a control frame without a valid head")
    return payload[0], int.from_bytes(payload[1:HEAD_BYTES], "big"), payload[HEAD_BYTES:]


class Session:
    """My half of the talk with `peer`; `open_stream` reaches it when the first word is there."""

    def __init__(self, peer: PeerId, open_stream: Open, heard: Callable[[PeerId], None]) -> None:
        self.peer = peer
        self._open = open_stream
        self._heard = heard
        self._outbox: deque[bytes] = deque()
        self._filled = trio.Event()
        self._eager: EagerStream | None = None
        self._pending: dict[int, trio.Event] = {}
        self._answers: dict[int, Any] = {}
        self._next_request = 0
        self._broken: str | None = None
        self._drained = trio.Event()
        self._retired = False
        self._scope: trio.CancelScope | None = None

    def tell(self, packet: bytes) -> None:
        """Send a packet. Raises `StreamClosed` when the session has ended or its queue is full."""
        if self._broken is not None:
            raise StreamClosed(f"the talk with {self.peer} has ended: {self._broken}")
        if self._eager is not None and self._eager.send_now(packet):
            return
        self._eager = None  # From here on `_write` sends, until it has caught up.
        if len(self._outbox) >= QUEUE_MESSAGES:
            raise StreamClosed(f"{QUEUE_MESSAGES} messages wait for {self.peer}, which does not read")
        if not self._outbox:
            self._drained = trio.Event()
        self._outbox.append(packet)
        self._filled.set()

    async def ask(self, message: object, *, timeout: float) -> Any:
        """The answer to `message`. Raises `DeadlineExceeded`, `StreamClosed`, or `NetworkError` with the peer's reason."""
        self._next_request = request = (self._next_request + 1) & 0xFFFFFFFF
        self._pending[request] = answered = trio.Event()
        try:
            self.tell(_packet(ASK, request, wire.pack(message)))
            with trio.move_on_after(timeout):
                await answered.wait()
            if request in self._answers:
                answer = self._answers.pop(request)
                if isinstance(answer, NetworkError):
                    raise answer
                return answer
            if self._broken is not None:
                raise StreamClosed(f"the talk with {self.peer} ended: {self._broken}")
            raise DeadlineExceeded(f"{self.peer} did not answer {type(message).__name__} within {timeout:g} s")
        finally:
            self._pending.pop(request, None)
            self._answers.pop(request, None)

    async def run(self) -> str:
        """Serve this session until it ends; returns the reason. A `RemoteError` passes, for the caller to charge."""
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
        """Wait until what was queued has been handed to the stream, at most `timeout` seconds."""
        with trio.move_on_after(timeout):
            await self._drained.wait()

    async def retire(self, timeout: float) -> None:
        """Another session goes on: end once all that was queued has gone and what was asked is answered."""
        with trio.move_on_after(timeout):
            await self._drained.wait()
            while self._pending:
                await next(iter(self._pending.values())).wait()
                await trio.lowlevel.checkpoint()  # Its asker takes the answer out.
        self._retired = True
        if self._scope is not None:
            self._scope.cancel()

    async def _write(self, stream: Stream) -> None:
        while True:
            while self._outbox:
                await stream.send_all(self._next_write())
            self._drained.set()
            self._filled = trio.Event()
            self._eager = stream if isinstance(stream, EagerStream) else None
            await self._filled.wait()

    def _next_write(self) -> bytes:
        batch = [self._outbox.popleft()]
        size = len(batch[0])
        while self._outbox and size + len(self._outbox[0]) <= WRITE_BYTES:
            size += len(self._outbox[0])
            batch.append(self._outbox.popleft())
        return b"".join(batch)

    async def _read(self, stream: Stream) -> None:
        buffer = FrameBuffer()
        while data := await stream.receive_some(READ_BYTES):
            self._heard(self.peer)
            buffer.feed(data)
            while (payload := buffer.next_frame()) is not None:
                kind, request, body = _unpacket(payload)
                if kind not in (ANSWER, FAULT):
                    raise MalformedMessage("a question on the stream of answers")
                if (waiting := self._pending.get(request)) is None:
                    continue  # Its asker has given up.
                refusal = body.decode(errors="replace")[:300]
                self._answers[request] = wire.unpack(body) if kind == ANSWER else NetworkError(refusal)
                waiting.set()

    def _end(self, reason: str) -> None:
        if self._broken is None:
            self._broken = reason
            self._outbox.clear()
            self._drained.set()
            for waiting in self._pending.values():
                waiting.set()


async def serve(
    stream: Stream, on_tell: Tell, on_ask: Answer, heard: Callable[[PeerId], None], unpack: Unpack = unpack_tell
) -> None:
    """Serve the other side's half: its words go to `on_tell`, its questions to `on_ask`, until the stream ends."""
    remote = stream.remote
    buffer = FrameBuffer()
    writing = trio.Lock()
    slots = trio.Semaphore(MAX_OPEN_ASKS)
    refused: list[NetworkError | RemoteError] = []

    async def answer(request: int, question: object) -> None:
        try:
            packet = _packet(ANSWER, request, wire.pack(await on_ask(remote, question)))
        except NetworkError as error:
            packet = _packet(FAULT, request, str(error).encode()[:300])
        finally:
            slots.release()
        async with writing:
            await stream.send_all(packet)

    def take(data: bytes) -> bool:
        """A single word, if `data` is just that; anything else, and an error to raise, is for the loop below."""
        if not buffer.empty:
            return False
        try:
            message = unpack(data)
            if message is not None:
                heard(remote)
                on_tell(remote, message)
        except (NetworkError, RemoteError) as error:
            refused.append(error)  # A word is not told twice: who hears it may count.
            return False
        return message is not None

    if isinstance(stream, EagerStream):
        stream.divert(take)
    try:
        async with trio.open_nursery() as nursery:
            while data := await stream.receive_some(READ_BYTES):
                if refused:
                    raise refused[0]
                heard(remote)
                buffer.feed(data)
                while (payload := buffer.next_frame()) is not None:
                    kind, request, body = _unpacket(payload)
                    message = wire.unpack(body)
                    if kind == TELL:
                        on_tell(remote, message)
                    elif kind == ASK:
                        await slots.acquire()
                        nursery.start_soon(answer, request, message)
                    else:
                        raise MalformedMessage("an answer on the stream of questions")
            nursery.cancel_scope.cancel()
    except* (NetworkError, RemoteError) as group:
        raise sole_error(group) from None
