"""What a stranger sends before it is anybody: keys, lines, identify messages and frames, over loopback sockets."""

import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import base58
import flockstep
import libp2p.crypto.rsa
import libp2p.crypto.x25519
import pytest
import trio
from chaos.edge import KINDS, fuzz, protocols, victim_process
from chaos.edge import victim as fuzzed
from flockstep.dht.directory.kademlia import open_directory
from flockstep.dht.directory.messages import Message, MessageReader, send
from flockstep.dht.directory.server import MAX_QUESTION_BYTES
from flockstep.peer.base.errors import StreamClosed
from flockstep.peer.base.transport import Stream
from flockstep.peer.host import Libp2pHost, open_host
from flockstep.peer.identity import Identity
from flockstep.peer.libp2p.gate import OTHER_KEY
from flockstep.peer.libp2p.packets import PACKETS, PacketTransport
from flockstep.peer.log.telemetry import Event, Telemetry
from flockstep.peer.nat.dialback import DIALBACK_PROTOCOL
from flockstep.peer.quota.limits import BootstrapLimits, GateLimits
from flockstep.peer.strangers.frames import FIRST_WINDOW, MAX_WINDOW
from flockstep.peer.strangers.greeting import MAX_LINE_BYTES, MAX_LINES
from flockstep.peer.strangers.identify import MAX_IDENTIFY_BYTES, MAX_LISTENED, MAX_PROTOCOLS
from flockstep.peer.strangers.ping import PING_BYTES, PING_PROTOCOL, PINGS_BURST_SECONDS, PINGS_PER_SECOND
from flockstep.peer.strangers.streams import FEW, QUESTION_BYTES, few_of_each
from flockstep.peer.yamux.machine import DATA, HEADER
from libp2p.custom_types import TProtocol
from libp2p.host import basic_host
from libp2p.identity.identify.identify import ID as IDENTIFY
from libp2p.identity.identify.identify import parse_identify_response
from libp2p.identity.identify.pb.identify_pb2 import Identify
from libp2p.io.exceptions import ConnectionClosedError
from libp2p.kad_dht.common import PROTOCOL_ID
from libp2p.network.stream.exceptions import StreamError as Libp2pStreamError
from libp2p.peer.id import ID
from libp2p.peer.peerdata import PeerData
from libp2p.relay.circuit_v2.pb.circuit_pb2 import HopMessage, Status
from libp2p.relay.circuit_v2.pb.circuit_pb2 import PeerId as CircuitPeer
from libp2p.relay.circuit_v2.protocol import PROTOCOL_ID as HOP
from libp2p.stream_muxer.exceptions import MuxedStreamEOF, MuxedStreamError, MuxedStreamReset
from libp2p.utils.varint import encode_delim, encode_uvarint, encode_varint_prefixed
from multiaddr import Multiaddr
from support.loopback import LOOPBACK, until

NOT_EXEMPT = ("192.0.2.0/24",)


@asynccontextmanager
async def victim(*, bootstrap: bool = False) -> AsyncIterator[Libp2pHost]:
    limits = BootstrapLimits() if bootstrap else None
    async with open_host(Identity.generate(), LOOPBACK, Telemetry(), bootstrap=limits, gate=GateLimits()) as host:
        yield host


@asynccontextmanager
async def stranger_of(host: Libp2pHost) -> AsyncIterator[Libp2pHost]:
    async with open_host(Identity.generate(), LOOPBACK, Telemetry()) as stranger:
        await stranger.connect(host.peer_id, host.addresses())
        yield stranger


def muxer_to(host: Libp2pHost, peer: str) -> Any:
    (connection,) = host.host.get_network().connections[ID.from_base58(peer)]
    return connection.muxed_conn


