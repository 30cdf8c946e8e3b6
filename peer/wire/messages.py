"""Every control message: its fields, their limits, and the number that names it on the wire.

Two families. Talk between two peers who have an authenticated stream (`Beat`, `MembersAsk`, `Fetch`, …) needs no
signature of its own. What a third peer must be able to check (everything of a round) travels as `Signed`: the sender,
the message's number, its canonical bytes, and the sender's signature over both. The numbers are final: a message
that changes its fields gets a new one. Limits and shared types of fields stand in `fields`, plain talk in `talk`.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, TypeAlias, cast

from ..claim import Accusations, Claim
from ..digest import digest
from ..errors import LocalError, MalformedMessage
from .direct import (
    Beat,
    Fetch,
    Goodbye,
    Leaves,
    LeavesAsk,
    LedgerAsk,
    LedgerPage,
    Members,
    MembersAsk,
    Serve,
    StateAsk,
    StateOffer,
)
from .fields import (
    MAX_COUNT,
    MAX_PACKED_BYTES,
    MAX_PAGE,
    MAX_REASON,
    MAX_RECUTS,
    MAX_ROSTER,
    MAX_SIGNED_BYTES,
    MAX_SKETCH_BYTES,
    Bytes,
    Count,
    Hash,
    Index,
    Invite,
    Peer,
    Prefix,
    Rate,
    Reason,
    RunId,
)
from .framing import MAX_FRAME_BYTES
from .schema import Between, Size, decode, encode

__all__ = [
    "MAX_COUNT",
    "MAX_PACKED_BYTES",
    "MAX_PAGE",
    "MAX_REASON",
    "MAX_RECUTS",
    "MAX_ROSTER",
    "MAX_SIGNED_BYTES",
    "MAX_SKETCH_BYTES",
    "Beat",
    "Bytes",
    "Count",
    "Fetch",
    "Goodbye",
    "Hash",
    "Index",
    "Invite",
    "Leaves",
    "LeavesAsk",
    "LedgerAsk",
    "LedgerPage",
    "Members",
    "MembersAsk",
    "Peer",
    "Prefix",
    "Rate",
    "Reason",
    "RunId",
    "Serve",
    "StateAsk",
    "StateOffer",
]
"""What stands elsewhere and is part of the wire; everything that is defined here is, too."""


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of a message: one attempt of one round of one run."""

    run: RunId
    round: Count
    attempt: Annotated[int, Between(0, 1 << 20)]


@dataclass(frozen=True, slots=True)
class Ready:
    """0: my inner phase has ended; I start from this state."""

    slot: Slot
    base_root: Hash
    tokens: Count
    upload: Rate
    """Measured upload in bytes/s; 0 for a peer that should own no part (relayed)."""
    download: Rate
    nonce_hash: Hash
    """Commits me to the nonce from which the sketches' seed is drawn later (§9)."""
    prefix: Prefix = ""
    """The network that I am in, as `peer.address.prefix_of` names it; empty where I do not know."""
    invite: Invite = b""
    """My invitation to the run, where it demands one."""


@dataclass(frozen=True, slots=True)
class Seat:
    """What a roster says of a member: what it has earned (`collectives.trust`), its network, its invitation."""

    trust: Annotated[float, Between(0.0, 1.0)]
    rounds: Annotated[int, Between(0, MAX_COUNT)]
    prefix: Prefix = ""
    invite: Invite = b""


@dataclass(frozen=True, slots=True)
class Roster:
    """1: who takes part, in order (the convener first), and which cells of the vector each one owns."""

    slot: Slot
    base_root: Hash
    members: Annotated[tuple[Peer, ...], Size(MAX_ROSTER, 1)]
    bounds: Annotated[tuple[Count, ...], Size(MAX_ROSTER + 1, 2)]
    """Part i is the cells bounds[i] … bounds[i+1] and belongs to member i; an empty part owns nothing."""
    seats: Annotated[tuple[Seat, ...], Size(MAX_ROSTER, 1)]
    """Of each member, in order."""


@dataclass(frozen=True, slots=True)
class RosterAck:
    """I accept this roster, and no other one in this attempt."""

    slot: Slot
    roster: Hash


@dataclass(frozen=True, slots=True)
class Commit:
    """2: my contribution, part by part, by its hashes. Immutable from here on."""

    slot: Slot
    roster: Hash
    tokens: Count
    steps: Count
    loss: float
    parts: Annotated[tuple[Hash, ...], Size(MAX_ROSTER, 1)]
    ramp: Annotated[float, Between(0.0, 1.0)] = 1.0
    """What the weight of my tokens is multiplied by: less than 1 in a newcomer's first rounds."""


@dataclass(frozen=True, slots=True)
class Have:
    """4: of each part that I own or stand in for, from which members I hold it (all indices into the roster)."""

    slot: Slot
    roster: Hash
    parts: Annotated[tuple[tuple[Index, Annotated[tuple[Index, ...], Size(MAX_ROSTER)]], ...], Size(MAX_ROSTER)]
    nonce: Hash
    """What I committed to in `Ready`, now that others have committed to their contributions."""


@dataclass(frozen=True, slots=True)
class Cut:
    """5: the contributions that enter: those that every part's holder has; `commits` binds what they are."""

    slot: Slot
    roster: Hash
    version: Annotated[int, Between(0, MAX_RECUTS)]
    """0, and one more each time that a contribution had to be taken out again."""
    contributors: Annotated[tuple[Index, ...], Size(MAX_ROSTER, 1)]
    commits: Hash
    nonces: Annotated[tuple[tuple[Index, Hash], ...], Size(MAX_ROSTER)]
    """Those of the parts' holders: with `commits`, what the seed of the sketches follows from."""


