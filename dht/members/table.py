"""The member table: the newest record of every member of a run, made equal on all peers by anti-entropy.

Theory of operation. Every peer states its own condition in `member` records and keeps the newest record of every other.
On contact two tables compare their `summary` and exchange what is `newer_than` the other's (anti-entropy). A record is
valid for its lifetime from the moment of receipt. Three things end a membership: the member states that it has left,
its record expires, or its heartbeat to me fails; the last holds until a newer record or any message of it arrives.

Of a lost member the table keeps the sequence (a tombstone), so that a peer that still lists it cannot bring it back
with the same record. Time is an argument. Records are checked here: an invalid one raises, so that its carrier is
charged.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from typing import Annotated

from ...peer.digest import DIGEST_BYTES
from ...peer.errors import MalformedMessage, ProtocolViolation
from ...peer.identity import Identity
from ...peer.transport import Address, PeerId, Rung
from ...peer.wire import MAX_COUNT, Invite
from ...peer.wire.schema import Between, Size, decode, encode
from ..records import MAX_SEQUENCE, Record
from ..run.admission import OPEN, Charter

MEMBER_KIND = "member"
LIFETIME = 60.0
"""Seconds. Six anti-entropy turns of 10 s: a change reaches all members in two or three, so a lost turn expires none."""
MAX_MEMBERS = 4096
"""The limit of the memory that strangers can take: about 1 kB a member."""
PAGE = 64
"""Records in one answer, at most 400 kB; the asker requests the next page with its new summary."""
MAX_MEMBER_BYTES = 6_000
MEMBER_ADDRESSES = 16
MEMBER_ADDRESS_BYTES = 256
LAST_ADDRESSES = 4
"""Of more addresses than fit, so many of the last ones stay: those at relays, which may be the only ones that work."""
MAX_RATE = 1e15
MAX_SHARE_BYTES = 1024
"""The largest share that `optim.data.leases` writes has 726 bytes."""

_Count = Annotated[int, Between(0, MAX_SEQUENCE)]
_Rate = Annotated[float, Between(0.0, MAX_RATE)]


class MemberState(StrEnum):
    """What a member is doing."""

    SYNCING = "syncing"
    TRAINING = "training"
    LEAVING = "leaving"
    LEFT = "left"


@dataclass(frozen=True, slots=True)
class MemberBody:
    """A member's statement about itself. Name the fields when you make one; rates are bytes a second, as measured."""

    state: Annotated[str, Size(16)]
    """A `MemberState`."""
    addresses: Annotated[tuple[Annotated[Address, Size(MEMBER_ADDRESS_BYTES)], ...], Size(MEMBER_ADDRESSES)] = ()
    rung: Annotated[str, Size(16)] | None = None
    """How others reach this member, a `Rung`; None before it knows."""
    device: Annotated[str, Size(64)] = ""
    version: Annotated[str, Size(32)] = ""
    round: _Count = 0
    root: Annotated[bytes, Size(DIGEST_BYTES, least=DIGEST_BYTES)] = bytes(DIGEST_BYTES)
    """The state root at the start of that round; zeros while syncing."""
    step: _Count = 0
    tokens: _Count = 0
    tokens_per_s: _Rate = 0.0
    loss: float | None = None
    up: _Rate = 0.0
    down: _Rate = 0.0
    sent: _Count = 0
    received: _Count = 0
    head: Annotated[bytes, Size(DIGEST_BYTES, least=DIGEST_BYTES)] = bytes(DIGEST_BYTES)
    """The hash of the certificate that this state comes from; zeros at the start of a run."""
    chain_tokens: Annotated[int, Between(0, MAX_COUNT)] = 0
    """All tokens of the run up to that certificate."""
    layout: Annotated[bytes, Size(DIGEST_BYTES, least=DIGEST_BYTES)] = bytes(DIGEST_BYTES)
    """A hash of the names and shapes of the parameters that it trains."""
    frozen: Annotated[bytes, Size(DIGEST_BYTES, least=DIGEST_BYTES)] = bytes(DIGEST_BYTES)
    """A hash of the parameters that it does not train; zeros if there are none."""
    share: Annotated[bytes, Size(MAX_SHARE_BYTES)] = b""
    """Its lease of the data, in bytes that only `optim.data.leases` reads; empty while it has none."""
    invite: Invite = b""
    """Its invitation, if the run demands one (`dht.run.admission`)."""

    def __post_init__(self) -> None:
        # A schema field is exactly a str: members of the two enumerations are stored as their text.
        try:
            object.__setattr__(self, "state", MemberState(self.state).value)
            object.__setattr__(self, "rung", None if self.rung is None else Rung(self.rung).value)
        except ValueError as error:
            raise MalformedMessage(f"MemberBody: {error}") from error


