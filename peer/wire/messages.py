"""Every round message, its limits, and the registry of message codes. Pure.

There are two families. Direct messages between two peers over an authenticated stream (`direct`: `Beat`, `MembersAsk`,
`Fetch`, …) need no signature. A message that third peers must be able to verify, as all of a round, travels as
`Signed`: the sender, the message's code, its canonical bytes, and the sender's signature over both. Codes are final: a
message whose fields change gets a new one. A message of an unknown code is malformed. Limits and shared field types are in
`fields`.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, TypeAlias, cast

from ..base.digest import DIGEST_BYTES, digest
from ..base.errors import LocalError, MalformedMessage
from .direct import (
    Accusations,
    Beat,
    Claim,
    Fetch,
    FilesAsk,
    FilesHeld,
    Goodbye,
    Leaves,
    LeavesAsk,
    LedgerAsk,
    LedgerPage,
    Members,
    MembersAsk,
    Met,
    Serve,
    StateAsk,
    StateOffer,
    Unheard,
    VoteAsk,
    VoteShown,
)
from .fields import (
    MARK_BYTES,
    MAX_ATTEMPT,
    MAX_COUNT,
    MAX_MISSED,
    MAX_OUTPUTS,
    MAX_PARTS,
    MAX_PHASE_SECONDS,
    MAX_ROSTER,
    MAX_SIGNED_BYTES,
    MAX_SKETCH_BYTES,
    MAX_STATEMENT_BYTES,
    NAME_BYTES,
    Bytes,
    Count,
    Hash,
    Index,
    Invite,
    PackedHeard,
    PackedReady,
    PackedRevision,
    PackedValue,
    Peer,
    Rate,
    Reason,
    RunId,
    Voucher,
)
from .framing import MAX_FRAME_BYTES
from .schema import Between, Size, decode, encode


@dataclass(frozen=True, slots=True)
class Slot:
    """The slot of a message. Run, round and previous name the decision, `attempt` orders the slots of one decision."""

    run: RunId
    round: Count
    previous: Hash
    """The hash of the certificate that the round extends: a message on another chain does not count."""
    attempt: Annotated[int, Between(0, MAX_ATTEMPT)] = 0

    @property
    def decision(self) -> tuple[str, int, bytes]:
        """What is decided. No two slots of different decisions are ever compared."""
        return self.run, self.round, self.previous

    def at(self, attempt: int) -> "Slot":
        """Return another slot of the same decision."""
        return Slot(self.run, self.round, self.previous, attempt)


@dataclass(frozen=True, slots=True)
class Lock:
    """The newest proof that a voter knows: its attempt and its value. The `Proof` itself travels beside the Ready."""

    attempt: Annotated[int, Between(0, MAX_ATTEMPT)]
    value: Hash


@dataclass(frozen=True, slots=True)
class Ready:
    """Step 0: my inner phase has ended, I start from this state, and I have entered the slot."""

    slot: Slot
    base_root: Hash
    tokens: Count
    upload: Rate
    """Measured upload in bytes/s, where the others have not measured it; 0 for a peer that should own no part (relayed)."""
    download: Rate
    nonce_hash: Hash
    """The commitment to my nonce, which enters the seed of the sketches (commit-reveal)."""
    invite: Invite = b""
    """My invitation to the run, if it requires one."""
    voucher: Voucher = b""
    """The owner's statement that vouches for me, if there is one: with it I may vote where keepers do."""
    lock: Annotated[tuple[Lock, ...], Size(1)] = ()
    """The newest proof that I know, if there is one."""
    is_leaving: bool = False
    """True if I leave after this round: I have no vote in the next one."""
    rates: Annotated[bytes, Size(MAX_PARTS)] = b""
    """At which rate I have received from each member of the last certified roster, in its order (`vector.lines`)."""
    seconds: Annotated[float, Between(0.0, MAX_PHASE_SECONDS)] = 0.0
    """How long I have trained for what I contribute, without any wait; 0 where I do not train."""
    control: Annotated[float, Between(0.0, MAX_PHASE_SECONDS)] = 0.0
    """How long I would wait for one exchange of small messages: a roster waits as long as its voters would."""
    transfer: Annotated[float, Between(0.0, MAX_PHASE_SECONDS)] = 0.0
    """How long I would wait for all parts to reach their owners."""


@dataclass(frozen=True, slots=True)
class Seat:
    """A member's seat in a roster: its record (`accountability.trust`), and what it states of itself in its Ready."""

    trust: Annotated[float, Between(0.0, 1.0)]
    rounds: Annotated[int, Between(0, MAX_COUNT)]
    invite: Invite = b""
    voucher: Voucher = b""
    is_leaving: bool = False


