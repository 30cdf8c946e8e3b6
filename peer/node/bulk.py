"""Bulk bytes: kept and served by their hash, fetched by the peers that need them.

Theory of operation. Nothing big is ever pushed. A peer announces a hash in a control message, and a peer that needs the
bytes fetches them; so memory is taken only for bytes that were requested, of a size that was known before. A fetch that
breaks resumes at its offset, over another stream or from another peer. On a bulk stream requests follow one another:
a `Fetch` frame one way, a `Serve` frame and its raw bytes the other.

Bytes in memory belong to a round and go at once, or evenly at the rate of `pace_round`, where training does not wait for
them: they then leave some of the line to others. Bytes in a file are for newcomers (checkpoints, outputs of earlier rounds):
they go at the rate that `UploadPace` allows, and while no bytes of a round are being sent. An answer says whether its rate
is limited: then neither end counts it as that of the line.
"""

import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import trio

from .. import wire
from ..base.digest import RunningDigest
from ..base.errors import DeadlineExceeded, MalformedMessage, NetworkError, ProtocolViolation, StreamClosed
from ..base.transport import PeerId, Stream, Transport
from ..log.telemetry import Telemetry
from ..wire.framing import FrameBuffer, frame
from .backlog import Backlog
from .file_blob import FileBlob
from .guard import QUESTION_MESSAGES, Cost

BULK_PROTOCOL = "/flockstep/bulk/1"
BULK_WRITE_BYTES = 1 << 20
"""Measured: writes of 1 MB are up to three times faster than writes of 64 kB through Noise and Yamux."""
LEAST_WRITE_BYTES = 1 << 14
WRITES_PER_SECOND = 20.0
LEAST_ROUND_RATE = float(1 << 16)
"""Bytes/s: a slower line is not one to spare, and a piece that waits its turn ends soon after the limit does."""
MAX_BULK_STREAMS = 2
"""Bulk streams to one peer at a time: more add nothing on one connection."""
MAX_SERVED_STREAMS = 8
"""Bulk streams that one peer may have open here: `MAX_BULK_STREAMS`, and those that it has replaced, which end later."""
MAX_UNREAD_BULK_IN_ALL = 256 << 20
"""Bytes of pieces that wait for their readers: of a full roster's two streams each, and as many again."""
MEASURED_BYTES = 1 << 16
"""Below this the round trip takes the time, not the bandwidth."""
LEAST_STATE_RATE = 4e3
"""Bytes/s on average, beside the patience, of a fetch that has one: who sends a byte now and then must not hold it up for
ever. A leaf of 4 MiB may take 17 minutes; whoever serves others at less cannot bring them a state."""
ROUND_FIRST_SECONDS = 5.0
"""The longest that a piece for a newcomer waits for rounds: a peer that does not read must not block others."""
SOUND_SECONDS = 60.0
"""Hashing a leaf of 4 MiB takes 1 ms or more. If it is damaged meanwhile, who fetches it finds that."""
Blob = bytes | bytearray | memoryview
Compute = Callable[..., Awaitable[Any]]
Obtain = Callable[[bytes, PeerId], Awaitable[None]]
"""Brings bytes of a name, as a rule their hash, here for a reader, if they are still to come; waits until then."""


@dataclass(slots=True)
class _Shelf:
    """One blob: its bytes, and the peers that may read it (None: every peer)."""

    data: Blob | FileBlob
    readers: frozenset[PeerId] | None


class BlobStore:
    """The blobs that this peer serves, by hash. Nothing is copied: a blob must not change until it is dropped."""

    def __init__(self) -> None:
        self._shelves: dict[bytes, _Shelf] = {}
        self.obtain: Obtain | None = None
        """What brings bytes here that a reader asks for and that are not here yet; None if nothing does."""

    def put(self, key: bytes, data: Blob | FileBlob, *, readers: Iterable[PeerId] | None = None) -> None:
        """Serve `data` under the hash `key`, to `readers` only if given, and to those that may read it already.

        Equal parts for two owners (both all zeros, say) have one hash: the second must not take it from the first.
        """
        shelf = self._shelves.get(key)
        if readers is None or (shelf is not None and shelf.readers is None):
            self._shelves[key] = _Shelf(data, None)
        else:
            self._shelves[key] = _Shelf(data, frozenset(readers).union(shelf.readers or () if shelf else ()))

    def drop(self, keys: Iterable[bytes]) -> None:
        """Stop serving these."""
        for key in keys:
            self._shelves.pop(key, None)

    def get(self, key: bytes, reader: PeerId) -> Blob | None:
        """Return the bytes if they are here, undamaged, and `reader` may read them; waits for the disk for a file."""
        data = self.find(key, reader)
        return data.read(key) if isinstance(data, FileBlob) else data

    def is_for(self, key: bytes, reader: PeerId) -> bool:
        """Return True for bytes that are meant for `reader` by name."""
        shelf = self._shelves.get(key)
        return shelf is not None and shelf.readers is not None and reader in shelf.readers

    def find(self, key: bytes, reader: PeerId) -> Blob | FileBlob | None:
        """Return the bytes, or the file that holds them, if `reader` may read them."""
        shelf = self._shelves.get(key)
        if shelf is None or (shelf.readers is not None and reader not in shelf.readers):
            return None
        return shelf.data


