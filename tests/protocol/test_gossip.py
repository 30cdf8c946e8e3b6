"""Members that lose each other, or their directory, find each other again."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import trio
from flockstep.dht.directory.memory import MemoryBoard, MemoryDirectory
from flockstep.dht.members.body import MemberBody, MemberState
from flockstep.dht.members.gossip import Gossip
from flockstep.dht.members.remembered import Remembered
from flockstep.dht.members.table import LIFETIME, PAGE, MemberTable
from flockstep.dht.published import validate_published
from flockstep.peer import wire
from flockstep.peer.base.config import PeerConfig
from flockstep.peer.identity import Identity
from flockstep.peer.log.telemetry import Event, Telemetry
from flockstep.peer.memory.network import MemoryNetwork, run_virtual
from flockstep.peer.node.node import Node

RUN = "a" * 52
ANNA, BERT, CARL, DORA = (Identity.from_seed(bytes([n]) * 32) for n in (1, 2, 3, 4))


class Member:
    """A peer that does nothing but be a member."""

    def __init__(self, identity: Identity, folder: Path) -> None:
        self.identity = identity
        self.folder = folder
        self.events: list[Event] = []

    async def live(self, network: MemoryNetwork, board: MemoryBoard) -> None:
        me = self.identity.peer_id
        telemetry = Telemetry(clock=trio.current_time)
        telemetry.subscribe(self.events.append)
        transport = network.transport(me, telemetry=telemetry)
        async with Node(transport, self.identity, PeerConfig(), telemetry, inline=True) as self.node:
            directory = MemoryDirectory(board, me, transport.addresses(), validate_published)
            remembered = Remembered(self.folder, RUN, telemetry)
            self.gossip = Gossip(self.node, MemberTable(RUN, me), directory, RUN, seed=0, remembered=remembered)
            self.gossip.announce(MemberBody(state=MemberState.TRAINING, addresses=transport.addresses()))
            await self.gossip.run()

    def knows(self, other: Identity) -> bool:
        return other.peer_id in self.gossip.presence.others()


class Town:
    """A network in memory and a directory, and the members that live there until the test ends."""

    def __init__(self, network: MemoryNetwork, nursery: trio.Nursery) -> None:
        self.network, self.nursery = network, nursery
        self.board = MemoryBoard()

    def start(self, identity: Identity, folder: Path) -> Member:
        member = Member(identity, folder)
        self.nursery.start_soon(member.live, self.network, self.board)
        return member

    async def members(self, folder: Path, *identities: Identity) -> list[Member]:
        """Start members, and wait until they know each other."""
        members = [self.start(identity, folder / identity.peer_id) for identity in identities]
        await trio.sleep(5.0)
        return members


@asynccontextmanager
async def lone_network() -> AsyncIterator[MemoryNetwork]:
    """A network in memory of which another one's peers see nothing."""
    network = MemoryNetwork()
    async with network.open():
        yield network


def run_test(body: Callable[[Town], Awaitable[None]]) -> None:
    async def main() -> None:
        network = MemoryNetwork(latency=0.01)
        async with network.open(), trio.open_nursery() as nursery:
            await body(Town(network, nursery))
            nursery.cancel_scope.cancel()

    run_virtual(main)


async def test_who_was_lost_and_speaks_again_counts_again_within_a_second(town: Town, /, tmp_path: Path) -> None:
    anna, _ = await town.members(tmp_path, ANNA, BERT)
    assert anna.knows(BERT)
    anna.node._broken(BERT.peer_id, "its session broke")
    assert not anna.knows(BERT)
    await trio.sleep(1.0)
    assert anna.knows(BERT)
    assert BERT.peer_id in anna.node._watched
    assert [event["peer"] for event in anna.events if event["event"] == "member.back"] == [BERT.peer_id]


async def test_whom_i_have_banned_does_not_come_back_by_an_answer_that_was_under_way(
    town: Town, /, tmp_path: Path
) -> None:
    anna, _ = await town.members(tmp_path, ANNA, BERT)
    disconnect = anna.node.transport.disconnect

    async def linger(peer: str) -> None:  # As real connections do.
        await trio.sleep(0.5)
        await disconnect(peer)

    anna.node.transport.disconnect = linger  # type: ignore[method-assign]
    town.nursery.start_soon(anna.gossip._ask, BERT.peer_id)
    await trio.sleep(0.01)
    anna.node.ban(BERT.peer_id, "it lied")
    await trio.sleep(0.2)
    assert not anna.knows(BERT)


async def test_who_asks_is_there_even_if_it_was_lost(town: Town, /, tmp_path: Path) -> None:
    anna, bert = await town.members(tmp_path, ANNA, BERT)
    anna.node._broken(BERT.peer_id, "its session broke")
    await bert.gossip._ask(ANNA.peer_id)
    assert anna.knows(BERT)


