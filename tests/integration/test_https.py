"""Bootstraps over HTTPS alone: directly, through a proxy that is a process, and why that fails; and the way back to TCP."""

import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest
import trio
from flockstep.peer.base.config import PeerConfig
from flockstep.peer.base.errors import ConnectFailed
from flockstep.peer.base.transport import Rung
from flockstep.peer.base.troubles import BAD_PROXY, PROXY_GONE, PROXY_REFUSES, PROXY_WANTS_LOGIN, REFUSED, UNTRUSTED
from flockstep.peer.host import Libp2pHost, open_host
from flockstep.peer.https import proxy
from flockstep.peer.https.certificate import TlsCertificate
from flockstep.peer.https.serve import WebPlace
from flockstep.peer.identity import Identity
from flockstep.peer.log.telemetry import Event, Telemetry
from flockstep.peer.nat import bootstraps
from flockstep.peer.quota.limits import BootstrapLimits
from libp2p.connection_types import ConnectionType
from libp2p.peer.id import ID
from support.connect_proxy import ConnectProxy, connect_proxy, pump
from support.loopback import ECHO, echo, until
from support.recorded import recorded
from support.tls import Authority

LOOPBACK = PeerConfig(home=Path("unused"), host="127.0.0.1", port=0, dial_timeout=60.0)
"""On a busy machine a dial takes longer than usual."""
PIECE = bytes(range(256)) * 512
"""Half of a stream's first window: it is sent before anything of it is read."""


@contextmanager
def closed_port() -> Iterator[int]:
    """A port of loopback that refuses connections, as nobody else gets it meanwhile."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


@pytest.fixture
def authority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Authority:
    made = Authority(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(made.root))
    monkeypatch.setattr(proxy, "PROXY_TIMEOUT", 60.0)
    for name in ("HTTPS_PROXY", "https_proxy", "NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    return made


@asynccontextmanager
async def bootstrap(authority: Authority, port: int = 0) -> AsyncIterator[tuple[Libp2pHost, str]]:
    """A bootstrap, and its address over TLS."""
    place = WebPlace("127.0.0.1", 0, TlsCertificate(*authority.issue("127.0.0.1")))
    config = PeerConfig(home=Path("unused"), host="127.0.0.1", port=port)
    limits = BootstrapLimits()
    async with open_host(Identity.generate(), config, Telemetry(), bootstrap=limits, web=(place,)) as host:
        yield host, host.addresses()[1]


@asynccontextmanager
async def peer() -> AsyncIterator[tuple[Libp2pHost, list[Event]]]:
    telemetry, events = recorded()
    async with open_host(Identity.generate(), LOOPBACK, telemetry) as host:
        yield host, events


async def test_a_bootstrap_is_held_over_tls_where_no_other_address_works(authority: Authority) -> None:
    with closed_port() as dead:
        async with bootstrap(authority) as (server, secure), peer() as (host, events):
            await host.bootstraps.enter(server.peer_id, secure, f"/ip4/127.0.0.1/tcp/{dead}")
            assert host.bootstraps.over_https == {server.peer_id: "directly"}
            assert [event["reason"] for event in events if event["event"] == "bootstrap.over_https"] == ["directly"]
            await host.bootstraps.first_check(server.peer_id)
            assert host.bootstraps.seen_at != ()


async def test_a_bootstrap_is_held_over_tcp_where_that_works(authority: Authority) -> None:
    async with bootstrap(authority) as (server, secure), peer() as (host, _):
        await host.bootstraps.enter(server.peer_id, secure, server.addresses()[0])
        assert host.bootstraps.over_https == {}
        assert host.rung(server.peer_id) is Rung.LAN


@contextmanager
def proxy_to(server: Libp2pHost, dead: int, *options: str) -> Iterator[ConnectProxy]:
    """A proxy behind which the port that nobody listens on is that of the server's TLS."""
    where = ("--map", f"127.0.0.1:{dead}=127.0.0.1:{server._web[0].port}")
    with connect_proxy(*where, *options) as office:
        yield office


