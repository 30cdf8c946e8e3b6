"""A member of a real run that breaks the rules: the network process of `flockstep join`, of which one thing is replaced.

    cd tests && PYTHONPATH=. python -m attacks.peer lying_owner join LINK --home /tmp/liar

`honest`, or an attack by name, with a scale where it takes one (`noise:3`): those on the protocol are of `scripts.liars`,
those on what is contributed of `scripts.attacks`, here by one who knows no contribution but its own. What follows are the
words of the `flockstep` command, whose trainer is as it always is.

The tests have no trainer, for torch takes seconds to load: they command the process over the bridge, `corrupt` tells the
attack, and `stand` and `train` do what the trainer would, with random numbers for a gradient.
"""

import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import trio
from flockstep.collectives.averager import Averager
from flockstep.collectives.codec import CELL
from flockstep.collectives.state.archive import Archive
from flockstep.optim import network
from flockstep.optim.outer import outer_step
from flockstep.optim.participant import VECTORS, Participant
from flockstep.peer.digest import DIGEST_BYTES, keyed
from flockstep.peer.process.bridge import Channel, Payload
from flockstep.peer.process.shared import Floats, SharedVectors
from flockstep.peer.telemetry import Event
from flockstep.scripts.attacks.gradients import Attack, Attackers
from flockstep.scripts.attacks.protocol import LIARS, TOGETHER, made
from flockstep.scripts.simulate_attack import careless

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


class Peer(Participant):
    """The network process of one member, corrupted as soon as it could say its first word."""

    def __init__(self, attack: str, channel: Channel, nursery: trio.Nursery) -> None:
        super().__init__(channel, nursery)
        self.handlers |= {"corrupt": self._corrupt, "stand": self._stand, "train": self._train, "fall": self._fall}
        self._corruption: Payload = {"attack": attack, "fellows": []}
        self._attack: Attack | None = None

    @property
    def averager(self) -> Averager:
        """Its rounds."""
        return self._averager

    @property
    def archive(self) -> Archive:
        """What it keeps."""
        return self._archive

    @property
    def peer(self) -> str:
        """Its id."""
        return self._node.peer_id

    async def _corrupt(self, payload: Payload) -> None:
        """Make this attack, together with these fellows."""
        self._corruption = payload

    async def _attach(self, payload: Payload) -> Payload:
        answer = await super()._attach(payload)
        self.node, self.identity = self._node, self._node.identity
        name, _, scale = self._corruption["attack"].partition(":")
        if name == HONEST:
            return answer
        attackers = Attackers.parse(f"{name}:1:{scale}" if scale else f"{name}:1", LIARS)
        if name in LIARS:
            options: dict[str, Any] = {} if attackers.scale is None else {"scale": attackers.scale}
            options |= {"fellows": self._corruption["fellows"]} if name in TOGETHER else {}
            LIARS[name](self, **options)
        else:
            self._attack, spec = attackers.fresh(), self._averager._spec
            self._averager._spec = replace(spec, contribution=careless(spec.contribution))
        return answer

    async def _average(self, payload: Payload) -> Payload:
        if self._attack is not None:
            own: Floats = self._vectors["exchange"][None]
            draw = np.random.default_rng(self._place.round)
            with np.errstate(all="ignore"):
                own[:] = self._attack(own.copy(), own.copy(), self._place.round, draw)
            made(self, "contribute")
        return await super()._average(payload)

    async def _stand(self, payload: Payload) -> Payload:
        """Become a member with a model of a few thousand parameters, the same for all, and hold the run's state."""
        vectors = SharedVectors.create(VECTORS, NUM_CELLS * CELL)
        vectors["theta"][:] = np.linspace(-1, 1, NUM_CELLS * CELL)
        await self._attach({"path": str(vectors.path), "num_cells": NUM_CELLS, "tensors": []})
        vectors.unlink()
        blank = {"round": 0, "root": bytes(DIGEST_BYTES).hex(), "tokens": 0, "certificate": ""}
        model = keyed("the model of the attacks' tests").hex()
        await self._join({**blank, "device": "cpu", "version": "0", "layout": model, "frozen": model})
        return await self._sync({})

    async def _train(self, payload: Payload) -> Payload:
        """Take part in rounds, in as many attempts as it takes, until this one is behind me; first wait for the members."""
        vectors, members = self._vectors, frozenset(payload["members"])
        while members and self._trainers() != members:
            await self._gossip.changed()
        while self._place.round < payload["round"]:
            if self._averager.behind:
                await self._sync({})
                continue
            vectors["exchange"][:] = self._gradient(self._place.round + 1)
            seconds = {"grace": GRACE, "seconds": GRACE}
            work = {"tokens": STEPS * TOKENS_PER_STEP, "steps": STEPS, "loss": 1.0, "ramp": 1.0}
            answer = await self._average({**work, **seconds})
            if answer["kind"] == "done":
                outer_step(vectors["theta"], vectors["momentum"], vectors["exchange"], self._outer)
                await self._applied({})
            else:
                await trio.sleep(RETRY)
        return self._standing()

    async def _fall(self, payload: Payload) -> None:
        """Be killed with SIGKILL the moment after this word has been handed to the network."""

        async def strike() -> None:
            for session in list(self._node._sessions.values()):
                await session.drain(DRAIN)
            os.kill(os.getpid(), signal.SIGKILL)

        def hear(event: Event) -> None:
            if event["event"] == "round.said" and event["step"] == payload["at"]:
                self._nursery.start_soon(strike)

        self._telemetry.subscribe(hear)

    def _gradient(self, round_: int) -> Floats:
        """What this peer brings: a direction that all share, and one of its own as long."""
        seeds = (round_, int.from_bytes(self.peer.encode()[-4:]) + round_)
        common, own = (np.random.default_rng(seed).normal(size=NUM_CELLS * CELL) for seed in seeds)
        return ((common + own) * 1e-3).astype(np.float32)


async def serve(attack: str, channel: Channel) -> None:
    """The network process, until its trainer closes the pipe."""
    async with trio.open_nursery() as nursery:
        await channel.serve(Peer(attack, channel, nursery).handlers)
        nursery.cancel_scope.cancel()


def entry(attack: str) -> str:
    """What to tell the bridge, so that the network process makes this attack."""
    return f"attacks.peer:{attack}"


def __getattr__(attack: str) -> Callable[[Channel], Any]:
    """The entry point of an attack, which the bridge looks up here by its name."""
    if attack.startswith("__"):
        raise AttributeError(attack)
    return partial(serve, attack)


if __name__ == "__main__":
    from flockstep.scripts.cli.main import main as flockstep

    network.ENTRY = entry(sys.argv.pop(1))
    os.environ["PYTHONPATH"] = os.pathsep.join((TESTS, os.environ.get("PYTHONPATH", "")))
    flockstep()
