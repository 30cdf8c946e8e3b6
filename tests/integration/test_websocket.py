"""WebSockets over loopback: TLS or plain, what is refused and why, and the way to a direct connection."""

import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
import trio
from flockstep.peer.base.errors import ConnectFailed, LocalError, NetworkError, UsageError
from flockstep.peer.base.transport import Rung, Stream
from flockstep.peer.base.troubles import NO_TLS, NO_WEBSOCKET, UNTRUSTED, WRONG_PEER
from flockstep.peer.host import Libp2pHost, open_host
from flockstep.peer.https import serve
from flockstep.peer.https.certificate import TlsCertificate
from flockstep.peer.https.dial import WebDialler
from flockstep.peer.https.serve import NO_REQUEST, WebPlace
from flockstep.peer.https.websocket import READ_BYTES, WebStream
from flockstep.peer.identity import Identity
from flockstep.peer.libp2p.tcp import TrafficMeter
from flockstep.peer.log.telemetry import Event, Telemetry
from flockstep.peer.nat.dialback import DIALBACK_PROTOCOL, ask
from flockstep.peer.quota.limits import BootstrapLimits
from flockstep.peer.strangers.frames import TURN
from libp2p.connection_types import ConnectionType
from libp2p.peer.id import ID
from support.loopback import ECHO, LOOPBACK, echo, until
from support.recorded import recorded
from support.tls import Authority
from wsproto import ConnectionType as Role
from wsproto import WSConnection
from wsproto.events import AcceptConnection, BytesMessage, CloseConnection, Ping, Pong, Request, TextMessage
from wsproto.events import Event as WebEvent

PIECE = bytes(range(256)) * 4096


@dataclass
class Bootstrap:
    """A bootstrap that accepts WebSockets, and its events."""

    host: Libp2pHost
    events: list[Event] = field(default_factory=list)

    @property
    def port(self) -> int:
        (web,) = self.host._web
        return web.port

    @property
    def address(self) -> str:
        """Where it accepts WebSockets over TLS, as it announces."""
        (found,) = (one for one in self.host.addresses() if one.endswith("/tls/ws"))
        return found


@asynccontextmanager
async def bootstrap(certificate: TlsCertificate | None = None) -> AsyncIterator[Bootstrap]:
    telemetry, events = recorded()
    limits, places = BootstrapLimits(), (WebPlace("127.0.0.1", 0, certificate),)
    async with open_host(Identity.generate(), LOOPBACK, telemetry, bootstrap=limits, web=places) as host:
        host.handle(ECHO, echo)
        yield Bootstrap(host, events)


@asynccontextmanager
async def peer() -> AsyncIterator[Libp2pHost]:
    async with open_host(Identity.generate(), LOOPBACK, Telemetry()) as host:
        host.handle(ECHO, echo)
        yield host


async def come_back(stream: Stream, num_pieces: int = 4) -> None:
    """Send pieces of a megabyte, and receive them again meanwhile."""

    async def send() -> None:
        for _ in range(num_pieces):
            await stream.send_all(PIECE)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(send)
        received = bytearray()
        while len(received) < num_pieces * len(PIECE):
            received += await stream.receive_some(1 << 20)
    assert received == num_pieces * PIECE


@pytest.fixture
def authority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Authority:
    made = Authority(tmp_path / "authority")
    monkeypatch.setenv("SSL_CERT_FILE", str(made.root))
    return made


async def test_bytes_go_both_ways_over_tls_on_streams_of_either_end(authority: Authority) -> None:
    certificate = TlsCertificate(*authority.issue("127.0.0.1"))
    async with bootstrap(certificate) as net, peer() as host:
        assert net.address == f"/ip4/127.0.0.1/tcp/{net.port}/tls/ws"
        await host.connect(net.host.peer_id, [net.address])
        await come_back(await host.open_stream(net.host.peer_id, ECHO))
        await come_back(await net.host.open_stream(host.peer_id, ECHO))
        assert host.traffic().sent > 8 * len(PIECE) < net.host.traffic().received
        assert host.dialled(net.host.peer_id) == (net.address,)
        assert net.host.bootstrap_server is not None
        assert net.host.bootstrap_server.gate.num_sockets == 1


