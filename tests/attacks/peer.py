"""A member of a real run that attacks: `join`'s network process with one method replaced.

    cd tests && PYTHONPATH=. python -m attacks.peer lying_owner join LINK --home /tmp/liar

`honest`, or an attack of `scripts.lab.attacks.protocol` by name. The other arguments are those of the `flockstep` command,
whose trainer is unchanged.

The tests have no trainer, since torch takes seconds to load: they command the process over the bridge, `Corrupt` names the
attack, and `Stand` and `Train` do what the trainer would, with random numbers for a gradient.
"""

import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import trio
from flockstep.collectives.allreduce.actions import OutcomeKind
from flockstep.collectives.chain.chain import ChainPosition
from flockstep.collectives.driver.rounds import Averager
from flockstep.collectives.vector.arrays import Floats
from flockstep.collectives.vector.codec import CELL, codec_named, round_into
from flockstep.optim.member import client
from flockstep.optim.member.border import (
    AttachVectors,
    AverageDelta,
    JoinRun,
    SyncState,
    TrainingVectors,
    vectors_of,
)
from flockstep.optim.member.member import Member
from flockstep.optim.member.participant import Connected, Participant, serve
from flockstep.peer.base.digest import keyed
from flockstep.peer.base.transport import PeerId
from flockstep.peer.log.telemetry import Event
from flockstep.peer.process.bridge import Channel, Command, Handler
from flockstep.peer.process.shared import SharedVectors
from flockstep.scripts.lab.attacks.protocol import LIARS

HONEST = "honest"
TESTS = str(Path(__file__).parents[1])
NUM_CELLS = 40
STEPS, TOKENS_PER_STEP = 10, 10
GRACE = 20.0
"""Seconds that slower members get: on a busy machine all must be in the round that a test is about."""
RETRY = 0.1
"""Seconds between attempts of a round."""
DRAIN = 1.0
"""Seconds for what is under way to whom, at most."""


@dataclass(frozen=True, slots=True)
class Corrupt(Command[None]):
    """Make this attack."""

    attack: str


@dataclass(frozen=True, slots=True)
class Stand(Command[ChainPosition]):
    """Become a member with a model of a few thousand parameters, the same for all, and hold the run's state."""


@dataclass(frozen=True, slots=True)
class Train(Command[ChainPosition]):
    """Take part in rounds, in as many attempts as it takes, until this one is behind me; first wait for the members."""

    round: int
    members: tuple[PeerId, ...]


@dataclass(frozen=True, slots=True)
class Fall(Command[None]):
    """Be killed with SIGKILL the moment after this message has been handed to the network."""

    at: str


class Corruptor(Connected):
    """A peer that has reached its run and will be corrupted as soon as it is a member."""

    corruption = Corrupt(HONEST)

    def handlers(self) -> Sequence[Handler]:
        return *super().handlers(), Corrupt.handled_by(self._corrupt), Stand.handled_by(self._stand)

    def make_participant(self, vectors: TrainingVectors, member: Member) -> Participant:
        return Peer(self.corruption, self, vectors, member)

    async def _corrupt(self, command: Corrupt) -> None:
        self.corruption = command

    async def _stand(self, command: Stand) -> ChainPosition:
        manifest = self.reached.signed.manifest
        codec = codec_named(manifest.codec.contribution)
        shared = SharedVectors.create(vectors_of(NUM_CELLS, manifest.outer.fragments, codec))
        shared["theta"][:] = np.linspace(-1, 1, NUM_CELLS * CELL)
        assert shared.path is not None
        participant = await self.participant(AttachVectors(shared.path, NUM_CELLS, ()))
        self.channel.handle(*participant.handlers())
        shared.unlink()
        model = keyed("the model of the attacks' tests")
        await participant.join(JoinRun("cpu", "0", model, model))
        return (await participant.sync(SyncState())).position


class Peer(Participant):
    """The network process of one member, corrupted before it can send its first message."""

    def __init__(
        self, corruption: Corrupt, connected: Connected, vectors: TrainingVectors, member: Member
    ) -> None:
        super().__init__(connected, vectors, member)
        self.node, self.identity = self._node, self._node.identity
        self._training = trio.Lock()
        if corruption.attack != HONEST:
            LIARS[corruption.attack](self)

    @property
    def averager(self) -> Averager:
        """Its rounds."""
        return self.member.averager

    @property
    def peer(self) -> str:
        """Its id."""
        return self._node.peer_id

    def handlers(self) -> Sequence[Handler]:
        return *super().handlers(), Train.handled_by(self._train), Fall.handled_by(self._fall)

    async def _train(self, command: Train) -> ChainPosition:
        vectors, members = self._vectors, frozenset(command.members)
        async with self._training:  # Who has no vote ends a round after the others, which may be in the next one.
            while members and self.member.expected() != members:
                await self._presence.changed()
            while self._position.round < command.round:
                if self.averager.behind:
                    await self.sync(SyncState())
                    continue
                round_into(self._gradient(self._position.round + 1), vectors.delta)
                work = AverageDelta(
                    tokens=STEPS * TOKENS_PER_STEP, steps=STEPS, loss=1.0, grace=GRACE, seconds=GRACE, ramp=1.0, patience=0.0
                )
                if (await self.average_delta(work)).kind is not OutcomeKind.DONE:
                    await trio.sleep(RETRY)
        return self._position

    async def _fall(self, command: Fall) -> None:
        async def strike() -> None:
            for session in list(self._node._sessions.values()):
                await session.drain(DRAIN)
            os.kill(os.getpid(), signal.SIGKILL)

        def receive(event: Event) -> None:
            if event["event"] == "round.said" and event["step"] == command.at:
                self._nursery.start_soon(strike)

        self._telemetry.subscribe(receive)

    def _gradient(self, round_: int) -> Floats:
        """What this peer brings: a direction that all share, and one of its own as long."""
        seeds = (round_, int.from_bytes(self.peer.encode()[-4:]) + round_)
        common, own = (np.random.default_rng(seed).normal(size=NUM_CELLS * CELL) for seed in seeds)
        return ((common + own) * 1e-3).astype(np.float32)


async def corrupted(attack: str, channel: Channel) -> None:
    """The network process, until its trainer closes the pipe."""
    await serve(channel, type("Attacker", (Corruptor,), {"corruption": Corrupt(attack)}))


def entry(attack: str) -> str:
    """What to tell the bridge, so that the network process makes this attack."""
    return f"attacks.peer:{attack}"


def __getattr__(attack: str) -> Callable[[Channel], Any]:
    """The entry point of an attack, which the bridge looks up here by its name."""
    if attack.startswith("__"):
        raise AttributeError(attack)
    return partial(corrupted, attack)


if __name__ == "__main__":
    from flockstep.scripts.cli.main import main as flockstep

    client.ENTRY = entry(sys.argv.pop(1))
    os.environ["PYTHONPATH"] = os.pathsep.join((TESTS, os.environ.get("PYTHONPATH", "")))
    flockstep()