@dataclass(frozen=True, slots=True)
class CutAck:
    """I accept this cut; as an owner I hold all of it."""

    slot: Slot
    cut: Hash


@dataclass(frozen=True, slots=True)
class Sketch:
    """6 and 9: the CountSketches of my parts, under the seed that was drawn after the cut, or after all outputs."""

    slot: Slot
    after: Hash
    tables: Annotated[bytes, Size(MAX_SKETCH_BYTES)]
    """Of each part in order, float32 [3, columns], little-endian."""


@dataclass(frozen=True, slots=True)
class Result:
    """7: the output of a part that I own or stand in for, by its hash, and the contributors' weights in the cut's order."""

    slot: Slot
    cut: Hash
    part: Index
    weights: Annotated[tuple[float, ...], Size(MAX_ROSTER, 1)]
    output: Hash


@dataclass(frozen=True, slots=True)
class ResultAck:
    """8: I hold all outputs; applying them leads to this state. A quorum of these is the round's certificate."""

    slot: Slot
    cut: Hash
    outputs: Annotated[tuple[Hash, ...], Size(MAX_ROSTER, 1)]
    next_root: Hash
    previous: Hash
    """The certificate of the round before (`quorum.certificate_hash`), so that certificates are a chain."""
    tokens: Count
    """All tokens of the run so far, this round's contributors included: the longer chain is the one with more."""
    flagged: Annotated[tuple[Index, ...], Size(MAX_ROSTER)] = ()
    """The members whose contributions the run's rule has found odd: they lose trust."""


@dataclass(frozen=True, slots=True)
class Void:
    """I give this attempt up, will sign no `ResultAck` of it any more, and know of these ones."""

    slot: Slot
    reason: Reason
    acks: Annotated[tuple[Bytes, ...], Size(MAX_ROSTER)]


@dataclass(frozen=True, slots=True)
class Certificate:
    """The record of a finished round: its roster and cut, and a quorum of equal `ResultAck`s, all signed."""

    slot: Slot
    roster: Bytes
    cut: Bytes
    acks: Annotated[tuple[Bytes, ...], Size(MAX_ROSTER, 1)]


@dataclass(frozen=True, slots=True)
class Signed:
    """A message that anybody can check: who says it, which message it is, its bytes, the signature over all of it."""

    sender: Peer
    code: Annotated[int, Between(0, 255)]
    payload: Bytes
    signature: Annotated[bytes, Size(64, 64)]

    def __hash__(self) -> int:
        """One signature, one message: enough to find it among others, and quicker than all four fields."""
        return hash(self.signature)

    @property
    def hash(self) -> bytes:
        """By which other messages refer to this one: of what was said, not of the signature."""
        return digest(self.payload)


CODES: dict[int, type] = {
    1: Beat,
    2: Goodbye,
    3: MembersAsk,
    4: Members,
    5: StateAsk,
    7: Fetch,
    8: Serve,
    9: Signed,
    10: Certificate,
    11: LedgerAsk,
    12: LedgerPage,
    13: StateOffer,
    14: LeavesAsk,
    15: Leaves,
    22: RosterAck,
    26: CutAck,
    27: Result,
    29: Void,
    30: Commit,
    31: Claim,
    32: Accusations,
    33: Ready,
    34: Roster,
    35: ResultAck,
    36: Have,
    37: Cut,
    38: Sketch,
}
_NUMBERS = {cls: code for code, cls in CODES.items()}

RoundMessage: TypeAlias = Ready | Roster | RosterAck | Commit | Have | Cut | CutAck | Sketch | Result | ResultAck | Void
ROUND_MESSAGES = (Ready, Roster, RosterAck, Commit, Have, Cut, CutAck, Sketch, Result, ResultAck, Void)


def code_of(message: object) -> int:
    """The number of a message's class. Raises `LocalError` for anything else."""
    try:
        return _NUMBERS[type(message)]
    except KeyError:
        raise LocalError(f"{type(message).__name__} is not a message") from None


def pack(message: object) -> bytes:
    """A message as one byte of its number and its canonical encoding."""
    return bytes((code_of(message),)) + encode(message)


def unpack(data: bytes) -> Any:
    """The message that `pack` wrote. Raises `MalformedMessage`."""
    cls = CODES.get(data[0]) if data else None
    if cls is None:
        raise MalformedMessage(f"message number {data[0] if data else 'none'} is unknown")
    return decode(cls, data[1:], max_bytes=MAX_FRAME_BYTES)


def signed_bytes(code: int, payload: bytes) -> bytes:
    """What the signature of a `Signed` covers; the prefix keeps it apart from every other thing that a key signs."""
    return b"flockstep round message 1\x00" + bytes((code,)) + payload


@lru_cache(maxsize=512)  # Certificates and Voids carry what has been heard before.
def opened(signed: Signed) -> RoundMessage:
    """The round message inside; its signature must have been checked before. Raises `MalformedMessage`."""
    cls = CODES.get(signed.code)
    if cls is None or cls not in ROUND_MESSAGES:
        raise MalformedMessage(f"message number {signed.code} is not one of a round")
    message: Any = decode(cls, signed.payload, max_bytes=MAX_SIGNED_BYTES)
    return cast(RoundMessage, message)
