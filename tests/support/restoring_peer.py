"""Birds with archives: what it takes to catch up with a flock, to give it states, and to go on after a death."""

from collections.abc import Sequence

import trio
from flockstep.collectives.place import Place
from flockstep.collectives.round.actions import OutcomeKind
from flockstep.collectives.state import merkle
from flockstep.dht.members.table import Member, MemberBody, MemberState
from flockstep.dht.records import Record
from flockstep.optim.member.catch_up import CatchUp
from flockstep.optim.outer import OuterSettings
from flockstep.peer.telemetry import Event
from support.swarm import OUTER, RUN, Bird


class Fledgling:
    """A bird with an archive, which follows its rounds, and with what it takes to catch up."""

    def __init__(self, bird: Bird, outer: OuterSettings = OUTER) -> None:
        assert bird.archive is not None
        self.bird = bird
        self.archive = bird.archive
        self.ledger = bird.archive.ledger
        self.state = bird.theta, bird.momentum
        self.catch_up = CatchUp(bird.node, bird.averager._spec, outer, self.state, bird.archive)

    @property
    def place(self) -> Place:
        return self.catch_up.place

    async def rounds(self, count: int) -> None:
        for _ in range(count):
            outcome = await self.bird.round()
            assert outcome.kind is OutcomeKind.DONE
            await self.catch_up.advance(Place(outcome.slot.round, outcome.root, outcome.tokens, outcome.certificate))

    async def serve_state(self) -> None:
        """Make a checkpoint of the state as it is, if it is time for one."""
        await self.catch_up.hash_state()
        leaves = merkle.leaves(self.bird.theta) + merkle.leaves(self.bird.momentum)
        await self.archive.checkpoints.write(self.place, self.state, leaves)

    def member(self, **other: int | bytes) -> Member:
        at = self.place
        stated = {"round": at.round, "root": at.root, "head": at.head.hash, "chain_tokens": at.tokens, **other}
        body = MemberBody(state=MemberState.TRAINING, **stated)  # type: ignore[arg-type]
        return Member(Record(RUN, "member", self.bird.peer, 1, 60.0, b"", bytes(64)), body, expires=60.0)

    def named(self, name: str) -> list[Event]:
        return [event for event in self.bird.events if event["event"] == name]


async def all_of(birds: Sequence[Fledgling], rounds: int) -> None:
    async with trio.open_nursery() as nursery:
        for bird in birds:
            nursery.start_soon(bird.rounds, rounds)


async def catch_up(late: Fledgling, others: Sequence[Fledgling]) -> None:
    members = [other.member() for other in others]
    await late.catch_up.examine(members)
    giver = late.catch_up.giver(members)
    assert giver is not None
    await late.catch_up.take_from(giver, members)
