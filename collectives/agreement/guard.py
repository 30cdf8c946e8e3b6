"""The signing guard and the memory that a restart loads: one statement a slot and kind. Pure.

Every kind of statement has one subject in a slot, the slot itself; nobody else chooses it. A voter never goes back to
an earlier slot, so the guard needs the statements of its newest slot only, and the memory is a few of them and two
proofs.
"""

from dataclasses import dataclass
from typing import TypeVar

from ...peer.errors import LocalError
from ...peer.wire import Slot
from .electorate import Electorate
from .statements import AcceptProof, Statement

_S = TypeVar("_S", bound=Statement)


@dataclass(frozen=True, slots=True)
class VoterMemory:
    """Everything that one voter must not forget within a decision. It is on disk before a statement is sent."""

    slot: Slot
    terms: tuple[Electorate, ...]
    """The electorates of all terms that I know, from term 0."""
    said: tuple[Statement, ...] = ()
    """What I signed in `slot`, in this order."""
    lock: AcceptProof | None = None
    """The proof of my newest Confirm."""
    newest_proof: AcceptProof | None = None
    """The newest proof that I know; at least as new as the lock."""
    is_observer: bool = False
    """True if an earlier memory of this decision may be lost: I sign nothing before the next one.

    Not even in a later term. Nothing proves that I had not been in that term already, with a lock. A steward appoints
    voters whose Readys it holds, so it misses nothing in an observer; and a peer that returns under a new key has
    signed nothing.
    """

    def __post_init__(self) -> None:
        if self.slot.term >= len(self.terms) or any(statement.slot != self.slot for statement in self.said):
            raise LocalError("a voter's memory names a term without its electorate, or statements of another slot")


class VoterGuard:
    """Remembers what was signed in the newest slot, and refuses a second, different statement of a kind."""

    def __init__(self, memory: VoterMemory) -> None:
        self._slot = memory.slot
        self._said: dict[type[Statement], Statement] = {type(statement): statement for statement in memory.said}

    @property
    def said(self) -> tuple[Statement, ...]:
        """What was signed in the newest slot, in this order."""
        return tuple(self._said.values())

    def signed(self, kind: type[_S]) -> bool:
        """Return True if a statement of this kind was signed in the newest slot."""
        return kind in self._said

    def enter(self, slot: Slot) -> None:
        """Go to a later slot. Raises `LocalError` if it is an earlier one: the voter would forget what it signed there."""
        if slot.decision != self._slot.decision or slot.ballot <= self._slot.ballot:
            raise LocalError(f"refusing to go back to term {slot.term}, attempt {slot.attempt}")
        self._slot, self._said = slot, {}

    def sign(self, statement: Statement) -> None:
        """Record a statement before it is signed. Raises `LocalError` if it contradicts an earlier one."""
        if statement.slot != self._slot or self._said.get(type(statement), statement) != statement:
            raise LocalError(f"refusing to sign a second {type(statement).__name__} in a slot, or one in another slot")
        self._said[type(statement)] = statement
