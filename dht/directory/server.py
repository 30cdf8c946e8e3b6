"""The Kademlia server (`/ipfs/kad/1.0.0`): it serves any peer, within stated limits.

Theory of operation. A stranger sends one message after the other on a stream. A refused message resets the stream, as
the specification demands, and its reason is counted. A value is stored only if `validate` accepts it for its key and
none of a higher sequence is there; a peer provides runs only, in its own name. `Store` limits the space,
`BootstrapLimits` the rate (`record_rate`), and `StoreFile` writes entries to disk.

A client that also announces the protocol is a candidate for the routing table. It enters once my dial back succeeds, to
the source IP address of its connection and the port that it announces. So a client behind NAT is never named to others,
and nobody can aim me at a third party (amplification). Servers whose outside address is another one know each other by
their operators' options (`--via`).

Only the messages are the library's. Its server (`kad_dht/kad_dht.py:900`) keeps the signed records of every client, takes
every client for a server, names clients behind NAT as the nearest peers, and keeps 50 000 values of up to 1 MiB.
"""

import time
from collections.abc import Callable
from typing import Any, Protocol

import trio
from libp2p.kad_dht.common import PROTOCOL_ID, format_time_rfc3339
from multiaddr import Multiaddr

from ...peer.address import rung_of
from ...peer.base.errors import LocalError, RemoteError, StreamClosed
from ...peer.base.transport import Address, Host, PeerId, Rung, SocketStream, Stream, has_socket
from ...peer.bootstrap.server import BootstrapServer
from ...peer.quota.origins import BURST_SECONDS, UNKNOWN, Origin
from ...peer.quota.places import GAVE_WAY, Places
from ...peer.quota.shares import Shares
from ..keys import RUN_KEY
from ..records import MAX_RECORD_BYTES
from .interface import Validate
from .messages import Message, MessageReader, add_peer_to, binary_id, peers_of, send
from .routing import Servers
from .store import MAX_KEY_BYTES, PROVIDER_SECONDS, VALUE_SECONDS, Entry, Store
from .store_file import StoreFile

MAX_QUESTION_BYTES = MAX_RECORD_BYTES + (8 << 10)
"""The limit of a message: one record, a key and some addresses."""

MAX_SERVER_STREAMS, MAX_STREAMS_PER_NETWORK, MAX_STREAMS_PER_ADDRESS = 256, 128, 64
MAX_STREAMS_PER_PEER = 8
STREAM_SECONDS = 30.0
"""Open streams: in all, of one network, one address and one peer, and the longest that one stays open. For a newcomer the
oldest one gives way of those who have most: silent strangers, a hundred of whom have one address, cannot use them up."""

QUESTIONS_PER_SECOND, QUESTIONS_BURST_SECONDS = 32.0, 32.0
"""Questions of one address: one looks at all known servers, and its answer is up to 700 times as long. A newcomer asks for
a run's manifest, its members, and a record of each: 130."""

NETWORK_QUESTIONS = 2
"""Those of a network, in those of one address: 64 a second, at 2 ms on a busy machine an eighth of a core."""

ALL_RECORDS = 16
"""Records a second of all, in those of one address: 900 members publish three each in half a minute."""

EXPIRY_PERIOD = 60.0
"""Seconds between removals of expired entries."""

PROBE_TIMEOUT = 3.0
PROBE_AGAIN_SECONDS = 600.0
MAX_PROBES = 4
MAX_ASKERS = 1024
"""Candidates are dialled once in ten minutes, four at a time; this is the limit of those remembered."""


class DirectoryHost(Host, Protocol):
    """The interface that a directory needs from the host on which it serves."""

    @property
    def bootstrap_server(self) -> BootstrapServer | None:
        """The limits and the refusals of a bootstrap; None on other hosts."""

    async def probe(self, peer: PeerId, address: Address, seconds: float) -> str:
        """Dial a peer at an address, shake hands and hang up; returns why that failed, or ""."""

    def announced(self, peer: PeerId, protocol: str) -> tuple[Address, ...]:
        """Return the addresses that a connected peer announces, if it also announces `protocol`."""


