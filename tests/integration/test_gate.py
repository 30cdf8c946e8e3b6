"""The gate of a host that is no bootstrap, over loopback sockets from several addresses of 127.0.0.0/8."""

import resource
import socket
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import pytest
import trio
from flockstep.peer.base.config import PeerConfig
from flockstep.peer.base.errors import ConnectFailed, StreamClosed
from flockstep.peer.base.transport import Rung, Stream
from flockstep.peer.host import Libp2pHost, open_host
from flockstep.peer.identity import Identity
from flockstep.peer.libp2p import gate
from flockstep.peer.log.telemetry import Event, Telemetry
from flockstep.peer.nat.relay import circuit_address
from flockstep.peer.quota.limits import BootstrapLimits, GateLimits
from flockstep.peer.quota.origins import Origin, Rates
from flockstep.peer.quota.places import GAVE_WAY
from flockstep.peer.quota.shares import Shares
from flockstep.peer.strangers.frames import TURN, carrier
from flockstep.peer.yamux.machine import HEADER, UPDATE
from support.real_time import over_sockets

NOT_EXEMPT = ("192.0.2.0/24",)
ECHO = "/test/echo/1"


async def hold(stream: Stream) -> None:
    await stream.receive_some(1)


class Member:
    """A host under limits that a test chooses, and others that connect to it from addresses that it chooses."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.host: Libp2pHost
        self.stack = AsyncExitStack()

    @classmethod
    @asynccontextmanager
    async def of(cls, limits: GateLimits) -> AsyncIterator["Member"]:
        member, telemetry = cls(), Telemetry()
        telemetry.subscribe(member.events.append)
        async with (
            open_host(Identity.generate(), PeerConfig(host="127.0.0.1", port=0), telemetry, gate=limits) as member.host,
            member.stack,
        ):
            member.host.handle(ECHO, hold)
            yield member

    async def visitor(self, ip: str, *, busy: bool = True, identity: Identity | None = None) -> Libp2pHost:
        """A connected peer from an address, with an open stream unless it is idle. Raises `ConnectFailed`."""
        config = PeerConfig(home=Path("unused"), host=ip, port=0)
        host = await self.stack.enter_async_context(open_host(identity or Identity.generate(), config, Telemetry()))
        address, peer = self.host.addresses()[0], self.host.peer_id
        if failure := await host._dialler.from_listen_port(peer, address):  # So that it comes from its own address.
            raise ConnectFailed(peer, [], remedy=failure)
        if busy:
            await self.stack.enter_async_context(_closing(await host.open_stream(peer, ECHO)))
        return host

    def reasons(self) -> set[object]:
        return {event["reason"] for event in self.events if event["event"] == "connection.refused"}


@asynccontextmanager
async def _closing(stream: Stream) -> AsyncIterator[None]:
    yield
    await stream.reset()


async def is_gone(host: Libp2pHost) -> None:
    while host.connected():
        await trio.lowlevel.checkpoint()


def test_a_member_connects_beside_300_silent_sockets_of_one_address() -> None:
    async def main() -> None:
        async with Member.of(GateLimits(exempt=("127.0.0.0/8",))) as member:
            silent = [await trio.open_tcp_stream("127.0.0.1", member.host.port) for _ in range(300)]
            await member.visitor("127.0.0.1")
            assert len(member.host.connected()) == 1
            assert member.reasons() == {"unfinished while too many others began"}
            for socket in silent:
                await socket.aclose()

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    try:
        over_sockets(main)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_a_flood_of_handshakes_from_one_address_closes_none_of_another() -> None:
    async with Member.of(GateLimits(handshakes=3)) as member:
        other = trio.socket.socket()
        await other.bind(("127.0.2.1", 0))
        await other.connect(("127.0.0.1", member.host.port))
        while not member.host._gate.num_sockets:
            await trio.lowlevel.checkpoint()
        flood = [await trio.open_tcp_stream("127.0.0.1", member.host.port) for _ in range(20)]
        while member.host._gate.refusals.counts.total() < 18:
            await trio.lowlevel.checkpoint()
        while member.host._gate.num_sockets > 3:
            await trio.lowlevel.checkpoint()
        assert sorted(guest.origin.address for guest in member.host._gate._guests) == ["127.0.0.1", "127.0.0.1", "127.0.2.1"]
        other.close()
        for socket in flood:
            await socket.aclose()


async def test_connections_and_streams_of_one_address_have_a_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh keys that shake hands and leave, or streams that are opened and dropped, could take a whole core."""
    monkeypatch.setattr(gate, "CONNECT_BURST_SECONDS", 2000.0)
    monkeypatch.setattr("flockstep.peer.host.STREAMS_BURST_SECONDS", 10.0)

    async with Member.of(GateLimits(connects_per_second=0.002, streams_per_second=0.5, exempt=NOT_EXEMPT)) as member:
        here = [await member.visitor("127.0.3.1", busy=False) for _ in range(4)]
        with pytest.raises(ConnectFailed):
            await member.visitor("127.0.3.1")
        await member.visitor("127.0.4.1", busy=False)
        assert member.reasons() == {"too many a second from one address"}
        with suppress(StreamClosed):
            for _ in range(20):
                await (await here[0].open_stream(member.host.peer_id, ECHO)).reset()
        await is_gone(here[0])
        assert any(event["step"] == "stream" for event in member.events if event["event"] == "connection.refused")


