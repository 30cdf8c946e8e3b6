"""Limits of a bootstrap on loopback, from addresses of 127.0.0.0/8 that are not exempt here."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from flockstep.peer.base.config import PeerConfig
from flockstep.peer.base.errors import ConnectFailed, NetworkError, StreamClosed
from flockstep.peer.base.transport import Stream
from flockstep.peer.bootstrap import relay_server
from flockstep.peer.bootstrap.relay_server import PIECE, RELAY_BURST_SECONDS, Throttle
from flockstep.peer.bootstrap.server import BootstrapServer
from flockstep.peer.host import Libp2pHost, open_host
from flockstep.peer.identity import Identity
from flockstep.peer.libp2p import gate
from flockstep.peer.log.telemetry import Event, Telemetry
from flockstep.peer.nat.dialback import DIALBACK_PROTOCOL
from flockstep.peer.nat.relay import circuit_address
from flockstep.peer.quota.limits import BootstrapLimits
from flockstep.peer.quota.places import GAVE_WAY
from libp2p.peer.id import ID
from libp2p.relay.circuit_v2.pb.circuit_pb2 import HopMessage, Status, StopMessage
from libp2p.relay.circuit_v2.protocol import PROTOCOL_ID as HOP
from libp2p.relay.circuit_v2.protocol import STOP_PROTOCOL_ID as STOP
from libp2p.utils.varint import encode_varint_prefixed
from support.loopback import ECHO, echo, until

NOT_EXEMPT = ("192.0.2.0/24",)


class Lab:
    """A bootstrap, and hosts at addresses that a test chooses."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.telemetry = Telemetry()
        self.telemetry.subscribe(self.events.append)
        self.bootstrap: Libp2pHost

    @property
    def server(self) -> BootstrapServer:
        assert self.bootstrap.bootstrap_server is not None
        return self.bootstrap.bootstrap_server

    @asynccontextmanager
    async def host(self, ip: str = "127.0.1.1", *, reserved: bool = False) -> AsyncIterator[Libp2pHost]:
        config = PeerConfig(home=Path("unused"), host=ip, port=0)
        async with open_host(Identity.generate(), config, Telemetry()) as host:
            address, peer = self.bootstrap.addresses()[0], self.bootstrap.peer_id
            failure = await host._dialler.from_listen_port(peer, address)  # So that it comes from its own address.
            if failure:
                raise ConnectFailed(peer, [], remedy=failure)
            if reserved:
                await self.reserve(host)
            yield host

    async def reserve(self, host: Libp2pHost) -> None:
        relays: Any = host.bootstraps._relays
        await relays.reserve(self.bootstrap.peer_id)

    def through(self) -> str:
        return circuit_address(self.bootstrap.addresses()[0], self.bootstrap.peer_id)

    def reasons(self) -> list[object]:
        return [event["reason"] for event in self.events if event["event"] == "bootstrap.refused"]


@asynccontextmanager
async def lab(**limits: Any) -> AsyncIterator[Lab]:
    lab = Lab()
    config = PeerConfig(home=Path("unused"), host="127.0.0.1", port=0)
    with trio.fail_after(120):  # A safety net against a hang.
        bootstrap = BootstrapLimits(**{"exempt": NOT_EXEMPT, **limits})
        async with open_host(Identity.generate(), config, lab.telemetry, bootstrap=bootstrap) as lab.bootstrap:
            yield lab


@asynccontextmanager
async def _closing(stream: Stream) -> AsyncIterator[None]:
    yield
    await stream.reset()


def forbid_punching(*hosts: Libp2pHost) -> None:
    for host in hosts:
        hidden: Any = host
        hidden._aims = hidden._puncher._aims = tuple


async def test_one_address_and_one_network_have_so_many_connections_and_their_oldest_gives_way() -> None:
    async with lab(connections_per_address=1, connections_per_network=2) as net, net.host("127.0.1.1") as first:
        async with net.host("127.0.1.1") as second:
            await until(lambda: not first.connected())
            async with net.host("127.0.2.1") as other, net.host("127.0.1.2") as neighbour, net.host("127.0.1.3") as third:
                await until(lambda: not second.connected())
                assert other.connected()
                assert neighbour.connected()
                assert third.connected()
        assert set(net.reasons()) == {GAVE_WAY}


async def test_loopback_is_exempt_where_the_operator_says_so() -> None:
    async with lab(connections_per_address=1, exempt=("127.0.0.0/8",)) as net, net.host(), net.host():
        assert net.server.gate.num_sockets == 2