class BandwidthMeter:
    """A rate in bytes/s over transfers big enough to measure (0: none yet); newer ones weigh more."""

    def __init__(self) -> None:
        self.rate = 0.0

    def add(self, num_bytes: int, seconds: float) -> None:
        """Count one transfer."""
        if num_bytes >= MEASURED_BYTES and seconds > 0:
            self.rate = 0.7 * self.rate + 0.3 * num_bytes / seconds if self.rate else num_bytes / seconds


class UploadPace:
    """Rate limits bytes for newcomers, and gives those of rounds priority."""

    def __init__(self, rate: Callable[[], float]) -> None:
        self._rate = rate
        self._turn = trio.Lock()
        self._free_at = -math.inf
        self._sending = 0
        self._quiet = trio.Event()

    @contextmanager
    def of_a_round(self) -> Iterator[None]:
        """Hold newcomers' bytes back while bytes of a round are being sent."""
        self._sending += 1
        try:
            yield
        finally:
            self._sending -= 1
            if not self._sending:
                self._quiet.set()
                self._quiet = trio.Event()

    async def pass_on(self, num_bytes: int) -> None:
        """Wait until so many bytes may go; a rate of 0 sets no limit."""
        if self._sending:
            with trio.move_on_after(ROUND_FIRST_SECONDS):
                await self._quiet.wait()
        if self._rate():
            async with self._turn:  # Who gives up waiting has used none of the rate.
                await trio.sleep_until(self._free_at)
                rate = self._rate()
                self._free_at = trio.current_time() + (num_bytes / rate if rate else 0.0)


@dataclass(slots=True)
class _Lane:
    """The streams to one peer: at most `MAX_BULK_STREAMS` in use, and the idle ones that wait for the next fetch."""

    slots: trio.CapacityLimiter = field(default_factory=lambda: trio.CapacityLimiter(MAX_BULK_STREAMS))
    idle: list[Stream] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Readers:
    """What a node says about the peers that ask for its bytes."""

    refuses: Callable[[PeerId], bool]
    """Whether nothing is to do with a peer: it is banned."""
    is_member: Callable[[PeerId], bool]
    why_not_serve: Callable[[PeerId], str]
    """Why a peer gets no bytes that are for everybody; empty if it does."""
    charge: Callable[[Stream], Callable[[Cost], None]]
    """Returns what takes a cost on a stream from its peer's budgets; it raises where nothing is left."""


