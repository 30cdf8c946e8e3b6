"""Runs one peer in the network process at its trainer's command: host, directory, membership, rounds and state.

Theory of operation. A peer is two objects, one after the other: `Connected` has reached the run, and `Participant` is a
member of it with a state. Each is complete when it is made, and handles the commands that make sense from then on
(`border`). This side sends every event and, a few times a second, a `Pulse` with what the trainer's pace and its leases
depend on. Beside the training it writes the checkpoints. NumPy only: torch would cost 300 MB and two seconds.
"""

import math
import os
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import trio

from ...collectives.accountability.credit import credit_in
from ...collectives.allreduce.actions import ROUND_EVENTS, OutcomeKind
from ...collectives.averager import Averager
from ...collectives.chain.chain import ChainPosition, Head
from ...collectives.chain.fork_choice import Expected, alike, is_keeper, lagging, position_in_body, training
from ...collectives.chain.head import Heads
from ...collectives.codec import FlatSum, FlatVector
from ...collectives.contribution import Averaged, Contribution
from ...collectives.spec import Spec, charter_of, spec_of
from ...collectives.state.archive import Archive
from ...dht.directory.interface import Directory
from ...dht.members.body import MemberBody, MemberState, fitted
from ...dht.members.gossip import Gossip
from ...dht.members.owner_log import OwnerLog
from ...dht.members.remembered import Remembered
from ...dht.members.table import MemberTable
from ...dht.run.link import JoinLink
from ...dht.run.manifest import SignedManifest
from ...dht.run.revision import kept_by
from ...dht.run.statements import OwnerStatements
from ...peer.config import PeerConfig
from ...peer.home_lock import home_lock
from ...peer.node.node import Node
from ...peer.process.bridge import Channel, Handler
from ...peer.process.shared import SharedVectors
from ...peer.telemetry import Telemetry
from ...peer.transport import Host
from ..data.lease_view import Neighbours
from ..data.leases import View
from ..outer import OuterSettings
from ..pace import slowest
from ..shards.seeding import Seeds
from .apply import elements_of, keep_rest, leaf_step
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
from .catch_up import PROOF_PATIENCE, CatchUp
from .evaluations import Evaluations
from .held import HeldState
from .member import attempt_figures, finish_round
from .reach import reach_run, stated_revision

PULSE_PERIOD = 0.25
SYNC_PATIENCE = 15.0
"""Seconds that a newcomer waits for other newcomers to settle which of them the run starts from."""
ANNOUNCE_PERIOD = 2.0
"""Seconds between announcements of mere progress; a change of state is announced at once."""


