"""A swarm for tests: production nodes and averagers on a network in memory."""

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import trio
from flockstep.collectives.allreduce.actions import Outcome, OutcomeKind
from flockstep.collectives.driver.contribution import Contribution
from flockstep.collectives.driver.rounds import Averager
from flockstep.collectives.robust.rules import rule_named
from flockstep.collectives.spec import Spec
from flockstep.collectives.state.archive import Archive
from flockstep.collectives.state.merkle import state_root
from flockstep.collectives.vector.arrays import Floats
from flockstep.collectives.vector.codec import CELL, FlatSum, codec_named
from flockstep.collectives.vector.mixed import codecs_named
from flockstep.dht.run.admission import OPEN, Charter
from flockstep.optim.member.apply import OuterState
from flockstep.optim.step.outer import OuterSettings
from flockstep.peer.base.config import PeerConfig
from flockstep.peer.identity import Identity
from flockstep.peer.log.telemetry import Event, Telemetry
from flockstep.peer.memory.network import MemoryNetwork
from flockstep.peer.node.node import Node

OUTER = OuterSettings(lr=0.8, momentum=0.5)
RUN = "a" * 52


def identities(count: int) -> list[Identity]:
    return [Identity.from_seed(bytes([index + 1]) * 32) for index in range(count)]


def delta_of(peer: str, size: int, round_: int, common: float = 0.0) -> Floats:
    """Return a peer's own direction in a round, plus `common` times the one that all have in it."""
    seed = int.from_bytes(peer.encode()[-4:]) + round_
    own, shared = (np.random.default_rng(number).normal(size=size) for number in (seed, round_))
    return np.asarray(own + common * shared, np.float32) * np.float32(1e-3)


@dataclass
class SimPeer:
    """One peer: its node, averager, state, and events."""

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
    """The norm of the common direction, relative to that of a peer's own."""
    lost: set[str] = field(default_factory=set)
    """The peers that it has lost, which it does not wait for."""
    phase_seconds: float = math.inf
    """The duration that its inner phases state."""
    patience: float = 0.0
    """The seconds to its next round, where it trains on while this one runs."""
    trains: bool = True
    """False for a keeper."""

    @property
    def peer(self) -> str:
        return self.identity.peer_id

    @property
    def root(self) -> bytes:
        return state_root(self.theta, self.momentum)

    def delta(self, round_: int) -> Floats:
        """Return this peer's contribution: known to the test, different for every peer and round."""
        return delta_of(self.peer, self.theta.size, round_, self.common)

    async def round(self, *, tokens: int = 100) -> Outcome:
        """Run one attempt of the next round, and apply it if it is certified."""
        number = self.averager.round
        contribution = Contribution(
            vector=FlatSum([self.delta(number)]) if self.trains else None,
            round=number,
            base_root=self.root,
            tokens=tokens if self.trains else 0,
            steps=10,
            loss=1.0,
            grace=1.0,
            seconds=self.phase_seconds,
            patience=self.patience,
        )
        codec = codec_named(self.codec)
        averaged = await self.averager.average(
            contribution,
            OuterState(self.theta, self.momentum, OUTER, codec).next_root,
        )
        if averaged.outcome.kind is OutcomeKind.DONE:
            OuterState(self.theta, self.momentum, OUTER, codec).apply(averaged.outcome.value.bounds, averaged.outputs)
        self.outcomes.append(averaged.outcome)
        return averaged.outcome


@dataclass
class SimSwarm:
    network: MemoryNetwork
    sims: list[SimPeer]
    launch: Callable[[Identity], Awaitable[SimPeer]]
    gone: set[str] = field(default_factory=set)
    lines: Mapping[Identity, float] = field(default_factory=dict)

    def kill(self, index: int) -> None:
        peer = self.sims[index].peer
        self.gone.add(peer)
        self.network.kill(peer)

    async def restart(self, index: int) -> SimPeer:
        """Kill a peer and start it again from its folder."""
        self.network.kill(self.sims[index].peer)
        return await self.start_again(index)

    async def start_again(self, index: int) -> SimPeer:
        """Start a killed peer again from its folder; the others count it as a member."""
        self.sims[index] = await self.launch(self.sims[index].identity)
        self.introduce()
        for sim in self.sims:
            sim.lost.discard(self.sims[index].peer)
        return self.sims[index]

    def introduce(self) -> None:
        """Introduce all peers to each other."""
        for sim in self.sims:
            for other in self.sims:
                sim.node.learn(other.peer, (f"/memory/{other.peer}",))
            sim.node.watch([other.peer for other in self.sims])

    def living(self) -> list[SimPeer]:
        return [sim for sim in self.sims if sim.peer not in self.gone]


