"""A round as a machine: from the moment that I am ready to a certified result or a void that is the same for all.

Theory of operation (DESIGN §8). Facts come in (`receive`, `lose`, `tick`, and the driver's results), are kept, and
`_advance` draws every conclusion that they allow. Nothing depends on the order of messages, and a repeated one changes
nothing. What must be done comes out as actions (`agenda`); the driver does it and reports back.

    GATHER   Ready from all active members → the first by rank (the convener) proposes a Roster
    AGREE    a quorum acknowledges the roster
    COLLECT  everybody commits to a contribution; owners fetch their parts and say what they Have; the convener cuts
    REDUCE   a quorum acknowledges the Cut; owners publish their Result; everybody fetches all outputs
    CONFIRM  everybody signs the outputs and the state that they lead to; a quorum of equal ones is the certificate
    ABANDON  something failed: who says Void signs no ResultAck afterwards, and counts as lost for those who go on. Who
             gives up shows the ResultAcks it knows; a quorum of these certifies the round after all, else it is void
    ENDED    `outcome` tells which, and why

All or nothing: no party applies anything before it holds a certificate, and a peer that has said Void can only end
with a certificate that somebody else completed. Nobody here is trusted: whatever a message claims is compared with
the roster, the cut and my own facts before it counts.
"""

import math
from collections.abc import Sequence

from ...peer import wire
from ...peer.transport import PeerId
from ...peer.wire.schema import encode
from ..chain.certificate import quorum, settled
from .actions import Action, Ended, Forward, Note, Outcome, OutcomeKind, Phase, Send, Setup
from .exchange import Exchange
from .gather import election, misquoted, proposal, refusal, reminder, shortage, stranger, unripe
from .roster import Facts, Table


