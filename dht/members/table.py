"""Members: who is in the run, in which state, until when; a table that any two peers can bring to agree.

Theory of operation. Every peer states its own condition in `member` records and keeps the newest record of everybody.
On contact two tables compare `summary` and hand each other what is `newer_than` the other's (anti-entropy). A record
holds for its lifetime from the moment it came. Three things end a membership: the member says that it has left, its
record expires, or I lose it: my heartbeat to it failed, which holds until a newer record arrives or it speaks to me.

Of a member that is gone the table keeps the sequence, so that a peer who has not yet forgotten it cannot bring it back
with the same record. Time is an argument. Records are checked here: a bad one raises, so that its carrier is charged.
"""

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from typing import Annotated

from ...peer.digest import DIGEST_BYTES
from ...peer.errors import MalformedMessage, ProtocolViolation
from ...peer.identity import Identity
from ...peer.transport import Address, PeerId, Rung
from ...peer.wire import MAX_COUNT
from ...peer.wire.fields import Invite
from ...peer.wire.schema import Between, Size, decode, encode
from ..records import MAX_SEQUENCE, Record
from ..run.admission import OPEN, Charter

MEMBER_KIND = "member"
LIFETIME = 60.0
"""Seconds. Six anti-entropy turns of 10 s: a change reaches everybody in two or three, so one lost turn ends nobody."""
MAX_MEMBERS = 4096
"""Bounds the memory that strangers can take: about 1 kB a member."""
PAGE = 64
"""Records in one answer, at most 400 kB: the next answer follows as soon as the summary has grown."""
MAX_BODY_BYTES = 6_000
MAX_UNITS = 1024
"""Of an epoch: fine enough to split among as many members, and 128 bytes as bits."""
EPOCHS_AHEAD = 4
"""Epochs in which units are leased at the same time: who finds nothing free in one goes on with the next."""
MAX_LEASES = 8
"""Of one member at a time."""
SOURCE_BYTES = 16

_Count = Annotated[int, Between(0, MAX_SEQUENCE)]
_Rate = Annotated[float, Between(0.0, 1e15)]


class MemberState(StrEnum):
    """What a member is doing."""

    SYNCING = "syncing"
    TRAINING = "training"
    LEAVING = "leaving"
    LEFT = "left"


@dataclass(frozen=True, slots=True)
class Lease:
    """A unit of the data that a member is training, or will train next."""

    epoch: _Count
    unit: Annotated[int, Between(0, MAX_UNITS - 1)]
    done: _Count | None = None
    """How many of its sequences are trained; None while it is only claimed."""


