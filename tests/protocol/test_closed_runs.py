"""What a closed run gives, and to whom: nothing to strangers, everything to whom it admits."""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
from flockstep.collectives.chain.chain import position_after
from flockstep.collectives.robust.rules import rule_named
from flockstep.collectives.spec import Spec
from flockstep.collectives.state.archive import Archive
from flockstep.collectives.state.merkle import leaves, state_root
from flockstep.collectives.vector.codec import CELL, codec_named
from flockstep.dht.directory.memory import MemoryBoard, MemoryDirectory
from flockstep.dht.members.body import MemberBody, MemberState
from flockstep.dht.members.gossip import Gossip
from flockstep.dht.members.table import MemberTable
from flockstep.dht.published import validate_published
from flockstep.dht.rendezvous import find_members
from flockstep.dht.run.admission import OPEN, Charter, Invitation, Ticket
from flockstep.peer import wire
from flockstep.peer.base.config import PeerConfig
from flockstep.peer.base.errors import NetworkError, UsageError
from flockstep.peer.identity import Identity
from flockstep.peer.log.telemetry import Event, Telemetry
from flockstep.peer.memory.network import MemoryNetwork, run_virtual
from flockstep.peer.node.node import Node
from support.certificates import RUN, certify

OWNER, LISTED, STRANGER, SECOND = (Identity.from_seed(bytes([seed]) * 32) for seed in (1, 2, 3, 4))
ALLOW = Charter(run=RUN, owner=OWNER.peer_id, kind="allow", allowed=frozenset({OWNER.peer_id, LISTED.peer_id}))
INVITE = Charter(run=RUN, owner=OWNER.peer_id, kind="invite")
INVITED = Ticket(Invitation.sign(OWNER, RUN, LISTED.peer_id), b"").credential(LISTED.peer_id)
QUESTIONS = (
    *(wire.StateAsk(RUN), wire.LeavesAsk(RUN, bytes(32)), wire.LedgerAsk(RUN, 1, 16), wire.MembersAsk(RUN, b"")),
    wire.FilesAsk(RUN, b""),
)
CELLS = 12


class World:
    """The owner's peer with a state, and others that ask it."""

    def __init__(self, network: MemoryNetwork, board: MemoryBoard, nursery: trio.Nursery, charter: Charter) -> None:
        self.network, self.board, self.nursery, self.charter = network, board, nursery, charter
        self.events: list[Event] = []
        self.gossips: dict[str, Gossip] = {}
        self.owner: Node
        self.key = bytes(32)

    async def peer(self, identity: Identity) -> Node:
        telemetry = Telemetry(clock=trio.current_time)
        if identity is OWNER:
            telemetry.subscribe(self.events.append)
        transport = self.network.transport(identity.peer_id, telemetry=telemetry)
        node: Node = await self.nursery.start(self._live, Node(transport, identity, PeerConfig(), telemetry, inline=True))
        node.learn(OWNER.peer_id, (f"/memory/{OWNER.peer_id}",))
        return node

    async def _live(self, node: Node, *, task_status: Any) -> None:
        async with node:
            task_status.started(node)
            await trio.sleep_forever()

    def directory(self, node: Node) -> MemoryDirectory:
        return MemoryDirectory(self.board, node.peer_id, node.transport.addresses(), validate_published)

    def join(self, node: Node, invite: bytes = b"") -> Gossip:
        table = MemberTable(RUN, node.peer_id, charter=self.charter)
        gossip = self.gossips[node.peer_id] = Gossip(node, table, self.directory(node), RUN, seed=0)
        gossip.announce(MemberBody(MemberState.TRAINING, node.transport.addresses(), invite=invite))
        self.nursery.start_soon(gossip.run)
        return gossip

    async def found(self, folder: Path) -> None:
        """The owner's peer, with a checkpoint and a certificate."""
        self.owner = await self.peer(OWNER)
        codec = codec_named("int8")
        spec = Spec(run=RUN, num_cells=CELLS, contribution=codec, output=codec, min_peers=1, floor=2.0, ceiling=60.0,
                    rule=rule_named("mean"), charter=self.charter)  # fmt: skip
        archive = await Archive.open(self.owner, spec, folder, (), every=1, resume=False)
        theta = np.linspace(-1, 1, CELLS * CELL).astype(np.float32)
        state = theta, np.zeros_like(theta)
        root, hashes = state_root(*state), leaves(state[0]) + leaves(state[1])
        certificate = certify(None, 100, roster=(OWNER,), mark=root)
        await archive.checkpoints.write(position_after(certificate, RUN), state, hashes)
        archive.ledger.extend([certificate])
        self.key, self.size = hashes[0], theta.nbytes
        self.join(self.owner)


