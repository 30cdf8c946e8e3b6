"""The serving side of the directory: libp2p's Kademlia (`/ipfs/kad/1.0.0`) for anyone, within stated limits.

Theory of operation. A stranger asks on a stream, one message after the other; `answer` says what it gets, `None` where it
is refused: then the stream is reset, as the specification wants, and the reason is counted. A value is stored only if
`validate` accepts it for its key and none of a higher sequence is there; a peer provides only in its own name. What is
stored is limited by `Store`, how often by `BootstrapLimits.record_rate`, and written down by `StoreFile`.

Who asks is a candidate for the table of servers if it says that it serves the protocol, too: it is in as soon as I get
through to it at the IP address that it comes from, at the port that it says it listens on. So a client behind NAT is never
named to anybody, and nobody can aim me at a third party. Servers whose outside address differs from that one know each
other because their operators say so (`--via`).

Only the messages are the library's. Its server (`kad_dht/kad_dht.py:900`) remembers the signed records of every asker,
takes in every asker as a server, tells clients behind NAT as the nearest peers, and keeps 50 000 values of up to 1 MiB.
"""

import time
from collections import Counter
from typing import Any

import trio
from libp2p.kad_dht.common import PROTOCOL_ID, format_time_rfc3339
from libp2p.peer.id import ID
from libp2p.peer.peerstore import PeerStoreError
from multiaddr import Multiaddr

from ...peer.address import valid_address
from ...peer.errors import LocalError, RemoteError
from ...peer.host import Libp2pHost
from ...peer.libp2p.stream import ROAD_ERRORS
from ...peer.quota.origins import UNKNOWN, Origin, Rates
from ...peer.transport import Address, PeerId
from ..records import MAX_RECORD_BYTES
from ..store_file import StoreFile
from .memory import Validate
from .messages import Message, add_peer_to, peers_of, receive, send
from .routing import Servers
from .store import MAX_KEY_BYTES, Entry, Store

PROVIDER_SECONDS = 3600.0
"""The specification's 48 h would list volunteers two days after they left; members provide anew twice a minute."""

VALUE_SECONDS = 48 * 3600.0
"""As in go-libp2p; who published a value publishes it anew long before (`directory.REPUBLISH_SECONDS`)."""

MAX_QUESTION_BYTES = MAX_RECORD_BYTES + (8 << 10)
"""It holds one record at most, beside a key and some addresses."""

MAX_STREAMS = 256
MAX_STREAMS_PER_PEER = 8
STREAM_SECONDS = 30.0
"""Open streams, those of one peer, and the life of one: silent strangers cannot close the door."""

EXPIRY_PERIOD = 60.0
"""Seconds between looks for what has ended."""

PROBE_TIMEOUT = 3.0
PROBE_AGAIN_SECONDS = 600.0
MAX_PROBES = 4
MAX_REMEMBERED = 1024
"""Candidates are tried once in ten minutes, four at a time; so many are remembered as tried."""


