"""One running peer: its sessions, heartbeats and bulk bytes; it owns the nursery of all their tasks.

Theory of operation. Floors above register handlers of messages and requests (`on_message`, `on_ask`), `send` and `ask`
others by their peer id, and `watch` the peers whose failure matters. A watched peer is *lost* when it cannot be
reached, when its session breaks, or when it has been silent for three beats: then `on_lost` is called once, with the
reason, and the peer is watched no longer. Of every peer that sends anything `on_heard` is called now and then: that is
the proof that somebody holds its key there. A message that breaks its rules ends that stream and charges its sender.
With a banned peer nothing is exchanged: no message, no request and no bytes, in either direction.
"""

import math
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

import trio

from .. import wire
from ..base.config import PeerConfig
from ..base.errors import NetworkError, RemoteError, StreamClosed
from ..base.transport import Address, Climber, PeerId, Stream, Transport, has_socket
from ..identity import Identity
from ..log.telemetry import Telemetry
from ..quota.origins import NOWHERE, UNKNOWN, Origin, Origins
from ..quota.refusals import REFUSAL_PERIOD, Refusals
from .backlog import Backlog
from .bulk import BlobStore, Bulk, Readers
from .guard import QUESTION_MESSAGES, Cost, Guard, Standing
from .heard import HeardPeers
from .running import RunningClock
from .session import SESSION_PROTOCOL, Session, Unpack, message_packet, serve_session, unpack_message
from .verification import Verification, VerificationQueue

MAX_MISSED_BEATS = 3
"""Two can be swallowed by one retransmission, three make it a matter of seconds."""
BEAT, ECHO = message_packet(wire.Beat()), message_packet(wire.Beat(echo=True))
"""The packets of heartbeats: most messages outside of rounds."""
RETIRE_TIMEOUT = 20.0
"""Seconds for the answers to requests on the old connection after an upgrade; longer than any request waits."""
MAX_LEARNED = 8192
"""Peers whose addresses, and whose last contact, are remembered: twice the rows of a member table."""
FEW_SIGNATURES = 3
"""So many take 0.3 ms, and are verified at once: what follows a record on its stream finds it taken up."""
MAX_CONTROL_STREAMS = 4
"""A peer has one; a second during an upgrade, others while I have not noticed yet that theirs have died."""
MAX_UNREAD_ANSWERS = 4 << 20
"""Bytes of answers that one peer has not read: four of the longest. An honest peer asks few questions at a time."""
MAX_UNREAD_ANSWERS_IN_ALL = 64 << 20
"""Those of 16 such peers."""
_M = TypeVar("_M")
_R = TypeVar("_R")


