"""Streams of strangers: no address, no network and no relay keeps a newcomer of another one out."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from flockstep.dht.directory import server as directory_server
from flockstep.dht.directory.kademlia import open_directory
from flockstep.dht.directory.messages import Message, MessageReader, about, send
from flockstep.peer.base.config import PeerConfig
from flockstep.peer.base.errors import StreamClosed
from flockstep.peer.host import Libp2pHost, open_host
from flockstep.peer.identity import Identity
from flockstep.peer.log.telemetry import Telemetry
from flockstep.peer.nat.relay import circuit_address
from flockstep.peer.quota.limits import BootstrapLimits, GateLimits
from flockstep.peer.quota.places import GAVE_WAY
from libp2p.identity.identify.identify import ID as IDENTIFY
from libp2p.identity.identify_push.identify_push import ID_PUSH
from libp2p.kad_dht.common import PROTOCOL_ID
from libp2p.stream_muxer.exceptions import MuxedStreamReset
from support.loopback import ECHO, echo, until

HERE = PeerConfig(home=Path("unused"), host="127.0.0.1", port=0)
NOT_EXEMPT = ("192.0.2.0/24",)


async def is_served(host: Libp2pHost, peer: str) -> bool:
    """Whether a new stream is answered."""
    stream = await host.open_stream(peer, ECHO)
    await stream.send_all(b"x")
    answered = await stream.receive_some(1) == b"x"
    await stream.aclose()
    return answered


async def num_served(host: Libp2pHost, peer: str, most: int) -> int:
    """How many streams are answered, one after the other, until one is not."""
    for count in range(most):
        try:
            await is_served(host, peer)
        except StreamClosed:
            return count
    return most


@asynccontextmanager
async def victim(limits: GateLimits) -> AsyncIterator[Libp2pHost]:
    async with open_host(Identity.generate(), HERE, Telemetry(), gate=limits) as host:
        host.handle(ECHO, echo)
        yield host


@asynccontextmanager
async def visitor(host: Libp2pHost, ip: str) -> AsyncIterator[Libp2pHost]:
    """A connected peer from an address, which has been told what the host answers: no stream of the library is left."""
    config = PeerConfig(home=Path("unused"), host=ip, port=0)
    async with open_host(Identity.generate(), config, Telemetry()) as guest:
        assert await guest._dialler.from_listen_port(host.peer_id, host.addresses()[0]) == ""
        await until(lambda: bool(guest.announced(host.peer_id, IDENTIFY)))
        yield guest


async def silent_streams(guest: Libp2pHost, peer: str, count: int) -> list[Any]:
    """Open streams on which nothing is proposed; the last one is known to be there once an answer has come."""
    (connection,) = guest._connections(peer)
    streams = [await connection.muxed_conn.open_stream() for _ in range(count)]
    for stream in streams:
        with suppress(MuxedStreamReset):  # One too many may be reset before.
            await stream.write(b"\x13")  # Of a line of multistream.
    return streams


async def gone(stream: Any) -> None:
    with suppress(MuxedStreamReset):
        while True:
            await stream.read(100)


def count_open(host: Libp2pHost) -> int:
    return len(host._open_streams)


async def test_of_all_open_streams_the_oldest_of_the_crowd_gives_way_to_a_newcomer(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    """80 connections with 128 streams each were all 10,000 that the library serves: nobody else had one."""
    monkeypatch.setattr("flockstep.peer.host.OPEN_STREAMS", 6)

    async with victim(GateLimits(exempt=NOT_EXEMPT)) as host, visitor(host, "127.0.3.1") as crowd:
        await until(lambda: count_open(host) == 0)
        streams = [await crowd.open_stream(host.peer_id, ECHO) for _ in range(6)]
        await until(lambda: count_open(host) == 6)
        async with visitor(host, "127.0.4.1") as newcomer:
            assert await is_served(newcomer, host.peer_id)
            with pytest.raises(StreamClosed):
                await streams[0].receive_some(1)
            assert crowd.connected() == newcomer.connected() == {host.peer_id}


async def test_one_address_and_one_network_hold_few_streams_for_each_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """25 kB each, in 110 connections of one /48: 127 MB became 474."""
    monkeypatch.setattr("flockstep.peer.host.STREAMS_OF_A_CONNECTION", 3)

    limits = GateLimits(per_address=1, per_network=2, exempt=NOT_EXEMPT)
    async with victim(limits) as host, AsyncExitStack() as stack:
        first, second = [await stack.enter_async_context(visitor(host, f"127.0.3.{n}")) for n in (1, 2)]
        await until(lambda: count_open(host) == 0)
        streams = await silent_streams(first, host.peer_id, 4)
        await gone(streams[0])
        await silent_streams(second, host.peer_id, 3)
        await until(lambda: count_open(host) == 6)
        third = await stack.enter_async_context(visitor(host, "127.0.3.3"))
        assert await is_served(third, host.peer_id)
        assert ("stream", GAVE_WAY) in host._gate.refusals.counts


async def test_who_has_a_seat_pays_for_streams_out_of_a_part_of_its_own_and_voters_for_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Members paid for none, and a key is a member for saying so: eight of them took 44 % of a core with 127 kB/s."""
    monkeypatch.setattr("flockstep.peer.host.STREAMS_BURST_SECONDS", 24_000.0)

    limits = GateLimits(streams_per_second=0.001, exempt=NOT_EXEMPT)
    async with victim(limits) as host, AsyncExitStack() as stack:
        member, seated, voter = [await stack.enter_async_context(visitor(host, "127.0.3.1")) for _ in range(3)]
        host.prefer(seated.peer_id.__eq__, voter.peer_id.__eq__)
        assert await num_served(member, host.peer_id, 30) < 30
        assert 0 < await num_served(seated, host.peer_id, 30) < 30
        assert await num_served(voter, host.peer_id, 30) == 30