def in_world(charter: Charter, folder: Path, body: Callable[[World], Awaitable[None]]) -> None:
    async def main() -> None:
        network = MemoryNetwork(latency=0.01)
        async with network.open(), trio.open_nursery() as nursery:
            world = World(network, MemoryBoard(), nursery, replace(charter, founders=frozenset({OWNER.peer_id})))
            await world.found(folder)
            await body(world)
            nursery.cancel_scope.cancel()

    run_virtual(main)


async def all_is_given(world: World, node: Node) -> None:
    offer = await node.ask(OWNER.peer_id, wire.StateAsk(RUN))
    page = await node.ask(OWNER.peer_id, wire.LedgerAsk(RUN, 1, 16))
    hashes = (await node.ask(OWNER.peer_id, wire.LeavesAsk(RUN, offer.checkpoints[0][1]))).hashes
    assert (len(offer.checkpoints), len(page.certificates), hashes[0]) == (1, 1, world.key)
    assert len((await node.ask(OWNER.peer_id, wire.MembersAsk(RUN, b""))).records) >= 1
    assert len(await node.fetch(OWNER.peer_id, world.key, world.size)) == world.size


@pytest.mark.parametrize("charter", [ALLOW, INVITE], ids=["allow", "invite"])
def test_a_stranger_is_given_nothing_and_told_why(charter: Charter, tmp_path: Path) -> None:
    async def body(world: World) -> None:
        node = await world.peer(STRANGER)
        for question in QUESTIONS:
            with pytest.raises(NetworkError, match=r"^this run is for its members only: .*[^\n]$"):
                await node.ask(OWNER.peer_id, question)
        with pytest.raises(NetworkError, match="this run is for its members only"):
            await node.fetch(OWNER.peer_id, world.key, world.size)
        refused = [event["step"] for event in world.events if event["event"] == "message.refused"]
        assert refused == [type(question).__name__ for question in QUESTIONS]

    in_world(charter, tmp_path, body)


def test_who_holds_a_spent_invitation_is_told_so(tmp_path: Path) -> None:
    seed = bytes([7]) * 32
    shared = Ticket(Invitation.sign(OWNER, RUN, Identity.from_seed(seed).peer_id, count=2, expires=9), seed)

    async def body(world: World) -> None:
        holders = [world.join(await world.peer(who), shared.credential(who.peer_id)) for who in (LISTED, SECOND)]
        await trio.sleep(5.0)
        for holder in holders:
            holder.check_entry()
        late = world.join(await world.peer(STRANGER), shared.credential(STRANGER.peer_id))
        await trio.sleep(5.0)
        with pytest.raises(UsageError, match="its invitation is spent: 2 of 2 peers use it"):
            late.check_entry()

    in_world(INVITE, tmp_path, body)