async def test_without_a_directory_the_remembered_members_are_asked(town: Town, /, tmp_path: Path) -> None:
    await town.members(tmp_path, ANNA, BERT)
    await trio.sleep(5.0)
    town.board.up = False
    again = town.start(CARL, tmp_path / ANNA.peer_id)  # What Anna has kept serves whoever reads it.
    with trio.fail_after(10.0):
        await trio.sleep(0.1)
        await again.gossip.looked.wait()
    assert again.knows(BERT)
    stranger = town.start(DORA, tmp_path / "stranger")
    await trio.sleep(10.0)
    assert not stranger.gossip.looked.is_set()


async def test_a_banned_member_is_gone_and_its_records_are_not_taken_from_others(town: Town, /, tmp_path: Path) -> None:
    anna, bert, carl = await town.members(tmp_path, ANNA, BERT, CARL)
    anna.node.ban(BERT.peer_id, "for the test")
    assert not anna.knows(BERT)
    for _ in range(4):
        bert.gossip.announce(MemberBody(state=MemberState.TRAINING))
        await trio.sleep(10.0)  # Carl hears it, and is asked what he knows.
    assert carl.knows(BERT)
    assert not anna.knows(BERT)
    assert anna.knows(CARL)


async def test_who_answers_with_ever_newer_records_keeps_nobody_from_renewing_its_own(
    town: Town, /, tmp_path: Path
) -> None:
    """Every page of its answers is full and new, and comes just in time: without a limit the exchange never ends."""
    anna, bert, carl = await town.members(tmp_path, ANNA, BERT, CARL)
    keys = [Identity.from_seed(bytes([100 + n]) * 32) for n in range(PAGE)]
    pages = 0

    async def endless(peer: str, question: wire.MembersAsk) -> wire.Members:
        nonlocal pages
        pages += 1
        await trio.sleep(4.0)
        tables = [MemberTable(RUN, key.peer_id, sequence=pages) for key in keys]
        news = [table.update_own(key, MemberBody(state="training"), 0.0) for table, key in zip(tables, keys, strict=True)]
        return wire.Members(tuple(record.encode() for record in news))

    bert.node.on_ask(wire.MembersAsk, endless)
    await trio.sleep(LIFETIME + 60.0)
    assert carl.knows(ANNA)
    assert any("the rest comes with the next exchange" in str(event.get("reason")) for event in anna.events)


async def test_two_processes_with_one_key_find_each_others_record_however_they_start(town: Town, /) -> None:
    town.board.latency = 0.1
    events: list[Event] = []
    telemetry = Telemetry(clock=trio.current_time)
    telemetry.subscribe(events.append)

    async with AsyncExitStack() as nodes:

        async def start(sequence: int, run: str) -> Gossip:
            """A process that begins at this time by its clock, on a computer of its own."""
            network = await nodes.enter_async_context(lone_network())
            node = await nodes.enter_async_context(
                Node(network.transport(ANNA.peer_id), ANNA, PeerConfig(), telemetry, inline=True)
            )
            directory = MemoryDirectory(town.board, ANNA.peer_id, (), validate_published)
            gossip = Gossip(node, MemberTable(run, ANNA.peer_id, sequence=sequence), directory, run, seed=0)
            gossip.announce(MemberBody(state=MemberState.SYNCING, addresses=(f"/ip4/192.0.2.1/tcp/{sequence}",)))
            return gossip

        first = await start(1000, RUN)
        assert await first.doubles() == await first.doubles() == ()
        first.announce(MemberBody(state=MemberState.TRAINING, addresses=("/ip4/192.0.2.1/tcp/1000",)))
        assert await first.doubles() == ()  # The directory may return what this process has signed before.
        for sequence, before in ((2000, 1000), (500, 2000)):  # The clock of a restart may have been set back.
            later = await start(sequence, RUN)
            assert await later.doubles() == (f"/ip4/192.0.2.1/tcp/{before}",)
        assert await first.doubles() == ("/ip4/192.0.2.1/tcp/2000",)
        running = await start(3000, RUN)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(running.run)
            await trio.sleep(1.0)  # It has published its record in place of the other one.
            assert await running.doubles() == ("/ip4/192.0.2.1/tcp/2000",)
            nursery.cancel_scope.cancel()
        refused = [event for event in events if event["event"] == "member.refused"]
        assert {event["peer"] for event in refused} == {ANNA.peer_id}
        at_once = [await start(sequence, "b" * 52) for sequence in (1000, 2000)]
        found: list[tuple[str, ...]] = []

        async def look(gossip: Gossip) -> None:
            found.append(await gossip.doubles())

        async with trio.open_nursery() as nursery:
            for gossip in at_once:
                nursery.start_soon(look, gossip)
        assert sorted(found) == [(), ("/ip4/192.0.2.1/tcp/2000",)]