class Bulk:
    """Serves this peer's blobs and fetches those of others."""

    def __init__(
        self,
        transport: Transport,
        blobs: BlobStore,
        telemetry: Telemetry,
        compute: Compute,
        state_upload: float,
        readers: Readers,
    ) -> None:
        self._transport = transport
        self._blobs = blobs
        self._telemetry = telemetry
        self._compute = compute
        self._readers = readers
        self._backlog = Backlog(
            streams=MAX_SERVED_STREAMS,
            per_peer=MAX_SERVED_STREAMS * BULK_WRITE_BYTES,
            in_all=MAX_UNREAD_BULK_IN_ALL,
            is_member=readers.is_member,
        )
        self._lanes: dict[PeerId, _Lane] = {}
        self.upload, self.download = BandwidthMeter(), BandwidthMeter()
        self._from: dict[PeerId, BandwidthMeter] = {}
        self.arrivals: dict[PeerId, float] = {}
        """When bytes of a fetch last arrived from each peer."""
        self._sound: dict[tuple[FileBlob, bytes], float] = {}
        """When each file was last found to hold the bytes that it is to hold."""
        self._round_rate = 0.0
        self._round_pace = UploadPace(lambda: self._round_rate)
        self._pace = UploadPace(lambda: state_upload or self.upload.rate / 2)
        transport.handle(BULK_PROTOCOL, self._serve)

    def pace_round(self, rate: float) -> None:
        """Limit the bytes/s of a round's bytes to all readers together; 0: none, as from the beginning."""
        self._round_rate = max(rate, LEAST_ROUND_RATE) if rate else 0.0

    async def fetch(
        self, peer: PeerId, key: bytes, into: bytearray | memoryview, *, patience: float, name: bytes = b""
    ) -> None:
        """Fetch the bytes whose hash is `key` from `peer`; they fill `into`. An idle stream may be dead: it is replaced once.

        A finite `patience` is a timeout in seconds without any byte, for bytes that the peer sends at a limited rate, of
        `LEAST_STATE_RATE` at least.
        `name` is that under which the peer offers them, if not their hash.
        Raises `NetworkError` if the connection breaks or the peer refuses, `ProtocolViolation` for other bytes.
        """
        size, done, hashed, is_limited = len(into), 0, RunningDigest(), False
        lane = self._lanes.setdefault(peer, _Lane())
        began = trio.current_time()
        for final in (False, True):
            try:
                async with lane.slots, self._stream(peer, lane, patience, fresh=final) as (stream, deadline):
                    latest = deadline.deadline - done / LEAST_STATE_RATE
                    await stream.send_all(frame(wire.pack(wire.Fetch(name or key, done))))
                    header, first = await _begin_answer(stream, size - done)
                    is_limited = is_limited or header.is_limited
                    async for piece in _rest_of_answer(stream, first, size - done):
                        self.arrivals[peer] = trio.current_time()
                        into[done : done + len(piece)] = piece
                        hashed.add(piece)
                        done += len(piece)
                        deadline.deadline = min(trio.current_time() + patience, latest + done / LEAST_STATE_RATE)
                break
            except StreamClosed as error:
                if final:
                    raise
                self._telemetry.emit("fetch.resumed", peer=peer, step="fetch", reason=str(error), offset=done)
        if not is_limited:
            for meter in (self.download, self._from.setdefault(peer, BandwidthMeter())):
                meter.add(size, trio.current_time() - began)
        if hashed.value() != key:
            raise ProtocolViolation(f"{peer} served {size} bytes that do not match their hash")

    def rate_from(self, peer: PeerId) -> float:
        """The measured rate of fetches from a peer, in bytes/s; 0 before one was measured on this connection."""
        meter = self._from.get(peer)
        return 0.0 if meter is None else meter.rate

    def forget(self, peer: PeerId) -> None:
        """Drop the idle streams of a peer whose connection is gone, and what that one carried."""
        self._lanes.pop(peer, None)
        self.arrivals.pop(peer, None)
        self._from.pop(peer, None)

    async def move(self, peer: PeerId) -> None:
        """Move to a better connection: transfers under way end on the old one, the next fetch opens a new stream."""
        if (lane := self._lanes.pop(peer, None)) is not None:
            while lane.idle:
                await lane.idle.pop().aclose()

    @asynccontextmanager
    async def _stream(
        self, peer: PeerId, lane: _Lane, patience: float, *, fresh: bool
    ) -> AsyncIterator[tuple[Stream, trio.CancelScope]]:
        """Open or reuse a stream for one request; the scope cancels it at the timeout."""
        with trio.move_on_after(patience) as scope:
            stream = lane.idle.pop() if lane.idle and not fresh else await self._transport.open_stream(peer, BULK_PROTOCOL)
            try:
                yield stream, scope
            except BaseException:
                with trio.CancelScope(shield=True, deadline=trio.current_time() + 1):
                    await stream.reset()
                raise
        if scope.cancelled_caught:
            slow = f"or less than {LEAST_STATE_RATE / 1e3:g} kB/s"
            raise DeadlineExceeded(f"{peer} has sent nothing for {patience:g} s, {slow}")
        if self._lanes.get(peer) is lane:
            lane.idle.append(stream)
        else:  # Nobody would use it again, and it would keep a connection open that a better one has replaced.
            await stream.aclose()

    async def _serve(self, stream: Stream) -> None:
        with self._backlog.stream(stream.remote):
            await self._answer_fetches(stream)

    async def _answer_fetches(self, stream: Stream) -> None:
        buffer = FrameBuffer(limit=256)  # A Fetch is about 50 bytes.
        charge = self._readers.charge(stream)
        while data := await stream.receive_some(1 << 12):
            buffer.feed(data)
            while (payload := buffer.next_frame()) is not None:
                if self._readers.refuses(stream.remote):
                    return
                charge(Cost(QUESTION_MESSAGES, len(payload)))
                request = wire.unpack(payload)
                if not isinstance(request, wire.Fetch):
                    raise MalformedMessage(f"{type(request).__name__} on a bulk stream")
                await self._send(stream, request)

    async def _send(self, stream: Stream, request: wire.Fetch) -> None:
        blob = self._blobs.find(request.hash, stream.remote)
        if blob is None and self._blobs.obtain is not None:
            await self._blobs.obtain(request.hash, stream.remote)
            blob = self._blobs.find(request.hash, stream.remote)
        refused = "" if self._blobs.is_for(request.hash, stream.remote) else self._readers.why_not_serve(stream.remote)
        if refused:
            blob = None
        elif blob is None:
            refused = "not here, or not for you"
        elif request.offset > len(blob):
            refused = "offset past the end"
        elif isinstance(blob, FileBlob) and not await self._is_sound(blob, request.hash):
            refused = "damaged on the disk"
        if blob is None or refused:
            self._telemetry.emit("fetch.refused", peer=stream.remote, step="serve", reason=refused)
            await stream.send_all(frame(wire.pack(wire.Serve(0, refused))))
            return
        is_limited = isinstance(blob, FileBlob) or self._round_rate > 0
        await stream.send_all(frame(wire.pack(wire.Serve(len(blob) - request.offset, "", is_limited))))
        if isinstance(blob, FileBlob):
            await self._send_file(stream, blob, request)
        elif is_limited:
            await self._send_memory(stream, blob, request)
        else:
            with self._pace.of_a_round():
                began = trio.current_time()
                await self._send_memory(stream, blob, request)
                self.upload.add(len(blob) - request.offset, trio.current_time() - began)

    async def _is_sound(self, blob: FileBlob, key: bytes) -> bool:
        """Return True if a file holds the bytes of this hash: read for that once in `SOUND_SECONDS`, not at each request."""
        now = trio.current_time()
        if self._sound.get((blob, key), -math.inf) + SOUND_SECONDS > now:
            return True
        if not await self._compute(blob.is_sound, key):
            return False
        self._sound = {known: at for known, at in self._sound.items() if at + SOUND_SECONDS > now} | {(blob, key): now}
        return True

    async def _send_file(self, stream: Stream, blob: FileBlob, request: wire.Fetch) -> None:
        pieces, left = blob.pieces(request.offset), len(blob) - request.offset
        try:
            while (piece := await self._compute(next, pieces, b"")) and left:
                # After the read: once a blob is dropped its file may change, and nobody is to get a mixture.
                if self._blobs.find(request.hash, stream.remote) != blob:
                    raise StreamClosed("the bytes that were being served were dropped")
                await self._pace.pass_on(len(piece))
                with self._backlog.unread(stream.remote, len(piece)):
                    await stream.send_all(piece)
                left -= len(piece)
        except OSError as error:
            raise StreamClosed(f"the file that was being served cannot be read any more: {error}") from error
        if left:
            raise StreamClosed("the file that was being served has become shorter")

    async def _send_memory(self, stream: Stream, blob: Blob, request: wire.Fetch) -> None:
        view = memoryview(blob)[request.offset :]
        start = 0
        while start < len(view):
            if self._blobs.find(request.hash, stream.remote) is not blob:
                raise StreamClosed("the bytes that were being served were dropped")
            # A copy: once a blob is dropped its bytes may change, and the rest of this piece must not.
            piece = bytes(view[start : start + self._piece_bytes()])
            start += len(piece)
            await self._round_pace.pass_on(len(piece))
            with self._backlog.unread(stream.remote, len(piece)):
                await stream.send_all(piece)

    def _piece_bytes(self) -> int:
        """The size of a write: at a limited rate some twenty a second, so that they are spread evenly."""
        if not self._round_rate:
            return BULK_WRITE_BYTES
        return min(BULK_WRITE_BYTES, max(LEAST_WRITE_BYTES, int(self._round_rate / WRITES_PER_SECOND)))


