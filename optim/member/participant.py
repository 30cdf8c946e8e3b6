"""Runs one peer in the network process at its trainer's command: host, directory, membership, rounds and state.

Theory of operation. A peer is two objects, one after the other: `Connected` has reached the run, and `Participant` drives
a `Member` of it, which has a state. Each is complete when it is made, and handles the commands that make sense from then on
(`border`). This side sends every event and, a few times a second, a `Pulse` with what the trainer's pace and its leases
depend on. Beside the training it writes the checkpoints. NumPy only: torch would cost 300 MB and two seconds.
"""

import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any, Self

import trio

from ...collectives.accountability.credit import shares_in, speeds_in
from ...collectives.allreduce.actions import OutcomeKind
from ...collectives.chain.certificate import value_of
from ...collectives.chain.chain import ChainPosition
from ...collectives.chain.fork_choice import alike, is_keeper, lagging, position_in_body, training
from ...collectives.driver.contribution import Contribution
from ...collectives.state.checkpoint_file import TensorAt
from ...collectives.vector.codec import CELL, FlatSum, FlatVector
from ...collectives.vector.mixed import codecs_named
from ...dht.members.body import MemberBody, MemberState
from ...dht.run.link import JoinLink
from ...peer.base.config import PeerConfig
from ...peer.base.home_lock import home_lock
from ...peer.base.transport import PeerId
from ...peer.log.telemetry import Telemetry
from ...peer.process.bridge import Channel, Handler
from ...peer.process.shared import SharedVectors
from ..data.lease_view import Neighbours
from ..data.leases import NO_CREDIT, View
from ..step.pace import slowest
from .apply import elements_of, keep_rest
from .border import (
    BLANK,
    AttachVectors,
    AverageDelta,
    FetchFile,
    JoinRun,
    LeaveRun,
    OpenRun,
    PublishEvaluation,
    PublishLeases,
    Pulse,
    ReportProgress,
    RoundEnded,
    RunOpened,
    StateSynced,
    SyncState,
    TelemetryNotice,
    TrainingVectors,
    vectors_of,
)
from .member import Member
from .reach import Contact, ReachedRun, reach_run, stated_revision

PULSE_PERIOD = 0.25
"""Between two looks at what the pace of training depends on: far less than an inner phase."""


class Connected:
    """A peer that has reached its run and is no member of it yet."""

    def __init__(self, channel: Channel, nursery: trio.Nursery, config: PeerConfig, reached: ReachedRun) -> None:
        self.channel = channel
        self.nursery = nursery
        self.config = config
        self.reached = reached

    @classmethod
    @asynccontextmanager
    async def reach(cls, channel: Channel, nursery: trio.Nursery, command: OpenRun) -> AsyncIterator[Self]:
        """Reach a run: host, directory, manifest, node; all are closed at the end. Raises `FlockstepError`."""
        telemetry = Telemetry()
        telemetry.subscribe(lambda event: channel.post(TelemetryNotice(event)))
        with home_lock(command.config.home, pid=os.getppid()):  # The trainer: whoever ends that ends both.
            async with reach_run(JoinLink.parse(command.link), command.config, telemetry) as reached:
                yield cls(channel, nursery, command.config, reached)

    def handlers(self) -> Sequence[Handler]:
        """The commands that this peer carries out."""
        fetch = FetchFile.handled_by(self.fetch_file)
        return AttachVectors.handled_by(self.attach), LeaveRun.handled_by(self.leave), fetch

    async def fetch_file(self, command: FetchFile) -> None:
        """Fetch a file of the run's data from members that the directory names."""
        await self.reached.seeds.fetch(command.hash, command.size, command.path, ())

    async def attach(self, command: AttachVectors) -> None:
        """Become a participant with the trainer's vectors, which carries out the commands from then on."""
        participant = await self.participant(command)
        self.channel.handle(*participant.handlers())

    async def participant(self, command: AttachVectors) -> "Participant":
        """A participant with the trainer's vectors. Raises `LocalError` where they cannot be mapped."""
        manifest = self.reached.signed.manifest
        codec = codecs_named(manifest.codec.contributions)
        shapes = vectors_of(command.num_cells, manifest.outer.fragments, codec)
        return await self.train(TrainingVectors.of(SharedVectors.attach(command.path, shapes)), command.tensors)

    async def train(self, vectors: TrainingVectors, tensors: Sequence[TensorAt]) -> "Participant":
        """A participant with these vectors, in which these tensors lie."""
        reached, state = self.reached, (vectors.theta, vectors.momentum)
        contact = Contact.of(reached, MemberBody(state=MemberState.SYNCING, name=self.config.name))
        cells = vectors.theta.size // CELL
        member = await Member.open(reached, contact, state, cells, tensors, resume=self.config.resume)
        return self.make_participant(vectors, member)

    def make_participant(self, vectors: TrainingVectors, member: Member) -> "Participant":
        """What `train` returns, from its parts."""
        return Participant(self, vectors, member)

    async def leave(self, command: LeaveRun) -> None:
        """Send those that I am connected to a goodbye."""
        await self.reached.node.leave(command.reason)