async def test_busy_connections_of_one_network_keep_no_newcomer_out_and_a_reservation_is_a_place_of_its_own() -> None:
    """900 busy connections of eight networks kept everybody else out of a bootstrap, for good."""
    async with lab(connections=4) as net, net.host("127.0.1.1", reserved=True) as needed, AsyncExitStack() as stack:
        crowd = [await stack.enter_async_context(net.host("127.0.2.1")) for _ in range(4)]
        for host in crowd[2:]:
            await stack.enter_async_context(_closing(await host.open_stream(net.bootstrap.peer_id, DIALBACK_PROTOCOL)))
        newcomers = [await stack.enter_async_context(net.host(f"127.0.{n}.1")) for n in (3, 4, 5, 6)]
        await until(lambda: not any(host.connected() for host in (*crowd, newcomers[0])))
        assert needed.connected()
        assert all(host.connected() for host in newcomers[1:])


async def test_who_is_idle_for_long_is_sent_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "LOOK_PERIOD", 0.01)

    async with lab() as net, net.host(reserved=True) as needed, net.host("127.0.2.1") as idle:
        monkeypatch.setattr(gate, "IDLE_SECONDS", 0.0)
        while idle.connected():
            await trio.lowlevel.checkpoint()
        assert net.reasons() == ["idle for too long"]
        assert needed.connected()


async def test_reservations_are_places_that_a_renewal_makes_no_younger() -> None:
    async with (
        lab(reservations=2, reservations_per_address=1) as net,
        net.host("127.0.1.1", reserved=True) as first,
        net.host("127.0.1.1") as neighbour,
        net.host("127.0.2.1") as second,
        net.host("127.0.3.1") as third,
    ):
        serves = net.server.relay.serves
        await net.reserve(neighbour)
        assert not serves(first.peer_id)
        await net.reserve(second)
        await net.reserve(neighbour)
        await net.reserve(third)
        assert [serves(host.peer_id) for host in (neighbour, second, third)] == [False, True, True]
        assert net.reasons() == [f"reservations: {GAVE_WAY}"]
        await second.disconnect(net.bootstrap.peer_id)
        await until(lambda: second.peer_id not in net.bootstrap.connected())
        await net.reserve(first)
        assert net.server.relay.num_reservations == 2
        assert serves(third.peer_id)


async def test_a_bootstrap_without_places_for_relayed_peers_says_so() -> None:
    async with lab(reservations=0, circuits=0) as net, net.host() as host:
        with pytest.raises(NetworkError, match="the relay is full"):
            await net.reserve(host)
        assert net.reasons() == ["this relay has no places"]


async def test_circuits_are_limited_and_counted_and_the_oldest_gives_way() -> None:
    async with (
        lab(circuits_per_peer=1) as net,
        net.host("127.0.1.1", reserved=True) as target,
        net.host("127.0.2.1") as caller,
        net.host("127.0.3.1") as other,
    ):
        forbid_punching(target, caller, other)
        target.handle(ECHO, echo)
        await caller.connect(target.peer_id, [net.through()])
        stream = await caller.open_stream(target.peer_id, ECHO)
        await stream.send_all(bytes(10_000))
        while len(await stream.receive_some(1)) == 0:
            pass
        assert net.server.relay.num_bytes > 10_000
        await other.connect(target.peer_id, [net.through()])
        await until(lambda: target.peer_id not in caller.connected())
        assert other.peer_id in target.connected()
        assert net.reasons() == [f"circuits: {GAVE_WAY}"]
        await other.disconnect(target.peer_id)
        await until(lambda: not net.server.relay.num_circuits)
        await caller.connect(target.peer_id, [net.through()])


async def test_nobody_holds_all_circuits_of_a_member_or_of_a_relay() -> None:
    """One address held the 64 of a member, with a silent stream on each, and four of one network the 512 of a bootstrap."""
    async with (
        lab(circuits=4, circuits_per_peer=3) as net,
        net.host("127.0.1.1", reserved=True) as target,
        net.host("127.0.2.1", reserved=True) as idle_target,
        AsyncExitStack() as stack,
    ):
        forbid_punching(target, idle_target)
        crowd = [await stack.enter_async_context(net.host(f"127.0.3.{n}")) for n in (1, 1, 2, 2, 3)]
        honest = await stack.enter_async_context(net.host("127.0.4.1"))
        forbid_punching(*crowd, honest)
        for host, to in zip(crowd, (target, target, target, idle_target, target), strict=True):
            await host.connect(to.peer_id, [net.through()])
        await honest.connect(target.peer_id, [net.through()])
        for host in crowd:  # Whoever lost its circuit comes again, and again.
            await host.connect(idle_target.peer_id, [net.through()])
            await host.connect(target.peer_id, [net.through()])
        assert target.peer_id in honest.connected()
        assert 2 <= net.server.relay.num_circuits <= 4