def fitted(body: MemberBody) -> tuple[MemberBody, str]:
    """Clamp what a record has no room for; returns the body, and what was clamped in words, empty if nothing was.

    Others have a part in these figures: the loss is that of the run's state, a bootstrap says where others reach me.
    """
    clamped = []
    addresses = tuple(address for address in body.addresses if len(address.encode()) <= MEMBER_ADDRESS_BYTES)
    if len(addresses) > MEMBER_ADDRESSES:
        addresses = addresses[: MEMBER_ADDRESSES - LAST_ADDRESSES] + addresses[-LAST_ADDRESSES:]
    if addresses != body.addresses:
        clamped.append(f"{len(body.addresses)} addresses to {len(addresses)}")
    loss = body.loss
    if loss is not None and not math.isfinite(loss):
        clamped.append(f"the loss {loss}")
        loss = None
    rate = min(body.tokens_per_s, MAX_RATE)
    if rate != body.tokens_per_s:
        clamped.append(f"{body.tokens_per_s:g} tokens/s")
    return replace(body, addresses=addresses, loss=loss, tokens_per_s=rate), ", ".join(clamped)


class MergeOutcome(StrEnum):
    """What the table did with a record."""

    NEW = "new"
    UPDATED = "updated"
    STALE = "stale"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Merge:
    """The outcome of merging one record, and its reason."""

    outcome: MergeOutcome
    reason: str


@dataclass(frozen=True, slots=True)
class Member:
    """One row of the table. `gone` is the reason why this member does not count; empty while it does."""

    record: Record
    body: MemberBody
    expires: float
    gone: str = ""
    gone_since: float = 0.0

    @property
    def peer(self) -> PeerId:
        """The member's id."""
        return self.record.peer


@lru_cache(maxsize=MAX_MEMBERS)  # Most records come several times; a signature check takes 0.1 ms.
def open_member(record: Record) -> MemberBody:
    """Decode the body of a `member` record and check its signature. Raises `RemoteError`."""
    if record.kind != MEMBER_KIND:
        raise ProtocolViolation(f"expected a {MEMBER_KIND!r} record, got {record.kind!r}")
    body = decode(MemberBody, record.body, max_bytes=MAX_MEMBER_BYTES)
    record.check()
    return body


