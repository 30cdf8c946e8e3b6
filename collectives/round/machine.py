"""The state machine of one round: from Ready to a certificate or an agreed Void. Pure.

Theory of operation (DESIGN §8). Inputs (`receive`, `lose`, `tick`, and the driver's results) are logged, and `_advance`
makes every transition that they allow. Nothing depends on the order of messages, and a repeated one changes nothing.
Work comes out as actions (`actions`); the driver does it and reports back.

    GATHER   Ready from all active members → the first by rank (the convener) proposes a Roster
    AGREE    a quorum acknowledges the roster
    COLLECT  every member commits to a contribution; owners fetch their parts and send a Have; the convener cuts
    JUDGE    a quorum acknowledges the Cut; contributors send a Sketch; the run's rule weighs the contributions
    REDUCE   owners publish their Result; every member fetches all outputs
    CHECK    contributors send a second Sketch, which verifies the outputs
    CONFIRM  every member signs the outputs and the state that they lead to; a quorum of equal ones is the certificate
    ABANDON  something failed: a member that sends Void signs no ResultAck afterwards, and counts as lost for those that
             go on. A Void carries the known ResultAcks; a quorum of these certifies the round after all, else it is
             void
    ENDED    `outcome` holds the end and its reason

Atomicity: no member applies anything before it holds a certificate, and a member that has sent Void can only end with a
certificate that another one completed. No peer is trusted: whatever a message claims is compared with the roster, the
cut and my own facts before it counts.
"""

import math
from collections.abc import Sequence

from ...peer import wire
from ...peer.transport import PeerId
from ...peer.wire.schema import encode
from ..chain.certificate import settled_result
from ..chain.quorum import quorum
from .actions import Action, Ended, Forward, Note, Outcome, OutcomeKind, Phase, Send, Setup
from .exchange import RosterRound
from .facts import MessageLog
from .gather import election, misquoted, proposal, refusal, reminder, stranger, why_not_enough, why_not_ready
from .roster import RosterView