def test_who_holds_a_spent_invitation_is_told_so_where_it_meets_nobody_but_the_other_holder(tmp_path: Path) -> None:
    seed = bytes([7]) * 32
    shared = Ticket(Invitation.sign(OWNER, RUN, Identity.from_seed(seed).peer_id, count=1, expires=9), seed)

    async def body(world: World) -> None:
        world.network.cut_pair(OWNER.peer_id, STRANGER.peer_id)
        for who in (LISTED, STRANGER):
            late = world.join(await world.peer(who), shared.credential(who.peer_id))
        await trio.sleep(5.0)
        late.check_entry()  # The run may have to begin yet.
        with pytest.raises(UsageError, match="its invitation is spent: 1 of 1 peers use it"):
            late.check_entry(has_begun=True)

    in_world(INVITE, tmp_path, body)


def test_an_open_run_gives_everything_to_everybody(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        await all_is_given(world, await world.peer(STRANGER))

    in_world(OPEN, tmp_path, body)


def test_who_is_listed_is_given_everything_before_anybody_knows_it(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        await all_is_given(world, await world.peer(LISTED))

    in_world(ALLOW, tmp_path, body)


@pytest.mark.parametrize("charter", [INVITE, replace(ALLOW, allowed=frozenset({OWNER.peer_id}))], ids=["invite", "allow"])
def test_an_invitation_opens_the_run_as_soon_as_a_record_shows_it(charter: Charter, tmp_path: Path) -> None:
    async def body(world: World) -> None:
        node = await world.peer(LISTED)
        with pytest.raises(NetworkError, match="shows no invitation"):
            await node.ask(OWNER.peer_id, wire.StateAsk(RUN))
        gossip = world.join(node, INVITED)
        await gossip.looked.wait()
        await all_is_given(world, node)
        assert OWNER.peer_id in gossip.presence.others()
        assert not [event for event in world.events if event["event"] == "gossip.failed"]

    in_world(charter, tmp_path, body)


@pytest.mark.parametrize("charter", [INVITE, replace(ALLOW, allowed=frozenset({OWNER.peer_id}))], ids=["invite", "allow"])
def test_an_invitation_opens_the_data_of_a_run_before_its_holder_is_a_member(charter: Charter, tmp_path: Path) -> None:
    async def body(world: World) -> None:
        node = await world.peer(LISTED)
        with pytest.raises(NetworkError, match="does not answer FilesAsk"):  # Nothing provides files here.
            await node.ask(OWNER.peer_id, wire.FilesAsk(RUN, INVITED))
        await all_is_given(world, node)
        other = await world.peer(STRANGER)
        for question in (wire.FilesAsk(RUN, INVITED), wire.StateAsk(RUN)):
            with pytest.raises(NetworkError, match="this run is for its members only"):
                await other.ask(OWNER.peer_id, question)

    in_world(charter, tmp_path, body)


def test_a_spent_invitation_opens_no_data(tmp_path: Path) -> None:
    seed = bytes([7]) * 32
    shared = Ticket(Invitation.sign(OWNER, RUN, Identity.from_seed(seed).peer_id, count=1), seed)

    async def body(world: World) -> None:
        world.join(await world.peer(LISTED), shared.credential(LISTED.peer_id))
        await trio.sleep(5.0)
        late = await world.peer(SECOND)
        for question in (wire.FilesAsk(RUN, shared.credential(SECOND.peer_id)), wire.StateAsk(RUN)):
            with pytest.raises(NetworkError, match="this run is for its members only"):
                await late.ask(OWNER.peer_id, question)

    in_world(INVITE, tmp_path, body)


def test_another_ones_invitation_opens_nothing(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        node = await world.peer(STRANGER)
        world.join(node, INVITED)
        await trio.sleep(30)
        with pytest.raises(NetworkError, match="this run is for its members only"):
            await node.ask(OWNER.peer_id, wire.StateAsk(RUN))

    in_world(INVITE, tmp_path, body)


def test_a_visitor_of_a_closed_run_lists_the_members_that_the_directory_names(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        await trio.sleep(5)
        node = await world.peer(STRANGER)
        members = await find_members(node, world.directory(node), RUN)
        assert [member.peer for member in members] == [OWNER.peer_id]

    in_world(ALLOW, tmp_path, body)
