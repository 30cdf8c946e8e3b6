"""A listing: the owner's word that its run may be shown to everybody who asks a bootstrap for runs. Pure.

Theory of operation. A listing is a record of the run's owner in the directory, under the run's id and its own, and holds only
the date of its end. All else that is shown of a run is in its manifest, whose hash is the run id. Whoever keeps an old
listing can publish it again: so it ends by a date that its owner has signed, a week ahead, and the owner's peer renews it
every day. A bootstrap answers with a `RunList` of the listed runs whose manifests it holds.
"""

from dataclasses import dataclass
from typing import Annotated

from ...peer.base.errors import ProtocolViolation
from ...peer.base.transport import PeerId
from ...peer.identity import Identity
from ...peer.wire.fields import Count, RunId
from ...peer.wire.schema import Between, Size, decode, encode
from ..records import MAX_LIFETIME, Record

LISTING_KIND = "listing"
MAX_LISTED_SECONDS = 7 * 86_400.0
"""How long a listing may be shown after its owner has withdrawn it, by whoever kept it."""
RENEWAL_SECONDS = 86_400.0
MAX_LISTING_BYTES = 512
MAX_LISTED_RUNS = 128
"""The runs in one answer: 128 of 400 bytes are below the 64 kB of a value."""
MAX_RUN_LIST_BYTES = 64_000
LISTING_FILE = "listing"
"""In a run's folder on its owner's disk: while it is there, the owner's peer renews the listing."""


@dataclass(frozen=True, slots=True)
class Listing:
    """The body of a listing."""

    ends: Annotated[float, Between(0.0, 1e12)]
    """Unix seconds; 0 withdraws it."""


@dataclass(frozen=True, slots=True)
class ListedRun:
    """One run in a bootstrap's list."""

    run: RunId
    listing: Annotated[bytes, Size(MAX_LISTING_BYTES, least=1)]
    """The owner's record."""
    round: Count
    """The round of its newest certificate that this bootstrap has; 0: none."""
    is_followed: bool
    """Whether the bootstrap has checked the certificates up to that one; else somebody has published it."""
    num_peers: Annotated[int, Between(0, 1 << 20)]
    """Peers that say to be in it."""


@dataclass(frozen=True, slots=True)
class RunList:
    """What a bootstrap answers."""

    runs: Annotated[tuple[ListedRun, ...], Size(MAX_LISTED_RUNS)]


def sign_listing(identity: Identity, run_id: str, now: float, *, listed: bool = True) -> Record:
    """Sign that a run of this owner is listed from now on, or that it is not any more."""
    body = encode(Listing(now + MAX_LISTED_SECONDS if listed else 0.0))
    sequence = int(now * 1000)
    return Record.sign(
        identity, run=run_id, kind=LISTING_KIND, sequence=sequence, lifetime=MAX_LIFETIME, body=body
    )


def open_listing(run_id: str, owner: PeerId, data: bytes) -> tuple[Record, Listing]:
    """Decode and check a listing of a run by this peer, owner or not. Raises `RemoteError`."""
    if len(data) > MAX_LISTING_BYTES:
        raise ProtocolViolation(f"a listing of {len(data)} bytes, at most {MAX_LISTING_BYTES} are allowed")
    record = Record.decode(data)
    if (record.kind, record.run, record.peer) != (LISTING_KIND, run_id, owner):
        raise ProtocolViolation(f"a {record.kind!r} record of {record.peer!r} is no listing of run {run_id!r} by {owner!r}")
    record.check()
    return record, decode(Listing, record.body, max_bytes=MAX_LISTING_BYTES)


def why_not_listed(run_id: str, data: bytes, owner: PeerId, now: float) -> str:
    """Return why a listing by the run's owner does not list it now; empty if it does. Raises as `open_listing`."""
    return why_not_now(open_listing(run_id, owner, data)[1], now)


def why_not_now(listing: Listing, now: float) -> str:
    """Return why a listing, checked before, does not list its run now; empty if it does."""
    if listing.ends <= now:
        return "its owner has withdrawn it" if not listing.ends else "its listing has expired"
    if listing.ends > now + 2 * MAX_LISTED_SECONDS:  # Clocks of volunteers are wrong by minutes, not by weeks.
        return "its listing ends too far in the future"
    return ""