async def test_nobody_comes_in_with_a_key_that_is_not_ed25519(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 kB of an RSA key held up the event loop for 4 s before its size was looked at."""

    events: list[Event] = []
    telemetry = Telemetry()
    telemetry.subscribe(lambda event: events.append(event) if event["event"] == "bootstrap.refused" else None)
    async with open_host(Identity.generate(), LOOPBACK, telemetry, bootstrap=BootstrapLimits()) as host:
        noise_key = libp2p.crypto.x25519.create_new_key_pair().private_key
        rsa = PacketTransport(libp2p.crypto.rsa.create_new_key_pair(1024), noise_key)
        read: list[bytes] = []
        monkeypatch.setattr("libp2p.crypto.rsa.RSA.import_key", read.append)
        async with await trio.open_tcp_stream("127.0.0.1", host.port) as stranger:
            raw: Any = _Raw(stranger)
            greeting = encode_delim(b"/multistream/1.0.0") + encode_delim(PACKETS.encode())
            await stranger.send_all(greeting)
            assert await raw.read(len(greeting)) == greeting
            await rsa.secure_outbound(raw, ID.from_base58(host.peer_id))
            assert await stranger.receive_some(1) == b""
        assert read == []
        assert not host.connected()
        await until(lambda: [event["reason"] for event in events] == [OTHER_KEY])


class _Raw:
    """A socket as the library's handshake reads it."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream
        self.is_initiator = True

    async def read(self, n: int | None = None) -> bytes:
        data = b""
        while n is not None and len(data) < n:
            data += await self._stream.receive_some(n - len(data))
        return data

    async def write(self, data: bytes) -> None:
        await self._stream.send_all(data)


@pytest.mark.parametrize("size", [0, MAX_LINE_BYTES + 1, 1 << 33, (1 << 63) + 5])
async def test_a_line_of_negotiation_is_refused_by_its_length(size: int) -> None:
    async with victim() as host, await trio.open_tcp_stream("127.0.0.1", host.port) as socket:
        await socket.send_all(encode_uvarint(size))
        with suppress(trio.BrokenResourceError):
            while await socket.receive_some(1000):  # It is closed, though nothing of the line has come.
                pass


async def test_a_stream_may_propose_so_many_protocols() -> None:
    async with victim() as host, stranger_of(host) as stranger:
        stream = await muxer_to(stranger, host.peer_id).open_stream()
        await stream.write(encode_delim(b"/multistream/1.0.0") + MAX_LINES * encode_delim(b"/nothing/1"))
        answers = b""
        with suppress(MuxedStreamReset):
            while True:
                answers += await stream.read(1000)
        assert answers.count(b"na\n") == MAX_LINES - 1


async def test_little_is_kept_of_an_identify_message_and_nothing_once_its_peer_has_gone() -> None:
    """6 MB stayed of each key, for good: half a million names, which one message of 1 MiB makes."""

    async with victim() as host:
        book = host.host.get_peerstore()
        for message, num_kept in (
            (Identify(protocols=[str(number) for number in range(1000)]), MAX_PROTOCOLS),
            (Identify(protocols=[""] * 500_000), 0),
        ):
            async with open_host(Identity.generate(), LOOPBACK, Telemetry()) as stranger:
                listened = [Multiaddr(f"/ip4/8.8.8.8/tcp/{port}").to_bytes() for port in range(1, 100)]
                message.listen_addrs.extend(listened)
                served = trio.Event()
                answer = encode_varint_prefixed(message.SerializeToString())
                stranger.host.set_stream_handler(TProtocol(IDENTIFY), _sender(answer, served))
                await stranger.connect(host.peer_id, host.addresses())
                await served.wait()
                peer = ID.from_base58(stranger.peer_id)
                await until(lambda: not _asking(host))
                kept = book.peer_data_map.get(peer, PeerData())
                assert (len(kept.protocols), len(kept.addrs)) == (num_kept, min(num_kept, MAX_LISTENED))
            await until(lambda: not book.has_peer(peer))  # noqa: B023  It is awaited here.


async def test_the_identify_message_names_this_program_and_its_version() -> None:
    async with victim() as host, stranger_of(host) as stranger:
        stream = await stranger.open_stream(host.peer_id, IDENTIFY)
        message = b""
        while data := await stream.receive_some(MAX_IDENTIFY_BYTES):
            message += data
        assert parse_identify_response(message).agent_version == f"flockstep/{flockstep.__version__}"


async def test_who_announces_what_is_no_address_takes_no_place_of_the_directory() -> None:
    """Each of its streams kept its place for good: 64 of them all those of its IP address."""

    async with (
        fuzzed("bootstrap", Telemetry()) as host,
        open_host(Identity.generate(), LOOPBACK, Telemetry()) as stranger,
    ):
        unread = Multiaddr("/ip4/8.8.8.8/tcp/1").to_bytes() + bytes.fromhex("a50303616263")  # p2p, and no peer id.
        message, served = Identify(protocols=[PROTOCOL_ID], listen_addrs=[unread]), trio.Event()
        answer = encode_varint_prefixed(message.SerializeToString())
        stranger.host.set_stream_handler(TProtocol(IDENTIFY), _sender(answer, served))
        await stranger.connect(host.peer_id, host.addresses())
        await served.wait()
        await until(lambda: not _asking(host))
        stream = await stranger.open_stream(host.peer_id, PROTOCOL_ID)
        await send(stream, Message(type=Message.FIND_NODE, key=b"anything"))
        assert await MessageReader(stream, 1 << 10).next() is not None
        assert host.announced(stranger.peer_id, PROTOCOL_ID) == ()


async def test_a_relay_writes_out_no_peer_id_before_its_length_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Base58 of 64 kB held up the event loop of a bootstrap for 3 s."""
    lengths: list[int] = []
    encode = base58.b58encode

    def counted(data: bytes) -> bytes:
        lengths.append(len(data))
        return bytes(encode(data))

    async with victim(bootstrap=True) as host, stranger_of(host) as stranger:
        stream = await stranger.open_stream(host.peer_id, HOP)
        question = HopMessage(type=HopMessage.CONNECT, peer=CircuitPeer(id=bytes(60_000)))
        monkeypatch.setattr(base58, "b58encode", counted)
        await stream.send_all(encode_varint_prefixed(question.SerializeToString()))
        answer = b""
        while data := await stream.receive_some(1000):
            answer += data
        assert HopMessage.FromString(answer[1:]).status == Status.UNEXPECTED_MESSAGE
        assert max(lengths, default=0) < 64


async def test_a_question_to_a_full_relay_reads_no_id_of_those_that_hold_its_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """512 of them took 3 ms of each question."""
    read: list[str] = []
    decode = base58.b58decode

    def noted(text: str) -> bytes:
        read.append(text)
        return bytes(decode(text))

    async def ask(host: Libp2pHost, guest: Libp2pHost, question: HopMessage) -> None:
        stream = await guest.open_stream(host.peer_id, HOP)
        await stream.send_all(encode_varint_prefixed(question.SerializeToString()))
        while await stream.receive_some(1000):
            pass

    async with victim(bootstrap=True) as host, stranger_of(host) as holder, stranger_of(host) as stranger:
        await ask(host, holder, HopMessage(type=HopMessage.RESERVE))
        assert host.bootstrap_server is not None
        assert host.bootstrap_server.relay.num_reservations == 1
        nobody = CircuitPeer(id=base58.b58decode(Identity.generate().peer_id))
        monkeypatch.setattr(base58, "b58decode", noted)
        await ask(host, stranger, HopMessage(type=HopMessage.CONNECT, peer=nobody))
        assert holder.peer_id not in read


async def test_nothing_is_kept_of_an_identify_message_that_is_read_after_its_peer_has_gone() -> None:
    async with victim() as host:
        async with stranger_of(host) as stranger:
            peer = ID.from_base58(stranger.peer_id)
            await until(lambda: stranger.peer_id in host.connected())
        book = host.host.get_peerstore()
        await until(lambda: not host.connected() and not book.has_peer(peer))
        listened = [Multiaddr("/ip4/8.8.8.8/tcp/1").to_bytes()]
        patched: Any = basic_host
        await patched.update_peerstore_from_identify(book, peer, Identify(listen_addrs=listened))
        assert not book.has_peer(peer)


def _sender(answer: bytes, served: trio.Event) -> Callable[[Any], Awaitable[None]]:
    async def serve(stream: Any) -> None:
        with suppress(MuxedStreamError, Libp2pStreamError):
            await stream.write(answer)
            await stream.close()
        served.set()

    return serve


def _asking(host: Libp2pHost) -> bool:
    """Return True while a stream of the host's own is open: that on which it asks for the identify message."""
    connections = [one for some in host.host.get_network().connections.values() for one in some]
    streams = [stream.muxed_stream for one in connections for stream in one.get_streams()]
    return any(stream.number % 2 == stream.muxed_conn.is_initiator for stream in streams)


def _streams(host: Libp2pHost, peer: str) -> list[Any]:
    (connection,) = host.host.get_network().connections[ID.from_base58(peer)]
    return list(connection.get_streams())


async def test_what_a_reset_stream_has_left_unread_is_dropped() -> None:
    """It stayed for a minute: 200 kB of each stream, 32 streams a second."""

    async with victim() as host, stranger_of(host) as stranger:
        muxer, mine = muxer_to(stranger, host.peer_id), muxer_to(host, stranger.peer_id)
        junk = await muxer.open_stream()
        await junk.write(b"\xff" * 100_000)
        await junk.reset()
        other = await muxer.open_stream()  # Behind it, so that it has been handled.
        await other.write(encode_delim(b"/multistream/1.0.0") + encode_delim(b"/nothing/1"))
        await other.read(100)
        await until(lambda: not mine.machine.unread_bytes)


async def test_a_peer_that_asks_on_and_waits_for_no_answer_is_reset() -> None:
    """256 kB waited in each of 512 streams while a bootstrap dialled back: 82 MB of 128 connections."""

    async with victim() as host, stranger_of(host) as stranger:
        host.handle("/test/busy/1", few_of_each(_never_reads))
        busy = await stranger.open_stream(host.peer_id, "/test/busy/1")
        await busy.send_all(bytes(QUESTION_BYTES))
        await busy.send_all(b"x")
        with pytest.raises(StreamClosed):
            await busy.receive_some(1)
        assert stranger.peer_id in host.connected()


async def _never_reads(stream: Stream) -> None:
    await trio.sleep_forever()


HELD = {DIALBACK_PROTOCOL: QUESTION_BYTES, PING_PROTOCOL: QUESTION_BYTES}


@pytest.mark.parametrize(("protocol", "most"), [*HELD.items(), (PROTOCOL_ID, MAX_QUESTION_BYTES)])
async def test_a_bootstrap_holds_few_unread_bytes_of_a_question(protocol: str, most: int) -> None:
    async with (
        victim(bootstrap=True) as host,
        open_directory(host, server=True, telemetry=Telemetry(), validate=lambda key, value: 0),
        stranger_of(host) as stranger,
    ):
        stream = await stranger.open_stream(host.peer_id, protocol)
        if protocol == PROTOCOL_ID:
            await send(stream, Message(type=Message.PING))
        await until(lambda: most in [stream.muxed_stream.most_unread for stream in _streams(host, stranger.peer_id)])


@pytest.mark.parametrize("protocol", [IDENTIFY, HOP])
async def test_nothing_is_kept_of_what_comes_behind_an_answered_question(protocol: str) -> None:
    """256 kB stayed of each stream for as long as its connection was open, in no limit: 64 MB of a connection."""

    async with victim(bootstrap=True) as host, stranger_of(host) as stranger:
        muxer, theirs = muxer_to(stranger, host.peer_id), muxer_to(host, stranger.peer_id)
        stream = await muxer.open_stream()
        await stream.write(encode_delim(b"/multistream/1.0.0") + encode_delim(protocol.encode()))
        await stream.write(encode_varint_prefixed(HopMessage(type=HopMessage.STATUS).SerializeToString()))
        with suppress(MuxedStreamEOF):
            while True:
                await stream.read()
        await stream.write(bytes(FIRST_WINDOW // 2))
        await muxer.ping()
        await until(lambda: stream.send_window >= FIRST_WINDOW // 2)  # Half of it was given back: it has been handled.
        assert theirs.unread_bytes == 0


async def test_why_a_connection_was_ended_here_is_an_event() -> None:
    events: list[Event] = []
    telemetry = Telemetry()
    telemetry.subscribe(lambda event: events.append(event) if event.get("step") == "yamux" else None)
    async with (
        open_host(Identity.generate(), LOOPBACK, telemetry) as host,
        stranger_of(host) as liar,
        stranger_of(host) as hog,
    ):
        muxer = muxer_to(liar, host.peer_id)
        muxer.machine.outbox.append(HEADER.pack(0, DATA, 0, 999, MAX_WINDOW + 1))
        with suppress(ConnectionClosedError):
            await muxer.written()
        muxer_to(host, hog.peer_id).give_way()
        await until(lambda: len(events) == 2)
        assert {event["event"]: event["peer"] for event in events} == {
            "peer.charged": liar.peer_id,
            "connection.refused": hog.peer_id,
        }
        assert muxer.machine.end == "the remote says that this side broke the protocol"


async def test_a_bootstrap_answers_pings_within_their_rate_and_a_member_none() -> None:
    """By the library's handler one stream of them took a whole core."""

    async with victim() as host, stranger_of(host) as stranger:
        with pytest.raises(StreamClosed):
            await stranger.open_stream(host.peer_id, PING_PROTOCOL)
    async with victim(bootstrap=True) as host, stranger_of(host) as stranger:
        stream = await stranger.open_stream(host.peer_id, PING_PROTOCOL)
        ping = bytes(range(PING_BYTES))
        await stream.send_all(ping[:7])  # In pieces, as TCP may deliver it.
        await stream.send_all(ping[7:])
        assert await received(stream, PING_BYTES) == ping
        answered = 1
        with suppress(StreamClosed):
            while True:
                await stream.send_all(ping)
                assert await received(stream, PING_BYTES) == ping
                answered += 1
        assert answered >= PINGS_PER_SECOND * PINGS_BURST_SECONDS


async def received(stream: Stream, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        data += await stream.receive_some(num_bytes - len(data))
    return data


@pytest.mark.parametrize("protocol", [DIALBACK_PROTOCOL, PING_PROTOCOL])
async def test_a_bootstrap_serves_a_peer_few_streams_of_a_protocol(protocol: str) -> None:
    async with victim(bootstrap=True) as host, stranger_of(host) as stranger:
        streams = [await stranger.open_stream(host.peer_id, protocol) for _ in range(FEW)]
        await stranger.open_stream(host.peer_id, protocol)
        with pytest.raises(StreamClosed):
            await streams[0].receive_some(1)
        await until(lambda: len(_streams(host, stranger.peer_id)) == FEW)


async def test_the_table_names_every_protocol_that_hosts_answer() -> None:
    table = (Path(__file__).parents[2] / "docs" / "deploy.md").read_text().partition("### Each protocol")[2]
    names = set(re.findall(r"`(/[a-z0-9./-]+)`", table.partition("\n## ")[0]))

    found: set[str] = set()
    for kind in KINDS:
        async with fuzzed(kind, Telemetry()) as host:
            found |= set(protocols(host))
    assert found == names


@pytest.mark.parametrize("kind", KINDS)
async def test_mutated_messages_of_every_protocol_leave_nothing_behind(kind: str) -> None:
    with victim_process(kind) as target:
        before = target.figures(2)
        assert await fuzz(target, seconds=3, seed=1) > 0
        after = target.figures()
        while (after["files"], after["known"]) != (before["files"], before["known"]):  # Until the last one is gone.
            after = await trio.to_thread.run_sync(target.figures)
        assert after["broken"] == []
        assert after["mb"] < before["mb"] + 40