def test_a_name_of_a_certificate_is_announced_and_a_wildcard_is_not(authority: Authority) -> None:
    certificate = TlsCertificate(*authority.issue("boot.example.org", "*.example.org", "192.0.2.7"))
    assert certificate.hosts == ("/dns/boot.example.org", "/ip4/192.0.2.7")


async def cause_of(host: Libp2pHost, wanted: str, address: str) -> str:
    with pytest.raises(ConnectFailed) as failure:
        await host.connect(wanted, [address])
    (attempt,) = failure.value.attempts
    return attempt.cause


async def test_a_certificate_that_is_not_trusted_is_named_as_the_reason(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bootstrap(TlsCertificate(*authority.issue("localhost"))) as net, peer() as host:
        wanted, address = net.host.peer_id, f"/ip4/127.0.0.1/tcp/{net.port}/tls/ws"
        assert (await cause_of(host, wanted, address)).startswith(f"{UNTRUSTED.cause}: 127.0.0.1: IP address mismatch")
        monkeypatch.delenv("SSL_CERT_FILE")
        named = address.replace("/ip4/127.0.0.1", "/dns/localhost")
        assert (await cause_of(host, wanted, named)).startswith(f"{UNTRUSTED.cause}: localhost: unable to get local")
        assert not host.connected()


async def test_what_is_no_websocket_is_named_as_the_reason(authority: Authority) -> None:
    async with (
        bootstrap(TlsCertificate(*authority.issue("127.0.0.1"))) as net,
        peer() as host,
        trio.open_nursery() as nursery,
    ):

        async def refuse(stream: trio.SocketStream) -> None:
            await stream.receive_some(1 << 16)
            await stream.send_all(b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n")

        (server,) = await nursery.start(partial(trio.serve_tcp, host="127.0.0.1"), refuse, 0)
        wanted, at = net.host.peer_id, "/ip4/127.0.0.1/tcp"
        proxy = server.socket.getsockname()[1]
        assert await cause_of(host, wanted, f"{at}/{proxy}/ws") == f"{NO_WEBSOCKET.cause}: HTTP 502"
        assert (await cause_of(host, wanted, f"{at}/{net.host.port}/tls/ws")).startswith(NO_TLS.cause)
        assert (await cause_of(host, wanted, f"{at}/{net.host.port}/ws")).startswith(NO_WEBSOCKET.cause)
        damaged = host.peer_id[:-1] + ("b" if host.peer_id.endswith("a") else "a")
        assert (await cause_of(host, damaged, f"{at}/{net.port}/tls/ws")) != ""
        other = Identity.generate().peer_id
        assert (await cause_of(host, other, net.address)).startswith(WRONG_PEER.cause)
        nursery.cancel_scope.cancel()


async def test_a_renewed_certificate_is_served_and_one_that_cannot_be_read_is_not(authority: Authority) -> None:
    chain, key = authority.issue("localhost")
    async with bootstrap(TlsCertificate(chain, key)) as net, peer() as host:
        address = f"/ip4/127.0.0.1/tcp/{net.port}/tls/ws"
        assert (await cause_of(host, net.host.peer_id, address)).startswith(UNTRUSTED.cause)
        authority.issue("127.0.0.1")
        await host.connect(net.host.peer_id, [address])
        await host.disconnect(net.host.peer_id)
        chain.write_bytes(b"half a file")
        for _ in range(2):
            await host.connect(net.host.peer_id, [address])
            await host.disconnect(net.host.peer_id)
        assert [event["event"] for event in net.events if event["event"] == "tls.unread"] == ["tls.unread"]


def test_files_that_are_no_certificate_are_refused_in_one_line(authority: Authority, tmp_path: Path) -> None:
    chain, key = authority.issue("localhost")
    other = tmp_path / "other"
    for files in ((other, key), (key, chain), (chain, Authority(tmp_path / "second").issue("localhost")[1])):
        with pytest.raises(UsageError, match=r"are no certificate: [^\n]+"):
            TlsCertificate(*files)


async def test_a_port_that_is_taken_is_named() -> None:
    async with bootstrap() as net:
        place = WebPlace("127.0.0.1", net.port)
        with pytest.raises(LocalError, match=f"cannot listen for WebSockets on 127.0.0.1 port {net.port}"):
            async with open_host(Identity.generate(), LOOPBACK, Telemetry(), bootstrap=BootstrapLimits(), web=(place,)):
                pass


def kinds(host: Libp2pHost, remote: str) -> list[ConnectionType]:
    connections = host.host.get_network().connections.get(ID.from_base58(remote), ())
    return [one.get_connection_type() for one in connections if not one.is_closed]


async def test_a_direct_connection_takes_the_place_of_a_websocket() -> None:
    async with bootstrap() as net, peer() as host:
        wanted, climbed = net.host.peer_id, list[str]()
        host.on_climb(climbed.append)
        await host.connect(wanted, [f"/ip4/127.0.0.1/tcp/{net.port}/ws"])
        stream = await host.open_stream(wanted, ECHO)
        assert kinds(host, wanted) == [ConnectionType.UNKNOWN]
        assert await host._dialler.plainly(wanted, f"/ip4/127.0.0.1/tcp/{net.host.port}") == ""
        await until(lambda: climbed == [wanted])
        await come_back(await host.open_stream(wanted, ECHO))
        await come_back(stream)  # What is under way ends where it began.
        await stream.aclose()
        for one, other in ((host, net.host), (net.host, host)):
            await until(lambda: kinds(one, other.peer_id) == [ConnectionType.DIRECT])  # noqa: B023  It is awaited here.


async def test_the_ladder_prefers_any_other_address_of_a_rung() -> None:
    async with bootstrap() as net, peer() as host:
        at = "/ip4/127.0.0.1/tcp"
        await host.connect(net.host.peer_id, [f"{at}/{net.port}/ws", f"{at}/{net.host.port}"])
        assert kinds(host, net.host.peer_id) == [ConnectionType.DIRECT]
        assert host.rung(net.host.peer_id) is Rung.LAN


class Client:
    """A WebSocket of wsproto's, with nothing of libp2p in it."""

    def __init__(self, socket: trio.SocketStream) -> None:
        self._socket = socket
        self._machine = WSConnection(Role.CLIENT)

    async def send(self, event: WebEvent) -> None:
        await self._socket.send_all(self._machine.send(event))

    async def next(self) -> WebEvent:
        """The next event. Raises `StopAsyncIteration` at the end of the connection."""
        while True:
            for event in self._machine.events():
                return event
            data = await self._socket.receive_some(READ_BYTES)
            if not data:
                raise StopAsyncIteration
            self._machine.receive_data(data)


@asynccontextmanager
async def client(net: Bootstrap, *headers: tuple[bytes, bytes]) -> AsyncIterator[Client]:
    async with await trio.open_tcp_stream("127.0.0.1", net.port) as raw:
        made = Client(raw)
        await made.send(Request(host="localhost", target="/", extra_headers=list(headers)))
        assert isinstance(await made.next(), AcceptConnection)
        yield made


async def test_pings_are_answered_and_a_text_ends_the_connection() -> None:
    async with bootstrap() as net, client(net) as stranger:
        assert await stranger.next() == BytesMessage(b"\x13/multistream/1.0.0\n")
        await stranger.send(Ping(b"number 1"))
        assert await stranger.next() == Pong(b"number 1")
        await stranger.send(TextMessage("hello"))
        with suppress(trio.BrokenResourceError, StopAsyncIteration):
            while True:
                await stranger.next()


async def test_a_close_frame_is_the_end_of_what_is_read() -> None:
    mine, theirs = (trio.SocketStream(trio.socket.from_stdlib_socket(one)) for one in socket.socketpair())
    stranger, stream = Client(mine), WebStream(theirs, theirs, is_client=False)
    await stranger.send(Request(host="localhost", target="/"))
    await stream.answer()
    assert isinstance(await stranger.next(), AcceptConnection)
    await stranger.send(BytesMessage(b"the last"))
    await stranger.send(CloseConnection(1000))
    assert (await stream.read(3), await stream.read(), await stream.read()) == (b"the", b" last", b"")
    await mine.aclose()
    await theirs.aclose()


CHEAP = {
    "pings": (b"", b"\x89\x80\0\0\0\0"),
    "pongs": (b"", b"\x8a\x80\0\0\0\0"),
    "empty messages": (b"", b"\x82\x80\0\0\0\0"),
    "messages of a byte": (b"", b"\x82\x81\0\0\0\0a"),
    "empty pieces of a message": (b"\x02\x80\0\0\0\0", b"\x00\x80\0\0\0\0"),
}


@pytest.mark.parametrize("kind", CHEAP)
async def test_frames_are_billed_to_whom_they_come_from_a_turn_at_a_time(kind: str) -> None:
    mine, theirs = (trio.SocketStream(trio.socket.from_stdlib_socket(one)) for one in socket.socketpair())
    stranger, stream, bills = Client(mine), WebStream(theirs, theirs, is_client=False), list[tuple[str, float]]()

    def spend(peer: str, frames: float) -> float:
        bills.append((peer, frames))
        return 0.0

    stream.spend_frames = spend
    await stranger.send(Request(host="localhost", target="/"))
    await stream.answer()
    stream.peer = "somebody"
    first, other = CHEAP[kind]
    await mine.send_all(first + 10_000 * other)
    await mine.send_eof()
    while await stream.read():
        pass
    assert {peer for peer, _ in bills} == {"somebody"}
    assert sum(frames for _, frames in bills) > 10_000 - 2 * TURN - 10
    assert max(frames for _, frames in bills) <= 2 * TURN
    await mine.aclose()
    await theirs.aclose()


async def test_an_earlier_websocket_of_a_peer_that_comes_again_is_looked_at() -> None:
    async with bootstrap() as net, peer() as host:
        for _ in range(2):
            assert await host._dialler.plainly(net.host.peer_id, f"/ip4/127.0.0.1/tcp/{net.port}/ws") == ""
        await until(lambda: "connection.alive" in [event["event"] for event in net.events])


async def test_a_message_takes_no_memory_for_the_length_that_it_announces() -> None:
    async with bootstrap() as net, await trio.open_tcp_stream("127.0.0.1", net.port) as raw:
        machine = WSConnection(Role.CLIENT)
        await raw.send_all(machine.send(Request(host="localhost", target="/")))
        await raw.receive_some(1 << 12)
        head = bytes((0x82, 0xFF)) + (1 << 62).to_bytes(8, "big") + bytes(4)  # Masked by zeros.
        lines = b"\x13/multistream/1.0.0\n\x0b/nothing/1\n"
        await raw.send_all(head + lines)  # The message goes on for ever, and what is there of it is read.
        answer = b""
        while b"na\n" not in answer:
            answer += await raw.receive_some(1 << 12)


async def reverse_proxy(port: int, forwarded: bytes, downstream: trio.SocketStream, *, tls: bool = False) -> None:
    """Passes a connection on to a port of this computer, as Caddy and nginx do, with a header in its request."""
    head = b""
    while b"\r\n\r\n" not in head:
        head += await downstream.receive_some(1 << 12)
    line, _, rest = head.partition(b"\r\n")

    async def pump(source: trio.abc.Stream, sink: trio.abc.Stream) -> None:
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            while data := await source.receive_some(1 << 16):
                await sink.send_all(data)
        nursery.cancel_scope.cancel()

    dial = trio.open_ssl_over_tcp_stream if tls else trio.open_tcp_stream
    async with await dial("127.0.0.1", port) as upstream, trio.open_nursery() as nursery:
        await upstream.send_all(line + b"\r\nX-Forwarded-For: " + forwarded + b"\r\n" + rest)
        nursery.start_soon(pump, downstream, upstream)
        nursery.start_soon(pump, upstream, downstream)


@pytest.mark.parametrize(
    ("forwarded", "seen"),
    [
        (b"203.0.113.9", "/ip4/203.0.113.9/tcp/0"),
        (b"198.51.100.1, 2001:db8::7", "/ip6/2001:db8::7/tcp/0"),  # The first one its client has made up.
        (b"nowhere", "/ip4/127.0.0.1/tcp/"),
    ],
)
async def test_a_peer_behind_a_reverse_proxy_counts_for_the_address_that_it_names(forwarded: bytes, seen: str) -> None:
    async with bootstrap() as net, peer() as host, trio.open_nursery() as nursery:
        pass_on = partial(reverse_proxy, net.port, forwarded)
        (proxy,) = await nursery.start(partial(trio.serve_tcp, host="127.0.0.1"), pass_on, 0)
        await host.connect(net.host.peer_id, [f"/ip4/127.0.0.1/tcp/{proxy.socket.getsockname()[1]}/ws"])
        stream = await host.open_stream(net.host.peer_id, DIALBACK_PROTOCOL)
        assert (await ask(stream, 0)).address.startswith(seen)
        await come_back(await host.open_stream(net.host.peer_id, ECHO))
        nursery.cancel_scope.cancel()


async def test_a_client_of_tls_is_not_believed_to_be_a_reverse_proxy(authority: Authority) -> None:
    certificate = TlsCertificate(*authority.issue("127.0.0.1"))
    async with bootstrap(certificate) as net, peer() as host, trio.open_nursery() as nursery:
        pass_on = partial(reverse_proxy, net.port, b"203.0.113.9", tls=True)
        (proxy,) = await nursery.start(partial(trio.serve_tcp, host="127.0.0.1"), pass_on, 0)
        await host.connect(net.host.peer_id, [f"/ip4/127.0.0.1/tcp/{proxy.socket.getsockname()[1]}/ws"])
        stream = await host.open_stream(net.host.peer_id, DIALBACK_PROTOCOL)
        assert (await ask(stream, 0)).address.startswith("/ip4/127.0.0.1/tcp/")
        nursery.cancel_scope.cancel()


async def test_a_client_that_is_silent_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "GREETING_TIMEOUT", 0.01)

    async with bootstrap() as net:
        async with await trio.open_tcp_stream("127.0.0.1", net.port) as raw:
            assert await raw.receive_some(1) == b""
        assert [event["reason"] for event in net.events if event["event"] == "bootstrap.refused"] == [NO_REQUEST]


async def test_connections_of_a_client_of_the_reverse_proxy_have_its_rate() -> None:
    """Those of the proxy itself, which all come from loopback, are let in at any rate."""

    async with bootstrap() as net:
        for number in range(70):  # Of one address 64 may come at once.
            async with client(net, (b"X-Forwarded-For", b"198.51.%d.1" % number)) as one:
                await one.next()
        reasons: set[object] = set()
        while "too many a second from one address" not in reasons:
            with suppress(StopAsyncIteration, trio.BrokenResourceError):
                async with client(net, (b"X-Forwarded-For", b"203.0.113.9")) as one:
                    await one.next()
            reasons = {event.get("reason") for event in net.events}


async def test_clients_of_a_proxy_that_names_none_count_as_one_address() -> None:
    async with bootstrap() as net:
        reasons: set[object] = set()
        while "too many a second from one address" not in reasons:
            with suppress(StopAsyncIteration, trio.BrokenResourceError):
                async with client(net) as one:
                    await one.next()
            reasons = {event.get("reason") for event in net.events}


async def test_of_too_many_requests_that_are_not_whole_the_oldest_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "MAX_UNREAD", 2)
    async with bootstrap() as net, AsyncExitStack() as stack:
        silent = [await stack.enter_async_context(await trio.open_tcp_stream("127.0.0.1", net.port)) for _ in range(3)]
        assert await silent[0].receive_some(1) == b""
        async with client(net) as one:
            await one.next()


@pytest.mark.parametrize("request_", [b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", b"\x13/multistream/1.0.0\n\r\n\r\n"])
async def test_who_asks_for_no_websocket_is_told_so_and_counted(request_: bytes) -> None:
    async with bootstrap() as net:
        async with await trio.open_tcp_stream("127.0.0.1", net.port) as raw:
            await raw.send_all(request_)
            answer = b""
            while data := await raw.receive_some(1 << 12):
                answer += data
        assert answer.startswith(b"HTTP/1.1 400" if request_.startswith(b"GET") else b"")
        assert [event["reason"] for event in net.events if event["event"] == "bootstrap.refused"] == [NO_REQUEST]


async def test_a_name_that_libp2p_knows_as_none_is_a_dial_that_fails() -> None:
    """A member may state any: our own check of names knows no IDNA."""
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with listener:
        port = listener.socket.getsockname()[1]
        with pytest.raises(NetworkError, match=r"'ab--c\.example' is no name of a host"):
            await WebDialler(TrafficMeter()).open(f"/dns/ab--c.example/tcp/{port}/ws", f"/ip4/127.0.0.1/tcp/{port}/ws")
