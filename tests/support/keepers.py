"""Runs with keepers on a network in memory: production keepers and participants, with contributions known to the test."""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import trio
from flockstep.collectives.accountability.conduct import Conduct
from flockstep.collectives.allreduce.actions import OutcomeKind
from flockstep.collectives.chain.certificate import value_of
from flockstep.collectives.chain.head import validate_run_value
from flockstep.collectives.evaluation.draw import DueEvaluation
from flockstep.collectives.state.checkpoint_file import TensorAt
from flockstep.collectives.state.merkle import state_root
from flockstep.collectives.vector.codec import CELL, Codec, codec_named, round_into
from flockstep.collectives.vector.mixed import codecs_named
from flockstep.dht.directory.memory import MemoryBoard, MemoryDirectory
from flockstep.dht.members.owner_log import publish_pages
from flockstep.dht.members.remembered import Remembered
from flockstep.dht.members.table import Member
from flockstep.dht.rendezvous import find_members
from flockstep.dht.run.manifest import (
    Admission,
    Data,
    Defence,
    EvalSettings,
    Inner,
    Manifest,
    Outer,
    SignedManifest,
    TimingSettings,
)
from flockstep.dht.run.revision import revised_by
from flockstep.dht.run.statements import OwnerStatements
from flockstep.optim.keeper.keeper import Keeper
from flockstep.optim.member.border import (
    AverageDelta,
    JoinRun,
    PublishEvaluation,
    Pulse,
    SyncState,
    TrainingVectors,
)
from flockstep.optim.member.participant import Connected
from flockstep.optim.member.reach import ReachedRun
from flockstep.optim.shards.seeding import Seeds
from flockstep.peer import wire
from flockstep.peer.base.config import PeerConfig
from flockstep.peer.base.digest import keyed
from flockstep.peer.base.transport import Host, PeerId, Reachability, Rung
from flockstep.peer.identity import Identity
from flockstep.peer.log.telemetry import Event, Telemetry
from flockstep.peer.memory.network import MemoryNetwork
from flockstep.peer.memory.peer import MemoryTransport
from flockstep.peer.node.node import Node
from flockstep.peer.process.bridge import Channel
from flockstep.peer.quota.origins import UNKNOWN, Origin

CELLS = 40
TENSORS = (TensorAt("weight", (CELLS * CELL,), "float32", 0),)
MODEL = keyed("a layout of tests")
PHASE_SECONDS = 5.0
PULSE_PERIOD = 1.0
"""Between two looks at what a trainer's pace depends on: four a second are 40 % of the timers of these runs."""


def key(number: int) -> Identity:
    return Identity.from_seed(bytes([number + 1]) * 32)


def kept_run(
    keepers: int,
    *,
    rounds: int = 1000,
    first: int = 0,
    fragments: int = 1,
    evaluate_every: int = 0,
    rule: str = "mean",
    layout: str = "",
) -> SignedManifest:
    """A run whose voters are the keepers with the keys `first`, `first` + 1, …; the first one owns it."""
    inner, outer = Inner(steps=60), Outer(rounds=rounds, lr=0.8, momentum=0.5, checkpoint_every=2)
    if fragments > 1:
        outer = replace(outer, mode="streaming", fragments=fragments)
    names = [key(first + number).peer_id for number in range(keepers)]
    manifest = Manifest(
        owner=names[0],
        name="kept",
        data=Data(source="text:own" if evaluate_every else "own"),
        inner=inner,
        outer=outer,
        admission=Admission(keepers=" ".join(names[1:])),
        defence=Defence(rule=rule),
        timing=TimingSettings(floor=2.0, ceiling=30.0),
        eval=EvalSettings(evaluate_every, ("Once",) if evaluate_every else ()),
        layout=layout,
    )
    return SignedManifest.sign(manifest, key(first))


class MemoryHost:
    """A host whose network is the one in memory."""

    def __init__(self, transport: MemoryTransport) -> None:
        self._transport = transport
        self.reachability = Reachability(Rung.DIRECT)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def prefer(self, needs: Callable[[PeerId], bool], votes: Callable[[PeerId], bool]) -> None:
        """Remember it: connections in memory are never scarce."""
        self.needs, self.votes = needs, votes


class Border:
    """The trainer's end of the border: it keeps the newest pulse."""

    def __init__(self) -> None:
        self.pulse: Pulse | None = None

    def post(self, notice: object) -> None:
        if isinstance(notice, Pulse):
            self.pulse = notice


@dataclass
class Peer:
    """One process of a member."""

    identity: Identity
    telemetry: Telemetry
    scope: trio.CancelScope
    events: list[Event] = field(default_factory=list)
    keeper: Keeper | None = None
    node: Node | None = None
    vectors: TrainingVectors | None = None
    conduct: Conduct | None = None
    round: int = 0
    outcomes: list[OutcomeKind] = field(default_factory=list)
    settings: dict[int, Manifest] = field(default_factory=dict)
    """What holds after so many rounds, as a member that trains has seen it."""

    @property
    def peer(self) -> PeerId:
        return self.identity.peer_id

    @property
    def at(self) -> tuple[int, str]:
        """The round and the root of its state."""
        if self.keeper is not None:
            kept = self.keeper.kept
            assert kept is not None
            return kept.place.round, state_root(*kept.held.vectors).hex()
        assert self.vectors is not None
        return self.round, state_root(self.vectors.theta, self.vectors.momentum).hex()

    def named(self, name: str) -> list[Event]:
        return [event for event in self.events if event["event"] == name]


