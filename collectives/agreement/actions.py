"""The interface between the machine and its driver: timing, and what the driver must do. Pure.

Before a statement is sent its slot is on the disk, with the lock where it is a Precommit, and with the bytes of the value
where it is a Prevote: no later process signs anything in that slot, or accepts a value against that lock. One that cannot be
written is not sent. The bytes of every accepted value stay on disk until the decision: a proof of it may exist that nobody
has shown yet, and then no other value can be decided.
"""

from dataclasses import dataclass
from typing import TypeAlias

from ...peer.base.errors import LocalError
from ...peer.base.transport import PeerId
from .statements import Statement


@dataclass(frozen=True, slots=True, kw_only=True)
class AgreementTiming:
    """The timeouts of a decision, in seconds."""

    control: float
    """One exchange of small messages. The proposer waits so long for more Readys than a quorum's."""
    attempt: float
    """An attempt, from the Readys of a quorum on: long enough for the slowest data. The phases of its data end it sooner."""

    def __post_init__(self) -> None:
        if not 0 < self.control < self.attempt:
            raise LocalError("an attempt must outlast the gathering of Readys")


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Sign a statement of mine and send it to all voters; it counts for me already."""

    statement: Statement


@dataclass(frozen=True, slots=True)
class FetchProven:
    """Fetch the bytes of a proven value by hash, check them, and report `hold`; these voters have accepted it."""

    value: bytes
    voters: tuple[PeerId, ...]


@dataclass(frozen=True, slots=True)
class Note:
    """Emit an event: a refusal, an exclusion, an equivocation, the next attempt."""

    event: str
    peer: PeerId
    step: str
    reason: str


AgreementAction: TypeAlias = Dispatch | FetchProven | Note
