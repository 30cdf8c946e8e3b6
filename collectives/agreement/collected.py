"""The newest statement of each kind by each voter, and the quorums among them. Pure.

The memory is bounded by the voters: a statement of a later slot replaces the earlier one of its kind. A replaced
statement can delay a decision and never lose it: whoever saw the quorum that it was part of shows the proof in its next
Ready.
"""

from collections import defaultdict
from collections.abc import Mapping
from typing import TypeVar, cast

from ...peer.base.transport import PeerId
from ...peer.wire import Precommit, Prevote, Slot
from .electorate import Electorate
from .statements import Statement, VoterReady

_S = TypeVar("_S", bound=Statement)


class NewestStatements:
    """The newest statement of each kind by each voter. Of two different ones in one slot the first counts."""

    def __init__(self) -> None:
        self._newest: dict[type, dict[PeerId, Statement]] = defaultdict(dict)
        self._alike: dict[Slot | Statement, dict[PeerId, Statement]] = defaultdict(dict)
        """The same by what counts together: the Readys of one slot, and statements of another kind that are equal."""
        self.num_readys = 0
        """A counter of Readys that were added."""

    def add(self, voter: PeerId, statement: Statement) -> str:
        """Add a statement; returns `new`, `known` (repeated, or older than another), or `conflict` (equivocation)."""
        newest = self._newest[type(statement)]
        earlier = newest.get(voter)
        if earlier is not None:
            if earlier.slot.attempt > statement.slot.attempt or earlier == statement:
                return "known"
            if earlier.slot == statement.slot:
                return "conflict"
        newest[voter] = statement
        self.num_readys += isinstance(statement, VoterReady)
        if earlier is not None:
            left = self._alike[_group(earlier)]
            del left[voter]
            if not left:
                del self._alike[_group(earlier)]
        self._alike[_group(statement)][voter] = statement
        return "new"

    def of(self, kind: type[_S]) -> Mapping[PeerId, _S]:
        """Return the newest statement of this kind by each voter, in the order of arrival."""
        return cast(Mapping[PeerId, _S], self._newest[kind])

    def readys(self, slot: Slot) -> Mapping[PeerId, VoterReady]:
        """Return the Readys of the voters whose newest one is in this slot, in the order of arrival."""
        return cast(Mapping[PeerId, VoterReady], self._alike.get(slot, {}))

    def latest(self) -> int:
        """Return the latest attempt that any voter has reached by its Ready; -1 if there is none."""
        return max((group.attempt for group in self._alike if isinstance(group, Slot)), default=-1)

    def attempts(self) -> dict[PeerId, int]:
        """Return the attempt that each voter has reached by its Ready."""
        return {voter: it.slot.attempt for voter, it in self.of(VoterReady).items()}

    def quorum_with(self, statement: Prevote | Precommit, electorate: Electorate) -> tuple[PeerId, ...] | None:
        """Return the voters that made the same statement, sorted, if they are a quorum."""
        voters = self._alike.get(statement, {})
        if len(voters) < electorate.fewest:
            return None
        return tuple(sorted(voters)) if electorate.is_quorum(voters) else None


def _group(statement: Statement) -> Slot | Statement:
    return statement.slot if isinstance(statement, VoterReady) else statement