async def test_two_peers_meet_through_a_relay_that_both_hold_through_a_proxy(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closed_port() as dead:
        async with bootstrap(authority) as (server, _), peer() as (one, _), peer() as (other, _):
            with proxy_to(server, dead, "--login", "anna@corp:s:cret/") as office:
                monkeypatch.setenv("HTTPS_PROXY", f"http://anna%40corp:s%3Acret%2F@localhost:{office.port}")
                address = f"/ip4/127.0.0.1/tcp/{dead}/tls/ws"
                for host in (one, other):
                    await host.bootstraps.enter(server.peer_id, address)
                    assert host.bootstraps.over_https == {server.peer_id: f"through the proxy localhost:{office.port}"}
                    assert office.next_line() == f"200 127.0.0.1:{dead}"
                other.handle(ECHO, echo)
                await other._relays.reserve(server.peer_id)
                await one.connect(other.peer_id, [f"{address}/p2p/{server.peer_id}/p2p-circuit"])
                assert one.rung(other.peer_id) is Rung.RELAYED
                stream = await one.open_stream(other.peer_id, ECHO)
                await stream.send_all(PIECE)
                received = b""
                while len(received) < len(PIECE):
                    received += await stream.receive_some(len(PIECE))
                assert received == PIECE


async def causes_through(proxy: str, server: Libp2pHost, address: str, patch: pytest.MonkeyPatch) -> list[str]:
    """Enter a bootstrap through a proxy; returns why that failed, directly and through it."""
    patch.setenv("HTTPS_PROXY", proxy)
    async with peer() as (host, events):
        with pytest.raises(ConnectFailed) as failure:
            await host.bootstraps.enter(server.peer_id, address)
        assert "s3cret" not in str([str(failure.value), *events])
    causes = [attempt.cause for attempt in failure.value.attempts]
    assert "\n" not in "".join(causes)
    return causes


async def test_what_a_proxy_refuses_is_said_in_its_own_words(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closed_port() as dead, closed_port() as also_dead:
        async with bootstrap(authority) as (server, _):
            address = f"/ip4/127.0.0.1/tcp/{dead}/tls/ws"
            target = f"127.0.0.1:{dead}"

            async def causes(url: str) -> str:
                directly, cause = await causes_through(url, server, address, monkeypatch)
                assert directly == REFUSED.cause
                return cause

            with proxy_to(server, dead, "--login", "anna:s3cret") as office:
                where = f"127.0.0.1:{office.port}"
                wanted = f"{PROXY_WANTS_LOGIN.cause}: {where} answered 407 Proxy Authentication Required"
                assert await causes(f"http://{where}") == wanted
                assert await causes(f"http://anna:other-s3cret@{where}") == wanted
            with proxy_to(server, dead, "--only-port", "443") as office:
                where = f"127.0.0.1:{office.port}"
                assert await causes(where) == f"{PROXY_REFUSES.cause}: {where} answered 403 Forbidden to CONNECT {target}"
            with connect_proxy() as office:
                where = f"127.0.0.1:{office.port}"
                wanted = f"{PROXY_REFUSES.cause}: {where} answered 502 Bad Gateway to CONNECT {target}"
                assert await causes(where) == wanted
            gone = await causes(f"http://anna:s3cret@127.0.0.1:{also_dead}")
            assert gone == f"{PROXY_GONE.cause}: 127.0.0.1:{also_dead}: {REFUSED.cause}"
            assert (await causes(f"http://127.0.0.1:{server.port}")).startswith(f"{PROXY_GONE.cause}: 127.0.0.1:")
            assert (await causes("socks5://127.0.0.1:1080")).startswith(f"{BAD_PROXY.cause}: it begins with socks5://")
            assert (await causes("http://127.0.0.1:none")).startswith(f"{BAD_PROXY.cause}: ")
            with proxy_to(server, dead) as office:
                monkeypatch.delenv("SSL_CERT_FILE")
                assert (await causes(f"127.0.0.1:{office.port}")).startswith(f"{UNTRUSTED.cause}: 127.0.0.1: unable to")


async def test_a_proxy_is_not_asked_for_what_no_proxy_names_nor_for_plain_websockets_nor_for_strangers_addresses(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closed_port() as dead:
        async with bootstrap(authority) as (server, _), peer() as (host, _):
            with proxy_to(server, dead) as office:
                url, secure = f"http://127.0.0.1:{office.port}", f"/ip4/127.0.0.1/tcp/{dead}/tls/ws"
                assert len(await causes_through(url, server, secure.replace("/tls", ""), monkeypatch)) == 1
                with pytest.raises(ConnectFailed) as failure:
                    await host.bootstraps.enter(server.peer_id, secure, stated=True)
                assert len(failure.value.attempts) == 1
                with pytest.raises(ConnectFailed) as failure:
                    await host.connect(server.peer_id, [secure])
                assert len(failure.value.attempts) == 1
                monkeypatch.setenv("NO_PROXY", "127.0.0.1")
                assert len(await causes_through(url, server, secure, monkeypatch)) == 1


async def test_a_bootstrap_that_can_be_reached_over_tcp_again_is_held_over_tcp(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bootstraps, "DIAL_BACK_PERIOD", 0.0)
    monkeypatch.setattr(bootstraps, "CHECK_PERIOD", bootstraps.BOOTSTRAP_POLL)  # More questions a second are refused.

    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        tcp = f"/ip4/127.0.0.1/tcp/{bound.getsockname()[1]}"
        async with bootstrap(authority) as (server, secure), peer() as (host, events), trio.open_nursery() as nursery:
            await host.bootstraps.enter(server.peer_id, tcp, secure)
            assert host.bootstraps.over_https == {server.peer_id: "directly"}

            async def forward(downstream: trio.SocketStream) -> None:
                async with await trio.open_tcp_stream("127.0.0.1", server.port) as upstream, trio.open_nursery() as both:
                    both.start_soon(pump, downstream, upstream, both.cancel_scope)
                    both.start_soon(pump, upstream, downstream, both.cancel_scope)

            bound.listen()
            listener = trio.SocketListener(trio.socket.from_stdlib_socket(bound.dup()))
            nursery.start_soon(trio.serve_listeners, forward, [listener])
            connections = host.host.get_network().connections[ID.from_base58(server.peer_id)]
            await until(
                lambda: [one.get_connection_type() for one in connections if not one.is_closed] == [ConnectionType.DIRECT]
            )
            assert host.bootstraps.over_https == {}
            assert "bootstrap.lost" not in [event["event"] for event in events]
            assert [event["peer"] for event in events if event["event"] == "connection.climbed"] == [server.peer_id]
            nursery.cancel_scope.cancel()
