"""Members that lose each other, or their directory, find each other again."""

from collections.abc import Awaitable, Callable
from pathlib import Path

import trio
from flockstep.dht.directory.memory import MemoryBoard, MemoryDirectory
from flockstep.dht.members.gossip import Gossip
from flockstep.dht.members.remembered import Remembered
from flockstep.dht.members.table import MemberBody, MemberState, MemberTable
from flockstep.dht.published import validate_published
from flockstep.peer.config import PeerConfig
from flockstep.peer.identity import Identity
from flockstep.peer.memory.network import MemoryNetwork, run_virtual
from flockstep.peer.node.node import Node
from flockstep.peer.telemetry import Event, Telemetry

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


def virtually(body: Callable[[MemoryNetwork, MemoryBoard, trio.Nursery], Awaitable[None]]) -> None:
    async def main() -> None:
        network, board = MemoryNetwork(latency=0.01), MemoryBoard()
        async with network.open(), trio.open_nursery() as nursery:
            await body(network, board, nursery)
            nursery.cancel_scope.cancel()

    run_virtual(main)


def test_who_was_lost_and_speaks_again_counts_again_within_a_second(tmp_path: Path) -> None:
    anna, bert = Member(ANNA, tmp_path / "anna"), Member(BERT, tmp_path / "bert")

    async def body(network: MemoryNetwork, board: MemoryBoard, nursery: trio.Nursery) -> None:
        for member in (anna, bert):
            nursery.start_soon(member.live, network, board)
        await trio.sleep(5.0)
        assert anna.knows(BERT)
        anna.node._broken(BERT.peer_id, "its session broke")
        assert not anna.knows(BERT)
        await trio.sleep(1.0)
        assert anna.knows(BERT)
        assert BERT.peer_id in anna.node._watched
        assert [event["peer"] for event in anna.events if event["event"] == "member.back"] == [BERT.peer_id]

    virtually(body)


def test_whom_i_have_banned_does_not_come_back_by_an_answer_that_was_under_way(tmp_path: Path) -> None:
    anna, bert = Member(ANNA, tmp_path / "anna"), Member(BERT, tmp_path / "bert")

    async def body(network: MemoryNetwork, board: MemoryBoard, nursery: trio.Nursery) -> None:
        for member in (anna, bert):
            nursery.start_soon(member.live, network, board)
        await trio.sleep(5.0)
        disconnect = anna.node.transport.disconnect

        async def linger(peer: str) -> None:  # As real connections do.
            await trio.sleep(0.5)
            await disconnect(peer)

        anna.node.transport.disconnect = linger  # type: ignore[method-assign]
        nursery.start_soon(anna.gossip._ask, BERT.peer_id)
        await trio.sleep(0.01)
        anna.node.ban(BERT.peer_id, "it lied")
        await trio.sleep(0.2)
        assert not anna.knows(BERT)

    virtually(body)


def test_who_asks_is_there_even_if_it_was_lost(tmp_path: Path) -> None:
    anna, bert = Member(ANNA, tmp_path / "anna"), Member(BERT, tmp_path / "bert")

    async def body(network: MemoryNetwork, board: MemoryBoard, nursery: trio.Nursery) -> None:
        for member in (anna, bert):
            nursery.start_soon(member.live, network, board)
        await trio.sleep(5.0)
        anna.node._broken(BERT.peer_id, "its session broke")
        await bert.gossip._ask(ANNA.peer_id)
        assert anna.knows(BERT)

    virtually(body)


def test_without_a_directory_the_remembered_members_are_asked(tmp_path: Path) -> None:
    anna, bert = Member(ANNA, tmp_path / "anna"), Member(BERT, tmp_path / "bert")

    async def body(network: MemoryNetwork, board: MemoryBoard, nursery: trio.Nursery) -> None:
        for member in (anna, bert):
            nursery.start_soon(member.live, network, board)
        await trio.sleep(10.0)
        board.up = False
        again = Member(CARL, tmp_path / "anna")  # What Anna has kept serves whoever reads it.
        nursery.start_soon(again.live, network, board)
        with trio.fail_after(10.0):
            await trio.sleep(0.1)
            await again.gossip.looked.wait()
        assert again.knows(BERT)
        stranger = Member(DORA, tmp_path / "stranger")
        nursery.start_soon(stranger.live, network, board)
        await trio.sleep(10.0)
        assert not stranger.gossip.looked.is_set()

    virtually(body)


def test_a_banned_member_is_gone_and_its_records_are_not_taken_from_others(tmp_path: Path) -> None:
    anna, bert, carl = (Member(who, tmp_path / who.peer_id) for who in (ANNA, BERT, CARL))

    async def body(network: MemoryNetwork, board: MemoryBoard, nursery: trio.Nursery) -> None:
        for member in (anna, bert, carl):
            nursery.start_soon(member.live, network, board)
        await trio.sleep(5.0)
        anna.node.ban(BERT.peer_id, "for the test")
        assert not anna.knows(BERT)
        for _ in range(4):
            bert.gossip.announce(MemberBody(state=MemberState.TRAINING))
            await trio.sleep(10.0)  # Carl hears it, and is asked what he knows.
        assert carl.knows(BERT)
        assert not anna.knows(BERT)
        assert anna.knows(CARL)

    virtually(body)