class Participant:
    """A member of a run with its state, and the commands that it carries out."""

    def __init__(self, connected: Connected, vectors: TrainingVectors, member: Member) -> None:
        reached = connected.reached
        self.member = member
        self._channel = connected.channel
        self._nursery = connected.nursery
        self._node = reached.node
        self._telemetry = reached.node.telemetry
        self._host = reached.host
        self._seeds = reached.seeds
        self._signed = reached.signed
        self._resume = connected.config.resume
        self._vectors = vectors
        self._contact = member.contact
        self._presence = member.contact.presence
        self._neighbours = Neighbours(self._contact.table, self._node.peer_id, self._telemetry, self._credit)
        self._joined = False
        self._pulse: Pulse | None = None

    def handlers(self) -> Sequence[Handler]:
        """The commands that this peer carries out."""
        return (
            JoinRun.handled_by(self.join),
            SyncState.handled_by(self.sync),
            AverageDelta.handled_by(self.average_delta),
            ReportProgress.handled_by(self.report_progress),
            PublishEvaluation.handled_by(self.publish_evaluation),
            PublishLeases.handled_by(self.publish_leases),
            FetchFile.handled_by(self.fetch_file),
            LeaveRun.handled_by(self.leave),
        )

    async def join(self, command: JoinRun) -> None:
        """Become a member that nobody waits for yet, with the state of my disk if it has one."""
        held = self.member.held
        held.place = BLANK
        if self._resume:
            await held.restore()
        self._contact.announce(
            state=MemberState.SYNCING,
            device=command.device,
            version=command.version,
            layout=command.layout,
            frozen=command.frozen,
            **position_in_body(held.place),
        )
        self._contact.begin(held.place.head)
        self._nursery.start_soon(self._send_pulses)

    async def sync(self, command: SyncState) -> StateSynced:
        """Hold the run's state: my own if I start the run, else that of the others."""
        held = self.member.held
        held.changed = False
        await self.member.sync(compare=not self._joined)
        self._joined = True
        self._send_pulse()  # An older pulse, about another state, would have the trainer sync again.
        return StateSynced(self._position, held.changed)

    async def average_delta(self, command: AverageDelta) -> RoundEnded:
        """Attempt the next round with what the trainer left in `delta`, and make its outer step if it is certified."""
        held, number = self.member.held, self._position.round + 1
        cells, codec = held.spec.cells_of(number), held.spec.contribution
        terms = self._terms(cells)
        vector, root = FlatSum(terms, cells.start), self._position.root
        averaged = await self.member.average(Contribution(vector=vector, round=number, base_root=root, **asdict(command)))
        outcome = averaged.outcome
        is_done = outcome.kind is OutcomeKind.DONE
        if is_done and self._node.peer_id in outcome.cut:
            bounds, mine = outcome.value.bounds, averaged.mine
            await self._node.compute(keep_rest, FlatSum(terms, bounds[0]), codec, bounds, mine, terms[1])
        return RoundEnded(self._position, outcome.kind, outcome.reason, drifted=is_done and not held.place.is_certified)

    def _terms(self, cells: range) -> tuple[FlatVector, FlatVector]:
        """Δ and the residual of these cells: their sum is my contribution."""
        span = elements_of(cells)
        return self._vectors.delta[: span.stop - span.start], self._vectors.residual[span]

    async def report_progress(self, command: ReportProgress) -> None:
        """Publish what my trainer has trained, with the next announcement that is due."""
        trained: dict[str, Any] = {"step": command.step, "tokens": command.tokens, "tokens_per_s": command.tokens_per_s}
        self._contact.change(loss=command.loss, **trained)
        self._contact.renew()

    async def publish_evaluation(self, command: PublishEvaluation) -> None:
        """Publish what my trainer has measured of the shared model; the directory may take its time."""
        if self._contact.evaluations is not None:
            self._nursery.start_soon(self._contact.evaluations.publish, self._position.certificate, command)

    async def publish_leases(self, command: PublishLeases) -> View | None:
        """Publish which units of the data I lease. Returns what is known of the others' leases."""
        share = self._neighbours.publish(command.share, command.ranking, command.number)
        self._contact.change(share=share)
        self._contact.renew(at_once=command.urgent)
        return self._neighbours.view()

    async def fetch_file(self, command: FetchFile) -> None:
        """Fetch a file of the run's data from other members."""
        await self._seeds.fetch(command.hash, command.size, command.path, self._presence.others())

    async def leave(self, command: LeaveRun) -> None:
        """End the round whose cut I have acknowledged, then send everybody a goodbye."""
        await self.member.leave(command.reason)

    def _credit(self, speeds: Mapping[PeerId, float]) -> tuple[Mapping[PeerId, float], Mapping[PeerId, float]]:
        """Each contributor's share in the tokens that the certificate of my state counts, and in the speeds stated."""
        if (certificate := self._position.certificate) is None:
            return NO_CREDIT, NO_CREDIT
        value, earned = value_of(certificate), self.member.archive.conduct.charter.earned
        return shares_in(value, earned=earned), speeds_in(value, speeds, earned=earned)

    @property
    def _position(self) -> ChainPosition:
        """Where my state stands."""
        return self.member.place

    async def _send_pulses(self) -> None:
        while True:
            self._send_pulse()
            await trio.sleep(PULSE_PERIOD)

    def _send_pulse(self) -> None:
        """Send the trainer what its pace depends on, only when it changes."""
        traffic, me = self._host.traffic(), self._node.peer_id
        averager, chain, archive = self.member.averager, self.member.catch_up.chain, self.member.archive
        members = alike(self._presence.active(), me)
        trainers = {member.peer for member in training(members) if not is_keeper(member)} | {me}
        ready = averager.ready()
        pacing = slowest(archive.conduct.pacing(trainers), ready | {me})
        pulse = Pulse(
            round=averager.round,
            ready=tuple(sorted(ready & pacing - {me})),
            active=len(pacing | {me}),
            why_not_average=averager.why_not_average or averager.why_no_quorum,
            behind=self.member.is_behind,
            lagging=lagging(chain.credible(members), self._position),
            kept=archive.checkpoints.kept,
            sent=traffic.sent,
            received=traffic.received,
            rungs={peer: rung for peer in self._presence.others() if (rung := self._host.rung(peer)) is not None},
            leases=self._neighbours.view(),
            successor=self.member.successor,
        )
        if self._contact.has_moved:
            self._contact.announce()
        if pulse != self._pulse:
            self._channel.post(pulse)
            self._pulse = pulse


async def serve(channel: Channel, connected: type[Connected] = Connected) -> None:
    """Carry out the trainer's commands until it closes the pipe."""
    async with trio.open_nursery() as nursery:

        async def hold_open(command: OpenRun, *, task_status: Any) -> None:
            async with connected.reach(channel, nursery, command) as peer:
                channel.handle(*peer.handlers())
                reached = peer.reached
                node, signed = reached.node, reached.signed
                revision = await stated_revision(reached.directory, reached.remembered, signed, node.telemetry)
                round_ = 0 if reached.anchor is None else reached.anchor.round
                task_status.started(RunOpened(signed.publishable, node.peer_id, revision, round_))
                await trio.sleep_forever()

        async def open_run(command: OpenRun) -> RunOpened:
            opened: RunOpened = await nursery.start(hold_open, command)
            return opened

        async def leave_unopened(command: LeaveRun) -> None:
            """Nobody knows of me yet."""

        channel.handle(OpenRun.handled_by(open_run), LeaveRun.handled_by(leave_unopened))
        await channel.serve()
        nursery.cancel_scope.cancel()


async def main(channel: Channel) -> None:
    """The network process."""
    await serve(channel)
