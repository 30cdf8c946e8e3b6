"""Planted flaws of the agreement: each is one rule left out, and the checkers must find every one of them."""

from dataclasses import dataclass, replace

from flockstep.collectives.agreement.actions import AgreementAction, AgreementTiming
from flockstep.collectives.agreement.electorate import Electorate
from flockstep.collectives.agreement.guard import VoterMemory
from flockstep.collectives.agreement.machine import VoterMachine
from flockstep.collectives.agreement.statements import Confirm, Propose, Statement, newest
from flockstep.collectives.agreement.validity import statement_fault
from flockstep.peer.wire import Slot

ANOTHER_VALUE = "a proposal of another value than the newest proof that it shows"


class UnlocksByNone(VoterMachine):
    """The trap: "I signed none in this attempt, so nothing was decided", and the lock is gone."""

    def _move(self, slot: Slot, reason: str) -> list[AgreementAction]:
        if not self._guard.signed(Confirm):
            self._lock = self._newest_proof = None
        return super()._move(slot, reason)


class ForgetsItsProofs(VoterMachine):
    """Neither the lock nor the newest proof is persisted."""

    @property
    def memory(self) -> VoterMemory:
        return replace(super().memory, lock=None, newest_proof=None)


class OnlyReadys(VoterMachine):
    """The lock rule is left out; the Readys that a proposal shows still determine its value."""

    def _lock_allows(self, propose: Propose) -> bool:
        return True


class OnlyLocks(VoterMachine):
    """The lock rule stands; a proposal may be of another value than the newest proof that it shows."""

    def receive(self, voter: str, statement: Statement, now: float) -> list[AgreementAction]:
        if statement_fault(voter, statement, self._slot, self._terms) != ANOTHER_VALUE:
            return super().receive(voter, statement, now)
        self._take(voter, statement)
        return self._advance(now)

    def _lock_allows(self, propose: Propose) -> bool:
        lock, proof = self._lock, newest(proof for _, proof in propose.readys if proof and proof.value == propose.value)
        if lock is None or propose.value == lock.value:
            return True
        return proof is not None and proof.slot.ballot >= lock.slot.ballot


class NeitherRule(OnlyLocks):
    """Accept without the lock rule, and whatever the Readys say."""

    def _lock_allows(self, propose: Propose) -> bool:
        return True


class ConfirmsLate(VoterMachine):
    """A proof of an earlier attempt is confirmed in the present one."""

    def _confirm(self) -> list[AgreementAction]:
        proof = self._newest_proof
        if proof is None or proof.value not in self._held or self._guard.signed(Confirm):
            return []
        self._lock = proof
        return self._sign(Confirm(self._slot, proof.value))


class LocksByAnyProof(OnlyLocks):
    """A newer proof frees the lock, of whatever value it is."""

    def _lock_allows(self, propose: Propose) -> bool:
        return VoterMachine._lock_allows(self, propose)


class ForgetsWhatItSigned(VoterMachine):
    """The guard is off: a restart does not know what was signed."""

    def __init__(self, me: str, memory: VoterMemory, timing: AgreementTiming) -> None:
        super().__init__(me, replace(memory, said=()), timing)


@dataclass(frozen=True)
class _ThosePresent(Electorate):
    present: frozenset[str] = frozenset()

    @property
    def quorum(self) -> int:
        return 2 * self.votes_of(self.present) // 3 + 1


class CountsThosePresent(VoterMachine):
    """A quorum is more than 2/3 of the voters that are here."""

    def _take(self, voter: str, statement: Statement) -> str:
        present = frozenset({self.me, voter, *getattr(self._terms[0], "present", ())})
        self._terms = tuple(_ThosePresent(term.votes, term.is_majority, present) for term in self._terms)
        return super()._take(voter, statement)