class Round:
    """One attempt of one round at one peer. Every method returns the resulting actions."""

    def __init__(self, setup: Setup, now: float) -> None:
        self.setup = setup
        self.slot = setup.ready.slot
        self.outcome: Outcome | None = None
        self.deadline = now + setup.timing.patience
        self._phase = Phase.GATHER
        self._active = set(setup.active)
        self._gone_on: set[PeerId] = set()
        self._facts = MessageLog()
        self._table: RosterView | None = None
        self._exchange: RosterRound | None = None
        self._quorum_ready = False
        self._convener: PeerId | None = None
        self._elected = -1
        self._proposed = -1
        self._abandoned = ""
        self._overdue: Phase | None = None
        self._latest = self.deadline
        self._enough_at: float | None = None

    @property
    def phase(self) -> Phase:
        """The current phase."""
        if self._exchange is not None and self._phase is Phase.COLLECT:
            return self._exchange.phase
        return self._phase

    @property
    def is_bound(self) -> bool:
        """True if I have acknowledged a cut, and the round goes on."""
        return self._phase is Phase.COLLECT and self._exchange is not None and self._exchange.is_bound

    # The driver's calls.

    def start(self) -> list[Action]:
        """Send my Ready."""
        return [Send(tuple(sorted(self._active)), self.setup.ready)]

    def receive(self, signed: wire.Signed, message: wire.RoundMessage, now: float) -> list[Action]:
        """Receive a message whose signature is checked. Raises `ProtocolViolation` if it breaks a rule."""
        slot, mine = message.slot, self.slot
        if self.outcome is not None or slot.round != mine.round or slot.run != mine.run:
            return []
        if self._table is not None and signed.sender not in self._table.places:
            return stranger(signed.sender, message, self._table, self._active)
        again = reminder(self.setup.me, signed.sender, message, self._facts) if self._phase is Phase.GATHER else []
        news = self._facts.add(signed, message)
        if news == "conflict":
            return [Note("round.equivocation", signed.sender, type(message).__name__, "a second and different one")]
        shown = self._table.shown_to(signed.sender, message) if self._table is not None and news == "new" else again
        return [*shown, *(self._advance(now) if news == "new" and self._may_change(signed.sender, message) else [])]

    def has_acknowledged(self, roster: wire.Signed) -> bool:
        """Return True if I have acknowledged this roster in this attempt."""
        return self._table is not None and self._table.hash == roster.hash

    def has_member(self, peer: PeerId) -> bool:
        """Return True if a peer is an active member of this attempt."""
        return peer in self._active

    def has_seat(self, peer: PeerId) -> bool:
        """Return True if a peer is an active member of this attempt, or in its roster."""
        return peer in self._active or (self._table is not None and peer in self._table.places)

    def add_member(self, peer: PeerId) -> list[Action]:
        """Add a member that has arrived in GATHER: it is sent my Ready, and waited for."""
        if self.phase is not Phase.GATHER or peer in self._active:
            return []
        self._active.add(peer)
        return [Send((peer,), self.setup.ready)]

    def peer_ahead(self, peer: PeerId) -> list[Action]:
        """Record a peer that is in a later round and will not get ready for this one; end if no quorum can remain."""
        if self.outcome is not None or self._phase is not Phase.GATHER or peer not in self._active:
            return []
        self._gone_on.add(peer)
        staying, members = len(self._active - self._gone_on), len(self._active)
        if staying >= quorum(members):
            return []
        return self._end(OutcomeKind.BEHIND, f"of {members} members {members - staying} are in a later round")

    def lose(self, peer: PeerId, reason: str, now: float) -> list[Action]:
        """Remove a lost peer from this attempt."""
        if self.outcome is not None or peer not in self._active:
            return []
        self._active.discard(peer)
        table = self._table
        if table is None:
            if peer == self._convener:  # The next by rank proposes a roster of the remaining members (view change).
                self._convener = None
            return self._advance(now)
        if peer not in table.members or self._phase is Phase.ABANDON:
            return self._advance(now)
        actions = self._without(peer, reason, now)
        return actions + self._advance(now)

    def tick(self, now: float) -> list[Action]:
        """React to the passing of time; call it at `deadline`."""
        if self.outcome is not None or now < self.deadline:
            return []
        if self._phase is Phase.GATHER:
            return self._gather_late(now)
        assert self._table is not None
        living = self._living(self._table)
        if self._phase is Phase.ABANDON:
            silent = sorted(living - self._facts.of(wire.Void, self.slot).keys())
            return self._end(OutcomeKind.VOID, f"{self._abandoned}; no message from {', '.join(silent)}")
        if self._exchange is None:
            self._overdue = self.phase
            silent = sorted(living - self._facts.of(wire.RosterAck, self.slot).keys())
            return self._abandon(f"no quorum for the roster: no message from {', '.join(silent)}", now)
        if self.phase is Phase.COLLECT and self._exchange.collect_phase.close():
            # Late contributions are left out; the convener and the others need time for the cut.
            self.deadline = now + 2 * self.setup.timing.control
            return self._advance(now)
        if self._exchange.on_timeout():
            self.deadline = now + self.setup.timing.control + self.setup.timing.transfer
            return self._advance(now)
        self._overdue = self.phase
        return self._abandon(f"{self.phase} took too long, missing: {self._exchange.missing(living)}", now)

    @property
    def exchange(self) -> RosterRound:
        """The part of the machine that takes the results of the driver's work."""
        assert self._exchange is not None, "the driver reports work that was never requested"
        return self._exchange

    def after_work(self, now: float, actions: Sequence[Action] = ()) -> list[Action]:
        """Advance after `exchange` took a result and returned `actions`; returns these and what follows."""
        return [*actions, *self._advance(now)]

    def give_up(self, reason: str, now: float) -> list[Action]:
        """Abandon the attempt for a reason of my own, such as a statement that I cannot sign."""
        if self.outcome is not None or self._phase is Phase.ABANDON:
            return []
        return self._end(OutcomeKind.VOID, reason) if self._table is None else self._abandon(reason, now)

    def certified(self, certificate: wire.Certificate, result: wire.ResultAck) -> list[Action]:
        """End with a certificate of my round that counts (`averager`): DONE if I hold what it certifies, else BEHIND."""
        if self.outcome is not None or certificate.slot.round != self.slot.round:
            return []
        if certificate.slot == self.slot and self._exchange is not None and self._exchange.holds(result):
            return self._end(OutcomeKind.DONE, "certified", certificate)
        return self._end(OutcomeKind.BEHIND, "the round was certified, and I do not hold all of its outputs")

    # Transitions: each happens once, as soon as the messages allow it.

    def _may_change(self, sender: PeerId, message: wire.RoundMessage) -> bool:
        """Return True if a new message can change anything now. Most cannot: they count with the next one that can."""
        match self._phase:
            case Phase.GATHER:
                return isinstance(message, (wire.Ready, wire.Roster))
            case Phase.AGREE:
                return isinstance(message, (wire.RosterAck, wire.Void))
            case Phase.COLLECT if self._exchange is not None:
                return isinstance(message, wire.Void) or self._exchange.may_change(sender, message, self._active)
        return isinstance(message, wire.Void)

    def _advance(self, now: float) -> list[Action]:
        if self.outcome is not None:
            return []
        if self._phase is Phase.GATHER:
            return self._gather(now)
        actions = self._let_go(now)
        if self.phase is Phase.ABANDON:
            return actions + self._settle()
        return actions + (self._agree(now) if self._exchange is None else self._exchange_on(self._exchange, now))

    def _let_go(self, now: float) -> list[Action]:
        """Treat members that sent Void as lost, since they will sign no result; the others go on if they can."""
        actions: list[Action] = []
        for peer, void in self._facts.of(wire.Void, self.slot).items():
            if peer in self._active and self._phase is not Phase.ABANDON:
                actions.append(Note("round.given_up", peer, self.phase, void.reason))
                actions += self._without(peer, f"it gave up: {void.reason}", now)
        return actions

    def _gather(self, now: float) -> list[Action]:
        rosters = self._facts.of(wire.Roster)
        # Of two (a convener was lost while it sent one) the larger: more members know it.
        for sender, roster in sorted(rosters.items(), key=lambda item: (-len(item[1].members), item[0])):
            if roster.slot.attempt < self.slot.attempt:
                continue
            if (why := refusal(self.setup, self._active, sender, roster, self._facts)) is not None:
                self._facts.drop(wire.Roster, sender)
                shown = [Forward((sender,), ready) for ready in misquoted(roster, self._facts)]
                return [Note("round.roster_refused", sender, "gather", why), *shown]
            self.slot = roster.slot
            if self.setup.me not in roster.members:
                return self._end(OutcomeKind.MISSED, f"{sender} closed the roster before I was ready")
            self._facts.restrict(roster.members)
            self._table = table = RosterView(self._facts.signed(wire.Roster, sender), roster, self.setup.me, self._facts)
            self._phase, self.deadline = Phase.AGREE, now + self.setup.timing.control
            return [Send(roster.members, wire.RosterAck(self.slot, table.hash)), *self._advance(now)]
        return self._propose(now)

    def _propose(self, now: float) -> list[Action]:
        received, needed = self._facts.num(wire.Ready), quorum(len(self._active))
        gathering = self._quorum_ready and self._convener is None and now < self.deadline
        if received < needed or (gathering and received < len(self._active)):
            return []
        readies = self._readies()
        if len(readies) >= needed and not self._quorum_ready:
            self._quorum_ready = True
            self.deadline = now + self.setup.timing.gather
        late = self._convener is not None or (self._quorum_ready and now >= self.deadline)
        if not (late or len(readies) == len(self._active)):
            return []
        slot, base_root, members = election(self.setup, readies)
        if base_root != self.setup.ready.base_root:
            return self._end(OutcomeKind.BEHIND, "most members start from another state than I")
        if why_not_enough(self.setup, self._active, members) or (
            self._convener is not None and slot.attempt <= self._elected
        ):
            return []  # Members with another state reach the same conclusion, take this state, and get ready again.
        if self._convener is None:
            self.deadline = now + self.setup.timing.control
        # A Ready of a later attempt changes the order of ranks, and one that is lost changes it back.
        self._convener, self._elected = members[0], slot.attempt
        if self._convener != self.setup.me or slot.attempt <= self._proposed:
            return []
        self._proposed = slot.attempt
        return [Send(tuple(readies), proposal(self.setup, readies))]

    def _gather_late(self, now: float) -> list[Action]:
        """Handle the timeout of GATHER: close the roster with the ready members, or go on training alone."""
        if self._convener is not None:
            return self._end(OutcomeKind.VOID, f"{self._convener}, the convener, proposed no roster")
        actions = self._propose(now)
        if actions or self._convener is not None:
            return actions  # If another member is the convener, it has until the new deadline.
        return self._end(OutcomeKind.VOID, why_not_ready(self.setup, self._active, self._readies()))

    def _readies(self) -> dict[PeerId, wire.Ready]:
        return {peer: ready for peer, ready in self._facts.of(wire.Ready).items() if peer in self._active}

    def _agree(self, now: float) -> list[Action]:
        table = self._table
        assert table is not None
        if self._facts.acknowledged(wire.RosterAck, self.slot, table.hash) < quorum(len(table.members)):
            return []
        self._phase, self._exchange = Phase.COLLECT, RosterRound(self.setup, self._facts, table)
        self.deadline = self._latest = now + self.setup.timing.control + self.setup.timing.transfer
        return [*self._exchange.collect_phase.begin(), *self._advance(now)]

    def _exchange_on(self, exchange: RosterRound, now: float) -> list[Action]:
        before = exchange.phase, exchange.cut
        actions = exchange.advance(self._active)
        phase = exchange.phase
        if (phase, exchange.cut) != before:
            # A member that confirms early grants the others, which still fetch outputs, the time that it had.
            left = self.deadline if phase is Phase.CONFIRM else now + self.setup.timing.transfer
            self.deadline = max(left, now) + self.setup.timing.control
        if phase is Phase.COLLECT and (worth := exchange.collect_phase.worth_waiting(self._active)) is not None:
            # I hold enough: wait for slow contributors only as long as that costs less than leaving them out.
            self._enough_at = now if self._enough_at is None else self._enough_at
            self.deadline = min(self._latest, self._enough_at + max(worth, self.setup.timing.control))
        if exchange.failure:
            return actions + self._abandon(exchange.failure, now)
        if exchange.certificate is not None:
            return actions + self._end(OutcomeKind.DONE, "certified", exchange.certificate)
        return actions

    def _without(self, peer: PeerId, reason: str, now: float) -> list[Action]:
        """Go on without a member, or abandon the round if too few are left."""
        self._active.discard(peer)
        table = self._table
        assert table is not None
        living, needed = len(self._living(table)), quorum(len(table.members))
        if living < needed:
            return self._abandon(f"{peer} was lost ({reason}): {living} are left, {needed} are needed", now)
        missing = table.owners - (self._exchange.reduce_phase.outputs.keys() if self._exchange is not None else set())
        if orphans := [part for part in missing if table.holder(part, self._active) is None]:
            return self._abandon(f"{peer} was lost ({reason}), the last who answered for part {min(orphans)}", now)
        self.deadline = self._latest = max(self.deadline, now + self.setup.timing.control + self.setup.timing.transfer)
        if self._exchange is not None:
            return self._exchange.lost(peer)
        # Members that did not receive the lost convener's roster receive it from us.
        return [Forward(table.members, table.signed)] if peer == table.members[0] else []

    # Agreement on a Void.

    def _abandon(self, reason: str, now: float) -> list[Action]:
        assert self._table is not None
        self._abandoned = reason[: wire.MAX_REASON]
        self._phase, self.deadline = Phase.ABANDON, now + 2 * self.setup.timing.control
        acks = self._facts.of(wire.ResultAck, self.slot)
        known = tuple(encode(self._facts.signed(wire.ResultAck, peer)) for peer in acks)
        return [Send(self._table.members, wire.Void(self.slot, self._abandoned, known))]

    def _settle(self) -> list[Action]:
        """Settle an abandoned round: certified by what the Voids carry, or void once all living members sent theirs."""
        table = self._table
        assert table is not None
        voids = self._facts.of(wire.Void, self.slot)
        if (
            agreement := settled_result(
                voids, self.slot, table.members, self.setup.verify, owner=self.setup.charter.authority
            )
        ) is not None:
            acks, result = agreement
            if (cut := table.cut_of(result)) is not None:
                return self.certified(table.certificate(cut, acks), result)
            return self._end(OutcomeKind.BEHIND, "the round was certified with a cut that I have not seen")
        return self._end(OutcomeKind.VOID, self._abandoned) if self._living(table) <= voids.keys() else []

    # Helpers.

    def _living(self, table: RosterView) -> set[PeerId]:
        return self._active & set(table.members)

    def _end(self, kind: OutcomeKind, reason: str, certificate: wire.Certificate | None = None) -> list[Action]:
        after_all = self._phase is Phase.ABANDON
        self._phase, self.deadline = Phase.ENDED, math.inf
        outcome = Outcome(kind, self.slot, reason, self._table.members if self._table else (), overdue=self._overdue)
        if certificate is not None and self._exchange is not None:
            outcome = self._exchange.certified(outcome, certificate, after_all=after_all)
        self.outcome = outcome
        return [Ended()]