@dataclass(frozen=True, slots=True)
class Share:
    """A member's part in the data, as `optim.shards` divides it."""

    source: Annotated[bytes, Size(SOURCE_BYTES)] = b""
    """A hash of what the data is: shares are compared only where it is the same. Empty while it has none."""
    epoch: _Count = 0
    """The oldest epoch that is not finished, as far as it knows."""
    finished: Annotated[tuple[Annotated[bytes, Size(MAX_UNITS // 8)], ...], Size(EPOCHS_AHEAD)] = ()
    """Which units of that epoch, and of those after it, anybody has finished: bit u % 8 of byte u // 8."""
    leases: Annotated[tuple[Lease, ...], Size(MAX_LEASES)] = ()


@dataclass(frozen=True, slots=True)
class MemberBody:
    """What a member says about itself. Name the fields when you make one; rates are bytes a second, as measured."""

    state: Annotated[str, Size(16)]
    """A `MemberState`."""
    addresses: Annotated[tuple[Annotated[Address, Size(256)], ...], Size(16)] = ()
    rung: Annotated[str, Size(16)] | None = None
    """How others reach this member, a `Rung`; None while it does not know."""
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
    """All tokens of the run as that certificate counts them."""
    layout: Annotated[bytes, Size(DIGEST_BYTES, least=DIGEST_BYTES)] = bytes(DIGEST_BYTES)
    """A hash of the names and shapes of the parameters that it trains."""
    frozen: Annotated[bytes, Size(DIGEST_BYTES, least=DIGEST_BYTES)] = bytes(DIGEST_BYTES)
    """A hash of the parameters that it does not train; zeros where there are none."""
    share: Share = Share()
    invite: Invite = b""
    """Its invitation, where the run demands one (`dht.admission`)."""

    def __post_init__(self) -> None:
        # A schema field is exactly a str: take the words of the two enumerations, keep their text.
        try:
            object.__setattr__(self, "state", MemberState(self.state).value)
            object.__setattr__(self, "rung", None if self.rung is None else Rung(self.rung).value)
        except ValueError as error:
            raise MalformedMessage(f"MemberBody: {error}") from error


class Outcome(StrEnum):
    """What a table did with a record."""

    NEW = "new"
    UPDATED = "updated"
    STALE = "stale"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Merge:
    """The outcome of one record, and why."""

    outcome: Outcome
    reason: str


@dataclass(frozen=True, slots=True)
class Member:
    """One row of the table. `gone` says why this member does not count; it is empty while it does."""

    record: Record
    body: MemberBody
    expires: float
    gone: str = ""
    gone_since: float = 0.0

    @property
    def peer(self) -> PeerId:
        """Whose row this is."""
        return self.record.peer


@lru_cache(maxsize=MAX_MEMBERS)  # Most records come several times; a signature takes 0.1 ms to check.
def open_member(record: Record) -> MemberBody:
    """The body of a `member` record whose signature holds. Raises `RemoteError`."""
    if record.kind != MEMBER_KIND:
        raise ProtocolViolation(f"expected a {MEMBER_KIND!r} record, got {record.kind!r}")
    body = decode(MemberBody, record.body, max_bytes=MAX_BODY_BYTES)
    record.check()
    return body


class MemberTable:
    """All members of one run that I have heard of. `sequence` is where my own records begin.

    Pass the wall clock in milliseconds as `sequence`: then a restarted peer's records are newer than all of its former
    life's, without a file. Should the clock have gone back, the first echo of an older record of mine mends it.
    """

    def __init__(self, run: str, me: PeerId, *, sequence: int = 0, charter: Charter = OPEN) -> None:
        self._run = run
        self._charter = charter
        self._me = me
        self._sequence = sequence
        self._rows: dict[PeerId, Member] = {}
        self._num_here = 0
        self._active: tuple[Member, ...] | None = None
        self._active_until = 0.0

    def merge(self, record: Record, now: float) -> Merge:
        """Take a record from anybody. Raises `RemoteError` where its carrier must not have passed it on."""
        held = self._rows.get(record.peer)
        if held is not None and held.record == record:
            return Merge(Outcome.STALE, "already known")  # Most of all traffic: saves checking the signature again.
        if record.run != self._run:
            raise ProtocolViolation(f"a record of {record.peer!r} for another run, {record.run!r}")
        body = open_member(record)
        if record.peer == self._me:
            self._sequence = max(self._sequence, record.sequence)
            return Merge(Outcome.STALE, "my own record of a former life")
        if held is not None and record.sequence <= held.record.sequence:
            return Merge(Outcome.STALE, f"sequence {record.sequence}, but {held.record.sequence} is known")
        if barred := self._charter.bars(record.peer, body.invite):
            return Merge(Outcome.REFUSED, barred)
        if held is None and not self._make_room():
            return Merge(Outcome.REFUSED, f"the table is full: {MAX_MEMBERS} members")
        self._keep(record, body, now)
        if held is None:
            return Merge(Outcome.NEW, body.state)
        return Merge(Outcome.UPDATED, f"{held.gone or held.body.state} -> {body.state}")

    def update_own(self, identity: Identity, body: MemberBody, now: float) -> Record:
        """Sign my new condition and put it into the table."""
        self._sequence += 1
        record = Record.sign(
            identity, run=self._run, kind=MEMBER_KIND, sequence=self._sequence, lifetime=LIFETIME, body=encode(body)
        )
        self._keep(record, body, now)
        return record

    def lose(self, peer: PeerId, now: float, reason: str) -> bool:
        """Count a silent peer out until a newer record of it comes; whether it counted before."""
        row = self._rows.get(peer)
        if row is None or row.gone or peer == self._me:
            return False
        self._put(replace(row, gone=reason, gone_since=now))
        return True

    def regain(self, peer: PeerId, now: float) -> bool:
        """A peer that I had lost has spoken again: its last record counts on; whether it counts from now."""
        row = self._rows.get(peer)
        if row is None or not row.gone or row.expires <= now or row.body.state == MemberState.LEFT:
            return False
        self._put(replace(row, gone="", gone_since=0.0))
        return True

    def expire(self, now: float) -> tuple[PeerId, ...]:
        """Count out, and return, those whose last record has run out. I never expire to myself."""
        return tuple(row.peer for row in self if row.expires <= now and self.lose(row.peer, now, "its record expired"))

    def active(self, now: float) -> tuple[Member, ...]:
        """The members who count, me among them once I have stated my condition, in the order of their ids."""
        if self._active is None or now >= self._active_until:
            self._active = tuple(row for row in self if self._counts(row, now))
            self._active_until = min((row.expires for row in self._active if row.peer != self._me), default=math.inf)
        return self._active

    @property
    def num_here(self) -> int:
        """How many have not gone, as far as I have noticed: quicker to tell than who counts."""
        return self._num_here

    def counts(self, peer: PeerId, now: float) -> bool:
        """Whether a peer is among the active members."""
        row = self._rows.get(peer)
        return row is not None and self._counts(row, now)

    def get(self, peer: PeerId) -> Member | None:
        """The row of a peer, whether it counts or not."""
        return self._rows.get(peer)

    def summary(self) -> tuple[tuple[PeerId, int], ...]:
        """What I know: (peer, sequence) of all, those who are gone included, in the order of their ids."""
        return tuple((row.peer, row.record.sequence) for row in self)

    def newer_than(self, summary: Iterable[tuple[PeerId, int]], now: float) -> tuple[Record, ...]:
        """The first `PAGE` unexpired records that a table with this summary lacks."""
        known = dict(summary)
        newer = (row.record for row in self if row.expires > now and row.record.sequence > known.get(row.peer, -1))
        return tuple(itertools.islice(newer, PAGE))

    def __iter__(self) -> Iterator[Member]:
        return iter([self._rows[peer] for peer in sorted(self._rows)])

    def __len__(self) -> int:
        return len(self._rows)

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
        """Whether one more row fits, after forgetting whoever is gone the longest if it must be."""
        if len(self._rows) < MAX_MEMBERS - (self._me not in self._rows):  # My own row must always fit.
            return True
        gone = [(row.gone_since, row.peer) for row in self if row.gone]
        if gone:
            del self._rows[min(gone)[1]]
        return bool(gone)
