"""Members as the network process runs them, on a network in memory; their inner phases are sleep."""

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import numpy as np
import trio
from flockstep.collectives.allreduce.actions import OutcomeKind
from flockstep.collectives.chain.chain import Head
from flockstep.collectives.driver.contribution import Contribution
from flockstep.collectives.spec import Spec
from flockstep.collectives.state.archive import Archive
from flockstep.collectives.state.merkle import state_root
from flockstep.collectives.vector.codec import CELL, FlatSum, codec_named
from flockstep.dht.directory.memory import MemoryBoard, MemoryDirectory
from flockstep.dht.members.body import MemberBody, MemberState
from flockstep.dht.members.gossip import Gossip
from flockstep.dht.members.table import MemberTable
from flockstep.dht.published import validate_published
from flockstep.dht.run.admission import OPEN, Charter
from flockstep.optim.member.member import Member
from flockstep.optim.member.reach import Contact
from flockstep.peer.base.config import PeerConfig
from flockstep.peer.identity import Identity
from flockstep.peer.log.telemetry import Event, Telemetry
from flockstep.peer.memory.network import MemoryNetwork, run_virtual
from flockstep.peer.node.node import Node
from support.swarm import OUTER, RUN, delta_of, identities

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
        self.starts = True
        """Whether it may start the run, as a keeper may not."""
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
            table = MemberTable(RUN, me)
            self.gossip = Gossip(node, table, self.directory, RUN, seed=0)
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
            archive = await Archive.open(node, spec, folder / me, (), every=10, resume=False)
            self.ledger = archive.ledger
            theta = np.linspace(-1, 1, CELLS * CELL).astype(np.float32)
            body = MemberBody(state=MemberState.SYNCING, layout=b"m" * 32)
            self.contact = Contact(node, table, self.gossip, body)
            vectors = theta, np.zeros_like(theta)
            self.member = Member(self.contact, spec, OUTER, vectors, archive, anchor=self.anchor)
            self.catch_up, self.held = self.member.catch_up, self.member.held
            self.contact.announce()
            self.contact.begin(self.held.place.head)
            await self.gossip.looked.wait()
            await self.sync()
            while True:
                await self.phase()

    async def sync(self) -> None:
        if self.published is not None:
            await self.catch_up.reach(self.gossip, 15.0, published=self.published, rounds=9)
        await self.member.sync(compare=True, starts=self.starts)

    async def phase(self) -> None:
        """An inner phase and an attempt of a round, or catching up as soon as the others are further."""
        until = trio.current_time() + PHASE
        while trio.current_time() < until:
            if self.member.is_behind:
                await self.sync()
            self.contact.announce()
            await trio.sleep(5.0)
        number, place = self.member.averager.round, self.held.place
        contribution = Contribution(
            vector=FlatSum([delta_of(self.identity.peer_id, CELLS * CELL, number)]),
            round=number,
            base_root=place.root,
            tokens=self.tokens,
            steps=10,
            loss=1.0,
            grace=1.0,
        )
        averaged = await self.member.average(contribution)
        self.done += averaged.outcome.kind is OutcomeKind.DONE

    @property
    def body(self) -> MemberBody:
        return self.contact.body

    @property
    def root(self) -> bytes:
        return state_root(*self.held.vectors)

    @property
    def round(self) -> int:
        return self.held.place.round

    def named(self, name: str) -> list[Event]:
        return [event for event in self.events if event["event"] == name]


class Town:
    """A network in memory with a directory, on which members live until the test ends."""

    def __init__(self, nursery: trio.Nursery, network: MemoryNetwork) -> None:
        self.nursery = nursery
        self.network = network
        self.board = MemoryBoard()

    def migrants(self, count: int) -> list[Migrant]:
        return [Migrant(identity, self.network, self.board, 100) for identity in identities(count)]

    def start(self, folder: Path, *migrants: Migrant) -> None:
        for migrant in migrants:
            self.nursery.start_soon(migrant.live, folder)


def in_town(body: Callable[[Town], Awaitable[None]]) -> None:
    """Run `body(town)` in virtual time, and end all members."""

    async def main() -> None:
        network = MemoryNetwork(seed=1, latency=0.02, jitter=0.01)
        async with network.open(), trio.open_nursery() as nursery:
            await body(Town(nursery, network))
            nursery.cancel_scope.cancel()

    run_virtual(main)


def found(founders: Sequence[Migrant], *others: Migrant) -> None:
    """Give all of them the charter of a run with these founders."""
    for migrant in (*founders, *others):
        migrant.charter = Charter(founders=frozenset(founder.identity.peer_id for founder in founders))


async def wait_for(condition: Callable[[], bool], patience: float) -> None:
    with trio.fail_after(patience):
        while not condition():  # noqa: ASYNC110  Virtual time, and no one event of many peers to await.
            await trio.sleep(1.0)