class MemberTable:
    """The member table of one run. `sequence` is where my own records begin.

    Pass the wall clock in milliseconds as `sequence`: then a restarted peer's records are newer than those of all its
    earlier processes, without a file. If the clock was set back, the first echo of an older record of mine corrects it.
    `wall_time` returns Unix time in seconds, for invitations that expire.
    """

    def __init__(
        self,
        run: str,
        me: PeerId,
        *,
        sequence: int = 0,
        charter: Charter = OPEN,
        wall_time: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._run = run
        self._charter = charter
        self._wall_time = wall_time
        self._me = me
        self._sequence = sequence
        self._rows: dict[PeerId, Member] = {}
        self._num_here = 0
        self._active: tuple[Member, ...] | None = None
        self._active_until = 0.0

    def merge(self, record: Record, now: float) -> Merge:
        """Merge a record that any peer carried. Raises `RemoteError` if its carrier must not have passed it on."""
        held = self._rows.get(record.peer)
        if held is not None and held.record == record:
            return Merge(MergeOutcome.STALE, "already known")  # Most of all traffic: saves the check of the signature.
        if record.run != self._run:
            raise ProtocolViolation(f"a record of {record.peer!r} for another run, {record.run!r}")
        body = open_member(record)
        if record.peer == self._me:
            self._sequence = max(self._sequence, record.sequence)
            return Merge(MergeOutcome.STALE, "a record of an earlier process of mine")
        if held is not None and record.sequence <= held.record.sequence:
            return Merge(MergeOutcome.STALE, f"sequence {record.sequence}, but {held.record.sequence} is known")
        if why_not := self._charter.why_not_admit(record.peer, body.invite):
            return Merge(MergeOutcome.REFUSED, why_not)
        if held is None and (why_not := self._why_not_enter(record.peer, body.invite)):
            return Merge(MergeOutcome.REFUSED, why_not)
        if held is None and not self._make_room():
            return Merge(MergeOutcome.REFUSED, f"the table is full: {MAX_MEMBERS} members")
        self._keep(record, body, now)
        if held is None:
            return Merge(MergeOutcome.NEW, body.state)
        return Merge(MergeOutcome.UPDATED, f"{held.gone or held.body.state} -> {body.state}")

    def why_not_serve(self, peer: PeerId) -> str:
        """Return why a closed run gives nothing to a peer; empty if it does, as any open run does.

        The record of a peer in the table has shown that it is admitted; without one, its id alone may.
        """
        if self._charter.kind == "open" or peer in self._rows:
            return ""
        why_not = self._charter.why_not_admit(peer, b"")
        return why_not and f"this run is for its members only: {why_not}"

    def update_own(self, identity: Identity, body: MemberBody, now: float) -> Record:
        """Sign my new record and put it into the table."""
        self._sequence += 1
        record = Record.sign(
            identity, run=self._run, kind=MEMBER_KIND, sequence=self._sequence, lifetime=LIFETIME, body=encode(body)
        )
        self._keep(record, body, now)
        return record

    def lose(self, peer: PeerId, now: float, reason: str) -> bool:
        """Mark a peer as lost until a newer record of it arrives; returns whether it counted before."""
        row = self._rows.get(peer)
        if row is None or row.gone or peer == self._me:
            return False
        self._put(replace(row, gone=reason, gone_since=now))
        return True

    def regain(self, peer: PeerId, now: float) -> bool:
        """Count a lost peer that has sent me a message by its last record; returns whether that still counts."""
        row = self._rows.get(peer)
        if row is None or not row.gone or row.expires <= now or row.body.state == MemberState.LEFT:
            return False
        self._put(replace(row, gone="", gone_since=0.0))
        return True

    def expire(self, now: float) -> tuple[PeerId, ...]:
        """Mark the members whose record has expired as lost, and return them. My own never expires."""
        return tuple(row.peer for row in self if row.expires <= now and self.lose(row.peer, now, "its record expired"))

    def active(self, now: float) -> tuple[Member, ...]:
        """Return the members that count, in the order of their ids; I am among them once I have signed a record."""
        if self._active is None or now >= self._active_until:
            self._active = tuple(row for row in self if self._counts(row, now))
            self._active_until = min((row.expires for row in self._active if row.peer != self._me), default=math.inf)
        return self._active

    @property
    def num_here(self) -> int:
        """The number of rows not marked as gone: cheaper than `active`, which also checks for expiry."""
        return self._num_here

    def counts(self, peer: PeerId, now: float) -> bool:
        """Return True if a peer is an active member."""
        row = self._rows.get(peer)
        return row is not None and self._counts(row, now)

    def get(self, peer: PeerId) -> Member | None:
        """Return the row of a peer, even if it does not count."""
        return self._rows.get(peer)

    def summary(self) -> tuple[tuple[PeerId, int], ...]:
        """Return (peer, sequence) of every row, gone members included, in the order of their ids."""
        return tuple((row.peer, row.record.sequence) for row in self)

    def newer_than(self, summary: Iterable[tuple[PeerId, int]], now: float) -> tuple[Record, ...]:
        """Return the first `PAGE` valid records that a table with this summary lacks."""
        known = dict(summary)
        newer = (row.record for row in self if row.expires > now and row.record.sequence > known.get(row.peer, -1))
        return tuple(itertools.islice(newer, PAGE))

    def __iter__(self) -> Iterator[Member]:
        return iter([self._rows[peer] for peer in sorted(self._rows)])

    def __len__(self) -> int:
        return len(self._rows)

    def _why_not_enter(self, peer: PeerId, invite: bytes) -> str:
        invites = (row.body.invite for row in self._rows.values())
        return self._charter.why_not_enter(peer, invite, invites, self._wall_time())

    def _keep(self, record: Record, body: MemberBody, now: float) -> None:
        left = body.state == MemberState.LEFT
        gone, since = ("it left", now) if left else ("", 0.0)
        self._put(Member(record, body, now + min(record.lifetime, LIFETIME), gone, since))

    def _put(self, row: Member) -> None:
        before = self._rows.get(row.peer)
        self._num_here += (not row.gone) - (before is not None and not before.gone)
        self._rows[row.peer] = row
        self._active = None

    def _counts(self, row: Member, now: float) -> bool:
        return not row.gone and (row.expires > now or row.peer == self._me)

    def _make_room(self) -> bool:
        """Return True if one more row fits, after dropping the row that is gone the longest if necessary."""
        if len(self._rows) < MAX_MEMBERS - (self._me not in self._rows):  # My own row must always fit.
            return True
        gone = [(row.gone_since, row.peer) for row in self if row.gone]
        if gone:
            del self._rows[min(gone)[1]]
        return bool(gone)