@dataclass(frozen=True, slots=True)
class Absence:
    """A voter that is in no roster since so many certified ones, and keeps its vote."""

    voter: Peer
    missed: Annotated[int, Between(1, MAX_MISSED)]


@dataclass(frozen=True, slots=True)
class Heard:
    """Step 1, by a voter to the proposer, once: whose Ready it holds, and would be in a roster with.

    A roster follows from the words of a quorum: who tells its Ready to some only is in it, or not, for everybody alike.
    """

    slot: Slot
    readys: Annotated[bytes, Size(MARK_BYTES * MAX_ROSTER, MARK_BYTES)]
    """The first `MARK_BYTES` of the hash of each Ready, mine first."""
    revision: Count = 0
    """The number of the owner's newest revision that I hold; 0 for the manifest's settings."""


@dataclass(frozen=True, slots=True)
class Roster:
    """Step 2: the members in order (the proposer first), and the cells of the vector that each one owns."""

    slot: Slot
    base_root: Hash
    members: Annotated[tuple[Peer, ...], Size(MAX_ROSTER, 1)]
    bounds: Annotated[tuple[Count, ...], Size(MAX_PARTS + 1, 2)]
    """Part i is the cells bounds[i] … bounds[i+1], owned by member i; it may be empty."""
    seats: Annotated[tuple[Seat, ...], Size(MAX_ROSTER, 1)]
    """The seat of each member, in order."""
    training: Annotated[bytes, Size(MAX_ROSTER // 8)]
    """Bit i is set if member i trains; little-endian, without zeros at its end."""
    basis: Hash
    """The hash of the `Basis` that this follows from."""
    revision: PackedRevision = b""
    """The owner's statement on the settings that hold from the next round on; empty while those of the manifest do."""


@dataclass(frozen=True, slots=True)
class Basis:
    """Step 2, to voters: what a roster follows from (`collectives.round.gather`)."""

    slot: Slot
    readys: Annotated[tuple[PackedReady, ...], Size(MAX_ROSTER, 1)]
    """The signed Readys that enough voters hold: of each member, in order, then of those that have no place."""
    heards: Annotated[tuple[PackedHeard, ...], Size(MAX_PARTS, 1)]
    """The signed Heards of a quorum of voters, sorted."""


@dataclass(frozen=True, slots=True)
class Commit:
    """Step 3: commits to my contribution by the hash of each part. It is immutable from here on."""

    slot: Slot
    roster: Hash
    tokens: Count
    steps: Count
    loss: float
    parts: Annotated[tuple[Hash, ...], Size(MAX_PARTS, 1)]
    ramp: Annotated[float, Between(0.0, 1.0)] = 1.0
    """The factor on the weight of my tokens: less than 1 in a newcomer's first rounds."""
    codec: Annotated[str, Size(8)] = ""
    """The codec of my parts, of those that the run lets a sender choose from; empty for its usual one."""


@dataclass(frozen=True, slots=True)
class Have:
    """Steps 4 and 7: a holder's word on the parts that it holds, twice.

    First it says whose contributions it holds, then whose sketches are of the bytes that it holds.
    """

    slot: Slot
    roster: Hash
    cut: Annotated[bytes, Size(DIGEST_BYTES)]
    """The hash of the first Cut, in a word on sketches; empty in one on contributions."""
    parts: Annotated[tuple[tuple[Index, Annotated[tuple[Index, ...], Size(MAX_ROSTER)]], ...], Size(MAX_PARTS)]
    """For each part the members (roster indices)."""
    names: Annotated[bytes, Size(NAME_BYTES * MAX_ROSTER, 0)]
    """The name of the Commit, or of the Sketch, of each member in `parts`, by its index."""
    nonce: Hash
    """The nonce that I committed to in `Ready`, revealed after the others' commits."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Steps 5 and 8: the holders' words that count. Who contributes follows from these (`collectives.allreduce.words`)."""

    slot: Slot
    roster: Hash
    before: Annotated[bytes, Size(DIGEST_BYTES)]
    """The hash of the first Cut, in the one that follows from words on sketches; empty in the first."""
    holders: Annotated[tuple[Index, ...], Size(MAX_PARTS, 1)]
    """Of each part that has cells, in order: whose word counts in it, its owner or a deputy."""
    words: Annotated[tuple[tuple[Index, Annotated[bytes, Size(NAME_BYTES, NAME_BYTES)]], ...], Size(MAX_PARTS, 1)]
    """The name of each Have that counts, by its author, sorted. The seed of the sketches follows from their nonces."""
    contributors: Annotated[tuple[Index, ...], Size(MAX_ROSTER, 1)]
    """Who contributes by these words, sorted: for members without a vote, which are sent no words."""
    masks: Annotated[tuple[Annotated[bytes, Size(MAX_ROSTER // 8)], ...], Size(MAX_PARTS, 1)]
    """Of each part that has cells, in order: bit i is set if the contributor at place i counts as zeros in it; little-endian
    without zeros at its end."""


@dataclass(frozen=True, slots=True)
class Sketch:
    """Steps 6 and 11: the CountSketches of my parts, under the seed derived from the cut, or from the cut and all outputs."""

    slot: Slot
    cut: Hash
    outputs: Annotated[tuple[Hash, ...], Size(MAX_PARTS)]
    """The outputs of all parts that the seed follows from; none in the sketches after the cut."""
    tables: Annotated[bytes, Size(MAX_SKETCH_BYTES)]
    """The table of each part in order, float32 [3, columns], little-endian."""


@dataclass(frozen=True, slots=True)
class Weigh:
    """Step 9, by a voter to the holder of a part that has no vote: what each contribution weighs in its part.

    It reduces what voters with a third of the votes state alike: one of them is honest.
    """

    slot: Slot
    cut: Hash
    """The hash of the last Cut, which the weights follow from."""
    part: Index
    weights: Annotated[tuple[tuple[Index, Annotated[float, Between(0.0, 2.0)]], ...], Size(MAX_ROSTER)]
    """Of each contributor that weighs something, by roster index, sorted. They sum to 1 at most, but for rounding."""


@dataclass(frozen=True, slots=True)
class Result:
    """Step 9: the hash of a part's output, by its owner or a deputy."""

    slot: Slot
    cut: Hash
    part: Index
    output: Hash


@dataclass(frozen=True, slots=True)
class Outputs:
    """Step 10, by the proposer: the outputs of all parts. The second sketches are taken under a seed that follows from them.

    It names them again, with the next number, where one of them is false, or where contributors do not sketch.
    """

    slot: Slot
    cut: Hash
    number: Annotated[int, Between(0, MAX_OUTPUTS - 1)]
    outputs: Annotated[tuple[Hash, ...], Size(MAX_PARTS, 1)]
    silent: Annotated[tuple[Index, ...], Size(MAX_ROSTER)]
    """The contributors whose sketches did not come: those after the cut say how long their shares may be."""


@dataclass(frozen=True, slots=True)
class Value:
    """What a round decides on: who took part, the outputs, and the state that they lead to.

    It holds no attempt, so that it can be proposed again without moving any bytes.
    """

    run: RunId
    round: Count
    previous: Hash
    """The hash of the previous round's value (`chain.certificate.certificate_hash`): certificates are a hash chain."""
    base_root: Hash
    members: Annotated[tuple[Peer, ...], Size(MAX_ROSTER, 1)]
    bounds: Annotated[tuple[Count, ...], Size(MAX_PARTS + 1, 2)]
    seats: Annotated[tuple[Seat, ...], Size(MAX_ROSTER, 1)]
    """Members, parts and seats of the roster; those that may vote are the next round's voters, beside the `absent`."""
    cut: Hash
    """The hash of the first `Cut`."""
    contributors: Annotated[tuple[Index, ...], Size(MAX_ROSTER, 1)]
    """The members whose contributions are in the outputs."""
    outputs: Annotated[tuple[Hash, ...], Size(MAX_PARTS, 1)]
    next_root: Hash
    tokens: Count
    """All tokens of the run so far, including those of this round that count."""
    flagged: Annotated[tuple[Index, ...], Size(MAX_ROSTER)] = ()
    """The members whose contributions the run's rule flagged: they lose trust."""
    revision: PackedRevision = b""
    """That of the roster: every certificate states the settings of the round after it."""
    credit: Annotated[tuple[Count, ...], Size(MAX_ROSTER)] = ()
    """The tokens of each contributor, in order, that count: 0 for one that was flagged or left without weight."""
    absent: Annotated[tuple[Absence, ...], Size(MAX_PARTS)] = ()
    """The voters of this round that its roster lacks, and that vote in the next one, by id."""


@dataclass(frozen=True, slots=True)
class Propose:
    """Step 12: the proposer's proposal. A new value comes of its roster; one with a proof is shown to be the newest."""

    slot: Slot
    value: PackedValue
    roster: Annotated[bytes, Size(DIGEST_BYTES)]
    """The hash of my roster in this slot, whose Readys justify a new value; empty for a value that has a proof."""
    readys: Annotated[tuple[PackedReady, ...], Size(MAX_PARTS)] = ()
    """For a value that has a proof: signed Readys of a quorum in this slot, by voter."""


@dataclass(frozen=True, slots=True)
class Prevote:
    """Step 13: I hold the bytes of this value and found nothing wrong, and I am not locked on another one."""

    slot: Slot
    value: Hash


@dataclass(frozen=True, slots=True)
class Precommit:
    """Step 14: I have seen a proof of this value in this slot, and it is my lock. A quorum is the round's certificate."""

    slot: Slot
    value: Hash


@dataclass(frozen=True, slots=True)
class Void:
    """I take no part in this attempt any more: the reason in words. It moves nobody to the next one."""

    slot: Slot
    reason: Reason


@dataclass(frozen=True, slots=True)
class Proof:
    """A quorum of Prevotes of a value in one slot; it proves itself, so it is not signed."""

    slot: Slot
    value: PackedValue
    voters: Annotated[tuple[Peer, ...], Size(MAX_PARTS, 1)]
    """Sorted."""
    signatures: Annotated[tuple[Annotated[bytes, Size(64, 64)], ...], Size(MAX_PARTS, 1)]
    """The signature of each voter under its statement."""


@dataclass(frozen=True, slots=True)
class Certificate:
    """The certificate of a finished round: its value, and a quorum of Precommits in one slot. Fields as in `Proof`."""

    slot: Slot
    value: PackedValue
    voters: Annotated[tuple[Peer, ...], Size(MAX_PARTS, 1)]
    signatures: Annotated[tuple[Annotated[bytes, Size(64, 64)], ...], Size(MAX_PARTS, 1)]


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

    @property
    def name(self) -> bytes:
        """The first `NAME_BYTES` of the hash, where many are named at once."""
        return self.hash[:NAME_BYTES]


CODES: dict[int, type] = {
    1: Beat,
    2: Goodbye,
    4: Members,
    5: StateAsk,
    7: Fetch,
    8: Serve,
    9: Signed,
    11: LedgerAsk,
    12: LedgerPage,
    13: StateOffer,
    14: LeavesAsk,
    15: Leaves,
    31: Claim,
    32: Accusations,
    46: Sketch,
    48: Propose,
    49: Prevote,
    50: Precommit,
    52: Void,
    53: Proof,
    54: Certificate,
    55: Met,
    56: VoteAsk,
    57: VoteShown,
    58: Unheard,
    60: MembersAsk,
    62: Ready,
    63: Commit,
    64: Heard,
    66: FilesAsk,
    67: FilesHeld,
    68: Have,
    70: Result,
    71: Outputs,
    73: Weigh,
    74: Cut,
    75: Roster,
    76: Basis,
}
_NUMBERS = {cls: code for code, cls in CODES.items()}

VoteMessage: TypeAlias = Ready | Propose | Prevote | Precommit
"""The statements of the agreement."""
DataMessage: TypeAlias = Heard | Basis | Roster | Commit | Have | Cut | Sketch | Weigh | Result | Outputs | Void
"""The messages that move the data of one attempt."""
RoundMessage: TypeAlias = VoteMessage | DataMessage
ROUND_MESSAGES = (
    *(Ready, Heard, Basis, Roster, Commit, Have, Cut, Sketch, Weigh, Result, Outputs),
    *(Propose, Prevote, Precommit, Void),
)


def code_of(message: object) -> int:
    """Return the code of a message's class. Raises `LocalError` for anything else."""
    try:
        return _NUMBERS[type(message)]
    except KeyError:
        raise LocalError(f"{type(message).__name__} is not a message") from None


def code_of_kind(kind: type) -> int:
    """Return the code of a message class."""
    return _NUMBERS[kind]


def pack(message: object) -> bytes:
    """Encode a message: one byte of its code, then its canonical encoding."""
    return bytes((code_of(message),)) + encode(message)


def unpack(data: bytes) -> Any:
    """Decode a message that `pack` encoded. Raises `MalformedMessage`."""
    if not data:
        raise MalformedMessage("a message without a number")
    if (cls := CODES.get(data[0])) is None:
        raise MalformedMessage(f"there is no message number {data[0]}")
    return decode(cls, data[1:], max_bytes=MAX_FRAME_BYTES)


def signed_bytes(code: int, payload: bytes) -> bytes:
    """Return the bytes that a `Signed`'s signature covers; the prefix separates them from other uses of the key."""
    return b"flockstep round message 2\x00" + bytes((code,)) + payload


@lru_cache(maxsize=512)  # A basis carries messages that were received before.
def opened(signed: Signed) -> RoundMessage:
    """Decode the round message inside; its signature must have been verified before. Raises `MalformedMessage`."""
    cls = CODES.get(signed.code)
    if cls is None or cls not in ROUND_MESSAGES:
        raise MalformedMessage(f"message number {signed.code} is not one of a round")
    max_bytes = MAX_SIGNED_BYTES if cls is Basis else MAX_STATEMENT_BYTES
    message: Any = decode(cls, signed.payload, max_bytes=max_bytes)
    return cast(RoundMessage, message)