async def _begin_answer(stream: Stream, expected: int) -> tuple[wire.Serve, bytes]:
    """Return the header of one answer and the first of its raw bytes, as many as have come with it."""
    buffer = FrameBuffer(limit=1024)
    while (payload := buffer.next_frame()) is None:
        data = await stream.receive_some(BULK_WRITE_BYTES)
        if not data:
            raise StreamClosed("the bulk stream ended before its answer")
        buffer.feed(data)
    header = wire.unpack(payload)
    if not isinstance(header, wire.Serve):
        raise MalformedMessage(f"{type(header).__name__} in place of an answer on a bulk stream")
    if header.refused:
        raise NetworkError(f"{stream.remote} does not serve it: {header.refused}")
    if header.length != expected:
        raise ProtocolViolation(f"{stream.remote} offers {header.length} bytes where {expected} are due")
    return header, buffer.rest()


async def _rest_of_answer(stream: Stream, piece: bytes, expected: int) -> AsyncIterator[bytes]:
    """Yield the raw bytes of one answer, of which `piece` has come, in the pieces in which they arrive."""
    while expected:
        if len(piece) > expected:
            raise ProtocolViolation(f"{stream.remote} sent more than it announced")
        if piece:
            yield piece
            expected -= len(piece)
        if expected:
            piece = await stream.receive_some(min(expected, BULK_WRITE_BYTES))
            if not piece:
                raise StreamClosed(f"the bulk stream ended {expected} bytes early")