async def test_those_behind_one_relay_have_equal_parts_of_its_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that opened eight streams a second had the connections closed of all others behind its relay."""
    monkeypatch.setattr("flockstep.peer.host.STREAMS_BURST_SECONDS", 24_000.0)

    limits = GateLimits(streams_per_second=0.001, exempt=NOT_EXEMPT)
    relay_host = open_host(Identity.generate(), HERE, Telemetry(), bootstrap=BootstrapLimits())
    async with relay_host as relay, victim(limits) as host, AsyncExitStack() as stack:
        await host.connect(relay.peer_id, relay.addresses())
        await host._relays.reserve(relay.peer_id)
        guests = []
        for _ in range(2):
            guest = await stack.enter_async_context(open_host(Identity.generate(), HERE, Telemetry()))
            guest._aims = guest._puncher._aims = tuple  # type: ignore[method-assign]  # It stays behind the relay.
            await guest.connect(host.peer_id, [circuit_address(relay.addresses()[0], relay.peer_id)])
            guests.append(guest)
        assert await num_served(guests[0], host.peer_id, 30) < 30
        await until(lambda: guests[0].peer_id not in host.connected())
        assert await is_served(guests[1], host.peer_id)


async def test_silent_streams_of_one_address_leave_the_directory_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """32 connections with eight streams each, renewed twice a minute, were all 256: nobody else found a run."""
    monkeypatch.setattr(directory_server, "MAX_SERVER_STREAMS", 8)
    monkeypatch.setattr(directory_server, "STREAM_SECONDS", 1e6)

    limits = BootstrapLimits(exempt=NOT_EXEMPT)
    async with (
        open_host(Identity.generate(), HERE, Telemetry(), bootstrap=limits) as host,
        open_directory(host, server=True, telemetry=Telemetry(), validate=lambda key, value: 0) as directory,
        visitor(host, "127.0.3.1") as crowd,
        visitor(host, "127.0.4.1") as newcomer,
    ):
        streams = [await crowd.open_stream(host.peer_id, PROTOCOL_ID) for _ in range(8)]
        await until(lambda: directory.server is not None and len(directory.server._streams) == 8)
        stream = await newcomer.open_stream(host.peer_id, PROTOCOL_ID)
        await send(stream, about(Message.PING, ""))
        answer = await MessageReader(stream, 1 << 12).next()
        assert answer is not None
        assert answer.type == Message.PING
        with pytest.raises(StreamClosed):
            await streams[0].receive_some(1)


async def test_nobody_takes_identify_messages_that_are_pushed() -> None:
    async with victim(GateLimits()) as host, visitor(host, "127.0.0.1") as guest:
        with pytest.raises(StreamClosed):
            await guest.open_stream(host.peer_id, ID_PUSH)


async def test_all_circuits_from_one_address_have_the_rate_of_one() -> None:
    limits = BootstrapLimits(exempt=("127.0.0.0/8",))
    async with open_host(Identity.generate(), HERE, Telemetry(), bootstrap=limits) as host:
        assert host.bootstrap_server is not None
        relay, origins = host.bootstrap_server.relay, host._gate.origins
        first, second, other, local = map(origins.of, ("2001:db8::1", "2001:db8::2", "2001:db8:1::1", "127.0.0.1"))
        held = relay._throttle_of(first)
        assert relay._throttle_of(second) is held
        assert relay._throttle_of(other) is not held
        assert relay._throttle_of(local) is not relay._throttle_of(local)
