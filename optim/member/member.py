"""One member of a run: holds its state, takes part in rounds, makes their outer steps, and catches up.

Theory of operation. A member owns no clock of rounds. Whoever drives it says when it averages, when it looks for a newer
state and when it leaves: a trainer in another process (`participant`), a keeper that trains nothing (`keeper.keeper`),
or a simulation. A certified round moves its state and is announced; so is a state that was taken from others. A state
that a certificate proves is left only for one that is proven, since what made the member look may be one liar's word.

Once the run's owner has ended it (`dht.run.succession`), a member stands still: as soon as its round is over its state goes
to the disk, and is neither moved by a round nor left for a newer one. Its driver leaves once the run that goes on is named.

Who leaves ends the round that it is bound to, and votes once more where the others need it; the round of that last vote
gives it no vote in the next one.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Self

import trio

from ...collectives.accountability.credit import credits_in
from ...collectives.allreduce.actions import ROUND_EVENTS, Outcome, OutcomeKind
from ...collectives.chain.certificate import value_of
from ...collectives.chain.chain import ChainPosition, Head
from ...collectives.chain.fork_choice import Expected, alike, position_in_body
from ...collectives.chain.voters import electorate_after
from ...collectives.driver.contribution import Averaged, Contribution
from ...collectives.driver.rounds import Averager
from ...collectives.picture.shown import median_loss
from ...collectives.spec import Spec, spec_of
from ...collectives.state.archive import Archive
from ...collectives.state.checkpoint_file import TensorAt
from ...collectives.vector.arrays import Floats
from ...dht.members.body import MemberState
from ...dht.run.statements import OwnerStatements
from ...dht.run.succession import ENDED, is_ending, successor_of
from ...peer.base.transport import Traffic
from ...peer.log.telemetry import Telemetry
from ..step.outer import OuterSettings
from .catch_up import PROOF_PATIENCE, CatchUp
from .held import HeldState
from .reach import Contact, ReachedRun

SYNC_PATIENCE = 15.0
"""Seconds that a newcomer waits for other newcomers to settle which of them the run starts from."""

FINISH_SECONDS = 1.5
"""A leaving peer's time to end a round whose cut it has acknowledged, before its deputies must do its work again.

