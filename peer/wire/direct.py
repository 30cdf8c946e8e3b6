"""Direct messages between two peers over an authenticated stream, which need no signature. Pure.

Claims are the exception: their accusers sign them, and `collectives.accountability.evidence` judges them.
"""

from dataclasses import dataclass
from typing import Annotated

from .fields import (
    MAX_CARRIED_RECORD_BYTES,
    MAX_COUNT,
    MAX_PACKED_BYTES,
    MAX_PAGE,
    MAX_SIGNED_BYTES,
    MAX_STATEMENT_BYTES,
    Count,
    Hash,
    Index,
    Invite,
    Peer,
    Reason,
    RunId,
)
from .schema import Between, Size

TAG_BYTES = 8
"""The length of a peer's tag (`dht.members.vouchers`): to collide with a given one takes 2⁶⁴ keys."""
SEQUENCE_BYTES = 8


@dataclass(frozen=True, slots=True)
class Beat:
    """A heartbeat, sent at every interval; a peer that misses three is lost."""

    echo: bool = False
    """Requests a heartbeat back: the other side may not watch me, or beat more slowly than I expect."""


@dataclass(frozen=True, slots=True)
class Goodbye:
    """Announces that the sender leaves, with the reason."""

    reason: Reason


@dataclass(frozen=True, slots=True)
class MembersAsk:
    """Anti-entropy request: the sequence that I know of each peer; the answer holds newer records."""

    run: RunId
    known: Annotated[bytes, Size(4096 * (TAG_BYTES + SEQUENCE_BYTES))]
    """Tag and sequence (big-endian) of each peer, one after the other."""


@dataclass(frozen=True, slots=True)
class Members:
    """Member records, signed by their peers: the answer to `MembersAsk`, or a pushed update (rumour)."""

    records: Annotated[tuple[Annotated[bytes, Size(MAX_CARRIED_RECORD_BYTES)], ...], Size(256)]


MAX_MET = 4096
"""The limit of peers in one `Met`: the rows of a member table."""


@dataclass(frozen=True, slots=True)
class Met:
    """States with which peers the sender has had a session in the last minute."""

    peers: Annotated[bytes, Size(MAX_MET * TAG_BYTES)]
    """Their tags, one after the other, in ascending order."""


@dataclass(frozen=True, slots=True)
class Unheard:
    """States that I have lost a member; with `asks` it requests that member's statements of a round from who has not."""

    run: RunId
    round: Count
    peer: Peer
    asks: bool


@dataclass(frozen=True, slots=True)
class StateAsk:
    """Requests the list of checkpoints that a peer provides."""

    run: RunId


@dataclass(frozen=True, slots=True)
class StateOffer:
    """The answer to `StateAsk`: the checkpoints that I provide as long as I keep them."""

    checkpoints: Annotated[tuple[tuple[Count, Hash, Annotated[bytes, Size(MAX_PACKED_BYTES)]], ...], Size(4)]
    """Of each the round, root, and packed certificate; the certificate of a run's first state is empty."""


@dataclass(frozen=True, slots=True)
class LeavesAsk:
    """Requests the leaf hashes of a state."""

    run: RunId
    root: Hash


@dataclass(frozen=True, slots=True)
class Leaves:
    """The answer to `LeavesAsk`: the hashes of θ's leaves and then of m's, by which their bytes are fetched."""

    hashes: Annotated[tuple[Hash, ...], Size(20_000)]


MAX_FILES_HELD = (1 << 16) + 8
"""The files of packed data, of which a run has no more."""


@dataclass(frozen=True, slots=True)
class FilesAsk:
    """Requests which files of the run's data a peer provides, also before the asker is a member."""

    run: RunId
    invite: Invite
    """Its invitation, if the run demands one."""


@dataclass(frozen=True, slots=True)
class FilesHeld:
    """The answer to `FilesAsk`: the first four bytes of the hash of each, one after the other, in ascending order."""

    tags: Annotated[bytes, Size(MAX_FILES_HELD * 4)]


@dataclass(frozen=True, slots=True)
class Fetch:
    """Requests bulk bytes by hash, from `offset` on; another holder's copy of a part by a hash of contributor and hash."""

    hash: Hash
    offset: Count


@dataclass(frozen=True, slots=True)
class Serve:
    """The answer to `Fetch`: `length` raw bytes follow, or none, with the reason."""

    length: Count
    refused: Reason
    is_limited: bool = False
    """Whether they come at a limited rate, by which nobody can measure a line."""


@dataclass(frozen=True, slots=True)
class LedgerAsk:
    """Requests the certificates of up to `limit` rounds, from `from_round` on."""

    run: RunId
    from_round: Annotated[int, Between(1, MAX_COUNT)]
    limit: Annotated[int, Between(1, MAX_PAGE)]


@dataclass(frozen=True, slots=True)
class LedgerPage:
    """The answer to `LedgerAsk`: packed certificates in order, as many as I have and as fit; validated after unpacking."""

    certificates: Annotated[tuple[Annotated[bytes, Size(MAX_PACKED_BYTES)], ...], Size(MAX_PAGE)]
    losses: Annotated[tuple[float, ...], Size(MAX_PAGE)] = ()
    """The loss of each of these rounds, as I saw members state it or was sent it; 0 where I know none. A claim."""


@dataclass(frozen=True, slots=True)
class VoteAsk:
    """Asks a member which round it is in."""

    run: RunId


@dataclass(frozen=True, slots=True)
class VoteShown:
    """The answer to `VoteAsk`: the round that a member votes in next, or would vote in."""

    round: Count


MAX_CLAIM_BYTES = MAX_SIGNED_BYTES + 200
"""The limit of a signed claim."""
MAX_CLAIMS = 2
"""The limit of one message: its frame stays below the limit of all frames."""


@dataclass(frozen=True, slots=True)
class Claim:
    """Evidence against one peer, signed by its accuser: equivocation, or statements that bind it to invalid bytes.

    Either two statements on one subject; or a sketch, a commit and its roster, if the sketch is not of the bytes of
    `part`; or a commit and its roster, if these bytes are not a valid encoding; or a result, its cut and its roster, if
    the output is not. Each statement is an encoded `wire.Signed`.
    """

    run: RunId
    statements: Annotated[tuple[Annotated[bytes, Size(MAX_STATEMENT_BYTES + 200)], ...], Size(3, 2)]
    part: Index


@dataclass(frozen=True, slots=True)
class Accusations:
    """Claims, each an encoded `wire.Signed` of its accuser; any peer may carry them."""

    claims: Annotated[tuple[Annotated[bytes, Size(MAX_CLAIM_BYTES)], ...], Size(MAX_CLAIMS, 1)]
