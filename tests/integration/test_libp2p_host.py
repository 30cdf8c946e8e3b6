"""The real network over loopback sockets."""

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from flockstep.peer.base.config import PeerConfig
from flockstep.peer.base.errors import (
    ConnectFailed,
    LocalError,
    NetworkError,
    ProtocolViolation,
    StreamClosed,
    UsageError,
)
from flockstep.peer.base.transport import Rung, Stream
from flockstep.peer.host import Libp2pHost, open_host
from flockstep.peer.identity import Identity
from flockstep.peer.libp2p.packets import PACKETS
from flockstep.peer.log.telemetry import Event, Telemetry
from flockstep.peer.quota.limits import BootstrapLimits
from libp2p.peer.id import ID
from support.loopback import ECHO, LOOPBACK, echo

MEGABYTE = 1 << 20


class Log:
    """The events of one or more hosts, and the wait for one."""

    def __init__(self) -> None:
        self.telemetry = Telemetry()
        self.events: list[Event] = []
        self._more = trio.Event()
        self.telemetry.subscribe(self._note)

    def _note(self, event: Event) -> None:
        self.events.append(event)
        self._more.set()
        self._more = trio.Event()

    async def wait(self, name: str) -> Event:
        while True:
            for event in self.events:
                if event["event"] == name:
                    return event
            await self._more.wait()


@asynccontextmanager
async def pair(log: Log) -> AsyncIterator[tuple[Libp2pHost, Libp2pHost]]:
    """Two hosts, the second connected to the first."""
    async with (
        open_host(Identity.generate(), LOOPBACK, log.telemetry) as first,
        open_host(Identity.generate(), LOOPBACK, log.telemetry) as second,
    ):
        await second.connect(first.peer_id, first.addresses())
        yield first, second


async def receive_all(stream: Stream) -> bytes:
    received = bytearray()
    while data := await stream.receive_some(MEGABYTE):
        received += data
    return bytes(received)


