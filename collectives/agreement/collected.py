"""The newest statement of each kind by each voter, and the quorums among them. Pure.

The memory is bounded by the voters: a statement of a later slot replaces the earlier one of its kind. A replaced
statement can delay a decision and never lose it: whoever saw the quorum that it was part of shows the proof in its next
Ready.
"""

from collections import defaultdict
from collections.abc import Mapping
from typing import TypeVar, cast

from ...peer.transport import PeerId
from ...peer.wire import Accept, Confirm, Slot
from .electorate import Electorate
from .statements import Statement, VoterReady

_S = TypeVar("_S", bound=Statement)


class NewestStatements:
    """The newest statement of each kind by each voter. Of two different ones in one slot the first counts."""

    def __init__(self) -> None:
        self._newest: dict[type, dict[PeerId, Statement]] = defaultdict(dict)
        self._alike: dict[Statement, set[PeerId]] = defaultdict(set)
        """The voters of equal Accepts and Confirms."""
        self._readys: dict[Slot, dict[PeerId, VoterReady]] = {}
        """The newest Ready of each voter once more, by slot: nearly always all are in one."""
        self.num_readys = 0
        """A counter of Readys that were added."""

    def add(self, voter: PeerId, statement: Statement) -> str:
        """Add a statement; returns `new`, `known` (repeated, or older than another), or `conflict` (equivocation)."""
        newest = self._newest[type(statement)]
        earlier = newest.get(voter)
        if earlier is not None:
            if earlier.slot.ballot > statement.slot.ballot or earlier == statement:
                return "known"
            if earlier.slot == statement.slot:
                return "conflict"
        newest[voter] = statement
        if isinstance(statement, VoterReady):
            self.num_readys += 1
            if earlier is not None:
                self._leave(voter, earlier.slot)
            self._readys.setdefault(statement.slot, {})[voter] = statement
        elif isinstance(statement, Accept | Confirm):
            if earlier is not None:
                self._forget(voter, earlier)
            self._alike[statement].add(voter)
        return "new"

    def _forget(self, voter: PeerId, earlier: Statement) -> None:
        self._alike[earlier].discard(voter)
        if not self._alike[earlier]:
            del self._alike[earlier]

    def _leave(self, voter: PeerId, slot: Slot) -> None:
        del self._readys[slot][voter]
        if not self._readys[slot]:
            del self._readys[slot]

    def of(self, kind: type[_S]) -> Mapping[PeerId, _S]:
        """Return the newest statement of this kind by each voter, in the order of arrival."""
        return cast(Mapping[PeerId, _S], self._newest[kind])

    def readys(self, slot: Slot) -> Mapping[PeerId, VoterReady]:
        """Return the Readys of the voters whose newest one is in this slot, in the order of arrival."""
        return self._readys.get(slot, {})

    def latest(self, term: int) -> int:
        """Return the latest attempt in a term that any voter has reached by its Ready; -1 if none is in it."""
        return max((slot.attempt for slot in self._readys if slot.term == term), default=-1)

    def attempts(self, term: int) -> dict[PeerId, int]:
        """Return the attempt in a term that each voter has reached by its Ready."""
        return {voter: slot.attempt for slot, readys in self._readys.items() if slot.term == term for voter in readys}

    def quorum_with(self, statement: Accept | Confirm, electorate: Electorate) -> tuple[PeerId, ...] | None:
        """Return the voters that made the same statement, sorted, if they are a quorum."""
        voters = self._alike.get(statement, set())
        if len(voters) < electorate.fewest:
            return None
        return tuple(sorted(voters)) if electorate.is_quorum(voters) else None
