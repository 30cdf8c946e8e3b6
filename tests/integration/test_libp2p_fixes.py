"""Each upstream bug of py-libp2p, reproduced: without its fix the test fails."""

import importlib.metadata
import logging
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from flockstep.peer.base.errors import LocalError
from flockstep.peer.base.transport import Stream
from flockstep.peer.host import Libp2pHost, open_host
from flockstep.peer.identity import Identity
from flockstep.peer.libp2p import fixes
from flockstep.peer.libp2p.tcp import KEEPALIVE_SECONDS, TCP_USER_TIMEOUT_MS, TunedStream
from flockstep.peer.log.telemetry import Telemetry
from flockstep.peer.quota.limits import BootstrapLimits
from libp2p.network.connection import swarm_connection
from libp2p.peer.id import ID
from multiaddr import Multiaddr
from support.loopback import ECHO, LOOPBACK, echo

MEGABYTE = 1 << 20


async def assert_echo(stream: Stream) -> None:
    await stream.send_all(b"alive")
    assert await stream.receive_some(100) == b"alive"


@asynccontextmanager
async def hosts(number: int) -> AsyncIterator[list[Libp2pHost]]:
    """Hosts of which all but the first are connected to the first; it echoes, and it is a relay."""
    with trio.fail_after(120):  # A safety net against a hang.
        async with open_host(Identity.generate(), LOOPBACK, Telemetry(), bootstrap=BootstrapLimits()) as first:
            first.handle(ECHO, echo)
            if number == 1:
                yield [first]
                return
            async with hosts(number - 1) as others:
                for host in others:
                    await host.connect(first.peer_id, first.addresses())
                yield [first, *others]


def test_another_version_of_the_library_is_refused_before_it_is_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    patched: list[str] = []
    monkeypatch.setattr(fixes, "WRITTEN_FOR", "0.0.0")
    monkeypatch.setattr(fixes, "_fixes", [lambda: patched.append("patched")])
    with pytest.raises(LocalError, match=f"libp2p {importlib.metadata.version('libp2p')} is installed") as raised:
        fixes.apply_fixes()
    assert "libp2p==0.0.0" in raised.value.remedy
    assert patched == []


def test_the_list_of_patches_names_each_of_them_and_tests_that_exist() -> None:
    _, _, table = (fixes.__doc__ or "").partition("    patch ")
    named = {line.split()[0] for line in table.splitlines()[1:] if re.match(r"    \S", line)}
    patches = {patch.__name__ for patch in fixes._fixes} | {"limit_greetings", "limit_identify"}
    assert named == patches
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    assert [name for name in re.findall(r"\b(test_\w+)(?!:)\b", table) if f"def {name}(" not in tests] == []


def test_the_library_keeps_quiet() -> None:
    fixes.apply_fixes()  # pytest itself handles all logging, so what would be printed cannot be looked at.
    assert any(isinstance(handler, logging.NullHandler) for handler in logging.getLogger("libp2p").handlers)
    module: Any = swarm_connection
    assert module.logging is logging.getLogger(swarm_connection.__name__)


async def test_a_dead_road_is_noticed_by_the_socket() -> None:
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with listener, await trio.open_tcp_stream(*listener.socket.getsockname()) as stream:
        assert stream.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL) != KEEPALIVE_SECONDS
        TunedStream(stream)
        assert stream.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert stream.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL) == KEEPALIVE_SECONDS
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            assert stream.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == TCP_USER_TIMEOUT_MS


def muxer_to(host: Libp2pHost, peer: str) -> Any:
    (connection,) = host.host.get_network().connections[ID.from_base58(peer)]
    return connection.muxed_conn


async def test_two_that_fill_both_directions_still_answer_each_other() -> None:
    """Pings and new streams, which ask for an answer, beside more bytes than the sockets hold."""
    more_than_sockets_hold = 24 * MEGABYTE

    async with hosts(2) as ends, trio.open_nursery() as nursery:
        received = dict.fromkeys((host.peer_id for host in ends), 0)

        async def fill(host: Libp2pHost, other: Libp2pHost) -> None:
            async def count(stream: Stream) -> None:
                while data := await stream.receive_some(MEGABYTE):
                    received[host.peer_id] += len(data)

            async def ask() -> None:
                while received[host.peer_id] < more_than_sockets_hold:
                    await muxer_to(host, other.peer_id).ping()

            host.handle("/test/count/1", count)
            nursery.start_soon(ask)
            for _ in range(more_than_sockets_hold // (4 * MEGABYTE)):
                stream = await host.open_stream(other.peer_id, "/test/count/1")
                nursery.start_soon(stream.send_all, bytes(4 * MEGABYTE))

        nursery.start_soon(fill, *ends)
        nursery.start_soon(fill, *reversed(ends))
        while min(received.values()) < more_than_sockets_hold:
            await trio.lowlevel.checkpoint()


async def test_an_error_in_one_connection_ends_that_connection_only() -> None:
    async with hosts(3) as (first, second, third):
        swarm: Any = first.host.get_network()
        serve = swarm.common_stream_handler
        poisoned: list[str] = []

        async def fail_for_the_second(raw: Any) -> None:
            if str(raw.muxed_conn.peer_id) == second.peer_id:
                poisoned.append(second.peer_id)
                raise RuntimeError
            await serve(raw)

        swarm.set_stream_handler(fail_for_the_second)
        await second.host.get_network().new_stream(ID.from_base58(first.peer_id))
        while second.peer_id in first.connected():
            await trio.lowlevel.checkpoint()
        assert poisoned
        await assert_echo(await third.open_stream(first.peer_id, ECHO))


async def test_nobody_is_dialled_unasked() -> None:
    async with hosts(1) as (known,), hosts(1) as (host,):
        swarm: Any = host.host.get_network()
        peer = ID.from_base58(known.peer_id)
        host.host.get_peerstore().add_addrs(peer, [Multiaddr(known.addresses()[0])], ttl=60)
        await swarm.auto_connector.maybe_connect()
        assert not host.connected()
