"""A flock for tests: peers of the production code (node, averager) on the network in memory."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import trio
from flockstep.collectives.averager import Averaged, Averager, Contribution, Spec
from flockstep.collectives.codec import CELL, Floats, codec_named
from flockstep.collectives.robust.rules import rule_named
from flockstep.collectives.round.actions import Outcome, OutcomeKind
from flockstep.collectives.state.archive import Archive
from flockstep.collectives.state.merkle import state_root
from flockstep.dht.run.admission import OPEN, Charter
from flockstep.optim.member.apply import decode_outputs, next_root
from flockstep.optim.outer import OuterSettings, outer_step
from flockstep.peer.config import PeerConfig
from flockstep.peer.identity import Identity
from flockstep.peer.memory.network import MemoryNetwork
from flockstep.peer.node.node import Node
from flockstep.peer.telemetry import Event, Telemetry

OUTER = OuterSettings(lr=0.8, momentum=0.5)
RUN = "a" * 52


def identities(count: int) -> list[Identity]:
    return [Identity.from_seed(bytes([index + 1]) * 32) for index in range(count)]


@dataclass
class Bird:
    """One peer: its node, its averager, its state, and what it has told."""

    identity: Identity
    node: Node
    averager: Averager
    theta: Floats
    momentum: Floats
    codec: str
    archive: Archive | None = None
    events: list[Event] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    common: float = 0.0
    """How long what all contribute alike is, in units of what is a peer's own."""

    @property
    def peer(self) -> str:
        return self.identity.peer_id

    @property
    def root(self) -> bytes:
        return state_root(self.theta, self.momentum)

    def delta(self, round_: int) -> Floats:
        """What this peer has to contribute: known to the test, different for every peer and round."""
        seed = int.from_bytes(self.peer.encode()[-4:]) + round_
        own, common = (np.random.default_rng(number).normal(size=self.theta.size) for number in (seed, round_))
        return np.asarray(own + self.common * common, np.float32) * np.float32(1e-3)

    async def round(self, *, tokens: int = 100) -> Outcome:
        """One attempt of the next round; applies it if it is certified."""
        number = self.averager.round
        contribution = Contribution(
            vector=self.delta(number),
            round=number,
            base_root=self.root,
            tokens=tokens,
            steps=10,
            loss=1.0,
            grace=1.0,
        )
        codec = codec_named(self.codec)
        averaged = await self.averager.average(
            contribution,
            lambda bounds, outputs: next_root(self.theta, self.momentum, OUTER, codec, bounds, outputs),
        )
        if averaged.outcome.kind is OutcomeKind.DONE:
            outer_step(self.theta, self.momentum, self.mean_of(averaged), OUTER)
        self.outcomes.append(averaged.outcome)
        return averaged.outcome

    def mean_of(self, averaged: Averaged) -> Floats:
        g = np.empty(self.theta.size, np.float32)
        whole = slice(0, self.theta.size)
        decode_outputs(codec_named(self.codec), averaged.outcome.bounds, averaged.outputs, whole, g)
        return g


@dataclass
class Flock:
    network: MemoryNetwork
    birds: list[Bird]
    launch: Callable[[Identity], Awaitable[Bird]]
    gone: set[str] = field(default_factory=set)

    def kill(self, index: int) -> None:
        peer = self.birds[index].peer
        self.gone.add(peer)
        self.network.kill(peer)

    async def restart(self, index: int) -> Bird:
        """Kill a bird; its next life begins with what its folder holds."""
        identity = self.birds[index].identity
        self.network.kill(identity.peer_id)
        self.birds[index] = await self.launch(identity)
        self.introduce()
        return self.birds[index]

    def introduce(self) -> None:
        """Let everybody know everybody."""
        for bird in self.birds:
            for other in self.birds:
                bird.node.learn(other.peer, (f"/memory/{other.peer}",))
            bird.node.watch([other.peer for other in self.birds])

    def living(self) -> list[Bird]:
        return [bird for bird in self.birds if bird.peer not in self.gone]