class Connected:
    """A peer that has reached its run and is no member of it yet."""

    def __init__(
        self,
        channel: Channel,
        nursery: trio.Nursery,
        *,
        config: PeerConfig,
        node: Node,
        host: Host,
        directory: Directory,
        signed: SignedManifest,
        remembered: Remembered,
        invite: bytes,
        folder: Path,
        anchor: Head | None,
        seeds: Seeds,
    ) -> None:
        self.channel = channel
        self.nursery = nursery
        self.config = config
        self.node = node
        self.host = host
        self.directory = directory
        self.signed = signed
        self.remembered = remembered
        self.invite = invite
        self.folder = folder
        self.anchor = anchor
        """The certificate that the join link names."""
        self.seeds = seeds

    @classmethod
    @asynccontextmanager
    async def reach(cls, channel: Channel, nursery: trio.Nursery, command: OpenRun) -> AsyncIterator[Self]:
        """Reach a run: host, directory, manifest, node; all are closed at the end. Raises `FlockstepError`."""
        with home_lock(command.config.home, pid=os.getppid()):  # The trainer, which would restart this process.
            async with cls._reach(channel, nursery, command.link, command.config) as connected:
                yield connected

    @classmethod
    @asynccontextmanager
    async def _reach(cls, channel: Channel, nursery: trio.Nursery, text: str, config: PeerConfig) -> AsyncIterator[Self]:
        telemetry = Telemetry()
        telemetry.subscribe(lambda event: channel.post(TelemetryNotice(event)))
        async with reach_run(JoinLink.parse(text), config, telemetry) as reached:
            yield cls(
                channel,
                nursery,
                config=config,
                node=reached.node,
                host=reached.host,
                directory=reached.directory,
                signed=reached.signed,
                remembered=reached.remembered,
                invite=reached.invite,
                folder=reached.folder,
                anchor=reached.anchor,
                seeds=reached.seeds,
            )

    def handlers(self) -> Sequence[Handler]:
        """The commands that this peer carries out."""
        fetch = FetchFile.handled_by(self.fetch_file)
        return AttachVectors.handled_by(self.attach), LeaveRun.handled_by(self.leave), fetch

    async def fetch_file(self, command: FetchFile) -> None:
        """Fetch a file of the run's data from members that the directory names."""
        await self.seeds.fetch(command.hash, command.size, command.path, ())

    async def attach(self, command: AttachVectors) -> None:
        """Become a participant with the trainer's vectors, which carries out the commands from then on."""
        participant = await self.participant(command)
        self.channel.handle(*participant.handlers())

    async def participant(self, command: AttachVectors) -> "Participant":
        """A participant with the trainer's vectors. Raises `LocalError` where they cannot be mapped."""
        signed, node = self.signed, self.node
        spec = spec_of(signed, command.num_cells, self.invite)
        shapes = vectors_of(spec.num_cells, spec.num_fragments, spec.contribution)
        vectors = TrainingVectors.of(SharedVectors.attach(command.path, shapes))
        # Members answer questions while the archive is read, which may take long.
        table = MemberTable(
            signed.run_id,
            node.peer_id,
            sequence=int(time.time() * 1000),
            charter=charter_of(signed),
            wall_time=time.time,
            known=self.remembered.bodies(),
        )
        gossip = Gossip(
            node, table, self.directory, signed.run_id, seed=signed.manifest.seed, remembered=self.remembered
        )
        every, resume = signed.manifest.checkpoint_rounds, self.config.resume
        advance = leaf_step(OuterSettings.of(signed.manifest), spec.output, spec.settings)
        archive = await Archive.open(node, spec, self.folder, command.tensors, advance, every=every, resume=resume)
        return self.make_participant(vectors, spec, table, gossip, archive)

    def make_participant(
        self, vectors: TrainingVectors, spec: Spec, table: MemberTable, gossip: Gossip, archive: Archive
    ) -> "Participant":
        """What `participant` returns, from its parts."""
        return Participant(self, vectors, spec, table, gossip, archive)

    async def leave(self, command: LeaveRun) -> None:
        """Send those that I am connected to a goodbye."""
        await self.node.leave(command.reason)


