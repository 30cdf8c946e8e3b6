"""Members as the network process runs them, on a network in memory; their inner phases are sleep."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import trio
from flockstep.collectives.allreduce.actions import OutcomeKind
from flockstep.collectives.averager import Averager
from flockstep.collectives.chain.chain import ChainPosition, Head
from flockstep.collectives.chain.fork_choice import position_in_body, training
from flockstep.collectives.codec import CELL, codec_named
from flockstep.collectives.spec import Spec
from flockstep.collectives.state.archive import Archive
from flockstep.dht.directory.memory import MemoryBoard, MemoryDirectory
from flockstep.dht.members.body import MemberBody, MemberState
from flockstep.dht.members.gossip import Gossip
from flockstep.dht.members.table import MemberTable
from flockstep.dht.published import validate_published
from flockstep.dht.run.admission import OPEN, Charter
from flockstep.optim.member.apply import leaf_step
from flockstep.optim.member.catch_up import CatchUp
from flockstep.optim.member.held import HeldState
from flockstep.peer.config import PeerConfig
from flockstep.peer.identity import Identity
from flockstep.peer.memory.network import MemoryNetwork
from flockstep.peer.node.node import Node
from flockstep.peer.telemetry import Event, Telemetry
from support.swarm import OUTER, RUN, SimPeer

CELLS = 8
PHASE = 40.0
"""Seconds of an inner phase: members exchange their tables a few times in it, as in a real run."""


class Migrant:
    """A member as the network process runs it: gossip, rounds, ledger, catching up; its inner phases are sleep."""

    def __init__(self, identity: Identity, network: MemoryNetwork, board: MemoryBoard, tokens: int) -> None:
        self.identity = identity
        self.network = network
        self.board = board
        self.tokens = tokens
        self.published: Head | None = None
        self.anchor: Head | None = None
        self.charter = OPEN
        self.events: list[Event] = []
        self.done = 0

    async def live(self, folder: Path) -> None:
        me = self.identity.peer_id
        telemetry = Telemetry(clock=trio.current_time)
        telemetry.subscribe(self.events.append)
        transport = self.network.transport(me, telemetry=telemetry)
        async with Node(transport, self.identity, PeerConfig(), telemetry, inline=True) as node:
            self.node = node
            self.directory = MemoryDirectory(self.board, me, transport.addresses(), validate_published)
            self.gossip = Gossip(node, MemberTable(RUN, me), self.directory, RUN, seed=0)
            codec = codec_named("int4")
            spec = Spec(
                run=RUN,
                num_cells=CELLS,
                contribution=codec,
                output=codec,
                min_peers=1,
                floor=2.0,
                ceiling=20.0,
                charter=self.charter,
            )
            self.archive = await Archive.open(node, spec, folder / me, (), leaf_step(OUTER, codec), every=10, resume=False)
            self.ledger = self.archive.ledger
            averager = Averager(
                node,
                spec,
                lambda: frozenset(m.peer for m in training(self.gossip.presence.active())),
                self.archive.outputs,
            )
            self.gossip.presence.on_newcomer(averager.add_member)
            theta = np.linspace(-1, 1, CELLS * CELL).astype(np.float32)
            self.sim = SimPeer(self.identity, node, averager, theta, np.zeros_like(theta), "int4")
            self.held = HeldState(node, spec, OUTER, (self.sim.theta, self.sim.momentum), self.archive)
            self.catch_up = CatchUp(node, spec, self.held, self.archive, anchor=self.anchor)
            self.body = MemberBody(state=MemberState.SYNCING, addresses=transport.addresses(), layout=b"m" * 32)
            self.gossip.announce(self.body)
            node.nursery.start_soon(self.gossip.run)
            await self.gossip.looked.wait()
            await self.sync()
            while True:
                await self.phase()

    async def sync(self) -> None:
        await self.catch_up.reach(self.gossip, 15.0, published=self.published, rounds=9)
        await self.held.advance(self.held.place)
        await self.settle()

    async def settle(self) -> None:
        place = self.held.place
        self.sim.averager.expect(place.round + 1, place.certificate)
        await self.archive.checkpoints.write(place, self.held.vectors, self.held.leaves[0] + self.held.leaves[1])
        self.body = replace(
            self.body,
            state=MemberState.TRAINING,
            root=place.root,
            **position_in_body(place),
        )
        self.gossip.announce(self.body)

    def behind(self) -> bool:
        return self.sim.averager.behind or self.catch_up.follows_another_chain(self.gossip.presence.active())

    async def phase(self) -> None:
        """An inner phase and an attempt of a round, or catching up as soon as the others are further."""
        until = trio.current_time() + PHASE
        while trio.current_time() < until:
            if self.behind():
                await self.sync()
            self.gossip.announce(self.body)
            await trio.sleep(5.0)
        outcome = await self.sim.round(tokens=self.tokens)
        if outcome.kind is OutcomeKind.DONE:
            place = ChainPosition(outcome.slot.round, outcome.value.next_root, outcome.value.tokens, outcome.certificate)
            await self.held.advance(place)
            await self.held.hash()
            await self.settle()
            self.done += 1

    @property
    def round(self) -> int:
        return self.held.place.round

    def named(self, name: str) -> list[Event]:
        return [event for event in self.events if event["event"] == name]


def found(founders: Sequence[Migrant], *others: Migrant) -> None:
    """Give all of them the charter of a run with these founders."""
    for migrant in (*founders, *others):
        migrant.charter = Charter(founders=frozenset(founder.identity.peer_id for founder in founders))


async def wait_for(condition: Callable[[], bool], patience: float) -> None:
    with trio.fail_after(patience):
        while not condition():  # noqa: ASYNC110  Virtual time, and no one event of many peers to await.
            await trio.sleep(1.0)