async def test_circuits_a_second_to_one_peer_are_shared_by_where_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer itself sees keys, which are free: whoever made 96 of them kept everybody else from it."""
    monkeypatch.setattr(relay_server, "CALLS_PER_SECOND", 0.0001)
    monkeypatch.setattr(relay_server, "CALLS_BURST_SECONDS", 20_000.0)
    async with (
        lab() as net,
        net.host("127.0.1.1", reserved=True) as target,
        net.host("127.0.2.1", reserved=True) as another,
        AsyncExitStack() as stack,
    ):
        crowd = [await stack.enter_async_context(net.host(f"127.0.3.{n}")) for n in (1, 1, 1, 2)]
        others = [await stack.enter_async_context(net.host(f"127.0.{n}.1")) for n in (4, 5)]
        forbid_punching(target, another, *crowd, *others)
        for host in crowd[:2]:
            await host.connect(target.peer_id, [net.through()])
        with pytest.raises(ConnectFailed, match="full"):
            await crowd[2].connect(target.peer_id, [net.through()])
        for host in (crowd[3], *others):
            await host.connect(target.peer_id, [net.through()])
        await crowd[2].connect(another.peer_id, [net.through()])
        assert net.reasons() == ["too many circuits a second to one peer from one address"]


async def test_a_circuit_ends_so_long_after_its_last_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    async with lab() as net, net.host("127.0.1.1", reserved=True) as target, net.host("127.0.2.1") as caller:
        forbid_punching(target, caller)
        await caller.connect(target.peer_id, [net.through()])
        monkeypatch.setattr(relay_server, "CIRCUIT_IDLE_SECONDS", 0.0)
        (connection,) = caller._connections(target.peer_id)
        await connection.muxed_conn.ping()
        await until(lambda: not net.server.relay.num_circuits)
        await until(lambda: target.peer_id not in caller.connected())


async def test_a_circuit_that_never_carries_a_byte_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """512 of them cost their holders nothing, and nobody else had one."""
    monkeypatch.setattr(relay_server, "CIRCUIT_IDLE_SECONDS", 0.0)
    accepted = encode_varint_prefixed(StopMessage(type=StopMessage.STATUS, status=Status.OK).SerializeToString())
    asked = HopMessage(type=HopMessage.CONNECT)

    async def accept(stream: Stream) -> None:
        await stream.send_all(accepted)
        await trio.sleep_forever()

    async with lab() as net, net.host("127.0.1.1", reserved=True) as target, net.host("127.0.2.1") as caller:
        target.handle(STOP, accept)
        asked.peer.id = ID.from_base58(target.peer_id).to_bytes()
        stream = await caller.open_stream(net.bootstrap.peer_id, HOP)
        await stream.send_all(encode_varint_prefixed(asked.SerializeToString()))
        assert await stream.receive_some(1)
        await until(lambda: not net.server.relay.num_circuits)


async def test_a_circuit_ends_with_its_bytes() -> None:
    async with (
        lab(circuit_bytes=300_000) as net,
        net.host("127.0.1.1", reserved=True) as target,
        net.host("127.0.2.1") as caller,
    ):
        forbid_punching(target, caller)
        target.handle(ECHO, echo)
        await caller.connect(target.peer_id, [net.through()])
        stream = await caller.open_stream(target.peer_id, ECHO)
        with pytest.raises(StreamClosed):
            await stream.send_all(bytes(5_000_000))
        while not net.reasons():
            await trio.lowlevel.checkpoint()
        assert net.reasons() == ["the circuit has reached its byte limit"]
        assert net.server.relay.num_bytes <= 300_000 + 2 * PIECE


def test_a_throttle_gives_everybody_a_turn_at_its_rate() -> None:
    async def main() -> None:
        throttle = Throttle(1000.0)
        passed: list[tuple[str, float]] = []

        async def send(name: str) -> None:
            for _ in range(10):
                await throttle.pass_on(500)
                passed.append((name, trio.current_time()))

        start = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(send, "a")
            nursery.start_soon(send, "b")
        assert passed[-1][1] - start == pytest.approx(20 * 0.5 - 0.5 - RELAY_BURST_SECONDS)
        assert sorted(name for name, _ in passed[:10]) == ["a"] * 5 + ["b"] * 5

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