async def with_swarm(
    count: int,
    body: Callable[[SimSwarm], object],
    *,
    cells: int = 40,
    codec: str = "int4",
    rule: str = "mean",
    seed: int = 0,
    min_peers: int = 1,
    hook: Callable[[SimSwarm, SimPeer, Event], None] | None = None,
    home: tuple[Path, int] | None = None,
    uploads: Sequence[float] = (),
    lines: Sequence[float] = (),
    charter: Charter = OPEN,
    invites: Mapping[int, bytes] = MappingProxyType({}),
) -> None:
    """Run `body(swarm)` with `count` peers that know each other and start from the same state.

    `home` is a folder for their archives and the rounds between two checkpoints; without it they have none. `uploads` are
    their rates of state provision in bytes/s, `lines` those of their lines, up and down. `codec` is that of
    outputs, and the usual one of contributions; more may follow it. `charter` is that of the run, whose founders are all
    peers where it names none; `invites` are invitations by index.
    """
    network = MemoryNetwork(seed=seed, latency=0.02, jitter=0.01)
    running = identities(count)
    founders = charter.founders or frozenset(identity.peer_id for identity in running)
    charter = replace(charter, founders=founders)
    configs = {identity: PeerConfig(state_upload=rate) for identity, rate in zip(running, uploads, strict=False)}
    async with network.open(), trio.open_nursery() as nursery:

        async def launch(identity: Identity) -> SimPeer:
            config = configs.get(identity, PeerConfig())
            admission = charter, invites.get(running.index(identity), b"")
            sim: SimPeer = await nursery.start(
                partial(_run_rounds, swarm, identity, config, cells, codec, rule, min_peers, hook, home, admission)
            )
            return sim

        swarm = SimSwarm(network, [], launch, lines=dict(zip(running, lines, strict=False)))
        for identity in running:
            swarm.sims.append(await launch(identity))
        swarm.introduce()
        await body(swarm)  # type: ignore[misc]
        nursery.cancel_scope.cancel()


async def _run_rounds(
    swarm: SimSwarm,
    identity: Identity,
    config: PeerConfig,
    cells: int,
    codec: str,
    rule: str,
    min_peers: int,
    hook: Callable[[SimSwarm, SimPeer, Event], None] | None,
    home: tuple[Path, int] | None,
    admission: tuple[Charter, bytes],
    *,
    task_status: Any,
) -> None:
    telemetry = Telemetry(clock=trio.current_time)
    line = swarm.lines.get(identity)
    transport = swarm.network.transport(identity.peer_id, up=line, down=line, telemetry=telemetry)
    lost: set[str] = set()
    async with Node(transport, identity, config, telemetry, inline=True) as node:
        node.on_lost(lambda peer, reason: lost.add(peer))
        spec = Spec(
            run=RUN,
            num_cells=cells,
            contribution=codecs_named(codec.split()),
            output=codec_named(codec.split()[0]),
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
        averager = Averager(node, spec, lambda: frozenset(sim.peer for sim in swarm.sims) - lost, outputs, conduct)
        theta = np.linspace(-1, 1, cells * CELL).astype(np.float32)
        sim = SimPeer(identity, node, averager, theta, np.zeros_like(theta), codec.split()[0], archive, events, lost=lost)
        sim.common = 0.0 if rule == "mean" else 1.0
        if hook is not None:
            telemetry.subscribe(lambda event: hook(swarm, sim, event))
        task_status.started(sim)
        await trio.sleep_forever()


async def all_at_once(sims: Sequence[SimPeer], rounds: int = 1) -> None:
    """Run the rounds of all peers concurrently; a killed one's task ends with its network."""
    async with trio.open_nursery() as nursery:
        for sim in sims:
            nursery.start_soon(_rounds, sim, rounds)


async def _rounds(sim: SimPeer, rounds: int) -> None:
    for _ in range(rounds):
        await sim.round()
