"""The state machine of one decision at one voter: rules, locks, attempts and terms. Pure.

Theory of operation (Tendermint, arXiv:1807.04938, for one height, over hashes; docs/trust.md argues its safety and
liveness). An attempt has a convener and four statements, one of each by each voter:

    Ready     to all when I enter the attempt, with the newest proof that I know
    Propose   by the convener under the Readys of a quorum: the value of the newest proof among them, or a new one
    Accept    of the convener's proposal, if I hold the bytes, and the lock allows it
    Confirm   when I know a proof (Accepts of a quorum) of this attempt; it is my lock from then on

Confirms of a quorum in one slot are the decision, whenever I see them. The lock: I accept another value than mine only
under a proof that is no older than my lock. A proof of an earlier attempt is shown and not confirmed, since others may
have moved on without it.

An attempt ends at my deadline, which begins with the Readys of a quorum, or when voters with 1/3 of the votes or more
are in a later one. I never go back. Without the first condition a voter on the wrong side of a partition would count
attempts alone, and never meet the others again once the deadlines are at their ceiling; with it all honest voters are
within one attempt of each other as soon as the network is calm. Less than 1/3 of the votes move nobody. So a refused
proposal ends no attempt: its convener could also have been silent, and the deadline is paid for either.

Terms change the electorate or its quorum: `appoint` for an appointment, `stall` for a term known beforehand. Ballots
are ordered by term, then attempt; locks and proofs pass on.

The driver verifies signatures, calls `meet` for each connection to a voter that is made or made again, since nothing is
sent twice otherwise, `tick` at `deadline`, and does the actions in their order.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass, field

from ...peer.transport import PeerId
from ...peer.wire import Slot
from .actions import (
    AgreementAction,
    AgreementNote,
    AgreementTiming,
    Decided,
    Dispatch,
    FallenBehind,
    FetchValue,
    ForwardReady,
    MakeValue,
    Persist,
)
from .collected import NewestStatements
from .electorate import NOBODY, Electorate
from .guard import VoterGuard, VoterMemory
from .statements import Accept, AcceptProof, Confirm, Decision, Propose, Statement, VoterReady, newest
from .validity import certificate_fault, statement_fault


@dataclass(slots=True)
class _Attempt:
    """What concerns one attempt only."""

    since: float | None = None
    """When a quorum was in this attempt or a later one: its clock starts."""
    is_gathered: bool = False
    """True if the convener waits for no more Readys."""
    is_making: bool = False
    """True if the convener has asked for a new value."""
    offer: tuple[bytes, tuple[tuple[PeerId, AcceptProof | None], ...]] | None = None
    """The new value that I made, and the Readys that justify it."""
    forwarded: dict[PeerId, float] = field(default_factory=dict)
    """The voters whose Readys I forwarded to the convener, and when."""
    is_weighed: bool = False
    """True if the proposal was compared with what I had forwarded when it arrived."""
    is_refused: bool = False


class VoterMachine:
    """One decision at one voter or observer. Every method returns the resulting actions."""

    def __init__(self, me: PeerId, memory: VoterMemory, timing: AgreementTiming) -> None:
        self.me = me
        self.decision: Decision | None = None
        self._timing = timing
        self._slot, self._terms = memory.slot, memory.terms
        self._lock, self._newest_proof = memory.lock, memory.newest_proof
        self._is_observer = memory.is_observer
        self._guard = VoterGuard(memory)
        self._statements = NewestStatements()
        self._held: set[bytes] = set()
        self._fetching: set[bytes] = set()
        self._rounds_ahead: dict[PeerId, int] = {}
        self._behind = memory.slot.round
        self._found: Decision | None = None
        self._is_present = True
        self._looked: tuple[int, Slot | None] = (-1, None)
        """The Readys and the slot that I have last looked at for a later attempt, the clock, and what to forward."""
        self._attempt = _Attempt()
        for statement in memory.said:
            self._take(me, statement)

    # What the driver may read.

    @property
    def slot(self) -> Slot:
        """The slot that I am in."""
        return self._slot

    @property
    def electorate(self) -> Electorate:
        """The electorate of my term."""
        return self._terms[self._slot.term]

    @property
    def convener(self) -> PeerId:
        """The convener of my slot."""
        return self.electorate.convener(self._slot.round, self._slot.term + self._slot.attempt)

    @property
    def memory(self) -> VoterMemory:
        """What a restart must load."""
        return VoterMemory(
            self._slot, self._terms, self._guard.said, self._lock, self._newest_proof, is_observer=self._is_observer
        )

    @property
    def has_said_ready(self) -> bool:
        """True if I have said Ready in my slot, as far as this machine knows: its driver may have failed to sign it."""
        return self._guard.signed(VoterReady)

    @property
    def newest_proof(self) -> AcceptProof | None:
        """The newest proof that I know."""
        return self._newest_proof

    @property
    def since(self) -> float | None:
        """When a quorum was in my attempt or a later one; None before."""
        return self._attempt.since

    @property
    def deadline(self) -> float:
        """When to call `tick`; infinite while less than a quorum is in my attempt, and at the end."""
        if self.decision is not None or self._attempt.since is None:
            return math.inf
        if self.convener == self.me and not self._attempt.is_gathered:
            return self._attempt.since + self._timing.control
        return self._attempt.since + self._timing.length(self._slot.attempt)

    # The driver's calls.

    def start(self, now: float) -> list[AgreementAction]:
        """Begin, or begin again after a restart: repeat what I signed in my slot."""
        repeated = [Dispatch(self._others(), statement) for statement in self._guard.said]
        return [*([Persist(self.memory)] if self._is_observer else []), *repeated, *self._advance(now)]

    def meet(self, voter: PeerId, now: float) -> list[AgreementAction]:
        """Bring a voter up to date to which a connection was made, or made again."""
        if self.decision is not None:
            return [Dispatch((voter,), self.decision)]
        if voter == self.convener:
            self._attempt.forwarded.clear()
            self._looked = -1, None
        return [*(Dispatch((voter,), statement) for statement in self._guard.said), *self._advance(now)]

    def receive(self, voter: PeerId, statement: Statement, now: float) -> list[AgreementAction]:
        """Receive a voter's statement whose signatures, the shown ones too, are verified."""
        slot, mine = statement.slot, self._slot
        if self.decision is not None or slot.run != mine.run or slot.round < mine.round:
            return []
        if slot.round > mine.round:
            return self._see_ahead(voter, statement) if isinstance(statement, VoterReady) else []
        if (why := statement_fault(voter, statement, mine, self._terms)) is not None:
            return [self._refused(voter, statement, why)]
        match self._take(voter, statement):
            case "known":
                return []
            case "conflict":
                what = type(statement).__name__
                return [AgreementNote("agreement.equivocation", voter, what, "a second and different one in its slot")]
        return self._advance(now)

    def certified(self, peer: PeerId, decision: Decision, now: float) -> list[AgreementAction]:
        """Receive a decision whose signatures are verified, from anybody."""
        if self.decision is not None or decision.slot.round != self._slot.round:
            return []
        if (why := certificate_fault(decision, self._slot, self._terms)) is not None:
            return [AgreementNote("agreement.refused", peer, "Decision", why)]
        self._found = decision
        return self._advance(now)

    def hold(self, value: bytes, now: float) -> list[AgreementAction]:
        """Report that I hold the bytes of a value, and checked them."""
        self._held.add(value)
        return self._advance(now)

    def offer(
        self, slot: Slot, value: bytes, readys: tuple[tuple[PeerId, AcceptProof | None], ...], now: float
    ) -> list[AgreementAction]:
        """Report the value that `MakeValue` asked for and that I hold, made under these Readys, none of which has a proof."""
        if slot == self._slot:
            self._attempt.offer = value, readys
        return self.hold(value, now)

    def gathered(self, now: float) -> list[AgreementAction]:
        """Wait for no more Readys than a quorum's, because the other voters are away."""
        self._attempt.is_gathered = True
        return self._advance(now)

    def pause(self) -> None:
        """Say no further Ready, because I do something else; statements of others still count."""
        self._is_present = False

    def resume(self, now: float) -> list[AgreementAction]:
        """Say Ready again. What was being fetched is asked for once more: that may have ended with the driver's attempt."""
        self._is_present = True
        self._fetching.clear()
        return self._advance(now)

    def abandon(self, reason: str, now: float) -> list[AgreementAction]:
        """Go to the next attempt before the deadline, because this one cannot decide any more as far as I know."""
        if self.decision is not None:
            return []
        return self._move(self._slot.at(self._slot.term, self._slot.attempt + 1), reason) + self._advance(now)

    def appoint(self, term: int, electorate: Electorate, now: float, attempt: int = 0) -> list[AgreementAction]:
        """Enter a later term with the voters of a verified appointment, or learn who votes in one that I did not know.

        Of terms between, which this voter has not been in, it takes no statement until it learns their voters, as from
        the appointment that a proof carries. `attempt` is the first one in which it may sign: others follow it there.
        """
        known = self._terms[term] if term < len(self._terms) else NOBODY
        if self.decision is not None or known == electorate:
            return []
        if known != NOBODY:
            why = f"term {term}: another appointment for the same term"
            return [AgreementNote("agreement.refused", self.me, "appoint", why)]
        missing = (NOBODY,) * (term - len(self._terms))
        self._terms = (*self._terms[:term], *missing, electorate, *self._terms[term + 1 :])
        self._looked = -1, None
        if term <= self._slot.term:
            return self._advance(now)
        return self._move(self._slot.at(term, attempt), f"term {term} was appointed") + self._advance(now)

    def stall(self, now: float) -> list[AgreementAction]:
        """Enter the next term if its electorate is known beforehand, because the present one has stalled."""
        term = self._slot.term + 1
        if self.decision is not None or term >= len(self._terms):
            return []
        return self._move(self._slot.at(term, 0), "the term before stalled") + self._advance(now)

    def tick(self, now: float) -> list[AgreementAction]:
        """React to the passing of time; call it at `deadline`."""
        if self.decision is not None or self._attempt.since is None:
            return []
        self._attempt.is_gathered |= now >= self._attempt.since + self._timing.control
        if now < self._attempt.since + self._timing.length(self._slot.attempt):
            return self._advance(now)
        later = self._slot.at(self._slot.term, self._slot.attempt + 1)
        return self._move(later, f"no decision with {self.convener} as the convener") + self._advance(now)

    # Transitions: each happens once, as soon as the statements allow it.

    def _advance(self, now: float) -> list[AgreementAction]:
        actions: list[AgreementAction] = []
        while self.decision is None and (more := self._transition(now)):
            actions += more
        return actions

    def _transition(self, now: float) -> list[AgreementAction]:
        if self._found is not None:
            return self._decide(self._found)
        have_moved = (self._statements.num_readys, self._slot) != self._looked
        if have_moved and (moved := self._follow()):
            return moved
        if self._is_observer or self.me not in self.electorate.votes:
            return []
        if self._is_present and not self._guard.signed(VoterReady):
            return self._sign(VoterReady(self._slot, self._newest_proof))
        if have_moved:
            self._looked = self._statements.num_readys, self._slot
            self._start_clock(now)
            if forwarded := self._forward(now):
                return forwarded
        return self._propose() or self._accept(now) or self._confirm()

    def _decide(self, decision: Decision) -> list[AgreementAction]:
        self.decision = decision
        return [Decided(decision), Dispatch(self._others(), decision)]

    def _follow(self) -> list[AgreementAction]:
        """Go to the latest attempt that 1/3 of the votes or more have reached: without these no quorum is left.

        More than 1/3 would leave three voters apart for ever of which one begins far ahead, because it lost its memory.
        """
        if self._statements.latest(self._slot.term) <= self._slot.attempt:
            return []
        attempt = self.electorate.frontier(self._statements.attempts(self._slot.term), self.electorate.blocking)
        if attempt is None or attempt <= self._slot.attempt:
            return []
        return self._move(self._slot.at(self._slot.term, attempt), "1/3 of the votes or more are there")

    def _start_clock(self, now: float) -> None:
        if self._attempt.since is not None:
            return
        attempts = self._statements.attempts(self._slot.term)
        if self.electorate.is_quorum(voter for voter, attempt in attempts.items() if attempt >= self._slot.attempt):
            self._attempt.since = now

    def _forward(self, now: float) -> list[AgreementAction]:
        """Forward each Ready to the convener: a voter that sends its Ready to only some cannot make us disagree on it.

        Who forwards none holds none against the convener: it may never have received what a liar has sent to me alone.
        """
        if not self.electorate.forwards(self.me, self.convener):
            return []
        readys, forwarded = self._statements.readys(self._slot), self._attempt.forwarded
        fresh = [voter for voter in readys if voter not in forwarded and voter not in (self.me, self.convener)]
        forwarded |= dict.fromkeys(fresh, now)
        return [ForwardReady(self.convener, voter, readys[voter]) for voter in fresh]

    def _propose(self) -> list[AgreementAction]:
        if self._guard.signed(Propose) or not self._guard.signed(VoterReady) or self.convener != self.me:
            return []
        readys = self._statements.readys(self._slot)
        self._attempt.is_gathered |= len(readys) == len(self.electorate.voters)
        if not self._attempt.is_gathered or not self.electorate.is_quorum(readys):
            return []
        shown = tuple(sorted((voter, ready.proof) for voter, ready in readys.items()))
        if (proof := newest(ready.proof for ready in readys.values())) is not None:
            return self._sign(Propose(self._slot, proof.value, shown))
        if self._attempt.offer is not None:
            return self._sign(Propose(self._slot, *self._attempt.offer))
        if self._attempt.is_making:
            return []
        self._attempt.is_making = True
        return [MakeValue(self._slot, shown)]

    def _accept(self, now: float) -> list[AgreementAction]:
        if self._attempt.is_refused or self._guard.signed(Accept):
            return []
        propose = self._statements.of(Propose).get(self.convener)
        if propose is None or propose.slot != self._slot:
            return []
        if (why := self._objection(propose, now)) is not None:
            self._attempt.is_refused = True
            return [self._refused(self.convener, propose, why)]
        if propose.value in self._held:
            return self._sign(Accept(self._slot, propose.value))
        return self._fetch(propose.newest_proof)

    def _objection(self, propose: Propose, now: float) -> str | None:
        """Return why I do not accept a valid proposal, or None."""
        if why := self.why_incomplete(dict(propose.readys), now):
            return why
        return None if self._lock_allows(propose) else "I am locked on another value by a newer proof"

    def why_incomplete(self, shown: Collection[PeerId], now: float) -> str:
        """Return which Readys that I forwarded in time the convener omits; empty if none, or if it was asked before.

        Asked once, when the convener has closed them: while the bytes come, more Readys do, and a liar could send its own
        just then.
        """
        if self._attempt.is_weighed:
            return ""
        self._attempt.is_weighed = True
        due = {voter for voter, at in self._attempt.forwarded.items() if at <= now - self._timing.control}
        omitted = sorted(due - set(shown))
        return f"it omits the Ready of {', '.join(omitted)}, which I had forwarded" if omitted else ""

    def _lock_allows(self, propose: Propose) -> bool:
        lock, proof = self._lock, propose.newest_proof
        if lock is None or propose.value == lock.value:
            return True
        return proof is not None and proof.slot.ballot >= lock.slot.ballot

    def _confirm(self) -> list[AgreementAction]:
        proof = self._newest_proof
        if proof is None or proof.slot != self._slot or self._guard.signed(Confirm):
            return []
        if proof.value not in self._held:
            return self._fetch(proof)
        self._lock = proof
        return self._sign(Confirm(self._slot, proof.value))

    def _fetch(self, proof: AcceptProof | None) -> list[AgreementAction]:
        """Fetch a proven value that I do not hold. The bytes of a new one come from those that make it."""
        if proof is None or proof.value in self._fetching:
            return []
        self._fetching.add(proof.value)
        return [FetchValue(proof.value, proof.voters)]

    # Helpers.

    def _move(self, slot: Slot, reason: str) -> list[AgreementAction]:
        left, self._slot = self.convener, slot
        self._guard.enter(slot)
        self._attempt = _Attempt()
        self._fetching.clear()
        return [AgreementNote("agreement.attempt", left, f"term {slot.term}, attempt {slot.attempt}", reason)]

    def _sign(self, statement: Statement) -> list[AgreementAction]:
        """Sign a statement: the only place that does. It is persisted before it is sent, and counts for me at once."""
        self._guard.sign(statement)
        self._take(self.me, statement)
        return [Persist(self.memory), Dispatch(self._others(), statement)]

    def _take(self, voter: PeerId, statement: Statement) -> str:
        """Count a valid statement, with the proof or decision that it shows or completes."""
        if (news := self._statements.add(voter, statement)) != "new":
            return news
        match statement:
            case VoterReady():
                self._learn(statement.proof)
            case Propose():
                self._learn(statement.newest_proof)
            case _:
                electorate = self._terms[statement.slot.term]
                voters = self._statements.quorum_with(statement, electorate)
                if voters is not None and isinstance(statement, Accept):
                    self._learn(AcceptProof(statement.slot, statement.value, voters))
                elif voters is not None:
                    self._found = Decision(statement.slot, statement.value, voters)
        return news

    def _learn(self, proof: AcceptProof | None) -> None:
        """Keep the newest proof."""
        if proof is not None and newest([self._newest_proof, proof]) is proof:
            self._newest_proof = proof

    def _see_ahead(self, voter: PeerId, ready: VoterReady) -> list[AgreementAction]:
        """Count a voter that is in a later round; the newest round of each counts."""
        if voter not in self.electorate.votes:
            return [self._refused(voter, ready, f"it is no voter of term {self._slot.term}")]
        self._rounds_ahead[voter] = max(ready.slot.round, self._rounds_ahead.get(voter, 0))
        reached = self.electorate.frontier(self._rounds_ahead)
        if reached is None or reached <= self._behind:
            return []
        self._behind = reached
        return [FallenBehind(reached)]

    def _others(self) -> tuple[PeerId, ...]:
        """The voters of all terms except me."""
        return tuple(sorted({voter for electorate in self._terms for voter in electorate.voters} - {self.me}))

    def _refused(self, voter: PeerId, statement: Statement, why: str) -> AgreementNote:
        return AgreementNote("agreement.refused", voter, type(statement).__name__, why)
