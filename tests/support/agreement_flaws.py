"""Planted flaws of the agreement: each is one rule left out, and the checkers must find every one of them."""

from dataclasses import dataclass

from flockstep.collectives.agreement.actions import AgreementAction
from flockstep.collectives.agreement.electorate import Electorate
from flockstep.collectives.agreement.machine import VoterMachine
from flockstep.collectives.agreement.statements import PrevoteQuorum, Propose, Statement, newest
from flockstep.collectives.agreement.validity import statement_fault
from flockstep.peer.wire import Precommit, Slot

ANOTHER_VALUE = "a proposal of another value than the newest proof that it shows"


class UnlocksByNone(VoterMachine):
    """The trap: "I signed none in this attempt, so nothing was decided", and the lock is gone."""

    def _move(self, slot: Slot, reason: str) -> list[AgreementAction]:
        if Precommit not in self._attempt.said:
            self._lock = self.newest_proof = None
        return super()._move(slot, reason)


def forgets_its_lock(signed: Slot, lock: PrevoteQuorum | None) -> tuple[Slot, PrevoteQuorum | None]:
    """The lock is not on the disk before a Precommit."""
    return signed.at(signed.attempt + 1), None


def forgets_what_it_signed(signed: Slot, lock: PrevoteQuorum | None) -> tuple[Slot, PrevoteQuorum | None]:
    """The slot is not on the disk: a later process signs in it again."""
    return signed, lock


class OnlyReadys(VoterMachine):
    """The lock rule is left out; the Readys that a proposal shows still determine its value."""

    def _lock_allows(self, propose: Propose) -> bool:
        return True


class OnlyLocks(VoterMachine):
    """The lock rule stands; a proposal may be of another value than the newest proof that it shows."""

    def receive(self, voter: str, statement: Statement, now: float) -> list[AgreementAction]:
        if statement_fault(voter, statement, self.slot, self.electorate) != ANOTHER_VALUE:
            return super().receive(voter, statement, now)
        self._take(voter, statement)
        return self._advance(now)

    def _lock_allows(self, propose: Propose) -> bool:
        lock, proof = self._lock, newest(proof for _, proof in propose.readys if proof and proof.value == propose.value)
        if lock is None or propose.value == lock.value:
            return True
        return proof is not None and proof.slot.attempt >= lock.slot.attempt


class NeitherRule(OnlyLocks):
    """Prevote without the lock rule, and whatever the Readys say."""

    def _lock_allows(self, propose: Propose) -> bool:
        return True


class PrecommitsLate(VoterMachine):
    """A proof of an earlier attempt is confirmed in the present one."""

    def _precommit(self) -> list[AgreementAction]:
        proof = self.newest_proof
        if proof is None or proof.value not in self._held or Precommit in self._attempt.said:
            return []
        self._lock = proof
        return self._say(Precommit(self.slot, proof.value))


class LocksByAnyProof(OnlyLocks):
    """A newer proof frees the lock, of whatever value it is."""

    def _lock_allows(self, propose: Propose) -> bool:
        return VoterMachine._lock_allows(self, propose)


@dataclass(frozen=True)
class _ThosePresent(Electorate):
    present: frozenset[str] = frozenset()

    @property
    def quorum(self) -> int:
        return 2 * self.votes_of(self.present) // 3 + 1


class CountsThosePresent(VoterMachine):
    """A quorum is more than 2/3 of the voters that are here."""

    def _take(self, voter: str, statement: Statement) -> str:
        present = frozenset({self.me, voter, *getattr(self.electorate, "present", ())})
        self.electorate = _ThosePresent(self.electorate.votes, present=present)
        return super()._take(voter, statement)