async def test_eight_megabytes_come_back_as_they_were() -> None:
    payload = memoryview(bytes(range(256)) * (8 * MEGABYTE // 256))
    async with pair(Log()) as (first, second):
        first.handle(ECHO, echo)
        stream = await second.open_stream(first.peer_id, ECHO)
        assert stream.remote == first.peer_id
        received = bytearray()

        async def receive() -> None:
            while len(received) < len(payload):
                received.extend(await stream.receive_some(MEGABYTE))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(receive)
            await stream.send_all(payload)
        assert received == payload
        await stream.aclose()
        assert await stream.receive_some(1) == b""  # The echo saw the end and closed its side.
        assert first.connected() == {second.peer_id}
        assert second.rung(first.peer_id) is first.rung(second.peer_id) is Rung.LAN
        assert second.rung(Identity.generate().peer_id) is None
        for here, there in ((first, second), (second, first)):
            assert here.traffic().sent > len(payload) < here.traffic().received
            assert here.traffic().sent >= there.traffic().received


async def test_what_was_sent_arrives_although_the_sender_has_left() -> None:
    log, left, received = Log(), trio.Event(), trio.Event()
    sizes: list[int] = []

    async def read_later(stream: Stream) -> None:
        await left.wait()
        sizes.append(len(await receive_all(stream)))
        received.set()

    async with open_host(Identity.generate(), LOOPBACK, log.telemetry) as stays:
        stays.handle("/test/late/1", read_later)
        async with open_host(Identity.generate(), LOOPBACK, log.telemetry) as leaves:
            await leaves.connect(stays.peer_id, stays.addresses())
            stream = await leaves.open_stream(stays.peer_id, "/test/late/1")
            await stream.send_all(bytes(100_000))
            await stream.aclose()
        left.set()
        await received.wait()
    assert sizes == [100_000]


async def test_a_stream_that_breaks_before_its_end_is_not_taken_for_complete() -> None:
    outcome: list[str] = []
    done = trio.Event()

    async def read(stream: Stream) -> None:
        try:
            await receive_all(stream)
        except StreamClosed as error:
            outcome.append(str(error))
        done.set()

    async with pair(Log()) as (first, second):
        first.handle("/test/read/1", read)
        stream = await second.open_stream(first.peer_id, "/test/read/1")
        await stream.send_all(b"half of it")
        await second.disconnect(first.peer_id)
        await done.wait()
        assert outcome
        assert not second.connected()
        with pytest.raises(StreamClosed):
            await stream.receive_some(1)
        with pytest.raises(StreamClosed):
            await stream.send_all(b"x")
        with pytest.raises(StreamClosed, match="no connection"):
            await second.open_stream(first.peer_id, ECHO)


async def test_a_cancelled_sender_leaves_the_other_streams_whole() -> None:
    async with pair(Log()) as (first, second):
        first.handle(ECHO, echo)
        first.handle("/test/sink/1", lambda stream: _drain(stream))
        control = await second.open_stream(first.peer_id, ECHO)
        for _ in range(10):
            bulk = await second.open_stream(first.peer_id, "/test/sink/1")
            before = second.traffic().sent
            async with trio.open_nursery() as nursery:
                nursery.start_soon(bulk.send_all, bytes(32 * MEGABYTE))
                while second.traffic().sent < before + MEGABYTE:
                    await trio.lowlevel.checkpoint()
                nursery.cancel_scope.cancel()
            await bulk.reset()
            await control.send_all(b"still here")
            assert await control.receive_some(100) == b"still here"


async def test_a_bootstrap_that_had_connected_here_first_is_held_as_any_other() -> None:
    """The host died of a KeyError: of two bootstraps that name each other the one that came second."""
    limits = BootstrapLimits()
    async with (
        open_host(Identity.generate(), LOOPBACK, Telemetry(), bootstrap=limits) as host,
        open_host(Identity.generate(), LOOPBACK, Telemetry(), bootstrap=limits) as other,
    ):
        await other.connect(host.peer_id, host.addresses())
        while other.peer_id not in host.connected():
            await trio.lowlevel.checkpoint()
        await host.bootstraps.enter(other.peer_id, other.addresses()[0])
        await host.bootstraps.first_check(other.peer_id)


async def _ignore(stream: Stream) -> None:
    await stream.receive_some(1)


async def _push(stream: Stream) -> None:
    while True:
        await stream.send_all(bytes(MEGABYTE))


async def _drain(stream: Stream) -> None:
    while await stream.receive_some(MEGABYTE):
        pass


async def test_a_sender_is_let_go_when_the_handler_returns_without_reading() -> None:
    async with pair(Log()) as (first, second):
        first.handle("/test/ignore/1", _ignore)
        stream = await second.open_stream(first.peer_id, "/test/ignore/1")
        await stream.send_all(bytes(MEGABYTE - 1))  # Four times the window: somebody must take it.
        await stream.aclose()


async def test_a_sender_that_goes_on_is_reset_after_a_megabyte_that_nobody_reads() -> None:
    async with pair(Log()) as (first, second):
        first.handle("/test/ignore/1", _ignore)
        stream, before = await second.open_stream(first.peer_id, "/test/ignore/1"), second.traffic().sent
        with pytest.raises(StreamClosed):
            await _push(stream)
        assert second.traffic().sent - before < 8 * MEGABYTE


async def test_every_failed_address_is_named_with_its_cause_and_blocks_nothing() -> None:
    log = Log()
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        refused = f"/ip4/127.0.0.1/tcp/{unused.getsockname()[1]}"
        async with (
            open_host(Identity.generate(), LOOPBACK, log.telemetry) as first,
            open_host(Identity.generate(), LOOPBACK, log.telemetry) as second,
        ):
            bad = [refused, "/dns4/no-such-host.invalid/tcp/4001", "nonsense"]
            with pytest.raises(ConnectFailed) as caught:
                await second.connect(first.peer_id, bad)
            assert [attempt.address for attempt in caught.value.attempts] == bad
            causes = [attempt.cause for attempt in caught.value.attempts]
            assert causes[0] == "connection refused: nothing listens there"
            assert causes[1].startswith("no such host name")
            assert causes[2] == "not an address that can be dialled"
            await second.connect(first.peer_id, [refused, *first.addresses()])
            assert second.connected() == {first.peer_id}
            with pytest.raises(LocalError, match="itself"):
                await second.connect(second.peer_id, second.addresses())


async def test_a_taken_port_gives_the_next_one() -> None:
    log = Log()
    async with open_host(Identity.generate(), LOOPBACK, log.telemetry) as first:
        wished = PeerConfig(host="127.0.0.1", port=first.port)
        async with open_host(Identity.generate(), wished, log.telemetry) as second:
            assert second.port > first.port
            taken = await log.wait("host.port_taken")
            assert (taken["port"], taken["chosen"]) == (first.port, second.port)
            await second.connect(first.peer_id, first.addresses())


async def test_an_address_of_another_computer_cannot_be_listened_on() -> None:
    with pytest.raises(LocalError, match=r"cannot listen on 8\.8\.8\.8") as caught:
        async with open_host(Identity.generate(), PeerConfig(host="8.8.8.8", port=4001), Telemetry()):
            pytest.fail("it listens")
    assert "--port" in caught.value.remedy


async def test_addresses_are_those_of_interfaces_and_dialable() -> None:
    async with open_host(Identity.generate(), PeerConfig(port=0), Telemetry()) as everywhere:
        assert everywhere.addresses()
        assert not any("0.0.0.0" in address for address in everywhere.addresses())
        async with open_host(Identity.generate(), LOOPBACK, Telemetry()) as other:
            await other.connect(everywhere.peer_id, everywhere.addresses())
    announced = ("/dns4/boot.example/tcp/4001",)
    async with open_host(Identity.generate(), PeerConfig(port=0, announce=announced), Telemetry()) as host:
        assert host.addresses() == announced
    with pytest.raises(UsageError, match="cannot be announced"):
        async with open_host(Identity.generate(), PeerConfig(announce=("nonsense",)), Telemetry()):
            pytest.fail("it listens")


async def test_plaintext_is_not_offered() -> None:
    async with open_host(Identity.generate(), LOOPBACK, Telemetry()) as host:
        offered = host.host.get_network().upgrader.security_multistream.transports
        assert [str(protocol) for protocol in offered] == [PACKETS, "/noise"]


@pytest.mark.parametrize("without", ["nobody", "dialled", "dialling", "both"])
async def test_a_peer_without_packets_is_reached_over_noise(without: str) -> None:
    async with (
        open_host(Identity.generate(), LOOPBACK, Telemetry()) as dialled,
        open_host(Identity.generate(), LOOPBACK, Telemetry()) as dialling,
    ):
        for role, host in (("dialled", dialled), ("dialling", dialling)):
            if without in (role, "both"):
                security = host.host.get_network().upgrader.security_multistream
                del security.transports[PACKETS]
                security.multiselect.remove_handler(PACKETS)
        dialled.handle(ECHO, echo)
        await dialling.connect(dialled.peer_id, dialled.addresses())
        (connection,) = dialling.host.get_network().connections[ID.from_base58(dialled.peer_id)]
        used = connection.muxed_conn.secured_conn.negotiated_security_protocol
        assert used == (PACKETS if without == "nobody" else "/noise")
        stream = await dialling.open_stream(dialled.peer_id, ECHO)
        data = bytes(range(256)) * (3 * MEGABYTE // 256 + 1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stream.send_all, data)
            received = bytearray()
            while len(received) < len(data):
                received += await stream.receive_some(MEGABYTE)
        assert received == data


@pytest.mark.parametrize(
    ("error", "event"),
    [
        (ProtocolViolation("lied"), "peer.charged"),
        (NetworkError("gone"), "stream.lost"),
        (ZeroDivisionError("bug"), "handler.failed"),
        (ExceptionGroup("nursery", [ExceptionGroup("inner", [ProtocolViolation("lied")])]), "peer.charged"),
    ],
    ids=["remote", "network", "bug", "group"],
)
async def test_a_failing_handler_ends_its_stream_only(error: Exception, event: str) -> None:
    log = Log()

    async def fail(stream: Stream) -> None:
        raise error

    async with pair(log) as (first, second):
        first.handle("/test/fail/1", fail)
        first.handle(ECHO, echo)
        stream = await second.open_stream(first.peer_id, "/test/fail/1")
        with pytest.raises(StreamClosed):
            await receive_all(stream)
        record = await log.wait(event)
        assert (record["peer"], record["step"]) == (second.peer_id, "/test/fail/1")
        assert record["reason"]
        alive = await second.open_stream(first.peer_id, ECHO)
        await alive.send_all(b"alive")
        assert await alive.receive_some(100) == b"alive"


async def test_an_unknown_protocol_is_refused() -> None:
    async with pair(Log()) as (first, second):
        with pytest.raises(StreamClosed, match="/test/unknown/1"):
            await second.open_stream(first.peer_id, "/test/unknown/1")


async def test_accepted_connections_that_ended_make_room_for_others() -> None:
    async with open_host(Identity.generate(), LOOPBACK, Telemetry()) as host:
        limiter: Any = host.host.get_network()._inbound_limiter
        async with open_host(Identity.generate(), LOOPBACK, Telemetry()) as guest:
            await guest.connect(host.peer_id, host.addresses())
            assert limiter.borrowed_tokens == 1
        while limiter.borrowed_tokens:
            await trio.lowlevel.checkpoint()


async def test_an_error_of_the_body_comes_out_as_it_is() -> None:
    with pytest.raises(ZeroDivisionError):
        async with pair(Log()):
            raise ZeroDivisionError


async def test_cancellation_leaves_nothing_behind() -> None:
    async with open_host(Identity.generate(), LOOPBACK, Telemetry()) as other:
        with trio.CancelScope() as scope:
            async with open_host(Identity.generate(), LOOPBACK, Telemetry()) as host:
                address = host.addresses()
                await host.connect(other.peer_id, other.addresses())
                scope.cancel()
                await trio.sleep_forever()
        with pytest.raises(ConnectFailed, match="connection refused"):
            await other.connect(host.peer_id, address)