class Round:
    """One attempt of one round, seen by one peer. Every method returns the actions that follow."""

    def __init__(self, setup: Setup, now: float) -> None:
        self.setup = setup
        self.slot = setup.ready.slot
        self.outcome: Outcome | None = None
        self.deadline = now + setup.timing.patience
        self._phase = Phase.GATHER
        self._active = set(setup.active)
        self._gone_on: set[PeerId] = set()
        self._facts = Facts()
        self._table: Table | None = None
        self._exchange: Exchange | None = None
        self._quorum_ready = False
        self._convener: PeerId | None = None
        self._elected = -1
        self._abandoned = ""
        self._overdue: Phase | None = None
        self._latest = self.deadline
        self._enough_at: float | None = None

    @property
    def phase(self) -> Phase:
        """Where the round stands."""
        if self._exchange is not None and self._phase is Phase.COLLECT:
            return self._exchange.phase
        return self._phase

    @property
    def is_bound(self) -> bool:
        """Whether I have acknowledged a cut, and the round goes on."""
        return self._phase is Phase.COLLECT and self._exchange is not None and self._exchange.is_bound

    # What the driver calls.

    def start(self) -> list[Action]:
        """Say that I am ready."""
        return [Send(tuple(sorted(self._active)), self.setup.ready)]

    def receive(self, signed: wire.Signed, message: wire.RoundMessage, now: float) -> list[Action]:
        """A message whose signature is right. Raises `ProtocolViolation` where it breaks a rule."""
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
        return [*shown, *(self._advance(now) if news == "new" and self._heeds(signed.sender, message) else [])]

    def awaits(self, peer: PeerId) -> bool:
        """Whether a peer counts among the members of this attempt."""
        return peer in self._active

    def greet(self, peer: PeerId) -> list[Action]:
        """A member has come: it learns that I am ready, and is waited for."""
        if self.phase is not Phase.GATHER or peer in self._active:
            return []
        self._active.add(peer)
        return [Send((peer,), self.setup.ready)]

    def outrun(self, peer: PeerId) -> list[Action]:
        """A peer is in a later round and will not become ready for this one: where too many are, I need not wait."""
        if self.outcome is not None or self._phase is not Phase.GATHER:
            return []
        self._gone_on.add(peer)
        staying, members = len(self._active - self._gone_on), len(self._active)
        if staying >= quorum(members):
            return []
        return self._end(OutcomeKind.BEHIND, f"of {members} members {members - staying} are in a later round")

    def lose(self, peer: PeerId, reason: str, now: float) -> list[Action]:
        """A peer is gone for this attempt."""
        if self.outcome is not None or peer not in self._active:
            return []
        self._active.discard(peer)
        table = self._table
        if table is None:
            if peer == self._convener:  # Whoever comes next by rank proposes a roster of those who are left.
                self._convener = None
            return self._advance(now)
        if peer not in table.members or self._phase is Phase.ABANDON:
            return self._advance(now)
        actions = self._without(peer, reason, now)
        return actions + self._advance(now)

    def tick(self, now: float) -> list[Action]:
        """Time has passed; worth calling at `deadline`."""
        if self.outcome is not None or now < self.deadline:
            return []
        if self._phase is Phase.GATHER:
            return self._gather_late(now)
        assert self._table is not None
        living = self._living(self._table)
        if self._phase is Phase.ABANDON:
            silent = sorted(living - self._facts.of(wire.Void, self.slot).keys())
            return self._end(OutcomeKind.VOID, f"{self._abandoned}; no word from {', '.join(silent)}")
        if self._exchange is None:
            self._overdue = self.phase
            silent = sorted(living - self._facts.of(wire.RosterAck, self.slot).keys())
            return self._abandon(f"no quorum for the roster: no word from {', '.join(silent)}", now)
        if self.phase is Phase.COLLECT and self._exchange.collecting.close():
            # Who has not delivered by now is left out; the convener and the others need time for the cut.
            self.deadline = now + 2 * self.setup.timing.control
            return self._advance(now)
        if self._exchange.hasten():
            self.deadline = now + self.setup.timing.control + self.setup.timing.transfer
            return self._advance(now)
        self._overdue = self.phase
        return self._abandon(f"{self.phase} took too long, missing: {self._exchange.missing(living)}", now)

    @property
    def exchange(self) -> Exchange:
        """What is told when a piece of work that was asked for is done."""
        assert self._exchange is not None, "the driver reports what was never asked of it"
        return self._exchange

    def told(self, now: float, actions: Sequence[Action] = ()) -> list[Action]:
        """`exchange` has been told, and has answered with `actions`: those, and what else follows."""
        return [*actions, *self._advance(now)]

    def certified(self, certificate: wire.Certificate, result: wire.ResultAck) -> list[Action]:
        """Somebody completed the certificate, which has been checked: I end with it if I hold what it certifies."""
        if self.outcome is not None or certificate.slot.round < self.slot.round:
            return []
        if certificate.slot.round > self.slot.round:
            return self._end(OutcomeKind.BEHIND, f"round {certificate.slot.round} is certified already")
        if certificate.slot == self.slot and self._exchange is not None and self._exchange.holds(result):
            return self._end(OutcomeKind.DONE, "certified", certificate)
        return self._end(OutcomeKind.BEHIND, "the round was certified, and I do not hold all of its outputs")

    # Drawing conclusions: each step happens once, as soon as the facts allow it.

    def _heeds(self, sender: PeerId, message: wire.RoundMessage) -> bool:
        """Whether a new word can change anything now. Most cannot: what is kept counts when something else does."""
        match self._phase:
            case Phase.GATHER:
                return isinstance(message, (wire.Ready, wire.Roster))
            case Phase.AGREE:
                return isinstance(message, (wire.RosterAck, wire.Void))
            case Phase.COLLECT if self._exchange is not None:
                return isinstance(message, wire.Void) or self._exchange.heeds(sender, message, self._active)
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
        """Who has given up will sign no result: it counts as lost, and who can do without it goes on."""
        actions: list[Action] = []
        for peer, void in self._facts.of(wire.Void, self.slot).items():
            if peer in self._active and self._phase is not Phase.ABANDON:
                actions.append(Note("round.given_up", peer, self.phase, void.reason))
                actions += self._without(peer, f"it gave up: {void.reason}", now)
        return actions

    def _gather(self, now: float) -> list[Action]:
        rosters = self._facts.of(wire.Roster)
        # Of two (a convener was lost while it spoke) the larger one: more members know it.
        for sender, roster in sorted(rosters.items(), key=lambda word: (-len(word[1].members), word[0])):
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
            self._table = table = Table(self._facts.signed(wire.Roster, sender), roster, self.setup.me, self._facts)
            self._phase, self.deadline = Phase.AGREE, now + self.setup.timing.control
            return [Send(roster.members, wire.RosterAck(self.slot, table.hash)), *self._advance(now)]
        return self._propose(now)

    def _propose(self, now: float) -> list[Action]:
        heard, needed = self._facts.num(wire.Ready), quorum(len(self._active))
        gathering = self._quorum_ready and self._convener is None and now < self.deadline
        if heard < needed or (gathering and heard < len(self._active)):
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
        if shortage(self.setup, self._active, members) or (self._convener is not None and slot.attempt <= self._elected):
            return []  # Who starts from another state hears the same, takes this one, and becomes ready once more.
        if self._convener is None:
            self.deadline = now + self.setup.timing.control
        # A word of a later attempt changes the order of ranks; no attempt has a second roster of mine.
        self._convener, self._elected = members[0], slot.attempt
        return [Send(tuple(readies), proposal(self.setup, readies))] if self._convener == self.setup.me else []

    def _gather_late(self, now: float) -> list[Action]:
        """GATHER has lasted too long: close the roster with who is ready, or go on training alone."""
        if self._convener is not None:
            return self._end(OutcomeKind.VOID, f"{self._convener}, the convener, proposed no roster")
        actions = self._propose(now)
        if actions or self._convener is not None:
            return actions  # If another one is the convener, it has until the new deadline.
        return self._end(OutcomeKind.VOID, unripe(self.setup, self._active, self._readies()))

    def _readies(self) -> dict[PeerId, wire.Ready]:
        return {peer: ready for peer, ready in self._facts.of(wire.Ready).items() if peer in self._active}

    def _agree(self, now: float) -> list[Action]:
        table = self._table
        assert table is not None
        if self._facts.acknowledged(wire.RosterAck, self.slot, table.hash) < quorum(len(table.members)):
            return []
        self._phase, self._exchange = Phase.COLLECT, Exchange(self.setup, self._facts, table)
        self.deadline = self._latest = now + self.setup.timing.control + self.setup.timing.transfer
        return [*self._exchange.collecting.begin(), *self._advance(now)]

    def _exchange_on(self, exchange: Exchange, now: float) -> list[Action]:
        before = exchange.phase, exchange.cut
        actions = exchange.advance(self._active)
        phase = exchange.phase
        if (phase, exchange.cut) != before:
            # Who confirms early gives those who still fetch outputs the time that it had itself.
            left = self.deadline if phase is Phase.CONFIRM else now + self.setup.timing.transfer
            self.deadline = max(left, now) + self.setup.timing.control
        if phase is Phase.COLLECT and (worth := exchange.collecting.worth_waiting(self._active)) is not None:
            # What I have is enough: who is slow is waited for as long as that costs less than to leave it out.
            self._enough_at = now if self._enough_at is None else self._enough_at
            self.deadline = min(self._latest, self._enough_at + max(worth, self.setup.timing.control))
        if exchange.failure:
            return actions + self._abandon(exchange.failure, now)
        if exchange.certificate is not None:
            return actions + self._end(OutcomeKind.DONE, "certified", exchange.certificate)
        return actions

    def _without(self, peer: PeerId, reason: str, now: float) -> list[Action]:
        """Go on without a member, or give up where too few are left."""
        self._active.discard(peer)
        table = self._table
        assert table is not None
        living, needed = len(self._living(table)), quorum(len(table.members))
        if living < needed:
            return self._abandon(f"{peer} was lost ({reason}): {living} are left, {needed} are needed", now)
        missing = table.owners - (self._exchange.harvest.outputs.keys() if self._exchange is not None else set())
        if orphans := [part for part in missing if table.holder(part, self._active) is None]:
            return self._abandon(f"{peer} was lost ({reason}), the last who answered for part {min(orphans)}", now)
        self.deadline = self._latest = max(self.deadline, now + self.setup.timing.control + self.setup.timing.transfer)
        if self._exchange is not None:
            return self._exchange.lost(peer)
        # Who has not heard the lost convener's roster hears it from us.
        return [Forward(table.members, table.signed)] if peer == table.members[0] else []

    # Giving up, together.

    def _abandon(self, reason: str, now: float) -> list[Action]:
        assert self._table is not None
        self._abandoned = reason[: wire.MAX_REASON]
        self._phase, self.deadline = Phase.ABANDON, now + 2 * self.setup.timing.control
        acks = self._facts.of(wire.ResultAck, self.slot)
        known = tuple(encode(self._facts.signed(wire.ResultAck, peer)) for peer in acks)
        return [Send(self._table.members, wire.Void(self.slot, self._abandoned, known))]

    def _settle(self) -> list[Action]:
        """Certified after all by what the Voids carry, or void once all who live have said so: the same for everybody."""
        table = self._table
        assert table is not None
        voids = self._facts.of(wire.Void, self.slot)
        if (
            agreement := settled(voids, self.slot, table.members, self.setup.verify, owner=self.setup.charter.authority)
        ) is not None:
            acks, result = agreement
            if (cut := table.cut_of(result)) is not None:
                return self.certified(table.certificate(cut, acks), result)
            return self._end(OutcomeKind.BEHIND, "the round was certified with a cut that I have not seen")
        return self._end(OutcomeKind.VOID, self._abandoned) if self._living(table) <= voids.keys() else []

    # Small things.

    def _living(self, table: Table) -> set[PeerId]:
        return self._active & set(table.members)

    def _end(self, kind: OutcomeKind, reason: str, certificate: wire.Certificate | None = None) -> list[Action]:
        after_all = self._phase is Phase.ABANDON
        self._phase, self.deadline = Phase.ENDED, math.inf
        outcome = Outcome(kind, self.slot, reason, self._table.members if self._table else (), overdue=self._overdue)
        if certificate is not None and self._exchange is not None:
            outcome = self._exchange.certified(outcome, certificate, after_all=after_all)
        self.outcome = outcome
        return [Ended()]
