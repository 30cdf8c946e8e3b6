"""A keeper: a member that holds the run's state, owns parts, checks, votes and serves newcomers, and trains nothing.

Theory of operation. A keeper is the network side of a peer without a trainer: NumPy, no torch. It learns the size of the
state (`state_size`), takes it like any newcomer, and from then on takes part in every round: its Ready states no tokens, so
nobody waits for a contribution of it. It becomes ready once two thirds of the members that train are (`Pace.called`), or
one of them and voters with more than a third of the votes. After a certified round it makes the outer step itself. After
the last round it goes on serving.

What it cannot do is make the start state of a run, which the manifest's seed decides: that takes the model. In the first
round it holds what most of the first members state (docs/trust.md), or the state whose root the manifest names: its owner's
keeper has that on its disk.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import trio

from ...collectives.allreduce.actions import OutcomeKind
from ...collectives.chain.certificate import value_of
from ...collectives.chain.fork_choice import is_keeper, training
from ...collectives.driver.contribution import Contribution
from ...collectives.spec import charter_of
from ...collectives.state.checkpoint_file import TensorAt
from ...collectives.vector.codec import CELL
from ...dht.members.body import MemberBody, MemberState
from ...dht.run.layout import UNPINNED
from ...dht.run.revision import revised_by
from ...peer.base.config import PeerConfig
from ...peer.base.errors import LocalError
from ...peer.base.transport import PeerId
from ..member.border import BLANK
from ..member.catch_up import LOOK_SECONDS
from ..member.member import SYNC_PATIENCE, Member
from ..member.participant import PULSE_PERIOD
from ..member.reach import Contact, ReachedRun
from ..step.pace import Pace
from .state_size import kept_size, size_from_members
from .trainers import Trainers

VOTES_PERIOD = 60.0
"""Seconds between two reports of who is here."""
KEEPER_RETRY_SECONDS = 1.0
"""Seconds after an attempt without effect; who trains comes back later than that."""


def _revision_of(kept: Member) -> bytes:
    """Return the revision that holds in the next round, as the certificate of my state names it."""
    certificate = kept.place.certificate
    return b"" if certificate is None else value_of(certificate).revision


class Keeper:
    """One keeper of a run. Nothing that others send raises here; `LocalError` if the memory is too small."""

    def __init__(self, reached: ReachedRun, config: PeerConfig, version: str = "") -> None:
        manifest = reached.signed.manifest
        self.charter = charter_of(reached.signed)
        self._reached = reached
        self._node = reached.node
        self._telemetry = reached.node.telemetry
        self.settings = manifest
        """What holds in the next round: the manifest, as its owner has revised it."""
        self._resume = config.resume
        self._pace = Pace(
            steps=1,
            seconds=manifest.inner.seconds / manifest.outer.fragments,
            floor=manifest.timing.floor,
            ceiling=manifest.timing.ceiling,
        )
        body = MemberBody(state=MemberState.SYNCING, device="keeper", version=version, name=config.name)
        self._contact = Contact.of(reached, body)
        self.kept: Member | None = None
        """The member with my state; None before I know its size."""
        self.succeeded = trio.Event()
        """Set once the run goes on as another one, which I may follow."""
        self._keeping = trio.CancelScope()
        self._waiting = ""
        self._finished = -1
        """The round after which the run was over, as it was reported."""
        self._trainers = Trainers()
        self._grace = self._pace.floor
        """Seconds for slower members to become ready after me: none of those that wait loses its patience before."""

    async def run(self) -> None:
        """Keep the run until cancelled. Raises `LocalError`."""
        self._contact.announce()
        self._contact.begin(BLANK.head)
        kept = self.kept = await self._open()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._report_votes, kept)
            nursery.start_soon(self._await_successor, kept)
            await self._sync(kept)
            with self._keeping:
                await self._keep(kept)
            await trio.sleep_forever()

    async def leave(self, reason: str, patience: float = 0.0) -> None:
        """Leave in order (`Member.leave`), after at most `patience` seconds."""
        kept = self.kept
        if kept is None:
            self._contact.announce(state=MemberState.LEFT)
            await self._node.leave(reason)
            return

        def stop() -> None:
            self._keeping.cancel()
            if patience and kept.averager.is_needed:
                why = "its vote may be needed for the next round; a second signal ends it at once"
                self._telemetry.emit("peer.stays", reason=why, round=kept.averager.round)

        await kept.leave(reason, patience, stop)

    async def _keep(self, kept: Member) -> None:
        is_late = False
        while True:
            began = trio.current_time()
            await self._await_round(kept, began, is_late)
            is_late = kept.is_behind
            if is_late:
                await self._sync(kept)
            else:
                await self._take_part(kept, trio.current_time() - began)

    async def _open(self) -> Member:
        """Learn the size of the state, and open what depends on it.

        Raises `UsageError` if the members let me in no more, or my disk has the state of another model.
        """
        cells, tensors = await self._size()
        try:
            theta, momentum = np.zeros(cells * CELL, np.float32), np.zeros(cells * CELL, np.float32)
        except MemoryError as error:
            needed = f"{8 * cells * CELL / 1e9:.1f} GB of memory"
            raise LocalError(f"the run's state takes {needed}", remedy="keep it on a computer with more") from error
        vectors = theta, momentum
        kept = await Member.open(self._reached, self._contact, vectors, cells, tensors, resume=self._resume)
        kept.held.place = BLANK
        if self._resume:
            await kept.held.restore()
        return kept

    async def _size(self) -> tuple[int, Sequence[TensorAt]]:
        """Learn the size of the state in cells, and where its tensors lie if my disk has it."""
        node, signed, pin = self._node, self._reached.signed, self._reached.signed.manifest.pin
        if pin is None:
            self._telemetry.emit("layout.unpinned", step="keep", reason=UNPINNED)
        folder = self._reached.folder
        found = await node.compute(kept_size, folder, self.charter, pin) if self._resume else None
        cells, tensors = found or (0, ())
        if not cells:
            reason = "no member that holds a state of the run is here"
            self._telemetry.emit("state.awaited", step="size", reason=reason, round=0)
        began = trio.current_time()
        while not cells:
            if trio.current_time() > began + SYNC_PATIENCE:
                self._contact.gossip.check_entry()
            cells = await size_from_members(node, signed.run_id, self._contact.presence.active(), self.charter)
            if not cells:
                with trio.move_on_after(LOOK_SECONDS):
                    await self._contact.presence.changed()
        reason = "from my disk" if found else "from the members"
        self._telemetry.emit("state.size", step="size", reason=reason, cells=cells)
        return cells, tensors

    async def _sync(self, kept: Member) -> None:
        """Hold the run's newest state; wait for a member that has it, since I cannot start a run."""
        before = kept.place.round
        # A run that has ended may still have a member with its state: a keeper waits for it.
        await kept.sync(starts=False)
        if kept.place.round != before:
            self._trainers.round_began = -math.inf
        self._look_at_settings(kept)

    async def _await_round(self, kept: Member, began: float, is_late: bool) -> None:
        """Wait until I am to be ready for the next round, or until my state is not the run's any more.

        A keeper without a vote that was behind (`is_late`) is ready at once. The others may be in that round already: they do
        not wait for it, and once they are in a later one, nobody calls it any more.
        """
        averager, ready_at = kept.averager, dict[PeerId, float]()
        while not kept.is_behind:
            now = trio.current_time()
            waiting = averager.waiting()
            ready_at = {peer: ready_at.get(peer, now) for peer in waiting}
            if self._may_begin(kept):
                if is_late and self._node.peer_id not in averager.electorate.votes:
                    return
                groups = kept.archive.conduct.pacing(self._counted())
                usual = self._pace.usual(self._trainers.phases(groups[-1]))
                called = self._pace.called(started=began, ready_at=ready_at, groups=groups, expected=usual)
                if called is not None and (now >= called[0] or averager.is_called):
                    self._grace = self._pace.floor
                    if called[1]:
                        patience = self._pace.ceiling - (now - min(at for peer, at in ready_at.items() if peer in groups[-1]))
                        grace = self._pace.grace(min(now - began, usual))
                        self._grace = max(self._pace.floor, min(grace, patience / 2))
                    return
            if self._contact.has_moved:
                self._contact.renew()
            await trio.sleep(PULSE_PERIOD)

    def _counted(self) -> frozenset[PeerId]:
        """Return the members that train, without those that have contributed to none of the last rounds."""
        trainers = {member.peer for member in training(self._contact.presence.active()) if not is_keeper(member)}
        return self._trainers.counted(trainers)

    def _may_begin(self, kept: Member) -> bool:
        """Return True if a round can be attempted; one event for each reason why not, one when it can again."""
        if kept.place.round >= self.settings.num_rounds:
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

    async def _take_part(self, kept: Member, seconds: float) -> None:
        """Take part in one attempt of the next round."""
        averaged = await kept.average(
            Contribution(
                vector=None,
                round=kept.place.round + 1,
                base_root=kept.place.root,
                tokens=0,
                steps=0,
                loss=0.0,
                grace=self._grace,
                seconds=seconds,
            )
        )
        if averaged.outcome.kind is not OutcomeKind.DONE:
            await trio.sleep(KEEPER_RETRY_SECONDS)
            return
        self._trainers.note(averaged.phases, averaged.outcome.cut, kept.expected(), trio.current_time())
        if not kept.place.is_certified:
            await self._sync(kept)
            return
        self._trainers.round_began = trio.current_time()
        self._look_at_settings(kept)
        self._report(kept)

    def _look_at_settings(self, kept: Member) -> None:
        """Take over the settings that the certificate of my state names, and report the end of the run."""
        place, settings = kept.place, revised_by(self._reached.signed, _revision_of(kept))
        rounds = settings.num_rounds
        if settings != self.settings:
            self.settings = settings
            reason = f"it has {rounds} rounds; `flockstep run info` shows all"
            self._telemetry.emit("run.revised", step="settings", reason=reason, round=place.round + 1, rounds=rounds)
        if place.round >= rounds and place.round != self._finished:
            self._finished = place.round
            self._telemetry.emit("run.finished", round=place.round, root=place.root.hex())

    async def _await_successor(self, kept: Member) -> None:
        await kept.goes_on.wait()
        self.succeeded.set()

    async def _report_votes(self, kept: Member) -> None:
        while True:
            self._report(kept)
            await trio.sleep(VOTES_PERIOD)

    def _report(self, kept: Member) -> None:
        """Emit who is here, and how many of the votes."""
        electorate, here = kept.averager.electorate, kept.expected() | {self._node.peer_id}
        missing = ", ".join(voter for voter in electorate.voters if voter and voter not in here)
        reason = f"missing: {missing}" if missing else "all voters are here"
        votes, quorum, total = electorate.votes_of(here), electorate.quorum, electorate.total
        figures: dict[str, Any] = {"votes": votes, "quorum": quorum, "total": total}
        self._telemetry.emit("run.votes", round=kept.place.round, peers=len(here), reason=reason, **figures)