class Node(AbstractAsyncContextManager["Node"]):
    """A peer on a transport. Use as `async with Node(…) as node`; leaving ends every session."""

    def __init__(
        self,
        transport: Transport,
        identity: Identity,
        config: PeerConfig,
        telemetry: Telemetry,
        *,
        inline: bool = False,
        unpack: Unpack = unpack_message,
    ) -> None:
        self.transport = transport
        self.identity = identity
        self.config = config
        self.telemetry = telemetry
        self.blobs = BlobStore()
        self.guard = Guard(telemetry)
        self.beat_interval = config.beat_outside
        self._inline = inline
        self._left = False
        self._unpack = unpack
        self._counts: Callable[[PeerId], bool] = lambda peer: False
        self.votes: Callable[[PeerId], bool] = lambda peer: False
        """Whether a peer may vote: what it sends counts against no budget that it shares with others at its address."""
        self._why_not_serve: Callable[[PeerId, bytes], str] = lambda peer, invite: ""
        limits = {"streams": MAX_CONTROL_STREAMS, "per_peer": MAX_UNREAD_ANSWERS, "in_all": MAX_UNREAD_ANSWERS_IN_ALL}
        self._answers = Backlog(**limits, is_member=self.is_member)
        readers = Readers(
            self.guard.refuses,
            self.is_member,
            self.why_not_serve,
            lambda stream: partial(self._take, stream.remote, self._note_origin(stream)),
        )
        self._bulk = Bulk(transport, self.blobs, telemetry, self.compute, config.state_upload, readers)
        self._verifications = VerificationQueue(self.compute, self.charge, self.refuse)
        self._refusals = Refusals(telemetry, trio.current_time, "message.refused")
        self._origins = Origins(())
        self._sessions: dict[PeerId, Session] = {}
        self._addresses: dict[PeerId, tuple[Address, ...]] = {}
        self._last_received: dict[PeerId, float] = {}
        self._last_sent: dict[PeerId, float] = {}
        self._watched: set[PeerId] = set()
        self._lost: dict[PeerId, str] = {}
        self._fetches: dict[PeerId, set[trio.CancelScope]] = {}
        self._message_handlers: dict[type, Callable[[PeerId, Any], None]] = {wire.Beat: self._beaten}
        self._ask_handlers: dict[type, Callable[[PeerId, Any], Awaitable[Any]]] = {}
        self._lost_handlers: list[Callable[[PeerId, str], None]] = []
        self._heard = HeardPeers(MAX_LEARNED)
        self._origin_of: dict[PeerId, Origin] = {}

    async def __aenter__(self) -> Self:
        self.now = trio.lowlevel.current_clock().current_time  # For every message; trio's own looks the clock up.
        self.running = RunningClock(self.now)
        self._manager = trio.open_nursery()
        self.nursery = await self._manager.__aenter__()
        self._beat_changed = trio.Event()
        self.transport.handle(SESSION_PROTOCOL, self._serve)
        if isinstance(self.transport, Climber):
            self.transport.on_climb(self._move)
        self.nursery.start_soon(self._heartbeat)
        if not self._inline:
            self.nursery.start_soon(self._verifications.run)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._left = True
        self.nursery.cancel_scope.cancel()
        await self._manager.__aexit__(kind, error, trace)

    @property
    def peer_id(self) -> PeerId:
        """My peer id."""
        return self.identity.peer_id

    @property
    def is_relayed(self) -> bool:
        """Return True if most others can reach me through a relay only."""
        return isinstance(self.transport, Climber) and self.transport.is_relayed

    @property
    def upload_rate(self) -> float:
        """Measured upload in bytes/s; 0 before anything was measured."""
        return self._bulk.upload.rate

    @property
    def download_rate(self) -> float:
        """Measured download in bytes/s; 0 before anything was measured."""
        return self._bulk.download.rate

    def rate_from(self, peer: PeerId) -> float:
        """Measured rate of bytes that I have received from a peer, in bytes/s; 0 before anything was measured."""
        return self._bulk.rate_from(peer)

    def on_message(self, kind: type[_M], handler: Callable[[PeerId, _M], None]) -> None:
        """Call `handler(sender, message)` for every received message of this class."""
        self._message_handlers[kind] = handler

    def on_ask(self, kind: type[_M], handler: Callable[[PeerId, _M], Awaitable[object]]) -> None:
        """Answer requests of this class with the result of `await handler(sender, question)`; `NetworkError` refuses."""
        self._ask_handlers[kind] = handler

    def on_lost(self, handler: Callable[[PeerId, str], None]) -> None:
        """Call `handler(peer, reason)` when a watched peer is lost."""
        self._lost_handlers.append(handler)

    def on_heard(self, handler: Callable[[PeerId], None]) -> None:
        """Call `handler(peer)` when a peer has sent anything, at most once in `HEARD_PERIOD` for each."""
        self._heard.handlers.append(handler)

    def heard(self, peer: PeerId) -> float:
        """Return when a peer last sent anything, up to `HEARD_PERIOD` s too early; −∞ if it did not, or was lost since."""
        return self._heard.at(peer)

    def origin_of(self, peer: PeerId) -> Origin:
        """Return where the last connection of a peer that I heard came from or led to; `UNKNOWN` if that is not known."""
        return self._origin_of.get(peer, UNKNOWN)

    def learn(self, peer: PeerId, addresses: Sequence[Address]) -> None:
        """Remember the addresses of `peer`; of too many peers that are not watched the oldest is forgotten."""
        if addresses:
            self._addresses.pop(peer, None)
            self._addresses[peer] = tuple(addresses)
        if len(self._addresses) > MAX_LEARNED:
            oldest = next((one for one in self._addresses if one not in self._watched), peer)
            for known in (self._addresses, self._last_sent):
                known.pop(oldest, None)

    def knows(self, peer: PeerId) -> bool:
        """Return True if an address of `peer` is known: it is or was a member."""
        return peer in self._addresses

    def prefer(self, is_member: Callable[[PeerId], bool]) -> None:
        """Count these peers as members, beside those that I watch: what is scarce is theirs first."""
        self._counts = is_member

    def restrict(self, why_not: Callable[[PeerId, bytes], str]) -> None:
        """Answer no question of a peer, and serve it no bytes for everybody, where `why_not` returns a reason.

        It is given the invitation that a question shows; empty where it shows none.
        """
        self._why_not_serve = why_not

    def why_not_serve(self, peer: PeerId, invite: bytes = b"") -> str:
        """Return why nothing of the run is given to a peer that shows an invitation; empty if it is."""
        return self._why_not_serve(peer, invite)

    def is_member(self, peer: PeerId) -> bool:
        """Return True for a member of the run, as far as I know."""
        return peer in self._watched or self._counts(peer)

    @property
    def watched(self) -> frozenset[PeerId]:
        """The peers whose failure matters."""
        return frozenset(self._watched)

    def ban(self, peer: PeerId, reason: str) -> None:
        """Exchange nothing with `peer` any more; those that watch it are notified that it is lost."""
        self.guard.ban(peer, reason)
        self._broken(peer, f"banned: {reason}", watched=True)
        self.nursery.start_soon(self._close, peer)

    def pardon(self, peer: PeerId) -> None:
        """Lift the ban of `peer`: it counts again as soon as a message of it, or a newer record, arrives."""
        self.guard.pardon(peer)

    def send(self, peers: PeerId | Iterable[PeerId], message: object) -> None:
        """Send `message` to one or several peers. It never blocks; a peer that it cannot be sent to is lost."""
        self._send((peers,) if isinstance(peers, str) else tuple(peers), message_packet(message))

    async def ask(self, peer: PeerId, message: object, *, timeout: float = 10.0) -> Any:
        """Send a request to `peer` and return its answer. Raises `NetworkError`."""
        self.guard.check(peer)
        return await self._session(peer).ask(message, timeout=timeout)

    async def fetch(self, peer: PeerId, key: bytes, size: int, *, patience: float = math.inf, name: bytes = b"") -> bytearray:
        """Fetch bulk bytes by their hash. Raises as `fetch_into` does."""
        await self.fetch_into(peer, key, into := bytearray(size), patience=patience, name=name)
        return into

    async def fetch_into(
        self, peer: PeerId, key: bytes, into: bytearray | memoryview, *, patience: float = math.inf, name: bytes = b""
    ) -> None:
        """Fill `into` with the bulk bytes of this hash. Raises `NetworkError`, or `RemoteError` for other bytes.

        `patience`: the timeout in seconds without any byte, for bytes sent at a limited rate (see `bulk`). `name`: under
        which the peer offers them, if not under their hash.

        A fetch from a lost peer fails at once: a stopped one would take a dial's whole timeout to show nothing.
        """
        self.guard.check(peer)
        fetches = self._fetches.setdefault(peer, set())
        with trio.CancelScope() as scope:
            fetches.add(scope)
            try:
                if peer not in self._lost:
                    await self.transport.connect(peer, self._addresses.get(peer, ()))
                    return await self._bulk.fetch(peer, key, into, patience=patience, name=name)
            finally:
                fetches.discard(scope)
        raise StreamClosed(f"{peer} is lost: {self._lost.get(peer, 'its session broke')}")

    def watch(self, peers: Iterable[PeerId]) -> None:
        """Exchange heartbeats with exactly these peers from now on; their silence is counted from now."""
        before, self._watched = self._watched, set(peers) - {self.peer_id} - self.guard.banned
        for peer in self._watched - before:
            self._last_received[peer] = self.now()  # Not `_note_arrival`: nothing shows yet that it is there.
            self._lost.pop(peer, None)
        for peer in before - self._watched:
            self._last_received.pop(peer, None)

    def lose(self, peer: PeerId, reason: str) -> None:
        """Count a watched peer as lost, since it has announced that it leaves."""
        self._broken(peer, reason)

    def set_beat(self, interval: float) -> None:
        """Set the seconds between heartbeats; every peer's silence is counted anew, since others learn of it later."""
        if interval != self.beat_interval:
            self.beat_interval = interval
            self._last_received.update(dict.fromkeys(self._watched, self.now()))
            self._beat_changed.set()

    def pace_round(self, rate: float) -> None:
        """Limit the bytes/s at which I send the bytes of a round, to all members together; 0: as fast as the line is."""
        self._bulk.pace_round(rate)

    def charge(self, peer: PeerId, step: str, error: RemoteError) -> None:
        """Count a breach of the rules against `peer`."""
        self.telemetry.emit("peer.charged", peer=peer, step=step, reason=str(error))

    def refuse(self, peer: PeerId, step: str, reason: str) -> None:
        """Say that something of `peer` was dropped; of a flood there is one event now and then, with their number."""
        self._refusals.add(step, reason, peer=peer)

    def verify(
        self, peer: PeerId, step: str, num_signatures: int, work: Callable[[], _R], then: Callable[[_R], None]
    ) -> None:
        """Do long verification for `peer` beside the event loop, members first, and call `then` with its result.

        In simulations, or if it is not long, it is done here. Raises as `Guard.take` does; what `work` raises is charged.
        """
        self.spend(peer, num_signatures)
        if self._inline or num_signatures <= FEW_SIGNATURES:
            then(work())
        else:
            self._verifications.add(Verification(peer, step, work, then), is_member=self.is_member(peer))

    def spend(self, peer: PeerId, num_signatures: int) -> None:
        """Take so many signatures, or work that is as long, from a peer's budgets. Raises as `Guard.take` does."""
        self._take(peer, self._origin_of.get(peer, NOWHERE), Cost(signatures=num_signatures))

    async def compute(self, function: Callable[..., _R], *args: Any) -> _R:
        """Run long arithmetic beside the event loop, so that heartbeats go on; inline in simulations (determinism)."""
        if self._inline:
            return function(*args)
        return await trio.to_thread.run_sync(function, *args)

    async def leave(self, reason: str) -> None:
        """Send a goodbye to every watched peer; takes at most one second."""
        self.send(sorted(self._watched), wire.Goodbye(reason))
        async with trio.open_nursery() as nursery:
            for session in list(self._sessions.values()):
                nursery.start_soon(session.drain, 1.0)

    def _send(self, peers: Sequence[PeerId], packet: bytes) -> None:
        now, banned = self.now(), self.guard.banned
        for peer in peers:
            if peer in banned:
                continue
            self._last_sent[peer] = now
            try:
                (self._sessions.get(peer) or self._session(peer)).send(packet)
            except StreamClosed as error:
                self._broken(peer, str(error))

    def _session(self, peer: PeerId) -> Session:
        session = self._sessions.get(peer)
        if session is None:
            session = self._sessions[peer] = Session(peer, lambda: self._reach(peer), self._note_arrival)
            self.nursery.start_soon(self._run_session, session)
        return session

    async def _reach(self, peer: PeerId) -> Stream:
        await self.transport.connect(peer, self._addresses.get(peer, ()))
        stream = await self.transport.open_stream(peer, SESSION_PROTOCOL)
        self._note_origin(stream)
        return stream

    def _move(self, peer: PeerId) -> None:
        """Move to a better connection: my next messages go over it, behind those on their way."""
        if self._left:
            return
        self.nursery.start_soon(self._bulk.move, peer)
        if (old := self._sessions.pop(peer, None)) is not None:

            async def reach() -> Stream:
                await old.drain(RETIRE_TIMEOUT)
                return await self._reach(peer)

            session = self._sessions[peer] = Session(peer, reach, self._note_arrival)
            self.nursery.start_soon(self._run_session, session)
            self.nursery.start_soon(old.retire, RETIRE_TIMEOUT)

    async def _run_session(self, session: Session) -> None:
        try:
            reason = await session.run()
        except RemoteError as error:
            self.charge(session.peer, "answer", error)
            reason = str(error)
        if self._sessions.get(session.peer) is session:
            self._broken(session.peer, reason)

    async def _serve(self, stream: Stream) -> None:
        if not self.guard.refuses(stream.remote):
            origin = self._note_origin(stream)
            receive, asked = partial(self._receive_message, origin), partial(self._asked, origin)
            with self._answers.stream(stream.remote):
                await serve_session(stream, receive, asked, partial(self._received, origin), self._unpack, self._answers)

    def _note_origin(self, stream: Stream) -> Origin:
        """Remember where the connection of a stream comes from or leads to, and return it; in memory that is nowhere."""
        if not has_socket(stream):
            return NOWHERE
        origin = self._origins.of(stream.remote_socket()[0])
        self._origin_of.pop(stream.remote, None)
        self._origin_of[stream.remote] = origin
        if len(self._origin_of) > MAX_LEARNED:
            del self._origin_of[next(iter(self._origin_of))]
        return origin

    def _take(self, peer: PeerId, origin: Origin, cost: Cost) -> None:
        """Take a cost from the budgets of a peer, and of those that it shares with others."""
        standing = Standing.VOTER if self.votes(peer) else Standing.MEMBER if self.is_member(peer) else Standing.STRANGER
        self.guard.take(peer, cost, self.now(), origin, standing)

    def _received(self, origin: Origin, peer: PeerId, num_bytes: int) -> None:
        self._note_arrival(peer)
        self._take(peer, origin, Cost(num_bytes=num_bytes))

    def _receive_message(self, origin: Origin, peer: PeerId, message: object, num_bytes: int) -> None:
        self._check_here()
        if num_bytes:
            self._note_arrival(peer)
        self._take(peer, origin, Cost(1, num_bytes, isinstance(message, wire.Signed)))
        if (handler := self._message_handlers.get(type(message))) is None:
            # A restarted member serves before all of it has started. The stream ends, so that the sender does not wait.
            raise StreamClosed(f"this peer does not take {type(message).__name__} now")
        handler(peer, message)

    async def _asked(self, origin: Origin, peer: PeerId, question: object) -> object:
        self._check_here()
        self._take(peer, origin, Cost(messages=QUESTION_MESSAGES))
        if why_not := self.why_not_serve(peer, question.invite if isinstance(question, wire.FilesAsk) else b""):
            self.refuse(peer, type(question).__name__, why_not)
            raise NetworkError(why_not)
        handler = self._ask_handlers.get(type(question))
        if handler is None:
            raise NetworkError(f"this peer does not answer {type(question).__name__}")
        return await handler(peer, question)

    def _check_here(self) -> None:
        """Raise `StreamClosed` once I left: the transport outlives the node by a moment, and messages still arrive."""
        if self._left:
            raise StreamClosed("this peer is leaving")

    def _note_arrival(self, peer: PeerId) -> None:
        now = self.now()
        if peer in self._watched:
            self._last_received[peer] = now
        self._lost.pop(peer, None)
        self._heard.note(peer, now)

    def _beaten(self, peer: PeerId, beat: wire.Beat) -> None:
        # A peer in a round beats fast, and expects the same of those that still train. A stranger's echo costs a session.
        is_fast = peer in self._watched and self.beat_interval <= self.config.beat_in_round
        if not beat.echo or is_fast or not self.knows(peer):
            return
        # After a round all beat at the same time: then the echo crosses with a beat of mine, which is the answer.
        if self._last_sent.get(peer, -math.inf) <= self.now() - self.config.beat_in_round / 2:
            self._send((peer,), BEAT)

    def _broken(self, peer: PeerId, reason: str, *, watched: bool = False) -> None:
        self._sessions.pop(peer, None)
        self._heard.forget(peer)
        self._bulk.forget(peer)
        if watched or peer in self._watched:
            self._watched.discard(peer)
            self._lost[peer] = reason
            for fetch in self._fetches.get(peer, ()):
                fetch.cancel()
            self.telemetry.emit("peer.lost", peer=peer, reason=reason)
            for handler in self._lost_handlers:
                handler(peer, reason)

    async def _heartbeat(self) -> None:
        due, reported = self.now() + self.beat_interval, self.now()
        while True:
            self._beat_changed = trio.Event()
            # A stopped peer is lost at its timeout, not at the next beat after it.
            longest_silent = min([self._last_received[peer] for peer in self._watched], default=math.inf)
            wake = max(self.now(), min(due, longest_silent + self._patience))
            self.running.expect(wake, self.beat_interval)
            with trio.move_on_at(wake):
                await self._beat_changed.wait()
                due = self.now()
            now = self.now()
            if seconds := self.running.overslept():
                self._forgive(now, seconds)
            if now - reported >= REFUSAL_PERIOD:
                reported = now
                self._refusals.report()
            if now >= due:
                due = now + self.beat_interval
                self._send([peer for peer in sorted(self._watched) if self._is_quiet(peer, now)], ECHO)
            patience = self._patience
            for peer in sorted(peer for peer in self._watched if now >= self._last_received[peer] + patience):
                if (arrival := self._bulk.arrivals.get(peer, -math.inf)) > self._last_received[peer]:
                    self._last_received[peer] = arrival  # On a full line its beats wait behind its bulk bytes.
                    continue
                self._broken(peer, f"silent for {now - self._last_received[peer]:.1f} s")
                self.nursery.start_soon(self._close, peer)

    def _forgive(self, now: float, seconds: float) -> None:
        """Do not count silence while this process was stopped (a suspended laptop, a busy machine): arrivals are unread."""
        self.telemetry.emit("peer.overslept", step="heartbeat", seconds=round(seconds, 3))
        last, a_beat_left = self._last_received, now - self._patience + self.beat_interval
        last |= {peer: min(now, max(last[peer] + seconds, a_beat_left)) for peer in self._watched}

    def _is_quiet(self, peer: PeerId, now: float) -> bool:
        """Return True if a beat is due: messages both ways in the last half of a beat serve as one."""
        recently = now - self.beat_interval / 2
        return self._last_sent.get(peer, -math.inf) <= recently or self._last_received[peer] <= recently

    @property
    def _patience(self) -> float:
        """The timeout: seconds of silence after which a watched peer is lost."""
        return MAX_MISSED_BEATS * self.beat_interval

    async def _close(self, peer: PeerId) -> None:
        """Close the connection to a silent peer, so that the next message dials anew."""
        with trio.move_on_after(1.0):
            await self.transport.disconnect(peer)