Of the three seconds that leaving may take: half a second remains for the goodbye, one for the end of the process.
"""
DEPART_PERIOD = 0.25
"""Seconds between two looks at who is ready, and after an attempt without effect."""
STAND_PERIOD = 5.0
"""Seconds until a state that the disk did not take is written again."""


class Member:
    """One member of a run."""

    def __init__(
        self,
        contact: Contact,
        spec: Spec,
        outer: OuterSettings,
        vectors: tuple[Floats, Floats],
        archive: Archive,
        *,
        anchor: Head | None = None,
        resumes: bool = True,
    ) -> None:
        """`anchor` is the certificate that a newcomer begins with; without `resumes` the run is to begin anew."""
        self.contact = contact
        self.archive = archive
        node, presence = contact.node, contact.presence
        self._node = node
        self._resumes = resumes
        self._settings = spec.settings
        self._round_over: trio.Event | None = None
        self._ends = False
        """Whether the run's owner has ended it."""
        self._stands = False
        """Whether my state is on the disk, and stays as it is."""
        self.successor = ""
        """The run that this one goes on as, once I may follow it; empty until then."""
        self._named = trio.Event()
        """Set once the owner has named that run."""
        self.goes_on = trio.Event()
        """Set with `successor`."""
        self.expected = Expected(presence.active, node.peer_id)
        """The other members of my rounds."""
        self.averager = Averager(node, spec, self.expected, archive.outputs, archive.conduct)
        self.held = HeldState(node, spec, outer, vectors, archive)
        self.catch_up = CatchUp(node, spec, self.held, archive, anchor=anchor if resumes else None)
        presence.on_newcomer(self.averager.add_member)
        presence.follow_chain(lambda: self.averager.electorate.votes, lambda: archive.conduct.certified)
        if contact.owner_log is not None:
            contact.owner_log.on_change(self._follow)

    @classmethod
    async def open(
        cls,
        reached: ReachedRun,
        contact: Contact,
        vectors: tuple[Floats, Floats],
        num_cells: int,
        tensors: Sequence[TensorAt],
        *,
        resume: bool,
    ) -> Self:
        """A member of a reached run, with its archive on disk; its model has `tensors` in so many cells."""
        node, manifest = reached.node, reached.signed.manifest
        spec, outer = spec_of(reached.signed, num_cells, reached.invite), OuterSettings.of(manifest)
        every = manifest.checkpoint_rounds
        archive = await Archive.open(node, spec, reached.folder, tensors, every=every, resume=resume)
        contact.change(num_cells=num_cells)
        member = cls(contact, spec, outer, vectors, archive, anchor=reached.anchor, resumes=resume)
        reached.host.prefer(archive.conduct.needs, node.votes)
        return member

    @property
    def place(self) -> ChainPosition:
        """Where its state stands."""
        return self.held.place

    @property
    def is_settled(self) -> bool:
        """Whether it holds the run's state and takes part."""
        return self.contact.body.state == MemberState.TRAINING

    @property
    def is_behind(self) -> bool:
        """Whether the run is further than its state, and it may move."""
        if self._stands:
            return False
        if self.averager.behind:
            return True
        members = alike(self.contact.presence.active(), self._node.peer_id)
        # A round itself reports how it ended.
        return not self.averager.busy and self.catch_up.follows_another_chain(members)

    async def average(self, contribution: Contribution) -> Averaged:
        """Attempt the next round; if it is certified, make its outer step, and announce the new state.

        `held.place.is_certified` is False where that step led elsewhere: then the state is to be taken from others.
        """
        node, held = self._node, self.held
        self.contact.presence.attend(self.averager.partners())
        before, began = node.transport.traffic(), trio.current_time()
        self._round_over = trio.Event()
        try:
            averaged = await self.averager.average(contribution, held.next_root)
            outcome = averaged.outcome
            is_done = outcome.kind is OutcomeKind.DONE
            figures = attempt_figures(outcome, trio.current_time() - began, before, node.transport.traffic())
            if is_done:
                await held.step(outcome.value.bounds, averaged.outputs)
                root, due = held.place.root, outcome.value.next_root
                await held.advance(ChainPosition(outcome.slot.round, root, outcome.value.tokens, outcome.certificate))
                loss = median_loss(self.contact.presence.active(), outcome.value.members)
                await node.compute(self.archive.losses.note, outcome.slot.round, loss)
                if root != due:
                    reason = f"the outer step led to {root.hex()[:8]}, certified is {due.hex()[:8]}"
                    node.telemetry.emit("state.drift", step="apply", reason=reason)
                if contribution.vector is not None:
                    figures["loss"] = contribution.loss if math.isfinite(contribution.loss) else None
                    figures["credit"] = credits_in(outcome.value).get(node.peer_id, 0)
            node.telemetry.emit(ROUND_EVENTS[outcome.kind], **figures)
        finally:
            self._round_over.set()
        if is_done:
            if held.place.is_certified:
                self.settle()
            self.contact.report(outcome, is_last=held.is_last)
        return averaged

    async def sync(self, *, compare: bool = False, starts: bool = True) -> None:
        """Hold the run's newest state, and announce it: mine if I start the run, or no other one is proven.

        With `compare` my model must be that of the others. Who cannot start a run (not `starts`) waits for a member that
        holds its state, even after its last round. Raises what `CatchUp.reach` does.
        """
        contact, catch_up, held, began = self.contact, self.catch_up, self.held, trio.current_time()
        before, source = held.num_bytes, None
        catch_up.ask_again()
        if (certificate := self.averager.decided) is not None:
            await catch_up.replay(certificate)
        holds = self.is_settled and (held.place.is_certified or held.place.certificate is None)
        if holds:
            await catch_up.await_proofs(contact.gossip, PROOF_PATIENCE)
        if not holds or catch_up.provider(contact.presence.active()) is not None:
            contact.announce(state=MemberState.SYNCING, **position_in_body(held.place))
            await self._look()
            await contact.check_alone()
            heads, settings = contact.heads, self._settings
            source = await catch_up.reach(
                contact.gossip,
                SYNC_PATIENCE,
                published=heads.ahead if heads is not None and self._resumes else None,
                rounds=settings(heads.revision).num_rounds if heads and settings and starts else math.inf,
                compare=compare,
                starts=starts,
            )
        await held.advance(held.place)
        self.averager.expect(held.place.round + 1, held.place.certificate)
        self.settle()
        figures: dict[str, Any] = {"round": held.place.round, "root": held.place.root.hex()}
        figures |= {"bytes": held.num_bytes - before, "seconds": round(trio.current_time() - began, 3)}
        self._node.telemetry.emit("state.synced", peer=source or "", **figures)

    async def _look(self) -> None:
        """Wait until I know how far the run is.

        Whoever holds a certified state waits for no more than those that are a quorum with it: two quorums share an honest
        voter, so one of these has signed what was decided since. If that was I, before I was killed, I catch up like any
        member that is behind. Without a certificate nobody knows how many voters there are.
        """
        certificate = self.place.certificate
        if certificate is None:
            await self.contact.await_look(SYNC_PATIENCE)
            return
        electorate = electorate_after(value_of(certificate), self.archive.conduct.charter)
        with trio.move_on_after(SYNC_PATIENCE):
            await self.contact.gossip.await_look(lambda answered: electorate.is_quorum({*answered, self._node.peer_id}))

    def settle(self) -> None:
        """I hold the state of my position: write it if a checkpoint is due, and be waited for."""
        place, held = self.place, self.held
        leaves, write = held.leaves[0] + held.leaves[1], self.archive.checkpoints.write
        self._node.nursery.start_soon(write, place, held.vectors, leaves, held.is_last)
        self.contact.announce(state=MemberState.TRAINING, root=place.root, **position_in_body(place))

    async def leave(self, reason: str, patience: float = 0.0, stop: Callable[[], None] = lambda: None) -> None:
        """End the round whose cut I have acknowledged, with its outer step, then send everybody a goodbye.

        With `patience` end any attempt that runs, since the others count on me until I say goodbye; and where my vote may be
        needed for one more round, stay for that: for so many seconds in all. `stop` keeps my driver from further attempts.
        """
        until, is_over, averager = trio.current_time() + patience, self._round_over, self.averager
        if is_over is not None and patience:
            with trio.move_on_at(until):
                await is_over.wait()
        elif is_over is not None and (averager.finishing or not averager.busy):
            await finish_round(is_over, averager.round, self._node.telemetry)
        stop()
        if patience:
            with trio.move_on_at(until):
                if self._round_over is not None:  # Else the end of a cancelled attempt would unhook the last one.
                    await self._round_over.wait()
                await self._stay()
        self.contact.announce(state=MemberState.LEFT)
        await self._node.leave(reason)

    async def _stay(self) -> None:
        """Take part in the next round without a contribution, while my vote may be needed for it.

        I am ready once another member is: alone I decide nothing, and where several leave there may be few others. The
        state stays what it is, since I leave.
        """
        averager, place = self.averager, self.place
        while averager.is_needed and not averager.behind and averager.round == place.round + 1:
            if averager.is_called or averager.waiting():
                leaving = Contribution(
                    vector=None,
                    round=averager.round,
                    base_root=place.root,
                    tokens=0,
                    steps=0,
                    loss=0.0,
                    grace=0.0,
                    is_leaving=True,
                )
                if (await averager.average(leaving, self.held.next_root)).outcome.kind is OutcomeKind.DONE:
                    return
            await trio.sleep(DEPART_PERIOD)

    def _follow(self, statements: OwnerStatements) -> None:
        """Carry out what the run's owner states, and show the others that I hold it."""
        contact, conduct = self.contact, self.archive.conduct
        conduct.follow(statements, contact.body.invite)
        contact.gossip.follow(conduct.charter)
        if is_ending(statements) and not self._ends:
            self._ends = True
            self._node.nursery.start_soon(self._stand_still)
        elif statements.records and self._ends == self._stands:
            contact.show(statements)
        if successor_of(statements):
            self._named.set()

    @property
    def _may_stand(self) -> bool:
        return self.is_settled and self.held.place.is_certified and (self._round_over is None or self._round_over.is_set())

    async def _stand_still(self) -> None:
        """Write my state once it moves no more, show that I hold the statement that ends the run, and await the next one."""
        contact, place = self.contact, self.held.place
        assert contact.owner_log is not None
        while not self._may_stand:
            if self._named.is_set() and not self.is_settled:  # I have no state of this run, and take that of the next one.
                break
            await trio.sleep(DEPART_PERIOD)
        if self._may_stand:
            self._stands, place = True, self.held.place
            await self._write(place)
            contact.show(contact.owner_log.statements)
            self._node.telemetry.emit("run.ended", round=place.round, root=place.root.hex(), reason=ENDED)
        await self._named.wait()
        run = successor_of(contact.owner_log.statements)
        if await contact.may_follow(run, place, self.archive.ledger.certificate):
            self._node.telemetry.emit("run.succeeded", run=run, round=place.round, reason=ENDED)
            self.successor = run
            self.goes_on.set()

    async def _write(self, place: ChainPosition) -> None:
        """Have my state on the disk, unless the next run is named before; each failure is an event."""
        held, checkpoints = self.held, self.archive.checkpoints
        while checkpoints.kept != place.round and not self._named.is_set():
            await checkpoints.write(place, held.vectors, held.leaves[0] + held.leaves[1], last=True)
            if checkpoints.kept != place.round:
                await trio.sleep(STAND_PERIOD)


async def finish_round(is_over: trio.Event, round_: int, telemetry: Telemetry) -> None:
    """Wait for the end of a round whose cut I have acknowledged, for `FINISH_SECONDS` at most."""
    with trio.move_on_after(FINISH_SECONDS):
        await is_over.wait()
        return
    reason = f"it has not ended within {FINISH_SECONDS:g} s, so that deputies may have to do my work again"
    telemetry.emit("peer.left_round", reason=reason, round=round_)


def attempt_figures(outcome: Outcome, seconds: float, before: Traffic, now: Traffic) -> dict[str, Any]:
    """Return the fields of the event that an attempt ends with (`ROUND_EVENTS`), the loss left out."""
    figures: dict[str, Any] = {
        "round": outcome.slot.round,
        "attempt": outcome.slot.attempt,
        "roster": list(outcome.members),
        "seconds": round(seconds, 3),
        "sent": now.sent - before.sent,
        "received": now.received - before.received,
    }
    if outcome.kind is OutcomeKind.DONE:
        return figures | {"cut": list(outcome.cut), "root": outcome.value.next_root.hex()}
    return figures | {"reason": outcome.reason}