@dataclass
class Visitor:
    """A node that is no member."""

    node: Node
    members: tuple[Member, ...]
    directory: MemoryDirectory
    events: list[Event]


class KeptRun:
    """A run in memory, whose peers are started and killed by the test."""

    def __init__(self, signed: SignedManifest, folder: Path, nursery: trio.Nursery, network: MemoryNetwork) -> None:
        self.signed = signed
        self.peers: dict[PeerId, Peer] = {}
        self.corrupt: dict[PeerId, Callable[[Node, Codec], None]] = {}
        """What makes a liar of a member that trains, by its id: called with its node and the codec of outputs."""
        self.layouts: dict[PeerId, bytes] = {}
        """What a member that trains states as its layout, by its id; `MODEL` where it is not set."""
        self.networks: dict[PeerId, str] = {}
        """Where keepers see the connections of a peer come from, by its id; unknown where it is not set."""
        self.phases: dict[PeerId, Callable[[], Awaitable[None]]] = {}
        """How a member that trains passes an inner phase, by its id; a sleep where it is not set."""
        self.claims: dict[PeerId, float] = {}
        """How many seconds a member that trains says that its phase took, by its id; the truth where it is not set."""
        self.losses: dict[PeerId, float | None] = {}
        """What a member that trains states where it is drawn to evaluate, by its id: 2.0 if not set; None: nothing."""
        self.hosts: dict[PeerId, MemoryHost] = {}
        """Where the state of a member that trains stood, by its id, when its network process died in an outer step."""
        self._folder = folder
        self._nursery = nursery
        self.network = network
        self.board = MemoryBoard()

    def _begin(self, identity: Identity) -> tuple[Peer, MemoryTransport, MemoryDirectory]:
        telemetry = Telemetry(clock=trio.current_time)
        peer = self.peers[identity.peer_id] = Peer(identity, telemetry, trio.CancelScope())
        telemetry.subscribe(peer.events.append)
        transport = self.network.transport(peer.peer, telemetry=telemetry)
        return peer, transport, MemoryDirectory(self.board, peer.peer, transport.addresses(), validate_run_value)

    def keep(self, number: int, *, resume: bool = True) -> Peer:
        peer, transport, directory = self._begin(key(number))

        async def live() -> None:
            with peer.scope:
                async with Node(transport, peer.identity, PeerConfig(), peer.telemetry, inline=True) as node:
                    peer.node = node
                    node.origin_of = self._origin_of  # type: ignore[method-assign]  # A network in memory has no addresses.
                    peer.keeper = Keeper(self._reached(node, directory), PeerConfig(resume=resume))
                    await peer.keeper.run()

        self._nursery.start_soon(live)
        return peer

    def _reached(self, node: Node, directory: MemoryDirectory) -> ReachedRun:
        folder, home = self._folder / node.peer_id, PeerConfig().home
        host = self.hosts[node.peer_id] = MemoryHost(cast(MemoryTransport, node.transport))
        return ReachedRun(
            node=node,
            host=cast(Host, host),
            directory=directory,
            signed=self.signed,
            remembered=Remembered(folder, self.signed.run_id, node.telemetry),
            invite=b"",
            folder=folder,
            anchor=None,
            seeds=Seeds(node, directory, self.signed, home),
        )

    def train(self, number: int, *, resume: bool = True, seconds: float = PHASE_SECONDS) -> Peer:
        peer, transport, directory = self._begin(key(number))
        self._nursery.start_soon(self._train, peer, transport, directory, resume, seconds)
        return peer

    def _origin_of(self, peer: PeerId) -> Origin:
        network = self.networks.get(peer)
        return Origin(network, network, exempt=False) if network else UNKNOWN

    @asynccontextmanager
    async def visit(self) -> AsyncIterator[Visitor]:
        """A visitor that knows the addresses of the members."""
        telemetry, identity = Telemetry(clock=trio.current_time), Identity.generate()
        events: list[Event] = []
        telemetry.subscribe(events.append)
        transport = self.network.transport(identity.peer_id, telemetry=telemetry)
        directory = MemoryDirectory(self.board, identity.peer_id, transport.addresses(), validate_run_value)
        async with Node(transport, identity, PeerConfig(), telemetry, inline=True) as node:
            members = await find_members(node, directory, self.signed.run_id)
            for member in members:
                node.learn(member.peer, member.body.addresses)
            yield Visitor(node, members, directory, events)

    def kill(self, peer: Peer) -> None:
        self.network.kill(peer.peer)
        peer.scope.cancel()
        del self.peers[peer.peer]

    async def state(self, statements: OwnerStatements) -> None:
        """Publish statements of the run's owner where members look for them."""
        owner = self.signed.manifest.owner
        directory = MemoryDirectory(self.board, owner, (), validate_run_value)
        await publish_pages(directory, statements, OwnerStatements(self.signed.run_id, owner))

    def start(self, serve: "Callable[[KeptRun], Any]") -> None:
        """Run something beside the peers until the end."""
        self._nursery.start_soon(serve, self)

    async def until(self, is_so: Callable[[], bool], seconds: float = 600.0) -> None:
        with trio.fail_after(seconds):
            while not is_so():  # noqa: ASYNC110  What is awaited is a state of several peers.
                await trio.sleep(0.1)

    async def _train(
        self, peer: Peer, transport: MemoryTransport, directory: MemoryDirectory, resume: bool, seconds: float
    ) -> None:
        with peer.scope:
            config = PeerConfig(resume=resume)
            async with (
                Node(transport, peer.identity, config, peer.telemetry, inline=True) as node,
                trio.open_nursery() as nursery,
            ):
                node.origin_of = self._origin_of  # type: ignore[method-assign]  # As above.
                await self._run_trainer(peer, node, nursery, directory, config, seconds)

    async def _run_trainer(
        self,
        peer: Peer,
        node: Node,
        nursery: trio.Nursery,
        directory: MemoryDirectory,
        config: PeerConfig,
        seconds: float,
    ) -> None:
        signed, border = self.signed, Border()
        connected = Connected(cast(Channel, border), nursery, config, self._reached(node, directory))
        size = CELLS * CELL
        codecs = codecs_named(signed.manifest.codec.contributions)
        kept: Any = codecs.memory_dtype
        theta = np.linspace(-1, 1, size).astype(np.float32)
        peer.vectors = TrainingVectors(theta, np.zeros_like(theta), np.zeros(size, kept), np.zeros(size, kept))
        if (corrupt := self.corrupt.get(peer.peer)) is not None:
            corrupt(node, codec_named(signed.manifest.codec.result))
        participant = await connected.train(peer.vectors, TENSORS)
        peer.conduct = participant.member.archive.conduct
        layout = self.layouts.get(peer.peer, MODEL)
        await participant.join(JoinRun("cpu", "test", layout, bytes(32)))
        position = (await participant.sync(SyncState())).position
        while True:
            peer.round = position.round
            peer.settings[peer.round] = settings_after_round(position.certificate, signed)
            if peer.round >= peer.settings[peer.round].num_rounds:
                break
            await self.phases.get(peer.peer, partial(trio.sleep, seconds))()
            pulse = border.pulse
            if pulse is not None and pulse.behind:
                position = (await participant.sync(SyncState())).position
                peer.round = position.round
            if pulse is not None and pulse.why_not_average:
                continue
            round_into(contribution_of(peer.peer, peer.round + 1), peer.vectors.delta)
            claim = self.claims.get(peer.peer, seconds)
            work = AverageDelta(tokens=100, steps=10, loss=1.0, grace=2.0, seconds=claim, ramp=1.0, patience=0.0)
            ended = await participant.average_delta(work)
            peer.outcomes.append(ended.kind)
            if ended.kind is OutcomeKind.DONE:
                assert not ended.drifted
                position = ended.position
                due = DueEvaluation.after(position.certificate, settings_after_round(position.certificate, signed).eval)
                loss = self.losses.get(peer.peer, 2.0)
                if due is not None and peer.peer in due.evaluators and loss is not None:
                    text = "as the model writes" if loss else f"by {peer.peer}"
                    await participant.publish_evaluation(PublishEvaluation(due.round, loss, 100, (text,)))
            elif ended.kind is OutcomeKind.BEHIND:
                position = (await participant.sync(SyncState())).position
        await trio.sleep_forever()


