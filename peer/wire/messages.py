"""Every round message, its limits, and the registry of message codes.

There are two families. Direct messages between two peers over an authenticated stream (`direct`: `Beat`, `MembersAsk`,
`Fetch`, …) need no signature. A message that third peers must be able to verify, as all of a round, travels as
`Signed`: the sender, the message's code, its canonical bytes, and the sender's signature over both. Codes are final: a
message whose fields change gets a new one. Limits and shared field types are in `fields`.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, TypeAlias, cast

from ..digest import digest
from ..errors import LocalError, MalformedMessage
from .direct import (
    Accusations,
    Beat,
    Claim,
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


@dataclass(frozen=True, slots=True)
class Slot:
    """The slot of a message: one attempt of one round of one run."""

    run: RunId
    round: Count
    attempt: Annotated[int, Between(0, 1 << 20)]


@dataclass(frozen=True, slots=True)
class Ready:
    """Step 0: my inner phase has ended, and I start from this state."""

    slot: Slot
    base_root: Hash
    tokens: Count
    upload: Rate
    """Measured upload in bytes/s; 0 for a peer that should own no part (relayed)."""
    download: Rate
    nonce_hash: Hash
    """The commitment to my nonce, which enters the seed of the sketches (commit-reveal, §9)."""
    prefix: Prefix = ""
    """The network that I am in, as `peer.address.prefix_of` names it; empty if unknown."""
    invite: Invite = b""
    """My invitation to the run, if it requires one."""


@dataclass(frozen=True, slots=True)
class Seat:
    """A member's seat in a roster: its trust record (`accountability.trust`), its network, its invitation."""

    trust: Annotated[float, Between(0.0, 1.0)]
    rounds: Annotated[int, Between(0, MAX_COUNT)]
    prefix: Prefix = ""
    invite: Invite = b""


@dataclass(frozen=True, slots=True)
class Roster:
    """Step 1: the members in order (the convener first), and the cells of the vector that each one owns."""

    slot: Slot
    base_root: Hash
    members: Annotated[tuple[Peer, ...], Size(MAX_ROSTER, 1)]
    bounds: Annotated[tuple[Count, ...], Size(MAX_ROSTER + 1, 2)]
    """Part i is the cells bounds[i] … bounds[i+1], owned by member i; it may be empty."""
    seats: Annotated[tuple[Seat, ...], Size(MAX_ROSTER, 1)]
    """The seat of each member, in order."""


@dataclass(frozen=True, slots=True)
class RosterAck:
    """Acknowledges a roster, and no other one in this attempt."""

    slot: Slot
    roster: Hash


@dataclass(frozen=True, slots=True)
class Commit:
    """Step 2: commits to my contribution by the hash of each part. It is immutable from here on."""

    slot: Slot
    roster: Hash
    tokens: Count
    steps: Count
    loss: float
    parts: Annotated[tuple[Hash, ...], Size(MAX_ROSTER, 1)]
    ramp: Annotated[float, Between(0.0, 1.0)] = 1.0
    """The factor on the weight of my tokens: less than 1 in a newcomer's first rounds."""


@dataclass(frozen=True, slots=True)
class Have:
    """Step 4: for each part that I own or stand in for, the members whose contributions I hold (roster indices)."""

    slot: Slot
    roster: Hash
    parts: Annotated[tuple[tuple[Index, Annotated[tuple[Index, ...], Size(MAX_ROSTER)]], ...], Size(MAX_ROSTER)]
    nonce: Hash
    """The nonce that I committed to in `Ready`, revealed after the others' commits."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Step 5: the contributions that enter, which every part's holder has; `commits` is the hash of their commits."""

    slot: Slot
    roster: Hash
    version: Annotated[int, Between(0, MAX_RECUTS)]
    """0, and one more with each re-cut."""
    contributors: Annotated[tuple[Index, ...], Size(MAX_ROSTER, 1)]
    commits: Hash
    nonces: Annotated[tuple[tuple[Index, Hash], ...], Size(MAX_ROSTER)]
    """The nonces of the parts' holders; with `commits` they determine the seed of the sketches."""


@dataclass(frozen=True, slots=True)
class CutAck:
    """Acknowledges a cut; an owner that sends it holds all contributions to its part."""

    slot: Slot
    cut: Hash


