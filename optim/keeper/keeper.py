"""A keeper: a member that holds the run's state, owns parts, checks, votes and serves newcomers, and trains nothing.

Theory of operation. A keeper is the network side of a peer without a trainer: NumPy, no torch. It learns the size of the
state (`state_size`), takes it like any newcomer, and from then on takes part in every round: its Ready states no tokens, so
nobody waits for a contribution of it. It becomes ready once two thirds of the members that train are (`Pace.called`), or
one of them and voters with more than a third of the votes. Where too few voters are here to decide, it is ready at once,
since an appointment names only voters that are. After a certified round it makes the outer step itself. After the last
round it goes on serving.

What it cannot do is make the start state of a run, which the manifest's seed decides: that takes the model. In the first
round it holds what most of the first members state (docs/trust.md), or the state whose root the manifest names: its owner's
keeper has that on its disk.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import trio

from ...collectives.accountability.conduct import Conduct
from ...collectives.allreduce.actions import ROUND_EVENTS, OutcomeKind
from ...collectives.averager import Averager
from ...collectives.chain.certificate import value_of
from ...collectives.chain.chain import ChainPosition, Head
from ...collectives.chain.fork_choice import Expected, is_keeper, position_in_body, training
from ...collectives.chain.head import Heads
from ...collectives.codec import CELL
from ...collectives.contribution import Contribution
from ...collectives.spec import Spec, charter_of, spec_of
from ...collectives.state.archive import Archive
from ...dht.directory.interface import Directory
from ...dht.members.body import MemberBody, MemberState, fitted
from ...dht.members.gossip import Gossip
from ...dht.members.owner_log import OwnerLog
from ...dht.members.remembered import Remembered
from ...dht.members.table import MemberTable
from ...dht.run.layout import UNPINNED
from ...dht.run.manifest import Manifest, SignedManifest
from ...dht.run.revision import kept_by, open_revision, why_not_revise
from ...dht.run.statements import OwnerStatements
from ...peer.arrays import Floats
from ...peer.errors import CannotFollow, LocalError
from ...peer.node.node import Node
from ...peer.transport import PeerId, Rung
from ..member.apply import LeafHashes, leaf_step
from ..member.border import BLANK
from ..member.catch_up import LOOK_SECONDS, PROOF_PATIENCE, CatchUp
from ..member.depart import finish_round, stay_for_round
from ..member.evaluations import Evaluations
from ..member.participant import ANNOUNCE_PERIOD, PULSE_PERIOD, SYNC_PATIENCE
from ..member.reach import attempt_figures
from ..outer import OuterSettings
from ..pace import Pace
from .state_size import kept_size, size_from_members

VOTES_PERIOD = 60.0
"""Seconds between two reports of who is here."""
MAX_IDLE_ROUNDS = 8
"""Rounds after which a member that contributes nothing is not waited for: keys are free."""
KEEPER_RETRY_SECONDS = 1.0
"""Seconds after an attempt without effect; who trains comes back later than that."""


@dataclass(slots=True)
class KeptState:
    """What a keeper has once it knows the size of the state."""

    spec: Spec
    theta: Floats
    momentum: Floats
    archive: Archive
    averager: Averager
    catch_up: CatchUp

    @property
    def vectors(self) -> tuple[Floats, Floats]:
        """θ and m."""
        return self.theta, self.momentum

    @property
    def place(self) -> ChainPosition:
        """Where the state stands."""
        return self.catch_up.place


def _revision_of(kept: KeptState) -> bytes:
    """Return the revision that holds in the next round, as the certificate of my state names it."""
    certificate = kept.place.certificate
    return b"" if certificate is None else value_of(certificate).revision


class Keeper:
    """One keeper of a run, over a node. Nothing that others send raises here; `LocalError` if the memory is too small."""

    def __init__(
        self,
        node: Node,
        directory: Directory,
        signed: SignedManifest,
        folder: Path,
        remembered: Remembered,
        *,
        invite: bytes = b"",
        name: str = "",
        version: str = "",
        resume: bool = True,
        anchor: Head | None = None,
        rung: Callable[[], Rung | None] = lambda: None,
    ) -> None:
        manifest = signed.manifest
        self.charter = charter_of(signed)
        self._node = node
        self._telemetry = node.telemetry
        self._signed = signed
        self._settings = signed.manifest
        """What holds in the next round: the manifest, as its owner has revised it."""
        self._folder = folder
        self._invite = invite
        self._resume = resume
        self._rung = rung
        self._outer = OuterSettings.of(manifest)
        self._pace = Pace(
            steps=1,
            seconds=manifest.inner.seconds / manifest.outer.fragments,
            floor=manifest.timing.floor,
            ceiling=manifest.timing.ceiling,
        )
        table = MemberTable(
            signed.run_id,
            node.peer_id,
            sequence=int(time.time() * 1000),
            charter=self.charter,
            wall_time=time.time,
            known=remembered.bodies(),
        )
        self._gossip = Gossip(node, table, directory, signed.run_id, seed=manifest.seed, remembered=remembered)
        self._members = Expected(self._gossip.presence.active, node.peer_id)
        self._anchor = anchor
        self._heads = Heads(directory, signed.run_id, self.charter, node.telemetry)
        self._evaluations = Evaluations(node.identity, directory, signed, node.telemetry)
        self._owner_log = OwnerLog(
            node,
            self._gossip.presence,
            directory,
            remembered.statements(OwnerStatements(signed.run_id, manifest.owner)),
            seed=manifest.seed,
            remembered=remembered,
        )
        self._body = MemberBody(state=MemberState.SYNCING, device="keeper", version=version, invite=invite, name=name)
        self._announced = 0.0
        self._holds = False
        self._kept: KeptState | None = None
        self._round_over = trio.Event()
        self._is_applying = False
        """True while the round that was decided is not in my state yet."""
        self._keeping = trio.CancelScope()
        self._waiting = ""
        self._settled = -1
        self._round_began = -math.inf
        """When the last round was certified here; long ago where I have only heard of it."""
        self._phases: dict[PeerId, float] = {}
        """By member that is here, the seconds of its last phase that was in a certified cut, as it has stated them."""
        self._grace = self._pace.floor
        """Seconds for slower members to become ready after me: none of those that wait loses its patience before."""
        self._idle: Counter[PeerId] = Counter()
        """By member, the certified rounds in a row that it was here and contributed nothing to."""

    @property
    def kept(self) -> KeptState | None:
        """My state; None before I know its size."""
        return self._kept

    @property
    def settings(self) -> Manifest:
        """What holds in the next round, once I am settled: the manifest, as its owner has revised it."""
        return self._settings

    @property
    def newest(self) -> tuple[int, SignedManifest]:
        """The number of the owner's newest revision, and the run under it: one that is to follow, or what holds now.

        Where nobody can train under what holds there is no round that could name another one.
        """
        held = stated = b""
        if self._kept is not None:
            held, stated = _revision_of(self._kept), self._kept.archive.conduct.revision
        newest, settings = held, self._settings
        if not why_not_revise(self._signed, stated, held):
            with suppress(CannotFollow):  # Of a later version: it does not hold yet.
                newest, settings = stated, kept_by(self._signed, stated)
        number = open_revision(newest, self._signed.run_id, self.charter.owner).number
        return number, replace(self._signed, manifest=settings)

    @property
    def is_over(self) -> bool:
        """True once I hold the state after the run's last round."""
        return self.is_settled and self._settled >= self._settings.num_rounds

    @property
    def is_settled(self) -> bool:
        """True while I hold the run's state and take part."""
        return self._body.state == MemberState.TRAINING

    async def run(self) -> None:
        """Keep the run until cancelled. Raises `LocalError`."""
        self._announce()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._gossip.run)
            nursery.start_soon(self._heads.look, BLANK.head)
            kept = self._kept = await self._open()
            nursery.start_soon(self._report_votes, kept)
            await self._sync(kept)
            with self._keeping:
                await self._keep(kept)
            await trio.sleep_forever()

    async def leave(self, reason: str, patience: float = 0.0) -> None:
        """End the round whose cut I have acknowledged, and apply it, then send everybody a goodbye.

        Where my vote may be needed for the next round I stay for that one, for `patience` seconds at most.
        """
        kept = self._kept
        if kept is not None and (kept.averager.finishing or self._is_applying):
            await finish_round(self._round_over, kept.averager.round, self._telemetry)
        self._keeping.cancel()
        if kept is not None and patience:
            if kept.averager.is_needed:
                reason_to_stay = "its vote may be needed for the next round; a second signal ends it at once"
                self._telemetry.emit("peer.stays", reason=reason_to_stay, round=kept.averager.round)
            await stay_for_round(kept.averager, lambda: kept.place, kept.catch_up.state.next_root, patience)
        self._announce(state=MemberState.LEFT)
        await self._node.leave(reason)

    async def _keep(self, kept: KeptState) -> None:
        is_late = False
        while True:
            began = trio.current_time()
            await self._await_round(kept, began, is_late)
            is_late = self._is_behind(kept)
            if is_late:
                await self._sync(kept)
            else:
                await self._take_part(kept, trio.current_time() - began)

    async def _open(self) -> KeptState:
        """Learn the size of the state, and open what depends on it.

        Raises `UsageError` if the members let me in no more, or my disk has the state of another model.
        """
        node, signed, charter = self._node, self._signed, self.charter
        if signed.manifest.pin is None:
            self._telemetry.emit("layout.unpinned", step="keep", reason=UNPINNED)
        found = await node.compute(kept_size, self._folder, charter, signed.manifest.pin) if self._resume else None
        cells, tensors = found or (0, ())
        if not cells:
            reason = "no member that holds a state of the run is here"
            self._telemetry.emit("state.awaited", step="size", reason=reason, round=0)
        began = trio.current_time()
        while not cells:
            if trio.current_time() > began + SYNC_PATIENCE:
                self._gossip.check_entry()
            members = self._gossip.presence.active()
            cells = await size_from_members(node, signed.run_id, members, charter)
            if not cells:
                with trio.move_on_after(LOOK_SECONDS):
                    await self._gossip.presence.changed()
        reason = "from my disk" if found else "from the members"
        self._telemetry.emit("state.size", step="size", reason=reason, cells=cells)
        spec = spec_of(signed, cells, self._invite)
        try:
            theta, momentum = np.zeros(cells * CELL, np.float32), np.zeros(cells * CELL, np.float32)
        except MemoryError as error:
            needed = f"{8 * cells * CELL / 1e9:.1f} GB of memory"
            raise LocalError(f"the run's state takes {needed}", remedy="keep it on a computer with more") from error
        every = signed.manifest.checkpoint_rounds
        advance = leaf_step(self._outer, spec.output, spec.settings)
        archive = await Archive.open(node, spec, self._folder, tensors, advance, every=every, resume=self._resume)
        averager = Averager(node, spec, self._members, archive.outputs, archive.conduct)
        state, anchor = (theta, momentum), self._anchor
        catch_up = CatchUp(node, spec, self._outer, state, archive, anchor=anchor, resumes=self._resume)
        self._gossip.presence.on_newcomer(averager.add_member)
        self._gossip.presence.follow_chain(lambda: averager.electorate.votes, lambda: archive.conduct.certified)
        self._owner_log.on_change(partial(self._follow, archive.conduct))
        self._node.nursery.start_soon(self._owner_log.run)
        await catch_up.resume(BLANK)
        if self._resume:
            await catch_up.restore()
        self._holds = catch_up.changed
        self._body = replace(self._body, num_cells=cells)
        return KeptState(spec, theta, momentum, archive, averager, catch_up)

    async def _sync(self, kept: KeptState) -> None:
        """Hold the run's newest state; wait for a member that has it, since I cannot start a run.

        While I hold a certified one I leave it only for one that is proven: what made me look may be one liar's word.
        """
        catch_up, gossip, began = kept.catch_up, self._gossip, trio.current_time()
        before = catch_up.num_bytes
        if self.is_settled and kept.place.root == kept.place.certified and not await self._has_provider(kept):
            kept.averager.expect(kept.place.round + 1, kept.place.certificate)
            return
        self._announce(state=MemberState.SYNCING, **position_in_body(kept.place))
        with trio.move_on_after(SYNC_PATIENCE):
            await gossip.looked.wait()
            await self._heads.looked.wait()
        published = self._heads.ahead if self._resume else None
        is_awaited = False
        while True:
            patience = SYNC_PATIENCE if self._holds else 0.0
            # A run that has ended may still have a member with its state: a keeper waits for it.
            leaves, source = await catch_up.reach(gossip, patience, published=published, compare=False)
            self._holds |= source is not None
            if self._holds:
                break
            if not is_awaited:
                is_awaited = True
                reason = "no member that holds a state of the run is here"
                self._telemetry.emit("state.awaited", step="sync", reason=reason, round=kept.place.round)
            with trio.move_on_after(LOOK_SECONDS):
                await gossip.presence.changed()
        await catch_up.advance(kept.place)
        kept.averager.expect(kept.place.round + 1, kept.place.certificate)
        figures: dict[str, Any] = {"round": kept.place.round, "root": kept.place.root.hex()}
        figures |= {"bytes": catch_up.num_bytes - before, "seconds": round(trio.current_time() - began, 3)}
        self._telemetry.emit("state.synced", peer=source or "", **figures)
        self._settle(kept, leaves)

    async def _has_provider(self, kept: KeptState) -> bool:
        """Return True if a member is proven to hold the run's state and I do not; others have a moment to prove theirs."""
        await kept.catch_up.await_proofs(self._gossip, PROOF_PATIENCE)
        return kept.catch_up.provider(self._gossip.presence.active()) is not None

    async def _await_round(self, kept: KeptState, began: float, is_late: bool) -> None:
        """Wait until I am to be ready for the next round, or until my state is not the run's any more.

        A keeper without a vote that was behind (`is_late`) is ready at once. The others may be in that round already: they do
        not wait for it, and once they are in a later one, nobody calls it any more.
        """
        averager, ready_at = kept.averager, dict[PeerId, float]()
        while not self._is_behind(kept):
            now = trio.current_time()
            waiting = averager.waiting()
            ready_at = {peer: ready_at.get(peer, now) for peer in waiting}
            if self._may_begin(kept):
                if is_late and self._node.peer_id not in averager.electorate.votes:
                    return
                groups = kept.archive.conduct.pacing(self._counted())
                usual = self._pace.usual([seconds for peer, seconds in self._phases.items() if peer in groups[-1]])
                called = self._pace.called(started=began, ready_at=ready_at, groups=groups, expected=usual)
                if averager.why_no_quorum or (called is not None and (now >= called[0] or averager.is_called)):
                    self._grace = self._pace.floor
                    if called is not None and called[1]:
                        patience = self._pace.ceiling - (now - min(at for peer, at in ready_at.items() if peer in groups[-1]))
                        grace = self._pace.grace(min(now - began, usual))
                        self._grace = max(self._pace.floor, min(grace, patience / 2))
                    return
            if now - self._announced >= ANNOUNCE_PERIOD and self._body.addresses != self._node.transport.addresses():
                self._announce()
            await trio.sleep(PULSE_PERIOD)

    def _counted(self) -> frozenset[PeerId]:
        """Return the members that train, without those that have contributed to none of the last rounds."""
        trainers = {member.peer for member in training(self._gossip.presence.active()) if not is_keeper(member)}
        counted = frozenset(peer for peer in trainers if self._idle[peer] < MAX_IDLE_ROUNDS)
        return counted or frozenset(trainers)

    def _may_begin(self, kept: KeptState) -> bool:
        """Return True if a round can be attempted; one event for each reason why not, one when it can again."""
        if kept.place.round >= self._settings.num_rounds:
            return False
        if self._node.peer_id not in kept.averager.drawn():
            return False
        why_not = kept.averager.why_not_average
        if why_not != self._waiting:
            event = "round.awaited" if why_not else "round.possible"
            reason = why_not or "what was missing is here"
            self._telemetry.emit(event, step="keep", reason=reason, round=kept.place.round + 1)
        self._waiting = why_not
        return not why_not

    async def _take_part(self, kept: KeptState, seconds: float) -> None:
        """Take part in one attempt of the next round, and make its outer step if it is certified."""
        node, averager, place = self._node, kept.averager, kept.place
        contribution = Contribution(
            vector=None,
            round=place.round + 1,
            base_root=place.root,
            tokens=0,
            steps=0,
            loss=0.0,
            grace=self._grace,
            seconds=seconds,
        )
        self._gossip.presence.attend(averager.drawn())
        before, began = node.transport.traffic(), trio.current_time()
        self._round_over = trio.Event()
        averaged = await averager.average(contribution, kept.catch_up.state.next_root)
        outcome = averaged.outcome
        self._is_applying = outcome.kind is OutcomeKind.DONE
        figures = attempt_figures(outcome, trio.current_time() - began, before, node.transport.traffic())
        if outcome.kind is not OutcomeKind.DONE:
            self._round_over.set()
            self._telemetry.emit(ROUND_EVENTS[outcome.kind], **figures)
            await trio.sleep(KEEPER_RETRY_SECONDS)
            return
        here = self._members()
        self._idle = Counter({peer: 0 if peer in outcome.cut else self._idle[peer] + 1 for peer in here})
        self._note_phases(averaged.phases, here)
        leaves = await kept.catch_up.step(outcome.value.bounds, averaged.outputs)
        root = kept.place.root
        await kept.catch_up.advance(ChainPosition(outcome.slot.round, root, outcome.value.tokens, outcome.certificate))
        self._is_applying = False
        self._round_over.set()
        is_last = kept.catch_up.is_last  # Then the proposer may leave at once.
        if outcome.certificate is not None and (is_last or outcome.members[0] == node.peer_id):
            node.nursery.start_soon(partial(self._heads.publish, outcome.certificate, is_last=is_last))
        self._telemetry.emit("round.done", **figures)
        if root != outcome.value.next_root:
            reason = f"the outer step led to {root.hex()[:8]}, certified is {outcome.value.next_root.hex()[:8]}"
            self._telemetry.emit("state.drift", step="apply", reason=reason)
            await self._sync(kept)
            return
        self._settle(kept, leaves)
        self._round_began = trio.current_time()
        self._report(kept)
        node.nursery.start_soon(self._evaluations.look, kept.place.certificate)

    def _note_phases(self, stated: Mapping[PeerId, float], here: Collection[PeerId]) -> None:
        """Remember how long contributors have trained, by their own word: none for longer than the round has lasted."""
        most = trio.current_time() - self._round_began
        known = self._phases | {peer: min(seconds, most) for peer, seconds in stated.items() if seconds}
        self._phases = {peer: seconds for peer, seconds in known.items() if peer in here}

    def _settle(self, kept: KeptState, leaves: LeafHashes) -> None:
        """I hold the state of my position: write it if a checkpoint is due, and be waited for."""
        place = kept.place
        settings = kept_by(self._signed, _revision_of(kept))
        if settings != self._settings:
            self._settings = settings
            reason = f"it has {settings.num_rounds} rounds; `flockstep run info` shows all"
            rounds = settings.num_rounds
            self._telemetry.emit("run.revised", step="settings", reason=reason, round=place.round + 1, rounds=rounds)
        last = place.round >= settings.num_rounds
        if place.round != self._settled:
            self._settled, self._round_began = place.round, -math.inf
            if last:
                self._telemetry.emit("run.finished", round=place.round, root=place.root.hex())
        self._node.nursery.start_soon(kept.archive.checkpoints.write, place, kept.vectors, leaves[0] + leaves[1], last)
        self._announce(state=MemberState.TRAINING, root=place.root, **position_in_body(place))

    def _follow(self, conduct: Conduct, statements: OwnerStatements) -> None:
        """Carry out what the run's owner states, and show the others that I hold it."""
        conduct.follow(statements, self._invite)
        self._gossip.follow(conduct.charter)
        if statements.records:
            self._announce(statements=statements.hash, statements_bytes=len(statements.packed))

    def _is_behind(self, kept: KeptState) -> bool:
        members = self._gossip.presence.active()
        return kept.averager.behind or kept.catch_up.follows_another_chain(members)

    async def _report_votes(self, kept: KeptState) -> None:
        while True:
            self._report(kept)
            await trio.sleep(VOTES_PERIOD)

    def _report(self, kept: KeptState) -> None:
        """Emit who is here, and how many of the votes."""
        electorate, here = kept.averager.electorate, self._members() | {self._node.peer_id}
        missing = ", ".join(voter for voter in electorate.voters if voter and voter not in here)
        reason = f"missing: {missing}" if missing else "all voters are here"
        votes, quorum, total = electorate.votes_of(here), electorate.quorum, electorate.total
        figures: dict[str, Any] = {"votes": votes, "quorum": quorum, "total": total}
        self._telemetry.emit("run.votes", round=kept.place.round, peers=len(here), reason=reason, **figures)

    def _announce(self, **changes: Any) -> None:
        self._announced = trio.current_time()
        node, traffic = self._node, self._node.transport.traffic()
        self._body = replace(
            self._body,
            addresses=node.transport.addresses(),
            rung=self._rung(),
            up=node.upload_rate,
            down=node.download_rate,
            sent=traffic.sent,
            received=traffic.received,
            **changes,
        )
        body, clamped = fitted(self._body)
        if clamped:
            self._telemetry.emit("member.clamped", step="announce", reason=clamped)
        self._gossip.announce(body)