def settings_after_round(certificate: wire.Certificate | None, signed: SignedManifest) -> Manifest:
    """Return the settings of the next round."""
    return revised_by(signed, b"" if certificate is None else value_of(certificate).revision)


def contribution_of(peer: PeerId, round_: int) -> "np.ndarray[Any, np.dtype[np.float32]]":
    """Return a contribution that is different for every peer and round, with a direction in common."""
    size, own = CELLS * CELL, int.from_bytes(peer.encode()[-4:]) + round_
    mine, common = (np.random.default_rng(number).normal(size=size) for number in (own, round_))
    return np.asarray(mine + common, np.float32) * np.float32(1e-3)


async def in_memory(signed: SignedManifest, folder: Path, body: Callable[[KeptRun], Any], *, seed: int = 0) -> None:
    """Run `body(run)` on a network in memory, and end all peers."""
    network = MemoryNetwork(seed=seed, latency=0.02, jitter=0.01)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flockstep.optim.member.participant.PULSE_PERIOD", PULSE_PERIOD)
        async with network.open(), trio.open_nursery() as nursery:
            await body(KeptRun(signed, folder, nursery, network))
            nursery.cancel_scope.cancel()


def all_at(peers: Sequence[Peer], round_: int) -> bool:
    """Return True if all these peers hold the state of that round or a later one."""
    return all(
        (peer.keeper is None or peer.keeper.kept is not None)
        and (peer.keeper is not None or peer.vectors is not None)
        and peer.at[0] >= round_
        for peer in peers
    )