@dataclass(frozen=True, slots=True)
class Sketch:
    """Steps 6 and 9: the CountSketches of my parts, under the seed derived from the cut, or from the cut and all outputs.

    Cut and outputs are stated, not a hash of them: nobody can ask for a sketch under the seed of a cut that is to come.
    """

    slot: Slot
    cut: Hash
    outputs: Annotated[tuple[Hash, ...], Size(MAX_ROSTER)]
    """The outputs of all parts that the seed follows from; none in the sketches after the cut."""
    tables: Annotated[bytes, Size(MAX_SKETCH_BYTES)]
    """The table of each part in order, float32 [3, columns], little-endian."""


@dataclass(frozen=True, slots=True)
class Result:
    """Step 7: the hash of a part's output, by its owner or deputy, and the weights in the order of the cut."""

    slot: Slot
    cut: Hash
    part: Index
    weights: Annotated[tuple[float, ...], Size(MAX_ROSTER, 1)]
    output: Hash


@dataclass(frozen=True, slots=True)
class ResultAck:
    """Step 8: signs all outputs, and the state that they lead to. A quorum of equal ones is the round's certificate."""

    slot: Slot
    cut: Hash
    outputs: Annotated[tuple[Hash, ...], Size(MAX_ROSTER, 1)]
    next_root: Hash
    previous: Hash
    """The hash of the previous round's certificate (`chain.certificate.certificate_hash`): certificates are a hash chain."""
    tokens: Count
    """All tokens of the run so far, including those of this round that count: fork choice prefers the chain with more."""
    flagged: Annotated[tuple[Index, ...], Size(MAX_ROSTER)] = ()
    """The members whose contributions the run's rule flagged: they lose trust."""


@dataclass(frozen=True, slots=True)
class Void:
    """Abandons an attempt: its sender signs no `ResultAck` afterwards. It carries the `ResultAck`s known so far."""

    slot: Slot
    reason: Reason
    acks: Annotated[tuple[Bytes, ...], Size(MAX_ROSTER)]


@dataclass(frozen=True, slots=True)
class Certificate:
    """The certificate of a finished round: its roster and cut, and a quorum of equal `ResultAck`s, all signed."""

    slot: Slot
    roster: Bytes
    cut: Bytes
    acks: Annotated[tuple[Bytes, ...], Size(MAX_ROSTER, 1)]


@dataclass(frozen=True, slots=True)
class Signed:
    """A message that anybody can verify: its sender, its code, its bytes, and the signature over code and bytes."""

    sender: Peer
    code: Annotated[int, Between(0, 255)]
    payload: Bytes
    signature: Annotated[bytes, Size(64, 64)]

    def __hash__(self) -> int:
        """Hash the signature alone: it identifies the message, and is quicker than all four fields."""
        return hash(self.signature)

    @property
    def hash(self) -> bytes:
        """The hash by which other messages refer to this one: of the payload, without the signature."""
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
    39: Sketch,
}
_NUMBERS = {cls: code for code, cls in CODES.items()}

RoundMessage: TypeAlias = Ready | Roster | RosterAck | Commit | Have | Cut | CutAck | Sketch | Result | ResultAck | Void
ROUND_MESSAGES = (Ready, Roster, RosterAck, Commit, Have, Cut, CutAck, Sketch, Result, ResultAck, Void)


def code_of(message: object) -> int:
    """Return the code of a message's class. Raises `LocalError` for anything else."""
    try:
        return _NUMBERS[type(message)]
    except KeyError:
        raise LocalError(f"{type(message).__name__} is not a message") from None


def pack(message: object) -> bytes:
    """Encode a message: one byte of its code, then its canonical encoding."""
    return bytes((code_of(message),)) + encode(message)


def unpack(data: bytes) -> Any:
    """Decode a message that `pack` encoded. Raises `MalformedMessage`."""
    cls = CODES.get(data[0]) if data else None
    if cls is None:
        raise MalformedMessage(f"message number {data[0] if data else 'none'} is unknown")
    return decode(cls, data[1:], max_bytes=MAX_FRAME_BYTES)


def signed_bytes(code: int, payload: bytes) -> bytes:
    """Return the bytes that a `Signed`'s signature covers; the prefix separates them from other uses of the key."""
    return b"flockstep round message 1\x00" + bytes((code,)) + payload


@lru_cache(maxsize=512)  # Certificates and Voids carry messages that were received before.
def opened(signed: Signed) -> RoundMessage:
    """Decode the round message inside; its signature must have been verified before. Raises `MalformedMessage`."""
    cls = CODES.get(signed.code)
    if cls is None or cls not in ROUND_MESSAGES:
        raise MalformedMessage(f"message number {signed.code} is not one of a round")
    message: Any = decode(cls, signed.payload, max_bytes=MAX_SIGNED_BYTES)
    return cast(RoundMessage, message)
