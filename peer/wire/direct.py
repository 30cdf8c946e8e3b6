"""Talk between two peers who have an authenticated stream: messages that need no signature of their own."""

from dataclasses import dataclass
from typing import Annotated

from .fields import MAX_COUNT, MAX_PACKED_BYTES, MAX_PAGE, MAX_RECORD_BYTES, Count, Hash, Peer, Reason, RunId
from .schema import Between, Size


@dataclass(frozen=True, slots=True)
class Beat:
    """I am alive: sent on every interval; three missed ones and the sender is lost."""

    echo: bool = False
    """Whether a word back is wanted: the other side may not watch me, or beat more slowly than I expect."""


@dataclass(frozen=True, slots=True)
class Goodbye:
    """I leave now, and why."""

    reason: Reason


@dataclass(frozen=True, slots=True)
class MembersAsk:
    """Anti-entropy: what I know of whom (peer, sequence); answer with what is newer."""

    run: RunId
    known: Annotated[tuple[tuple[Peer, Count], ...], Size(4096)]


@dataclass(frozen=True, slots=True)
class Members:
    """Member records, signed by their peers: the answer to `MembersAsk`, or a change that is pushed."""

    records: Annotated[tuple[Annotated[bytes, Size(MAX_RECORD_BYTES)], ...], Size(256)]


@dataclass(frozen=True, slots=True)
class StateAsk:
    """Which checkpoints of the state can you give?"""

    run: RunId


@dataclass(frozen=True, slots=True)
class StateOffer:
    """These checkpoints I can give, as long as I keep them."""

    checkpoints: Annotated[tuple[tuple[Count, Hash, Annotated[bytes, Size(MAX_PACKED_BYTES)]], ...], Size(4)]
    """Of each the round, the root, and the packed certificate of that round; none of the state that a run starts from."""


@dataclass(frozen=True, slots=True)
class LeavesAsk:
    """Of which leaves does this state consist?"""

    run: RunId
    root: Hash


@dataclass(frozen=True, slots=True)
class Leaves:
    """The hashes of θ's leaves and then of m's, by which the bytes of each are fetched."""

    hashes: Annotated[tuple[Hash, ...], Size(20_000)]


@dataclass(frozen=True, slots=True)
class Fetch:
    """Send me these bulk bytes, from `offset` on."""

    hash: Hash
    offset: Count


@dataclass(frozen=True, slots=True)
class Serve:
    """`length` raw bytes follow; or none, and why."""

    length: Count
    refused: Reason


@dataclass(frozen=True, slots=True)
class LedgerAsk:
    """The certificates of up to `limit` rounds, from this one on?"""

    run: RunId
    from_round: Annotated[int, Between(1, MAX_COUNT)]
    limit: Annotated[int, Between(1, MAX_PAGE)]


@dataclass(frozen=True, slots=True)
class LedgerPage:
    """As many of them as I have and as fit, in order, packed: what they say is checked once they are unpacked."""

    certificates: Annotated[tuple[Annotated[bytes, Size(MAX_PACKED_BYTES)], ...], Size(MAX_PAGE)]
