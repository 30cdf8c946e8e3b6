"""Direct messages between two peers over an authenticated stream, which need no signature.

Claims are the exception: their accusers sign them, and `collectives.accountability.evidence` judges them.
"""

from dataclasses import dataclass
from typing import Annotated

from .fields import (
    MAX_CARRIED_RECORD_BYTES,
    MAX_COUNT,
    MAX_PACKED_BYTES,
    MAX_PAGE,
    Count,
    Hash,
    Index,
    Peer,
    Reason,
    RunId,
)
from .schema import Between, Size


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
    known: Annotated[tuple[tuple[Peer, Count], ...], Size(4096)]


@dataclass(frozen=True, slots=True)
class Members:
    """Member records, signed by their peers: the answer to `MembersAsk`, or a pushed update (rumour)."""

    records: Annotated[tuple[Annotated[bytes, Size(MAX_CARRIED_RECORD_BYTES)], ...], Size(256)]


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


@dataclass(frozen=True, slots=True)
class Fetch:
    """Requests bulk bytes by hash, from `offset` on."""

    hash: Hash
    offset: Count


@dataclass(frozen=True, slots=True)
class Serve:
    """The answer to `Fetch`: `length` raw bytes follow, or none, with the reason."""

    length: Count
    refused: Reason


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


MAX_STATEMENT_BYTES = 32_000
"""The limit of one signed statement: the longest, a roster of 64 members, has up to 20 kB."""
MAX_CLAIMS = 8
"""The limit of one message: its frame stays below the limit of all frames."""


@dataclass(frozen=True, slots=True)
class Claim:
    """Evidence against one peer, signed by its accuser: equivocation, or statements that bind it to invalid bytes.

    Either two statements on one subject; or a sketch, a commit and its roster, if the sketch is not of the bytes of
    `part`; or a commit and its roster, if these bytes are not a valid encoding; or a result, its cut and its roster, if
    the output is not. Each statement is an encoded `wire.Signed`.
    """

    run: RunId
    statements: Annotated[tuple[Annotated[bytes, Size(MAX_STATEMENT_BYTES)], ...], Size(3, 2)]
    part: Index


@dataclass(frozen=True, slots=True)
class Accusations:
    """Claims, each an encoded `wire.Signed` of its accuser; any peer may carry them."""

    claims: Annotated[tuple[Annotated[bytes, Size(4 * MAX_STATEMENT_BYTES)], ...], Size(MAX_CLAIMS, 1)]
