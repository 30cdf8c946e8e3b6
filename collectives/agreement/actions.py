"""The interface between the machine and its driver: timing, and what the driver must do.

Actions are done in their order. `Persist` is on disk before what follows it is sent: a voter that is killed in between
only repeats itself. A statement that the disk did not take is not sent.
"""

from dataclasses import dataclass
from typing import TypeAlias

from ...peer.errors import LocalError
from ...peer.transport import PeerId
from ...peer.wire import Slot
from .guard import VoterMemory
from .statements import AcceptProof, Decision, Statement, VoterReady

ATTEMPT_BACKOFF = 1.5
"""The factor from one attempt's deadline to the next: attempts grow until they are long enough for the network."""
MAX_BACKOFFS = 64
"""The factor stops growing here (10¹¹); the ceiling holds long before, and floats overflow at 1751."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgreementTiming:
    """The timeouts of a decision, in seconds."""

    control: float
    """One exchange of small messages. The convener waits so long for more Readys than a quorum's."""
    attempt: float
    """The first attempt, from the Readys of a quorum on."""
    ceiling: float
    """No attempt takes longer."""

    def __post_init__(self) -> None:
        if not 0 < self.control < self.attempt <= self.ceiling:
            raise LocalError("an attempt must outlast the gathering of Readys, and the ceiling the attempt")

    def length(self, attempt: int) -> float:
        """Return the seconds of an attempt, from the Readys of a quorum on."""
        return min(self.ceiling, self.attempt * ATTEMPT_BACKOFF ** min(attempt, MAX_BACKOFFS))


@dataclass(frozen=True, slots=True)
class Persist:
    """Write the memory to disk, with the bytes of the value that its Accept names, and sync both before the next action.

    The bytes of every accepted value stay on disk until the decision: a proof of it may exist that nobody has shown yet, and
    then no other value can be decided. With bytes in memory only, a power cut would leave the proof and lose its value.
    """

    memory: VoterMemory


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Sign a statement and send it; a decision is sent as it is."""

    to: tuple[PeerId, ...]
    message: Statement | Decision


@dataclass(frozen=True, slots=True)
class ForwardReady:
    """Forward another voter's signed Ready to the convener unchanged."""

    to: PeerId
    voter: PeerId
    ready: VoterReady


@dataclass(frozen=True, slots=True)
class MakeValue:
    """Make a new value under these Readys (move the data), and report `offer`."""

    slot: Slot
    readys: tuple[tuple[PeerId, AcceptProof | None], ...]


@dataclass(frozen=True, slots=True)
class FetchValue:
    """Fetch the bytes of a proven value by hash, check them, and report `hold`; these voters have accepted it."""

    value: bytes
    voters: tuple[PeerId, ...]


@dataclass(frozen=True, slots=True)
class Decided:
    """The value is decided."""

    decision: Decision


@dataclass(frozen=True, slots=True)
class FallenBehind:
    """Voters with more than 1/3 of the votes are in this later round or beyond: ask them for the certificates between."""

    round: int


@dataclass(frozen=True, slots=True)
class AgreementNote:
    """Emit an event: a refusal, an equivocation, the next attempt."""

    event: str
    peer: PeerId
    step: str
    reason: str


AgreementAction: TypeAlias = (
    Persist | Dispatch | ForwardReady | MakeValue | FetchValue | Decided | FallenBehind | AgreementNote
)
