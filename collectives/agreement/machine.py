"""The state machine of one decision at one voter: rules, locks and attempts. Pure.

Theory of operation (Tendermint, arXiv:1807.04938, for one height, over hashes; docs/round.md argues its safety and
liveness). An attempt has a proposer and four statements, one of each by each voter:

    Ready     to all when I enter the attempt, with the newest proof that I know
    Propose   by the proposer under the Readys of a quorum: the value of the newest proof among them, or a new one
    Prevote    of the proposer's proposal, if I hold the bytes, and the lock allows it
    Precommit   when I know a proof (Prevotes of a quorum) of this attempt; it is my lock from then on

Precommits of a quorum in one slot are the decision, whenever I see them. The lock: I accept another value than mine only
under a proof that is no older than my lock. A proof of an earlier attempt is shown and not confirmed, since others may
have moved on without it.

An attempt ends at my deadline, which begins with the Readys of a quorum, or when voters with 1/3 of the votes or more
are in a later one. I never go back. Without the first condition a voter on the wrong side of a partition would count
attempts alone, and never meet the others again; with it all honest voters are within one attempt of each other as soon as
the network is calm. Less than 1/3 of the votes move nobody. So a refused
proposal ends no attempt: its proposer could also have been silent, and the deadline is paid for either.

A later process of the same voter begins in a slot that no earlier one was in, with the lock of the newest Precommit.

The driver verifies signatures, calls `meet` for each connection to a voter that is made or made again, since nothing is
sent twice otherwise, `tick` at `deadline`, and does the actions in their order.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass, field

from ...peer.base.transport import PeerId
from ...peer.wire import Precommit, Prevote, Slot
from .actions import AgreementAction, AgreementTiming, Dispatch, FetchProven, Note
from .collected import NewestStatements
from .electorate import Electorate
from .statements import Decision, PrevoteQuorum, Propose, Shown, Statement, VoterReady, newest
from .validity import statement_fault

RECALL_SECONDS = 600.0
"""Seconds without a decision, with all voters here, until an observer votes again."""


@dataclass(slots=True)
class _Attempt:
    """What concerns one attempt only."""

    said: dict[type[Statement], Statement] = field(default_factory=dict)
    """What I have said in it, one statement of a kind."""
    since: float | None = None
    """When a quorum was in this attempt or a later one: its clock starts."""
    is_gathered: bool = False
    """True if the proposer waits for no more Readys."""
    making: Shown | None = None
    """The Readys under which I, its proposer, am to make a new value."""
    offer: tuple[bytes, Shown] | None = None
    """The new value that I made, and the Readys that justify it."""
    is_refused: bool = False


class VoterMachine:
    """One decision at one voter or observer; it says nothing before `resume`. Methods return the resulting actions."""

    def __init__(
        self,
        me: PeerId,
        slot: Slot,
        electorate: Electorate,
        timing: AgreementTiming,
        lock: PrevoteQuorum | None = None,
        *,
        is_observer: bool = False,
    ) -> None:
        self.me = me
        self.slot = slot
        """The slot that I am in: at first one in which I have signed nothing."""
        self.electorate = electorate
        """The voters of the decision."""
        self.newest_proof = lock
        """The newest proof that I know; at least as new as my lock."""
        self.decision: Decision | None = None
        self._lock = lock
        """The proof of my newest Precommit."""
        self._timing = timing
        self.is_observer = is_observer
        """True if I sign nothing: an earlier memory of this decision may be lost, with a lock."""
        self._observed_since: float | None = None
        self.is_present = False
        """True if I say Ready in my slot, and in those that I go to."""
        self._statements = NewestStatements()
        self._held: set[bytes] = set()
        self._fetching: set[bytes] = set()
        self._rounds_ahead: dict[PeerId, int] = {}
        self._behind = slot.round
        self._looked: tuple[int, Slot | None] = (-1, None)
        """The Readys and the slot that I have last looked at for a later attempt, and the clock."""
        self._attempt = _Attempt()
        self.proposer = self._find_proposer()
        """The proposer of my slot."""

    # What the driver may read.

    @property
    def has_said_ready(self) -> bool:
        """True if I have said Ready in my slot, as far as this machine knows: its driver may have failed to sign it."""
        return VoterReady in self._attempt.said

    @property
    def making(self) -> Shown | None:
        """The Readys under which I, the proposer, am to make a new value (move the data) and report `offer`; None if not."""
        return self._attempt.making

    @property
    def is_behind(self) -> bool:
        """True if voters with more than a third of the votes are in later rounds: ask for the certificates between."""
        return self._behind > self.slot.round

    @property
    def since(self) -> float | None:
        """When a quorum was in my attempt or a later one; None before."""
        return self._attempt.since

    @property
    def deadline(self) -> float:
        """When to call `tick`; infinite while less than a quorum is in my attempt, and at the end."""
        if self.decision is not None or self._attempt.since is None:
            return math.inf
        if self.proposer == self.me and not self._attempt.is_gathered:
            return self._attempt.since + self._timing.control
        return self._attempt.since + self._timing.attempt

    # The driver's calls.

    def meet(self, voter: PeerId, now: float) -> list[AgreementAction]:
        """Bring a voter up to date to which a connection was made, or made again."""
        if self.decision is not None:
            return []
        return [*map(Dispatch, self._attempt.said.values()), *self._advance(now)]

    def receive(self, voter: PeerId, statement: Statement, now: float) -> list[AgreementAction]:
        """Receive a voter's statement whose signatures, the shown ones too, are verified."""
        slot, mine = statement.slot, self.slot
        if self.decision is not None or slot.run != mine.run or slot.round < mine.round:
            return []
        if slot.round > mine.round:
            return self._see_ahead(voter, slot.round) if isinstance(statement, VoterReady) else []
        if (why := statement_fault(voter, statement, mine, self.electorate)) is not None:
            return [self._refused(voter, statement, why)]
        match self._take(voter, statement):
            case "known":
                return []
            case "conflict":
                what = type(statement).__name__
                return [Note("agreement.equivocation", voter, what, "a second and different one in its slot")]
        return self._advance(now)

    def hold(self, value: bytes, now: float) -> list[AgreementAction]:
        """Report that I hold the bytes of a value, and checked them."""
        self._held.add(value)
        return self._advance(now)

    def offer(self, slot: Slot, value: bytes, readys: Shown, now: float) -> list[AgreementAction]:
        """Report the value that I was to make and that I hold, made under these Readys, none of which has a proof."""
        if slot == self.slot:
            self._attempt.offer = value, readys
        return self.hold(value, now)

    def gathered(self, now: float) -> list[AgreementAction]:
        """Wait for no more Readys than a quorum's, because the other voters are away."""
        self._attempt.is_gathered = True
        return self._advance(now)

    def pause(self) -> None:
        """Say no further Ready, because I do something else; statements of others still count."""
        self.is_present = False

    def resume(self, now: float) -> list[AgreementAction]:
        """Say Ready again. What was being fetched is asked for once more: that may have ended with the driver's attempt."""
        self.is_present = True
        self._fetching.clear()
        return self._advance(now)

    def recall(self, here: Collection[PeerId], now: float) -> list[AgreementAction]:
        """Vote again as an observer, if otherwise nobody may ever decide: all voters are here, and long have not decided.

        Voters with a third of the votes may have lost their memory together, and wait for each other. A decision that was
        made before would be known to one that has not lost its own, unless liars alone do.
        """
        self._observed_since = now if self._observed_since is None else self._observed_since
        has_waited = now >= self._observed_since + RECALL_SECONDS
        if not (self.is_observer and has_waited and self.electorate.votes.keys() <= set(here)):
            return []
        self.is_observer = False
        why = f"all voters are here and have not decided for {RECALL_SECONDS:.0f} s: too many may have lost their memory"
        return [Note("agreement.recalled", self.me, "observe", why)]

    def abandon(self, reason: str, now: float) -> list[AgreementAction]:
        """Go to the next attempt before the deadline, because this one cannot decide any more as far as I know."""
        if self.decision is not None:
            return []
        return self._move(self.slot.at(self.slot.attempt + 1), reason) + self._advance(now)

    def tick(self, now: float) -> list[AgreementAction]:
        """React to the passing of time; call it at `deadline`."""
        if self.decision is not None or self._attempt.since is None:
            return []
        self._attempt.is_gathered |= now >= self._attempt.since + self._timing.control
        if now < self._attempt.since + self._timing.attempt:
            return self._advance(now)
        return self.abandon(f"no decision with {self.proposer} as the proposer", now)

    # Transitions: each happens once, as soon as the statements allow it.

    def _advance(self, now: float) -> list[AgreementAction]:
        actions: list[AgreementAction] = []
        while self.decision is None and (more := self._transition(now)):
            actions += more
        may_vote = self.me in self.electorate.votes and not self.is_observer
        if self.decision is not None and self.decision.value in self._held and may_vote:
            actions += self._precommit()  # Others may lack a vote that has decided it here.
        return actions

    def _transition(self, now: float) -> list[AgreementAction]:
        have_moved = (self._statements.num_readys, self.slot) != self._looked
        if have_moved and (moved := self._follow()):
            return moved
        if self.is_observer or self.me not in self.electorate.votes:
            return []
        if self.is_present and VoterReady not in self._attempt.said:
            return self._say(VoterReady(self.slot, self.newest_proof))
        if have_moved:
            self._looked = self._statements.num_readys, self.slot
            self._start_clock(now)
        return self._propose() or self._prevote() or self._precommit()

    def _follow(self) -> list[AgreementAction]:
        """Go to the latest attempt that 1/3 of the votes or more have reached: without these no quorum is left.

        More than 1/3 would leave three voters apart for ever of which one begins far ahead, because it lost its memory.
        """
        if self._statements.latest() <= self.slot.attempt:
            return []
        attempt = self.electorate.frontier(self._statements.attempts(), self.electorate.blocking)
        if attempt is None or attempt <= self.slot.attempt:
            return []
        return self._move(self.slot.at(attempt), "1/3 of the votes or more are there")

    def _start_clock(self, now: float) -> None:
        if self._attempt.since is not None or len(self._statements.of(VoterReady)) < self.electorate.fewest:
            return
        attempts = self._statements.attempts()
        if self.electorate.is_quorum(voter for voter, attempt in attempts.items() if attempt >= self.slot.attempt):
            self._attempt.since = now

    def _propose(self) -> list[AgreementAction]:
        said = self._attempt.said
        if Propose in said or VoterReady not in said or self.proposer != self.me:
            return []
        readys = self._statements.readys(self.slot)
        self._attempt.is_gathered |= len(readys) == len(self.electorate.voters)
        if not self._attempt.is_gathered or not self.electorate.is_quorum(readys):
            return []
        shown = tuple(sorted((voter, ready.proof) for voter, ready in readys.items()))
        if (proof := newest(ready.proof for ready in readys.values())) is not None:
            return self._say(Propose(self.slot, proof.value, shown))
        if self._attempt.offer is not None:
            return self._say(Propose(self.slot, *self._attempt.offer))
        self._attempt.making = self._attempt.making or shown
        return []

    def _prevote(self) -> list[AgreementAction]:
        if self._attempt.is_refused or Prevote in self._attempt.said:
            return []
        propose = self._statements.of(Propose).get(self.proposer)
        if propose is None or propose.slot != self.slot:
            return []
        if not self._lock_allows(propose):
            self._attempt.is_refused = True
            return [self._refused(self.proposer, propose, "I am locked on another value by a newer proof")]
        if propose.value in self._held:
            return self._say(Prevote(self.slot, propose.value))
        return self._fetch(propose.newest_proof)

    def _lock_allows(self, propose: Propose) -> bool:
        lock, proof = self._lock, propose.newest_proof
        if lock is None or propose.value == lock.value:
            return True
        return proof is not None and proof.slot.attempt >= lock.slot.attempt

    def _precommit(self) -> list[AgreementAction]:
        proof = self.newest_proof
        if proof is None or proof.slot != self.slot or Precommit in self._attempt.said:
            return []
        if proof.value not in self._held:
            return self._fetch(proof)
        self._lock = proof
        return self._say(Precommit(self.slot, proof.value))

    def _fetch(self, proof: PrevoteQuorum | None) -> list[AgreementAction]:
        """Fetch a proven value that I do not hold. The bytes of a new one come from those that make it."""
        if proof is None or proof.value in self._fetching:
            return []
        self._fetching.add(proof.value)
        return [FetchProven(proof.value, proof.voters)]

    # Helpers.

    def _find_proposer(self) -> PeerId:
        return self.electorate.proposer(self.slot.round, self.slot.attempt)

    def _move(self, slot: Slot, reason: str) -> list[AgreementAction]:
        left, self.slot = self.proposer, slot
        self.proposer = self._find_proposer()
        self._attempt = _Attempt()
        self._fetching.clear()
        return [Note("agreement.attempt", left, f"attempt {slot.attempt}", reason)]

    def _say(self, statement: Statement) -> list[AgreementAction]:
        """Say a statement, one of a kind in a slot. It counts for me at once."""
        self._attempt.said[type(statement)] = statement
        self._take(self.me, statement)
        return [Dispatch(statement)]

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
                voters = self._statements.quorum_with(statement, self.electorate)
                if voters is not None and isinstance(statement, Prevote):
                    self._learn(PrevoteQuorum(statement.slot, statement.value, voters))
                elif voters is not None:
                    self.decision = Decision(statement.slot, statement.value, voters)
        return news

    def _learn(self, proof: PrevoteQuorum | None) -> None:
        """Keep the newest proof."""
        if proof is not None and newest([self.newest_proof, proof]) is proof:
            self.newest_proof = proof

    def _see_ahead(self, voter: PeerId, round_: int) -> list[AgreementAction]:
        """Count a voter that is in a later round; the newest round of each counts."""
        if voter not in self.electorate.votes:
            return []
        self._rounds_ahead[voter] = max(round_, self._rounds_ahead.get(voter, 0))
        reached = self.electorate.frontier(self._rounds_ahead)
        if reached is None or reached <= self._behind:
            return []
        self._behind = reached
        return [Note("agreement.behind", self.me, "ready", f"more than 1/3 of the votes are in round {reached}")]

    def _refused(self, voter: PeerId, statement: Statement, why: str) -> Note:
        return Note("agreement.refused", voter, type(statement).__name__, why)