class Participant:
    """A member of a run with its state, and the commands that it carries out."""

    def __init__(
        self,
        connected: Connected,
        vectors: TrainingVectors,
        spec: Spec,
        table: MemberTable,
        gossip: Gossip,
        archive: Archive,
    ) -> None:
        node, signed = connected.node, connected.signed
        self._channel = connected.channel
        self._nursery = connected.nursery
        self._node = node
        self._telemetry = node.telemetry
        self._host = connected.host
        self._seeds = connected.seeds
        self._signed = signed
        self._resume = connected.config.resume
        self._vectors = vectors
        outer, state = OuterSettings.of(signed.manifest), (vectors.theta, vectors.momentum)
        self._spec = spec
        self._gossip = gossip
        self._archive = archive
        self._neighbours = Neighbours(table, node.peer_id, node.telemetry)
        self._trainers = Expected(gossip.presence.active, node.peer_id)
        self._averager = Averager(node, spec, self._trainers, archive.outputs, archive.conduct)
        resumes, anchor = connected.config.resume, connected.anchor
        self._held = HeldState(node, spec, outer, state, archive)
        self._catch_up = CatchUp(node, spec, self._held, archive, anchor=anchor, resumes=resumes)
        self._heads = Heads(connected.directory, signed.run_id, spec.charter, self._telemetry)
        invite, name = connected.invite, connected.config.name
        self._body = MemberBody(state=MemberState.SYNCING, invite=invite, name=name, num_cells=spec.num_cells)
        self._announced = 0.0
        self._joined = False
        self._clamped = ""
        self._pulse: Pulse | None = None
        self._round_over: trio.Event | None = None
        self._owner_log = OwnerLog(
            node,
            gossip.presence,
            connected.directory,
            connected.remembered.statements(OwnerStatements(signed.run_id, signed.manifest.owner)),
            seed=signed.manifest.seed,
            remembered=connected.remembered,
        )
        self._evaluations = Evaluations(node.identity, connected.directory, signed, node.telemetry)
        gossip.presence.on_newcomer(self._averager.add_member)
        gossip.presence.follow_chain(lambda: self._averager.electorate.votes, lambda: archive.conduct.certified)
        self._owner_log.on_change(self._follow)
        self._host.prefer(self._node.is_member)

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
        """Become a member that nobody waits for yet: with the trainer's state, or, if it has none, that of my disk."""
        self._joined = command.again
        await self._held.resume(command.position)
        if command.position == BLANK and self._resume:
            await self._held.restore()
        elif command.again:
            await self._check_kept(command.position)
        self._body = replace(
            self._body,
            state=MemberState.SYNCING,
            device=command.device,
            version=command.version,
            layout=command.layout,
            frozen=command.frozen,
            **position_in_body(self._position),
        )
        self._announce()
        self._nursery.start_soon(self._gossip.run)
        self._nursery.start_soon(self._owner_log.run)
        self._nursery.start_soon(self._heads.look, self._position.head)
        self._nursery.start_soon(self._send_pulses)

    async def _check_kept(self, position: ChainPosition) -> None:
        """Restore the state from disk where an earlier process of mine died in the middle of an outer step."""
        await self._held.hash()
        is_known = position.certificate is not None or bool(self._spec.start)  # Not a state that the seed makes.
        if self._position.root != position.root and is_known:
            reason = f"the vectors have the root {self._position.root.hex()[:8]}, not {position.root.hex()[:8]}"
            self._telemetry.emit("state.torn", step="restart", reason=reason, round=position.round)
            await self._held.restore()

    async def sync(self, command: SyncState) -> StateSynced:
        """Hold the run's state: my own if I start the run, else that of the others."""
        held, catch_up, began = self._held, self._catch_up, time.monotonic()
        held.changed, before, source = False, held.num_bytes, None
        await held.hash()
        catch_up.ask_again()
        certificate = self._averager.decided
        is_replayed = certificate is not None and await catch_up.replay(certificate)
        if not is_replayed and (catch_up.proofs.is_beaten or certificate is not None):
            # Who misses round after round is never between rounds, where the others' heads are examined.
            await catch_up.await_proofs(self._gossip, PROOF_PATIENCE)
        if certificate is not None:
            await held.hash()
        if self._body.state != MemberState.TRAINING or catch_up.provider(self._gossip.presence.active()) is not None:
            self._body = replace(self._body, state=MemberState.SYNCING)
            self._announce()
            with trio.move_on_after(SYNC_PATIENCE):
                await self._gossip.looked.wait()
                await self._heads.looked.wait()
            # Without `resume` the run is to begin anew, so the published head does not bind me.
            published = self._heads.ahead if self._resume else None
            rounds = kept_by(self._signed, self._heads.revision).num_rounds
            source = await catch_up.reach(
                self._gossip, SYNC_PATIENCE, published=published, rounds=rounds, compare=not self._joined
            )
        self._joined = True
        catch_up.proofs.is_beaten = False
        await held.advance(self._position)
        self._averager.expect(self._position.round + 1, self._position.certificate)
        self._settle()
        figures: dict[str, Any] = {"bytes": held.num_bytes - before, "seconds": round(time.monotonic() - began, 3)}
        figures |= {"round": self._position.round, "root": self._position.root.hex()}
        self._telemetry.emit("state.synced", peer=source or "", **figures)
        self._send_pulse()  # An older pulse, about another state, would have the trainer sync again.
        return StateSynced(self._position, held.changed)

    async def average_delta(self, command: AverageDelta) -> RoundEnded:
        """Attempt the next round with what the trainer left in `delta`, and make its outer step if it is certified."""
        number = self._position.round + 1
        before, began = self._host.traffic(), time.monotonic()
        contribution = Contribution(
            vector=FlatSum(self._terms(number), self._spec.cells_of(number).start),
            round=number,
            base_root=self._position.root,
            tokens=command.tokens,
            steps=command.steps,
            loss=command.loss,
            grace=command.grace,
            seconds=command.seconds,
            ramp=command.ramp,
            patience=command.patience,
        )
        self._gossip.presence.attend(self._averager.drawn())
        self._round_over = trio.Event()
        averaged = await self._averager.average(contribution, self._held.next_root)
        outcome = averaged.outcome
        is_done, is_true = outcome.kind is OutcomeKind.DONE, False
        figures = attempt_figures(outcome, time.monotonic() - began, before, self._host.traffic())
        if is_done:
            is_true = await self._make_step(averaged)
            figures["loss"] = command.loss if math.isfinite(command.loss) else None
            figures["credit"] = credit_in(outcome.value, self._node.peer_id)
        self._telemetry.emit(ROUND_EVENTS[outcome.kind], **figures)
        self._round_over.set()
        if is_true:
            self._settle()
            self._nursery.start_soon(self._evaluations.look, self._position.certificate)
        return RoundEnded(self._position, outcome.kind, outcome.reason, drifted=is_done and not is_true)

    async def _make_step(self, averaged: Averaged) -> bool:
        """Make the outer step of a certified round. Returns whether it led to the certified state."""
        outcome, held = averaged.outcome, self._held
        if self._node.peer_id in outcome.cut:
            terms, codec = self._terms(outcome.slot.round), held.spec.contribution
            x = FlatSum(terms, outcome.value.bounds[0])
            await self._node.compute(keep_rest, x, codec, outcome.value.bounds, averaged.mine, terms[1])
        await held.step(outcome.value.bounds, averaged.outputs)
        root = self._position.root
        await held.advance(ChainPosition(outcome.slot.round, root, outcome.value.tokens, outcome.certificate))
        # One publishes, and the proposer rotates.
        if outcome.members[0] == self._node.peer_id and outcome.certificate is not None:
            self._nursery.start_soon(partial(self._heads.publish, outcome.certificate, is_last=held.is_last))
        if root == outcome.value.next_root:
            return True
        reason = f"the outer step led to {root.hex()[:8]}, certified is {outcome.value.next_root.hex()[:8]}"
        self._telemetry.emit("state.drift", step="apply", reason=reason)
        return False

    def _terms(self, number: int) -> tuple[FlatVector, FlatVector]:
        """Δ and the residual of the cells that a round averages: their sum is my contribution."""
        span = elements_of(self._spec.cells_of(number))
        return self._vectors.delta[: span.stop - span.start], self._vectors.residual[span]

    async def report_progress(self, command: ReportProgress) -> None:
        """Publish what my trainer has trained, with the next announcement that is due."""
        trained: dict[str, Any] = {"step": command.step, "tokens": command.tokens, "tokens_per_s": command.tokens_per_s}
        self._body = replace(self._body, loss=command.loss, **trained)
        if trio.current_time() - self._announced >= ANNOUNCE_PERIOD:
            self._announce()

    async def publish_evaluation(self, command: PublishEvaluation) -> None:
        """Publish what my trainer has measured of the shared model; the directory may take its time."""
        self._nursery.start_soon(self._evaluations.publish, self._position.certificate, command)

    async def publish_leases(self, command: PublishLeases) -> View | None:
        """Publish which units of the data I lease. Returns what is known of the others' leases."""
        share = self._neighbours.publish(command.share, command.ranking, command.number)
        self._body = replace(self._body, share=share)
        if command.urgent or trio.current_time() - self._announced >= ANNOUNCE_PERIOD:
            self._announce()
        return self._neighbours.view()

    async def fetch_file(self, command: FetchFile) -> None:
        """Fetch a file of the run's data from other members."""
        await self._seeds.fetch(command.hash, command.size, command.path, self._gossip.presence.others())

    async def leave(self, command: LeaveRun) -> None:
        """End the round whose cut I have acknowledged, then send everybody a goodbye."""
        is_applying = not self._averager.busy
        if self._round_over is not None and (self._averager.finishing or is_applying):
            await finish_round(self._round_over, self._averager.round, self._telemetry)
        self._body = replace(self._body, state=MemberState.LEFT)
        self._announce()
        await self._node.leave(command.reason)

    def _settle(self) -> None:
        """I hold the state of my position: write it if a checkpoint is due, and be waited for."""
        position, held = self._position, self._held
        write, leaves = self._archive.checkpoints.write, held.leaves[0] + held.leaves[1]
        self._nursery.start_soon(write, position, held.vectors, leaves, held.is_last)
        self._body = replace(self._body, state=MemberState.TRAINING, root=position.root, **position_in_body(position))
        self._announce()

    @property
    def _position(self) -> ChainPosition:
        """Where my state stands."""
        return self._held.place

    def _follow(self, statements: OwnerStatements) -> None:
        """Carry out what the run's owner states, and show the others that I hold it."""
        self._archive.conduct.follow(statements, self._spec.invite)
        self._gossip.follow(self._archive.conduct.charter)
        if statements.records:
            self._body = replace(self._body, statements=statements.hash, statements_bytes=len(statements.packed))
        if self._announced:
            self._announce()

    def _announce(self) -> None:
        self._announced = trio.current_time()
        traffic = self._host.traffic()
        self._body = replace(
            self._body,
            addresses=self._host.addresses(),  # They change when this computer moves to another network.
            rung=self._host.reachability.rung,
            up=self._node.upload_rate,
            down=self._node.download_rate,
            sent=traffic.sent,
            received=traffic.received,
        )
        body, clamped = fitted(self._body)
        if clamped and clamped != self._clamped:
            self._telemetry.emit("member.clamped", step="announce", reason=clamped)
        self._clamped = clamped
        self._gossip.announce(body)

    async def _send_pulses(self) -> None:
        while True:
            self._send_pulse()
            await trio.sleep(PULSE_PERIOD)

    def _send_pulse(self) -> None:
        """Send the trainer what its pace depends on, only when it changes."""
        traffic = self._host.traffic()
        me = self._node.peer_id
        members = alike(self._gossip.presence.active(), me)
        trainers = {member.peer for member in training(members) if not is_keeper(member)} | {me}
        ready = self._averager.ready()
        pacing = slowest(self._archive.conduct.pacing(trainers), ready | {me})
        is_behind = self._averager.behind or self._catch_up.proofs.is_beaten
        pulse = Pulse(
            round=self._averager.round,
            ready=tuple(sorted(ready & pacing - {me})),
            active=len(pacing | {me}),
            why_not_average=self._averager.why_not_average or self._averager.why_no_quorum,
            behind=is_behind or (not self._averager.busy and self._catch_up.follows_another_chain(members)),
            lagging=lagging(self._catch_up.proofs.credible(members), self._position),
            kept=self._archive.checkpoints.kept,
            sent=traffic.sent,
            received=traffic.received,
            rungs={peer: rung for peer in self._gossip.presence.others() if (rung := self._host.rung(peer)) is not None},
            leases=self._neighbours.view(),
        )
        if self._body.addresses != self._host.addresses():
            self._announce()
        if pulse != self._pulse:
            self._channel.post(pulse)
            self._pulse = pulse


async def serve(channel: Channel, connected: type[Connected] = Connected) -> None:
    """Carry out the trainer's commands until it closes the pipe."""
    async with trio.open_nursery() as nursery:

        async def hold_open(command: OpenRun, *, task_status: Any) -> None:
            async with connected.reach(channel, nursery, command) as peer:
                channel.handle(*peer.handlers())
                revision = await stated_revision(peer.directory, peer.remembered, peer.signed, peer.node.telemetry)
                task_status.started(RunOpened(peer.signed.publishable, peer.node.peer_id, revision))
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