@pytest.mark.skipif(sys.platform != "linux", reason="only the kernel of Linux takes a filter for packets")
async def test_the_kernel_drops_further_attempts_of_who_connects_too_fast_and_of_nobody_else() -> None:
    """To accept and to close a connection costs 25 µs or more: one address that tries 5,000 a second took a core's eighth."""

    async with Member.of(GateLimits(connects_per_second=1 / gate.CONNECT_BURST_SECONDS, exempt=NOT_EXEMPT)) as member:
        where = ("127.0.0.1", member.host.port)
        first = await trio.open_tcp_stream(*where, local_address="127.0.3.1")
        await first.aclose()
        over = await trio.open_tcp_stream(*where, local_address="127.0.3.1")
        assert await over.receive_some(1) == b""
        # On loopback a connection that is not dropped is established within the call.
        tries = [socket.socket() for _ in range(50)]
        for each in tries:
            each.setblocking(False)
            each.bind(("127.0.3.1", 0))
            each.connect_ex(where)
        other = await trio.open_tcp_stream(*where, local_address="127.0.4.1")
        for each in tries:
            with pytest.raises(OSError, match="not connected"):
                each.getpeername()
            each.close()
        assert member.host._gate.refusals.counts["connection", "too many a second from one address"] == 1
        member.host._gate._let_in_again()
        again = await trio.open_tcp_stream(*where, local_address="127.0.3.1")
        for stream in (over, other, again):
            await stream.aclose()


def nobody(peer: str) -> bool:
    return False


async def test_strangers_give_way_and_whoever_the_run_needs_has_places_that_they_cannot_take() -> None:
    async with Member.of(GateLimits(connections=4)) as member:
        voters = [await member.visitor("127.0.1.1") for _ in range(2)]
        seated = await member.visitor("127.0.1.1")
        member.host.prefer(frozenset({seated.peer_id}).__contains__, frozenset(host.peer_id for host in voters).__contains__)
        stranger = await member.visitor("127.0.1.1")
        newcomers = [await member.visitor(f"127.0.{number}.1") for number in range(2, 6)]
        await is_gone(stranger)
        await is_gone(newcomers[0])
        assert member.reasons() == {GAVE_WAY}
        assert all(host.connected() for host in (*voters, seated, *newcomers[1:]))


async def test_the_needed_share_their_places_but_voters_stay() -> None:
    """Seats and tenure can be had by keys that are free, if slowly: they shut in nobody."""
    async with Member.of(GateLimits(connections=4)) as member:
        first, second, voter = [await member.visitor("127.0.1.1") for _ in range(3)]
        member.host.prefer(lambda peer: peer in (first.peer_id, second.peer_id), voter.peer_id.__eq__)
        newcomers = [await member.visitor(f"127.0.{number}.1") for number in range(2, 5)]
        await is_gone(first)
        assert all(host.connected() for host in (second, voter, *newcomers))


async def test_of_a_voters_connections_all_but_one_give_way() -> None:
    """Else one voter could take all files of every member."""
    async with Member.of(GateLimits(connections=1)) as member:
        voter = Identity.generate()
        member.host.prefer(nobody, voter.peer_id.__eq__)
        first = await member.visitor("127.0.1.1", identity=voter)
        second = await member.visitor("127.0.2.1", identity=voter)
        await is_gone(first)
        stranger = await member.visitor("127.0.3.1")
        assert second.connected()
        assert stranger.connected()


async def test_who_votes_no_more_competes_for_a_place_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "LOOK_PERIOD", 0.01)
    async with Member.of(GateLimits(connections=1)) as member:
        voter = await member.visitor("127.0.1.1")
        member.host.prefer(nobody, voter.peer_id.__eq__)
        stranger = await member.visitor("127.0.2.1")
        assert voter.connected()
        member.host.prefer(nobody, nobody)
        await is_gone(stranger)
        assert voter.connected()


async def test_relayed_connections_have_a_limit_and_strangers_give_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "MAX_RELAYED", 1)

    config = PeerConfig(home=Path("unused"), host="127.0.0.1", port=0)
    async with (
        open_host(Identity.generate(), config, Telemetry(), bootstrap=BootstrapLimits()) as relay,
        open_host(Identity.generate(), config, Telemetry()) as target,
        open_host(Identity.generate(), config, Telemetry()) as first,
        open_host(Identity.generate(), config, Telemetry()) as second,
        open_host(Identity.generate(), config, Telemetry()) as third,
    ):
        for host in (target, first, second, third):
            host._aims = host._puncher._aims = tuple  # type: ignore[method-assign]
            await host.connect(relay.peer_id, relay.addresses())
        await target._relays.reserve(relay.peer_id)
        through = [circuit_address(relay.addresses()[0], relay.peer_id)]
        await first.connect(target.peer_id, through)
        await second.connect(target.peer_id, through)
        while target.peer_id in first.connected():
            await trio.lowlevel.checkpoint()
        assert second.peer_id in target.connected()
        target.prefer(nobody, second.peer_id.__eq__)
        await third.connect(target.peer_id, through)
        assert {second.peer_id, third.peer_id} < target.connected()


