"""Peers of a `SimSwarm` with archives: they catch up, provide states, and restart."""

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import trio
from flockstep.collectives.allreduce.actions import OutcomeKind
from flockstep.collectives.chain.chain import ChainPosition
from flockstep.collectives.state import merkle
from flockstep.dht.members.body import MemberBody, MemberState
from flockstep.dht.members.table import Member
from flockstep.dht.records import Record
from flockstep.optim.member.catch_up import CatchUp
from flockstep.optim.member.held import HeldState
from flockstep.optim.step.outer import OuterSettings
from flockstep.peer.log.telemetry import Event
from flockstep.peer.memory.network import run_virtual
from support.swarm import OUTER, RUN, SimPeer, SimSwarm, with_swarm

CELLS = 40


class RestoringPeer:
    """A `SimPeer` with an archive, which follows its rounds, and a `CatchUp`."""

    def __init__(self, sim: SimPeer, outer: OuterSettings = OUTER) -> None:
        assert sim.archive is not None
        self.sim = sim
        self.archive = sim.archive
        self.ledger = sim.archive.ledger
        self.state = sim.theta, sim.momentum
        self.held = HeldState(sim.node, sim.averager._spec, outer, self.state, sim.archive)
        self.catch_up = CatchUp(sim.node, sim.averager._spec, self.held, sim.archive)

    @property
    def place(self) -> ChainPosition:
        return self.held.place

    async def rounds(self, count: int) -> None:
        for _ in range(count):
            outcome = await self.sim.round()
            assert outcome.kind is OutcomeKind.DONE
            place = ChainPosition(outcome.slot.round, outcome.value.next_root, outcome.value.tokens, outcome.certificate)
            await self.held.advance(place)

    async def examine(self, members: Sequence[Member]) -> bool:
        """Read on to the heads that members state; returns whether all claims that matter were compared."""
        chain = self.catch_up.chain
        chain.ask(members, self.place)
        while chain.asked_for:
            await chain.changed.wait()
        return not chain.unproven(members, self.place)

    async def serve_state(self) -> None:
        """Write a checkpoint of the current state, if one is due."""
        await self.held.hash()
        leaves = merkle.leaves(self.sim.theta) + merkle.leaves(self.sim.momentum)
        await self.archive.checkpoints.write(self.place, self.state, leaves)

    def member(self, **other: int | bytes) -> Member:
        at = self.place
        stated = {"round": at.round, "root": at.root, "head": at.head.hash, "chain_tokens": at.tokens, **other}
        body = MemberBody(state=MemberState.TRAINING, **stated)  # type: ignore[arg-type]
        return Member(Record(RUN, "member", self.sim.peer, 1, 60.0, b"", bytes(64)), body, expires=60.0)

    def named(self, name: str) -> list[Event]:
        return [event for event in self.sim.events if event["event"] == name]


async def all_of(sims: Sequence[RestoringPeer], rounds: int) -> None:
    async with trio.open_nursery() as nursery:
        for sim in sims:
            nursery.start_soon(sim.rounds, rounds)


async def catch_up(late: RestoringPeer, others: Sequence[RestoringPeer]) -> None:
    members = [other.member() for other in others]
    await late.examine(members)
    provider = late.catch_up.provider(members)
    assert provider is not None
    await late.catch_up.take_from(provider, members)


Body = Callable[[SimSwarm, list[RestoringPeer], RestoringPeer], Awaitable[None]]


def run_rounds(
    count: int, missed: int, body: Body, folder: Path, *, codec: str = "int4", outer: OuterSettings = OUTER
) -> None:
    """All do one round together; the last one misses so many; then `body(swarm, others, it)`."""

    async def main(swarm: SimSwarm) -> None:
        sims = [RestoringPeer(sim, outer if sim is swarm.sims[-1] else OUTER) for sim in swarm.sims]
        await all_of(sims, 1)
        *others, late = sims
        swarm.sims.remove(late.sim)
        await all_of(others, missed)
        await late.held.hash()
        await body(swarm, others, late)

    run_virtual(lambda: with_swarm(count, main, cells=CELLS, codec=codec, home=(folder, 100)))