async def with_flock(
    count: int,
    body: Callable[[Flock], object],
    *,
    cells: int = 40,
    codec: str = "int4",
    rule: str = "mean",
    seed: int = 0,
    min_peers: int = 1,
    hook: Callable[[Flock, Bird, Event], None] | None = None,
    home: tuple[Path, int] | None = None,
    uploads: Sequence[float] = (),
    charter: Charter = OPEN,
    invites: Mapping[int, bytes] = MappingProxyType({}),
) -> None:
    """Run `body(flock)` with `count` peers who know each other and start from the same state.

    Each has an archive in a folder of its own in `home`, with a checkpoint every so many rounds, if that is given, and
    gives states at so many bytes/s as `uploads` says. The run has a `charter`, some have `invites`, by index.
    """
    network = MemoryNetwork(seed=seed, latency=0.02, jitter=0.01)
    flying = identities(count)
    configs = {identity: PeerConfig(state_upload=rate) for identity, rate in zip(flying, uploads, strict=False)}
    async with network.open(), trio.open_nursery() as nursery:

        async def launch(identity: Identity) -> Bird:
            config = configs.get(identity, PeerConfig())
            admission = charter, invites.get(flying.index(identity), b"")
            bird: Bird = await nursery.start(
                partial(_fly, flock, identity, config, cells, codec, rule, min_peers, hook, home, admission)
            )
            return bird

        flock = Flock(network, [], launch)
        for identity in flying:
            flock.birds.append(await launch(identity))
        flock.introduce()
        await body(flock)  # type: ignore[misc]
        nursery.cancel_scope.cancel()


async def _fly(
    flock: Flock,
    identity: Identity,
    config: PeerConfig,
    cells: int,
    codec: str,
    rule: str,
    min_peers: int,
    hook: Callable[[Flock, Bird, Event], None] | None,
    home: tuple[Path, int] | None,
    admission: tuple[Charter, bytes],
    *,
    task_status: Any,
) -> None:
    telemetry = Telemetry(clock=trio.current_time)
    transport = flock.network.transport(identity.peer_id, telemetry=telemetry)
    lost: set[str] = set()
    async with Node(transport, identity, config, telemetry, inline=True) as node:
        node.on_lost(lambda peer, reason: lost.add(peer))
        spec = Spec(
            run=RUN,
            num_cells=cells,
            contribution=codec_named(codec),
            output=codec_named(codec),
            min_peers=min_peers,
            floor=2.0,
            ceiling=60.0,
            rule=rule_named(rule),
            charter=admission[0],
            invite=admission[1],
        )
        archive, events = None, list[Event]()
        telemetry.subscribe(events.append)
        if home is not None:
            folder, every = home
            archive = await Archive.open(node, spec, folder / identity.peer_id, (), every=every, resume=True)
        outputs = archive.outputs if archive is not None else None
        conduct = archive.conduct if archive is not None else None
        averager = Averager(node, spec, lambda: frozenset(bird.peer for bird in flock.birds) - lost, outputs, conduct)
        theta = np.linspace(-1, 1, cells * CELL).astype(np.float32)
        bird = Bird(identity, node, averager, theta, np.zeros_like(theta), codec, archive, events)
        bird.common = 0.0 if rule == "mean" else 1.0
        if hook is not None:
            telemetry.subscribe(lambda event: hook(flock, bird, event))
        task_status.started(bird)
        await trio.sleep_forever()


async def all_at_once(birds: Sequence[Bird], rounds: int = 1) -> None:
    """Every bird does its rounds; a killed one's task ends with its network."""
    async with trio.open_nursery() as nursery:
        for bird in birds:
            nursery.start_soon(_rounds, bird, rounds)


async def _rounds(bird: Bird, rounds: int) -> None:
    for _ in range(rounds):
        await bird.round()