class DirectoryServer:
    """One host's serving side. Raises `LocalError` for a host that is no bootstrap."""

    def __init__(self, host: Libp2pHost, validate: Validate, file: StoreFile | None) -> None:
        if host.door is None:
            raise LocalError("only a bootstrap's host can serve a directory")
        self.store = Store(host.door.limits)
        self.servers = Servers(host.peer_id)
        self._host = host
        self._origins = host.door.gate.origins
        self._refusals = host.door.refusals
        self._validate = validate
        self._file = file
        self._rates = Rates(host.door.limits.record_rate)
        self._streams = 0
        self._streams_of: Counter[PeerId] = Counter()
        self._tried: dict[PeerId, float] = {}
        self._probes = trio.CapacityLimiter(MAX_PROBES)
        if file is not None:
            file.load(self.store, time.time())

    async def serve(self, *, task_status: Any) -> None:
        """Answer questions until cancelled."""
        async with trio.open_nursery() as nursery:

            async def answer(stream: Any) -> None:
                await self._serve(stream, nursery)

            self._host.host.set_stream_handler(PROTOCOL_ID, answer)
            task_status.started()
            try:
                while True:
                    await trio.sleep(EXPIRY_PERIOD)
                    self.store.expire(time.time())
            finally:
                self._host.host.remove_stream_handler(PROTOCOL_ID)

    def answer_myself(self, question: Message) -> Message | None:
        """What this server answers to its own host, which cannot dial itself."""
        return self._answer(question, self._host.peer_id, Origin("myself", "myself", exempt=True), "")

    async def _serve(self, stream: Any, nursery: trio.Nursery) -> None:
        """The questions of one stream, for a while."""
        peer = str(stream.muxed_conn.peer_id)
        remote = stream.get_remote_address()
        ip = remote[0] if remote else ""
        origin = self._origins.of(ip) if ip else UNKNOWN
        if self._streams >= MAX_STREAMS or self._streams_of[peer] >= MAX_STREAMS_PER_PEER:
            self._refusals.add("directory", "too many open streams", origin, peer)
            await stream.reset()
            return
        self._consider(peer, ip, nursery)
        self._streams += 1
        self._streams_of[peer] += 1
        try:
            with trio.move_on_after(STREAM_SECONDS) as scope:
                while question := await receive(stream, MAX_QUESTION_BYTES):
                    if (answer := self._answer(question, peer, origin, ip)) is None:
                        await stream.reset()
                        return
                    await send(stream, answer)
            await (stream.reset() if scope.cancelled_caught else stream.close())
        except RemoteError as error:
            self._refusals.add("directory", str(error), origin, peer)
            await stream.reset()
        except ROAD_ERRORS:
            await stream.reset()
        finally:
            self._streams -= 1
            self._streams_of[peer] -= 1
            if not self._streams_of[peer]:
                del self._streams_of[peer]

    def _answer(self, question: Message, peer: PeerId, origin: Origin, ip: str) -> Message | None:
        """The answer to one question; None where it is refused."""
        key, now = bytes(question.key), time.time()
        answer = Message(type=question.type, key=key)
        if question.type == Message.PING:
            return answer
        refusal = "" if 0 < len(key) <= MAX_KEY_BYTES else "a key of no or of too many bytes"
        if question.type in (Message.PUT_VALUE, Message.ADD_PROVIDER):
            if not refusal and not self._rates.take(origin, trio.current_time()):
                refusal = "too many records a second from one address"
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
                    add_peer_to(answer.closerPeers, ID.from_base58(server), addresses)
        return answer

    def _look_up(self, question: Message, answer: Message, now: float) -> None:
        key = bytes(question.key)
        if question.type == Message.GET_VALUE and (held := self.store.value(key, now)):
            answer.record.key, answer.record.value = held.key, held.value
            answer.record.timeReceived = format_time_rfc3339()
        elif question.type == Message.GET_PROVIDERS:
            for entry in self.store.providers(key, now):
                told = answer.providerPeers.add()
                told.id = ID.from_base58(entry.peer).to_bytes()
                told.addrs.extend(entry.addresses)

    def _take_in(self, question: Message, peer: PeerId, ip: str, now: float) -> str:
        """Store what a message brings; why not, where it may not be stored."""
        key = bytes(question.key)
        if question.type == Message.ADD_PROVIDER:
            named = peers_of(question.providerPeers)
            if not named.get(peer):
                return "a provider other than who says so, or without an address"
            addresses = tuple(Multiaddr(address).to_bytes() for address in named[peer])
            entry = Entry(key, peer, b"", addresses, ip, now + PROVIDER_SECONDS)
        else:
            value, held = bytes(question.record.value), self.store.value(key, now)
            if question.record.key != key:
                return "a record of another key"
            if held is None or held.value != value:  # What I hold is valid: members publish the same twice a minute.
                try:
                    sequence = self._validate(key.decode(), value)
                    if held is not None and self._validate(key.decode(), held.value) > sequence:
                        return "an older value than the one that is held"
                except (RemoteError, ValueError):
                    return "an invalid value"
            entry = Entry(key, "", value, (), ip, now + VALUE_SECONDS)
        if self.store.put(entry):
            self._refusals.add("store", "the oldest gave way", self._origins.of(ip), peer)
        if self._file is not None:
            self._file.append(entry, self.store)
        return ""

    def _consider(self, peer: PeerId, ip: str, nursery: trio.Nursery) -> None:
        """Find out whether who asks is a server that others can ask."""
        now = trio.current_time()
        if peer in self.servers or self._tried.get(peer, -PROBE_AGAIN_SECONDS) > now - PROBE_AGAIN_SECONDS:
            return
        book = self._host.host.get_peerstore()
        try:
            serves = PROTOCOL_ID in book.get_protocols(ID.from_base58(peer))
            told = [str(address).partition("/p2p/")[0] for address in book.addrs(ID.from_base58(peer))] if serves else []
        except PeerStoreError:  # It has not told yet what it speaks.
            return
        addresses = tuple(address for address in told if valid_address(address) and address.split("/")[2] == ip)
        if addresses:
            self._tried[peer] = now
            if len(self._tried) > MAX_REMEMBERED:
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