class DirectoryServer:
    """The directory server of one host. Raises `LocalError` for a host that is no bootstrap."""

    def __init__(self, host: DirectoryHost, validate: Validate, file: StoreFile | None) -> None:
        bootstrap = host.bootstrap_server
        if bootstrap is None:
            raise LocalError("only a bootstrap's host can serve a directory")
        self.store = Store(bootstrap.limits)
        self.servers = Servers(host.peer_id)
        self.answer_for: Callable[[str], bytes | None] = lambda key: None
        """Returns the value of a key that this server answers itself, whatever is stored; None for all others."""
        self._host = host
        self._origins = bootstrap.gate.origins
        self._refusals = bootstrap.refusals
        self._validate = validate
        self._file = file
        self._rates = Shares(bootstrap.limits.record_rate, BURST_SECONDS, all_share=ALL_RECORDS)
        self._questions = Shares(QUESTIONS_PER_SECOND, QUESTIONS_BURST_SECONDS, network_share=NETWORK_QUESTIONS)
        self._start = time.time() - trio.current_time()
        self._nursery: trio.Nursery | None = None
        most = MAX_SERVER_STREAMS, MAX_STREAMS_PER_ADDRESS, MAX_STREAMS_PER_NETWORK, MAX_STREAMS_PER_PEER
        self._streams = Places[trio.CancelScope](*most)
        self._tried: dict[PeerId, float] = {}
        self._probes = trio.CapacityLimiter(MAX_PROBES)
        if file is not None:
            file.load(self.store, self._now())

    async def serve(self, *, task_status: Any) -> None:
        """Serve until cancelled."""
        async with trio.open_nursery() as self._nursery:
            self._host.handle(PROTOCOL_ID, self._serve)
            task_status.started()
            try:
                while True:
                    await trio.sleep(EXPIRY_PERIOD)
                    self.store.expire(self._now())
            finally:
                self._nursery = None

    def answer_myself(self, question: Message) -> Message | None:
        """Answer a request of this server's own host, which cannot dial itself."""
        return self._answer(question, self._host.peer_id, Origin("myself", "myself", exempt=True), "")

    def _now(self) -> float:
        """Return Unix seconds, counted since this server began: a clock that is set meanwhile drops nothing."""
        return self._start + trio.current_time()

    async def _serve(self, stream: Stream) -> None:
        """Answer the requests of one stream, for `STREAM_SECONDS`."""
        assert has_socket(stream)
        peer, ip = stream.remote, _ip_of(stream)
        origin = self._origins.of(ip) if ip else UNKNOWN
        if self._nursery is None:
            await stream.reset()
            return
        scope = trio.move_on_after(STREAM_SECONDS)
        if (oldest := self._streams.enter(scope, origin, peer)) is not None:
            self._refusals.add("directory", f"streams: {GAVE_WAY}", origin, peer)
            oldest.cancel()
        try:
            with scope:
                reader = MessageReader(stream, MAX_QUESTION_BYTES)
                while question := await reader.next():
                    stream.hold_at_most(MAX_QUESTION_BYTES)
                    if self._nursery is not None:  # With each: what it announces may come after the first one.
                        self._consider(peer, ip, self._nursery)
                    if (answer := self._answer(question, peer, origin, ip)) is None:
                        await stream.reset()
                        return
                    await send(stream, answer)
            if scope.cancelled_caught:
                await stream.reset()
        except RemoteError as error:
            self._refusals.add("directory", str(error), origin, peer)
            await stream.reset()
        except StreamClosed:
            await stream.reset()
        finally:
            self._streams.leave(scope)

    def _answer(self, question: Message, peer: PeerId, origin: Origin, ip: str) -> Message | None:
        """Answer one request; None if it is refused."""
        key, now = bytes(question.key), self._now()
        answer = Message(type=question.type, key=key)
        if whose := self._questions.exceeded(origin, trio.current_time()):
            self._refusals.add("directory", f"too many questions a second from {whose}", origin, peer)
            return None
        if question.type == Message.PING:
            return answer
        refusal = "" if 0 < len(key) <= MAX_KEY_BYTES else "a key of no or of too many bytes"
        if question.type in (Message.PUT_VALUE, Message.ADD_PROVIDER):
            if not refusal and (whose := self._rates.exceeded(origin, trio.current_time())):
                refusal = f"too many records a second from {whose}"
            refusal = refusal or self._take_in(question, peer, ip, now)
        if refusal:
            self._refusals.add("record", refusal, origin, peer)
            return None
        if question.type == Message.PUT_VALUE:
            answer.record.CopyFrom(question.record)
        elif question.type != Message.ADD_PROVIDER:
            self._look_up(question, answer, now)
            for server, addresses in self.servers.nearest(key).items():
                if server not in (peer, self._host.peer_id):
                    add_peer_to(answer.closerPeers, server, addresses)
            if key == binary_id(self._host.peer_id):  # Go-libp2p takes no server into its table that does not know itself.
                add_peer_to(answer.closerPeers, self._host.peer_id, self._host.addresses())
        return answer

    def _look_up(self, question: Message, answer: Message, now: float) -> None:
        key = bytes(question.key)
        own = self.answer_for(key.decode(errors="replace")) if question.type == Message.GET_VALUE else None
        if own is not None:
            answer.record.key, answer.record.value = key, own
        elif question.type == Message.GET_VALUE and (held := self.store.value(key, now)):
            answer.record.key, answer.record.value = held.key, held.value
            answer.record.timeReceived = format_time_rfc3339()
        elif question.type == Message.GET_PROVIDERS:
            for entry in self.store.providers(key, now):
                provider = answer.providerPeers.add()
                provider.connection = Message.CONNECTED if self._host.rung(entry.peer) else Message.NOT_CONNECTED
                provider.id = binary_id(entry.peer)
                provider.addrs.extend(entry.addresses)

    def _take_in(self, question: Message, peer: PeerId, ip: str, now: float) -> str:
        """Store the entries of a message; returns why it is refused, or ""."""
        key = bytes(question.key)
        if question.type == Message.ADD_PROVIDER:
            if not RUN_KEY.fullmatch(key):
                return "a provider record of no run"
            named = peers_of(question.providerPeers)
            if not named.get(peer):
                return "a provider record of another peer, or without an address"
            addresses = tuple(Multiaddr(address).to_bytes() for address in named[peer])
            entry = Entry(key, peer, b"", addresses, ip, now + PROVIDER_SECONDS)
        else:
            value, held = bytes(question.record.value), self.store.value(key, now)
            if question.record.key != key:
                return "a record of another key"
            if held is None or held.value != value:  # Members republish the same twice a minute.
                sequence = self._sequence(key, value)
                if sequence is None:
                    return "an invalid value"
                # What was stored before the manifest of its run was known may be invalid by now.
                if held is not None and (found := self._sequence(key, held.value)) is not None and found > sequence:
                    return "an older value than the one that is held"
            entry = Entry(key, "", value, (), ip, now + VALUE_SECONDS)
        if self.store.put(entry):
            self._refusals.add("store", "the oldest gave way", self._origins.of(ip), peer)
        if self._file is not None:
            self._file.append(entry, self.store)
        return ""

    def _sequence(self, key: bytes, value: bytes) -> int | None:
        """Return the sequence of a value under a key; None if it is not valid."""
        try:
            return self._validate(key.decode(), value)
        except (RemoteError, ValueError):
            return None

    def _consider(self, peer: PeerId, ip: str, nursery: trio.Nursery) -> None:
        """Dial a client back that announces itself as a server at the public address that it comes from."""
        now = trio.current_time()
        if peer in self.servers or self._tried.get(peer, -PROBE_AGAIN_SECONDS) > now - PROBE_AGAIN_SECONDS:
            return
        announced = self._host.announced(peer, PROTOCOL_ID)
        addresses = tuple(one for one in announced if one.split("/")[2] == ip and rung_of(one) is Rung.DIRECT)
        if addresses:
            self._tried[peer] = now
            if len(self._tried) > MAX_ASKERS:
                del self._tried[next(iter(self._tried))]
            nursery.start_soon(self._probe, peer, addresses)

    async def _probe(self, peer: PeerId, addresses: tuple[Address, ...]) -> None:
        async with self._probes:
            for address in addresses[:MAX_PROBES]:
                try:
                    failure = await self._host.probe(peer, address, PROBE_TIMEOUT)
                except Exception as error:  # noqa: BLE001  The boundary of one peer.
                    failure = repr(error)
                if not failure:
                    self.servers.answered(peer, (address,))
                    return
                self._refusals.add("server", "it cannot be reached from outside", peer=peer)


def _ip_of(stream: SocketStream) -> str:
    """Return the source IP address of a stream; empty if its connection is gone."""
    try:
        return stream.remote_socket()[0]
    except StreamClosed:
        return ""