@pytest.mark.parametrize("num_circuits", [1, 3])
async def test_circuits_of_one_relay_share_one_frame_budget_but_voters_have_their_own(
    monkeypatch: pytest.MonkeyPatch, num_circuits: int
) -> None:
    spent: Counter[str] = Counter()
    strangers: set[str] = set()

    def spend_alone(self: Rates, origin: Origin, now: float, amount: float) -> float:
        spent[origin.address] += round(amount)
        return 0.0

    def spend_shared(self: Shares, origin: Origin, now: float, amount: float) -> float:
        spent[origin.network] += round(amount)
        assert origin.address in strangers or not origin.network.startswith("relay ")
        return 0.0

    async with through_relays(1 + num_circuits + 1) as (relay, target, *others):
        strangers.update(host.peer_id for host in others[1:])
        monkeypatch.setattr(Rates, "spend", spend_alone)
        monkeypatch.setattr(Shares, "spend", spend_shared)
        await target._relays.reserve(relay.peer_id)
        target.prefer(others[1].peer_id.__eq__, others[0].peer_id.__eq__)  # A seat is no vote.
        for host in others:
            await host.connect(target.peer_id, [circuit_address(relay.addresses()[0], relay.peer_id)])
            await flood(host, target.peer_id, 10 * TURN)
        while min(spent[others[0].peer_id], spent[f"relay {relay.peer_id}"] / (len(others) - 1)) < 9 * TURN:
            await trio.lowlevel.checkpoint()
        (outer,) = target._connections(relay.peer_id)
        inner = [connection for host in others for connection in target._connections(host.peer_id)]
        assert {carrier(connection.muxed_conn) for connection in inner} == {outer.muxed_conn}
        assert carrier(outer.muxed_conn) is None
        payers = {payer for payer, frames in spent.items() if frames >= TURN}
        assert payers == {others[0].peer_id, f"relay {relay.peer_id}"}


async def test_a_relay_announces_no_circuit_inside_of_a_circuit() -> None:
    async with through_relays(2) as (relay, target, other), through_relays(0) as (outer, *_):
        await target.connect(outer.peer_id, outer.addresses())
        for one in (relay, outer):
            await target._relays.reserve(one.peer_id)
        await target.disconnect(relay.peer_id)
        while target.peer_id in relay.connected():
            await trio.lowlevel.checkpoint()
        await relay.connect(target.peer_id, [circuit_address(outer.addresses()[0], outer.peer_id)])
        assert relay.rung(target.peer_id) is Rung.RELAYED
        with pytest.raises(ConnectFailed):
            await other.connect(target.peer_id, [circuit_address(relay.addresses()[0], relay.peer_id)])
        assert other.peer_id not in target.connected()


async def test_keys_behind_a_relay_keep_nobody_out_and_a_relay_that_lies_has_a_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys that dialled through a relay left newcomers less than one circuit each: of 45 none was served beside 96."""
    monkeypatch.setattr(gate, "CONNECT_BURST_SECONDS", 20_000.0)
    async with Member.of(GateLimits(connects_per_second=64 / gate.CONNECT_BURST_SECONDS)) as member:
        served = []
        for number in range(64 * gate.ALL_CONNECTS + 1):
            with member.host._gate.admit_circuit("relay", f"key {number}"):
                await trio.lowlevel.checkpoint_if_cancelled()
                served.append(number)
        assert served == list(range(64 * gate.ALL_CONNECTS))
        assert member.host._gate.refusals.counts == {("connection", "too many circuits a second from one relay"): 1}
        with member.host._gate.admit_circuit("another relay", "key 0"):
            await trio.lowlevel.checkpoint_if_cancelled()
            served.append(0)
        assert served[-1] == 0


@asynccontextmanager
async def through_relays(num_others: int) -> AsyncIterator[list[Libp2pHost]]:
    """A relay, and hosts that are connected to it and punch no holes."""
    config = PeerConfig(home=Path("unused"), host="127.0.0.1", port=0)
    async with AsyncExitStack() as stack:
        relay = open_host(Identity.generate(), config, Telemetry(), bootstrap=BootstrapLimits())
        hosts = [await stack.enter_async_context(relay)]
        for _ in range(num_others):
            hosts.append(await stack.enter_async_context(open_host(Identity.generate(), config, Telemetry())))
            hosts[-1]._aims = hosts[-1]._puncher._aims = tuple  # type: ignore[method-assign]
            await hosts[-1].connect(hosts[0].peer_id, hosts[0].addresses())
        yield hosts


async def flood(host: Libp2pHost, peer: str, num_frames: int) -> None:
    """Send window updates for a stream that does not exist."""
    (connection,) = host._connections(peer)
    connection.muxed_conn.machine.outbox.append(HEADER.pack(0, UPDATE, 0, 999, 1) * num_frames)
    await connection.muxed_conn.written()
