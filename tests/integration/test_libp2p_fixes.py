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
from flockstep.peer.base.errors import LocalError, StreamClosed
from flockstep.peer.base.transport import Rung, Stream
from flockstep.peer.host import Libp2pHost, open_host
from flockstep.peer.identity import Identity
from flockstep.peer.libp2p import fixes
from flockstep.peer.libp2p.tcp import KEEPALIVE_SECONDS, TCP_USER_TIMEOUT_MS, TunedStream
from flockstep.peer.log.telemetry import Telemetry
from flockstep.peer.quota.limits import BootstrapLimits
from flockstep.peer.strangers.frames import FIRST_WINDOW, MAX_WINDOW
from flockstep.peer.yamux import muxer
from flockstep.peer.yamux.machine import HEADER, PING, SYN
from libp2p.io.exceptions import ConnectionClosedError
from libp2p.network.connection import swarm_connection
from libp2p.peer.id import ID
from libp2p.relay.circuit_v2.config import RelayConfig, RelayRole
from libp2p.relay.circuit_v2.protocol import PROTOCOL_ID as HOP
from libp2p.relay.circuit_v2.protocol import STOP_PROTOCOL_ID as STOP
from libp2p.relay.circuit_v2.protocol import CircuitV2Protocol
from libp2p.relay.circuit_v2.transport import CircuitV2Transport
from libp2p.tools.anyio_service import background_trio_service
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


def test_a_reader_may_pause_for_as_long_as_it_likes() -> None:
    clock = trio.testing.MockClock(rate=1.0)

    async def main() -> None:
        read_on, complete = trio.Event(), trio.Event()
        received = bytearray()

        async def pause(stream: Stream) -> None:
            await read_on.wait()
            while data := await stream.receive_some(MEGABYTE):
                received.extend(data)
            complete.set()

        async with hosts(2) as (first, second), trio.open_nursery() as nursery:
            first.handle("/test/pause/1", pause)
            more_than_a_window = 17 * MEGABYTE
            stream: Any = await second.open_stream(first.peer_id, "/test/pause/1")

            async def send() -> None:
                await stream.send_all(bytes(more_than_a_window))
                await stream.aclose()

            nursery.start_soon(send)
            while stream._muxed.send_window:
                await trio.lowlevel.checkpoint()
            for _ in range(2):  # The library gives up after 5 s, by a timer that starts when it sees no window.
                await trio.testing.wait_all_tasks_blocked(0.01)
                clock.jump(6)
            read_on.set()
            await complete.wait()
            assert len(received) == more_than_a_window

    trio.run(main, clock=clock)


async def test_a_sender_that_ignores_the_window_is_cut_off() -> None:
    async with hosts(3) as (first, greedy, honest):

        async def ignore(stream: Stream) -> None:
            await trio.sleep_forever()

        first.handle("/test/ignore/1", ignore)
        stream: Any = await greedy.open_stream(first.peer_id, "/test/ignore/1")

        async def flood() -> None:
            while True:
                stream._muxed.send_window = MEGABYTE
                await stream.send_all(bytes(MEGABYTE))

        with pytest.raises(StreamClosed):
            await flood()
        while greedy.peer_id in first.connected():
            await trio.lowlevel.checkpoint()
        await assert_echo(await honest.open_stream(first.peer_id, ECHO))


async def test_a_window_is_updated_by_halves_and_doubles() -> None:
    async with hosts(2) as (first, second):
        stream: Any = await second.open_stream(first.peer_id, ECHO)
        piece, window, unread = bytes(1000), FIRST_WINDOW, 0

        async def send() -> None:
            nonlocal unread
            await stream.send_all(piece)
            left = len(piece)
            while left:  # An update would have been sent before the bytes come back.
                left -= len(await stream.receive_some(left))
            unread += len(piece)

        await send()
        opening = window - unread - stream._muxed.send_window  # The protocol's name.
        unread += opening
        for _ in range(3):
            while unread + len(piece) < window // 2:
                await send()
                assert stream._muxed.send_window == window - unread
            await send()
            window, unread = 2 * window, 0
            assert stream._muxed.send_window == window
        while window < MAX_WINDOW:
            piece = bytes(window // 2)
            await send()
            window, unread = 2 * window, 0
        piece = bytes(window // 2)
        await send()
        assert stream._muxed.send_window == window


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


async def test_a_remote_that_asks_and_does_not_read_the_answers_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(muxer, "MAX_PIECES_WAITING", 100)

    async with hosts(3) as (first, greedy, honest):
        end = muxer_to(greedy, first.peer_id).secured_conn.conn.read_writer.read_write_closer.stream

        async def read_nothing(room: memoryview) -> int:
            return await trio.sleep_forever()

        end.receive_into = read_nothing

        async def ask_on() -> None:
            while True:
                muxer_to(greedy, first.peer_id).machine.outbox += [HEADER.pack(0, PING, SYN, 0, 0)] * 1000
                await muxer_to(greedy, first.peer_id).written()

        with pytest.raises(ConnectionClosedError):
            await ask_on()
        while greedy.peer_id in first.connected():
            await trio.lowlevel.checkpoint()
        await assert_echo(await honest.open_stream(first.peer_id, ECHO))


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


@asynccontextmanager
async def circuits_of(host: Libp2pHost) -> AsyncIterator[Any]:
    protocol = CircuitV2Protocol(host.host, limits=None, allow_hop=False)
    async with background_trio_service(protocol):
        await protocol.event_started.wait()
        yield CircuitV2Transport(host.host, protocol, RelayConfig(roles=RelayRole.CLIENT | RelayRole.STOP))


async def test_the_end_of_one_circuit_leaves_another_to_the_same_peer_alone() -> None:
    async with (
        hosts(1) as (relay,),
        hosts(1) as (target,),
        hosts(1) as (first,),
        hosts(1) as (second,),
        circuits_of(target) as incoming,
        circuits_of(first) as one,
        circuits_of(second) as two,
    ):
        for host in (target, first, second):
            await host.connect(relay.peer_id, relay.addresses())
        relay_id = ID.from_base58(relay.peer_id)
        async with trio.open_nursery() as nursery:
            hop = await target.host.new_stream(relay_id, [HOP])
            assert await incoming.reserve(hop, relay_id, nursery)
            nursery.cancel_scope.cancel()
        through = f"{relay.addresses()[0]}/p2p/{relay.peer_id}/p2p-circuit/p2p/{target.peer_id}"
        await one.dial(Multiaddr(through))
        await two.dial(Multiaddr(through))
        assert first.rung(target.peer_id) is second.rung(target.peer_id) is Rung.RELAYED
        await assert_echo(await first.open_stream(target.peer_id, ECHO))
        stays = await second.open_stream(target.peer_id, ECHO)
        await assert_echo(stays)
        swarm: Any = relay.host.get_network()
        (to_target,) = swarm.connections[ID.from_base58(target.peer_id)]

        def num_circuits() -> int:
            return sum(raw.get_protocol() == STOP for raw in to_target.get_streams())

        assert num_circuits() == 2
        await first.disconnect(target.peer_id)
        while num_circuits() == 2:
            await trio.lowlevel.checkpoint()
        assert num_circuits() == 1
        await assert_echo(stays)
