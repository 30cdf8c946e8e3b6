"""The newest statement of each kind by each voter, and the quorums among them. Pure.

The memory is bounded by the voters: a statement of a later slot replaces the earlier one of its kind. A replaced
statement can delay a decision and never lose it: whoever saw the quorum that it was part of shows the proof in its next
Ready.
"""

from typing import TypeVar, cast

from ...peer.transport import PeerId
from .electorate import Electorate
from .statements import Accept, Confirm, Statement, VoterReady, VotingSlot

_S = TypeVar("_S", bound=Statement)


class NewestStatements:
    """The newest statement of each kind by each voter. Of two different ones in one slot the first counts."""

    def __init__(self) -> None:
        self._newest: dict[tuple[type[Statement], PeerId], Statement] = {}

    def add(self, voter: PeerId, statement: Statement) -> str:
        """Add a statement; returns `new`, `known` (repeated, or older than another), or `conflict` (equivocation)."""
        key = type(statement), voter
        earlier = self._newest.get(key)
        if earlier is not None:
            if earlier.slot.ballot > statement.slot.ballot or earlier == statement:
                return "known"
            if earlier.slot == statement.slot:
                return "conflict"
        self._newest[key] = statement
        return "new"

    def of(self, kind: type[_S]) -> dict[PeerId, _S]:
        """Return the newest statement of this kind by each voter, in the order of arrival."""
        return {voter: cast(_S, statement) for (its, voter), statement in self._newest.items() if its is kind}

    def in_slot(self, kind: type[_S], slot: VotingSlot) -> dict[PeerId, _S]:
        """Return the statements of this kind in one slot."""
        return {voter: statement for voter, statement in self.of(kind).items() if statement.slot == slot}

    def attempts(self, term: int) -> dict[PeerId, int]:
        """Return the attempt in a term that each voter has reached by its Ready."""
        return {voter: it.slot.attempt for voter, it in self.of(VoterReady).items() if it.slot.term == term}

    def quorum_with(self, statement: Accept | Confirm, electorate: Electorate) -> tuple[PeerId, ...] | None:
        """Return the voters that made the same statement, sorted, if they are a quorum."""
        voters = [voter for voter, other in self.of(type(statement)).items() if other == statement]
        return tuple(sorted(voters)) if electorate.is_quorum(voters) else None
