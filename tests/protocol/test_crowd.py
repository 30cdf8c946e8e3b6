"""Many members: none connects to all, and each learns of all."""

from collections.abc import Iterable
from dataclasses import replace

import pytest
import trio
from flockstep.dht.directory.memory import MemoryBoard, MemoryDirectory
from flockstep.dht.members import gossip as gossip_module
from flockstep.dht.members import presence as presence_module
from flockstep.dht.members.body import MemberBody, MemberState
from flockstep.dht.members.gossip import GOSSIP_PERIOD, NEIGHBOURS, RENEW_PERIOD, Gossip
from flockstep.dht.members.presence import MET_PERIOD, REVIEW_PERIOD, Presence
from flockstep.dht.members.table import LIFETIME, MemberTable
from flockstep.dht.published import validate_published
from flockstep.peer import wire
from flockstep.peer.base.config import PeerConfig
from flockstep.peer.identity import Identity
from flockstep.peer.log.telemetry import Telemetry
from flockstep.peer.memory.network import MemoryNetwork, run_virtual
from flockstep.peer.node.node import Node

run_test = run_virtual

RUN = "a" * 52
CROWD = 24


@pytest.fixture
def small_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight members are a crowd already, so that a test has time for one."""
    monkeypatch.setattr(presence_module, "MESH", 8)


class Party:
    """Members that do nothing but be members."""

    def __init__(self) -> None:
        self.network, self.board = MemoryNetwork(latency=0.01), MemoryBoard()
        self.members: list[Gossip] = []
        self.nodes: list[Node] = []

    async def join(self, number: int) -> None:
        identity = Identity.from_seed(bytes([number + 1]) * 32)
        telemetry = Telemetry(clock=trio.current_time)
        transport = self.network.transport(identity.peer_id, telemetry=telemetry)
        async with Node(transport, identity, PeerConfig(), telemetry, inline=True) as node:
            directory = MemoryDirectory(self.board, identity.peer_id, transport.addresses(), validate_published)
            gossip = Gossip(node, MemberTable(RUN, identity.peer_id), directory, RUN, seed=number)
            self.members.append(gossip)
            self.nodes.append(node)
            gossip.announce(body(transport.addresses()))
            await gossip.run()


def body(addresses: tuple[str, ...], round_: int = 0) -> MemberBody:
    return MemberBody(state=MemberState.TRAINING, addresses=addresses, round=round_)


async def gather(party: Party, nursery: trio.Nursery, count: int) -> None:
    for number in range(count):
        nursery.start_soon(party.join, number)
    await trio.sleep(30)


async def test_everybody_knows_everybody_through_a_few_neighbours(
    small_mesh: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    party = Party()
    async with party.network.open(), trio.open_nursery() as nursery:
        await gather(party, nursery, CROWD)
        assert [len(member.presence.others()) for member in party.members] == [CROWD - 1] * CROWD
        told: list[int] = []
        send = Node.send

        def count(node: Node, peers: str | Iterable[str], message: object) -> None:
            if isinstance(message, wire.Members):
                told.append(1 if isinstance(peers, str) else len(list(peers)))
            send(node, peers, message)

        monkeypatch.setattr(Node, "send", count)
        first = party.nodes[0]
        party.members[0].announce(body(first.transport.addresses(), round_=7))
        await trio.sleep(5)
        rounds = [{m.peer: m.body.round for m in member.presence.active()}[first.peer_id] for member in party.members]
        assert rounds == [7] * CROWD
        assert max(told) == NEIGHBOURS
        nursery.cancel_scope.cancel()


async def test_a_member_of_a_crowd_that_looks_for_a_newer_state_states_it_only_if_it_takes_long(small_mesh: None) -> None:
    party = Party()
    async with party.network.open(), trio.open_nursery() as nursery:
        await gather(party, nursery, CROWD)
        (gossip, *others), node = party.members, party.nodes[0]

        def stated() -> set[str]:
            rows = [{row.peer: row.body for row in other.presence.active()} for other in others]
            return {row[node.peer_id].state for row in rows}

        await trio.sleep(RENEW_PERIOD - 30 + GOSSIP_PERIOD / 2)  # It has just renewed its record, and is between two turns.
        looks = replace(body(node.transport.addresses(), round_=6), state=MemberState.SYNCING)
        gossip.announce(looks)
        await trio.sleep(1.2 * GOSSIP_PERIOD)  # It has had one turn.
        assert stated() == {MemberState.TRAINING}
        gossip.announce(body(node.transport.addresses()))
        await trio.sleep(GOSSIP_PERIOD)
        gossip.announce(looks)
        await trio.sleep(1.2 * GOSSIP_PERIOD)
        assert stated() == {MemberState.TRAINING}
        await trio.sleep(GOSSIP_PERIOD)
        assert stated() == {MemberState.SYNCING}
        nursery.cancel_scope.cancel()


async def test_a_newcomer_gets_one_word_of_each_member_at_once() -> None:
    party, words = Party(), list[tuple[str, wire.Met]]()
    async with party.network.open(), trio.open_nursery() as nursery:
        await gather(party, nursery, 12)  # One more is less than `MET_GROWTH`: no word to all is due because of it.
        nursery.start_soon(party.join, 12)
        while len(party.nodes) == 12:
            await trio.lowlevel.checkpoint()
        party.nodes[-1].on_message(wire.Met, lambda peer, word: words.append((peer, word)))
        await trio.sleep(3.0)
        assert sorted(peer for peer, _ in words) == sorted(node.peer_id for node in party.nodes[:-1])
        assert all(len(word.peers) == 12 * wire.TAG_BYTES for _, word in words)
        nursery.cancel_scope.cancel()


async def test_a_word_that_repeats_the_last_one_costs_no_look_at_the_table(
    small_mesh: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    party = Party()
    async with party.network.open(), trio.open_nursery() as nursery:
        await gather(party, nursery, CROWD)
        await trio.sleep(2 * MET_PERIOD)
        looks, review = list[Presence](), Presence.review

        def count(presence: Presence) -> None:
            looks.append(presence)
            review(presence)

        monkeypatch.setattr(Presence, "review", count)
        await trio.sleep(2 * MET_PERIOD)
        assert len(looks) == CROWD * 2 * MET_PERIOD / REVIEW_PERIOD
        nursery.cancel_scope.cancel()


async def test_heartbeats_go_to_those_with_whom_i_share_a_round(small_mesh: None) -> None:
    party = Party()
    async with party.network.open(), trio.open_nursery() as nursery:
        await gather(party, nursery, CROWD)
        partners = [node.peer_id for node in party.nodes[1:4]]
        party.members[0].presence.attend(partners)
        lost: list[str] = []
        party.nodes[0].on_lost(lambda peer, reason: lost.append(peer))
        for node in (party.nodes[2], party.nodes[9]):
            party.network.stall(node.peer_id)
        await trio.sleep(30)
        assert lost == [party.nodes[2].peer_id]
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("count", [3, 12])  # Less than the mesh of eight, and more.
async def test_who_has_no_news_is_still_a_member_after_the_life_of_a_record(small_mesh: None, count: int) -> None:
    party = Party()
    async with party.network.open(), trio.open_nursery() as nursery:
        await gather(party, nursery, count)
        await trio.sleep(3 * LIFETIME)
        assert [len(member.presence.others()) for member in party.members] == [count - 1] * count
        nursery.cancel_scope.cancel()


async def test_a_newcomer_takes_a_table_of_several_pages(small_mesh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gossip_module, "PAGE", 4)
    monkeypatch.setattr("flockstep.dht.members.table.PAGE", 4)

    party = Party()
    async with party.network.open(), trio.open_nursery() as nursery:
        await gather(party, nursery, CROWD)
        nursery.start_soon(party.join, CROWD)
        await trio.sleep(5)
        assert len(party.members[-1].presence.others()) == CROWD
        nursery.cancel_scope.cancel()
