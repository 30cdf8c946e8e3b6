"""The member table: the newest record of every member of a run, made equal on all peers by anti-entropy. Pure.

Theory of operation. Every peer states its own condition in `member` records and keeps the newest record of every other.
On contact two tables compare their `summary` and exchange what is `newer_than` the other's (anti-entropy). A record is
valid for its lifetime from the moment of receipt.

A record is a claim: whoever has a key can sign one. Its row *counts* only while I have met its peer, which means that a
message of it came over an authenticated session in the last minute (`meet`), or while enough others have (`vouch`). Only
rows that count, or did, are handed on, and rows that never did are the first to go (`claims`). Three more things end a
membership: the member states that it has left, its record expires, or its heartbeat to me fails; the last holds until a
newer record or an exchange with it.

Of a lost member the table keeps the sequence (a tombstone), so that a peer that still lists it cannot bring it back
with the same record. Time is an argument. Records are checked here: an invalid one raises, so that its carrier is
charged.
"""

import itertools
import math
import struct
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from ...peer.base.errors import MalformedMessage, ProtocolViolation
from ...peer.base.transport import PeerId
from ...peer.identity import Identity
from ...peer.quota.limits import GateLimits
from ...peer.quota.origins import NOWHERE, UNKNOWN, Origin
from ...peer.quota.places import Places
from ...peer.wire import TAG_BYTES
from ...peer.wire.schema import encode
from ..records import Record
from ..run.admission import OPEN, Charter
from .body import MEMBER_KIND, MemberBody, MemberState, open_member
from .claims import Claims, room_of
from .vouchers import tag_of

LEFT = "it left"
"""Why a member is gone that has said so."""
LIFETIME = 180.0
"""Seconds. Three renewals (`gossip.RENEW_PERIOD`), so a lost one expires nobody."""
PRESENCE = 60.0
"""Seconds for which a peer counts after its last message: twelve of the slowest heartbeats, three of the rarest `Met`."""
MAX_MEMBERS = 4096
"""The limit of the memory that others can take: with the usual record 3 kB a row, with the largest 20 kB."""
MAX_LISTED = 512
"""Claims in a question to anybody, 32 kB: they would be sent again. A flood of claims makes questions no longer than that."""
MAX_OVER_RELAY = 512
"""Members that count by sessions over one relay: as many as may reserve a place there."""
OTHER_PROCESS = "another process has signed it with this peer's key: an earlier one, or one with a copy of the home folder"
LAPSED = "nobody has met it for a minute"
SUMMARY = struct.Struct(f">{TAG_BYTES}sQ")
"""An entry of a summary. A tag in place of the id is a quarter of the bytes; only keys of one owner can share one."""
PAGE = 64
"""Records in one answer, at most 400 kB; the asker requests the next page with its new summary."""


class MergeOutcome(StrEnum):
    """What the table did with a record."""

    NEW = "new"
    UPDATED = "updated"
    STALE = "stale"
    REFUSED = "refused"
    FULL = "full"


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


@dataclass(frozen=True, slots=True)
class Meeting:
    """The last session with a peer: until when it makes the peer count, and where it came from."""

    until: float
    origin: Origin
    relayed: bool


class MemberTable:
    """The member table of one run. `sequence` is where my own records begin.

    Pass the wall clock in milliseconds as `sequence`: then a restarted peer's records are newer than those of all its
    earlier processes, without a file. If the clock was set back, the first echo of an older record of mine corrects it.
    `wall_time` returns Unix time in seconds, for invitations that expire. They still let in the `known` peers, which were
    members when an earlier process of mine ended, and those of the certificate that I stand at (`certified`).
    """

    def __init__(
        self,
        run: str,
        me: PeerId,
        *,
        sequence: int = 0,
        charter: Charter = OPEN,
        wall_time: Callable[[], float] = lambda: 0.0,
        known: Collection[PeerId] = (),
    ) -> None:
        self._run = run
        self._charter = charter
        self._wall_time = wall_time
        self._known = frozenset(known)
        self.certified: Callable[[], Collection[PeerId] | None] = lambda: ()
        """Returns the members of the newest certificate; None while I hold none, and cannot know who came in time."""
        self._me = me
        self._sequence = self._began = sequence
        self._rows: dict[PeerId, Member] = {}
        self._shown: dict[PeerId, bytes] = {}
        """Valid invitations of peers that are no members yet."""
        self._sorted: list[PeerId] | None = None
        """Their ids in order; None where a row has come or gone since."""
        self._claims = Claims()
        self._met: dict[PeerId, Meeting] = {}
        self._vouched: frozenset[PeerId] = frozenset()
        gate = GateLimits()
        self._direct = Places[PeerId](MAX_MEMBERS, gate.per_address, gate.per_network, newest=True)
        self._relayed = Places[PeerId](MAX_MEMBERS, MAX_OVER_RELAY, newest=True)
        self._aside: set[PeerId] = set()
        """Rows that are claims or gone."""
        self._active: tuple[Member, ...] | None = None
        self._active_until = 0.0
        self._why_shut_out = ""

    def merge(
        self, record: Record, now: float, *, carrier: PeerId = "", origin: Origin = UNKNOWN, met: bool = False
    ) -> Merge:
        """Merge a record that any peer carried, from `origin`; `met`: I have a session with its peer.

        Raises `RemoteError` if its carrier must not have passed it on.
        """
        held = self._rows.get(record.peer)
        if held is not None and record.sequence == held.record.sequence and held.record == record:
            return Merge(MergeOutcome.STALE, "already known")  # Most of all traffic: saves the check of the signature.
        if record.run != self._run:
            raise ProtocolViolation(f"a record of {record.peer!r} for another run, {record.run!r}")
        network = "" if origin.exempt else origin.network
        room, by = room_of(len(record.body)), None if met else carrier
        if record.peer != self._me and (why_not := self._why_no_room(record.peer, by, network, room)):
            return Merge(MergeOutcome.FULL, why_not)  # Before its signature costs anything.
        body = open_member(record)
        if record.peer == self._me:
            if self._began < record.sequence <= self._sequence:
                return Merge(MergeOutcome.STALE, "an earlier record of this process")
            is_newer, self._sequence = record.sequence > self._sequence, max(self._sequence, record.sequence)
            return Merge(MergeOutcome.REFUSED if is_newer else MergeOutcome.STALE, OTHER_PROCESS)
        if held is not None and record.sequence <= held.record.sequence:
            return Merge(MergeOutcome.STALE, f"sequence {record.sequence}, but {held.record.sequence} is known")
        charter = self._charter
        if why_not := charter.why_not_admit(record.peer, body.invite) or charter.why_not_train(body.layout, body.num_cells):
            return Merge(MergeOutcome.REFUSED, why_not)
        if held is None and (why_not := self._why_not_enter(record.peer, body.invite)):
            mine = self._rows.get(self._me)
            if mine is not None and self._charter.is_one_invitation(mine.body.invite, body.invite):
                self._why_shut_out = why_not
            return Merge(MergeOutcome.REFUSED, why_not)
        if held is None:
            self._make_room(by, room)
        if held is None or record.peer in self._claims:
            self._claims.add(record.peer, carrier, network, room)
        self._keep(record, body, now)
        if held is None:
            return Merge(MergeOutcome.NEW, body.state)
        return Merge(MergeOutcome.UPDATED, f"{held.gone or held.body.state} -> {body.state}")

    def follow(self, charter: Charter) -> tuple[tuple[PeerId, str], ...]:
        """Admit by other rules from now on; drops the rows that they do not admit.

        Returns the members that counted until now, with the reasons.
        """
        self._charter, self._active = charter, None
        dropped: list[tuple[PeerId, str]] = []
        for row in tuple(self):
            why_not = charter.why_not_admit(row.peer, row.body.invite)
            if why_not and row.peer != self._me:
                self._drop(row.peer)
                if not row.gone:
                    dropped.append((row.peer, why_not))
        return tuple(dropped)

    def meet(self, peer: PeerId, now: float, origin: Origin = UNKNOWN, *, relayed: bool = False) -> str:
        """Count a peer of the table for `PRESENCE` s, since a message of it has come over a session from `origin`.

        Returns why it does not count, empty if it does: from one origin come so many members at most as connections.
        """
        if peer not in self._rows or peer == self._me:
            return ""
        before = self._met.get(peer)
        if before is None or (before.origin, before.relayed) != (origin, relayed):
            self._forget_meeting(peer)
            limited = origin if relayed or origin != UNKNOWN else NOWHERE
            newest = (self._relayed if relayed else self._direct).enter(peer, limited)
            if newest == peer:
                return "too many members from one address or network"
            if newest is not None:
                self._forget_meeting(newest)
            if before is None or before.until <= now:
                self._active = None
        self._met[peer] = Meeting(now + PRESENCE, origin, relayed)
        self._see(peer)
        return ""

    def has_met(self, peer: PeerId, now: float) -> bool:
        """Return True if I have had a session with a peer of the table in the last minute."""
        meeting = self._met.get(peer)
        return meeting is not None and meeting.until > now

    def to_vouch_for(self, now: float) -> tuple[PeerId, ...]:
        """Return the peers that count at the time `now` only if others vouch for them, in the order of their ids."""
        met, me = self._met, self._me
        return tuple(
            peer
            for peer, row in self._in_order()
            if row.expires > now and row.gone in ("", LAPSED) and (peer not in met or met[peer].until <= now) and peer != me
        )

    def vouch(self, peers: Collection[PeerId]) -> None:
        """Count these peers until the next call, since others have met them; not those that left, or whose record expired."""
        vouched = frozenset(peer for peer in peers if peer in self._rows and self._rows[peer].gone in ("", LAPSED))
        if vouched != self._vouched:
            self._vouched, self._active = vouched, None
            for peer in vouched:
                self._see(peer)

    def why_not_serve(self, peer: PeerId, invite: bytes) -> str:
        """Return why a closed run gives nothing to a peer; empty if it does, as any open run does.

        The record of a peer in the table has shown that it is admitted; without one its id may, or the invitation that it
        shows now, or has shown before: a newcomer reads the run's data before it is a member.
        """
        if self._charter.kind == "open" or peer in self._rows:
            return ""
        why_not = self._charter.why_not_admit(peer, invite or self._shown.get(peer, b""))
        if invite and not why_not and not (why_not := self._why_not_enter(peer, invite)):
            self._shown[peer] = invite
            if len(self._shown) > MAX_MEMBERS:
                del self._shown[next(iter(self._shown))]
        return why_not and f"this run is for its members only: {why_not}"

    def why_shut_out(self) -> str:
        """Return why members that hold my invitation, too, may let me in no more; empty if I know of no such reason.

        I count them beside myself: which of us were first, only those know that were here.
        """
        return self._why_shut_out

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
        counted = self._counts(row, now)
        self._forget_meeting(peer)
        self._set_gone(row, now, reason)
        return counted

    def regain(self, peer: PeerId, now: float) -> bool:
        """Let a lost peer that has sent me a message be met by its last record; returns whether that is still valid."""
        row = self._rows.get(peer)
        if row is None or not row.gone or row.expires <= now or row.body.state == MemberState.LEFT:
            return False
        self._put(replace(row, gone="", gone_since=0.0))
        return True

    def expire(self, now: float) -> tuple[tuple[PeerId, str], ...]:
        """Mark the members whose record has expired, or that nobody has met for a minute, as lost.

        Returns them with the reason. My own row never expires. Claims are dropped once their record has expired.
        """
        for peer in [peer for peer, meeting in self._met.items() if meeting.until <= now]:
            self._forget_meeting(peer)
        lost = []
        for peer, row in self._in_order():
            has_expired, is_seen = row.expires <= now, row.gone or peer in self._met or peer in self._vouched
            if peer == self._me or (is_seen and not has_expired):
                continue
            if peer in self._claims:
                if has_expired:
                    self._drop(peer)
            elif not row.gone:  # Its meeting holds as long as it did: a session outlives a record that its peer renews late.
                reason = "its record expired" if has_expired else LAPSED
                self._set_gone(row, now, reason)
                lost.append((peer, reason))
        return tuple(lost)

    def active(self, now: float) -> tuple[Member, ...]:
        """Return the members that count, in the order of their ids; I am among them once I have signed a record."""
        if self._active is None or now >= self._active_until:
            counted: list[Member] = []
            self._active_until = math.inf
            met, vouched, me = self._met, self._vouched, self._me
            for peer, row in self._in_order():  # `_until` of each, without a call for each: this loop is most of the work.
                if row.gone or (peer not in vouched and peer not in met and peer != me):
                    continue
                until = math.inf if peer == me else row.expires
                if peer in met and peer not in vouched:
                    until = min(until, met[peer].until)
                if until > now:
                    counted.append(row)
                    if until < self._active_until:
                        self._active_until = until
            self._active = tuple(counted)
        return self._active

    @property
    def num_here(self) -> int:
        """The number of rows that count or did a moment ago: cheaper than `active`."""
        return len(self._rows) - len(self._aside)

    @property
    def num_claims(self) -> int:
        """The number of rows that never counted."""
        return len(self._claims)

    def is_claim(self, peer: PeerId) -> bool:
        """Return True for a peer in the table that never counted."""
        return peer in self._claims

    def counts(self, peer: PeerId, now: float) -> bool:
        """Return True if a peer is an active member."""
        row = self._rows.get(peer)
        return row is not None and self._counts(row, now)

    def get(self, peer: PeerId) -> Member | None:
        """Return the row of a peer, even if it does not count."""
        return self._rows.get(peer)

    def summary(self, asked: PeerId = "") -> bytes:
        """Return tag and sequence of every row, gone members included, in the order of their ids; 16 bytes each.

        Of more than `MAX_LISTED` claims only those that the `asked` peer has carried: it need not send them again.
        """
        few = len(self._claims) <= MAX_LISTED
        carried = () if few else self._claims.carried_by(asked)
        listed = self if few else (row for row in self if row.peer not in self._claims or row.peer in carried)
        return b"".join(SUMMARY.pack(tag_of(row.peer), row.record.sequence) for row in listed)

    def room_for_claims(self, carrier: PeerId, origin: Origin) -> tuple[int, str]:
        """Return how many peers that are not in the table a carrier may claim to be here, and why no more."""
        network = "" if origin.exempt else origin.network
        room = self._claims.room_for(carrier, network)
        if why_not := self._why_no_room("", carrier, network, 1):
            return 0, why_not
        return room, self._claims.why_not_add(carrier, network, room + 1)

    def newer_than(self, summary: bytes, now: float) -> tuple[Record, ...]:
        """Return the first `PAGE` valid records that a table with this summary lacks; no claims.

        Raises `MalformedMessage` unless the summary has whole entries.
        """
        if len(summary) % SUMMARY.size:
            raise MalformedMessage(f"{len(summary)} bytes are no summary of a table")
        known = dict(SUMMARY.iter_unpack(summary))
        rows = (self._rows[peer] for peer in sorted(peer for peer in self._rows if peer not in self._claims))
        newer = (
            row.record for row in rows if row.expires > now and row.record.sequence > known.get(tag_of(row.peer), -1)
        )
        return tuple(itertools.islice(newer, PAGE))

    def claimed(self, now: float) -> tuple[Member, ...]:
        """Return the members whose records are valid, whether they count or not: for who only asks members."""
        return tuple(row for row in self if not row.gone and row.expires > now)

    def __iter__(self) -> Iterator[Member]:
        return iter([row for _, row in self._in_order()])

    def _in_order(self) -> list[tuple[PeerId, Member]]:
        """Return the rows in the order of their ids, each with its id."""
        if self._sorted is None:
            self._sorted = sorted(self._rows)
        rows = self._rows
        return [(peer, rows[peer]) for peer in self._sorted]

    def __len__(self) -> int:
        return len(self._rows)

    def _why_not_enter(self, peer: PeerId, invite: bytes) -> str:
        invites = (row.body.invite for row in self._rows.values())
        certified = self.certified()
        may_return = certified is None or peer in certified or peer in self._known
        time = 0.0 if may_return else self._wall_time()
        return self._charter.why_not_enter(peer, invite, invites, time)

    def _keep(self, record: Record, body: MemberBody, now: float) -> None:
        left = body.state == MemberState.LEFT
        gone, since = (LEFT, now) if left else ("", 0.0)
        self._put(Member(record, body, now + min(record.lifetime, LIFETIME), gone, since))

    def _put(self, row: Member) -> None:
        if row.peer not in self._rows:
            self._sorted = None
        self._rows[row.peer] = row
        self._active = None
        self._set_aside(row.peer)

    def _set_gone(self, row: Member, now: float, reason: str) -> None:
        self._vouched -= {row.peer}
        self._put(replace(row, gone=reason, gone_since=now))

    def _set_aside(self, peer: PeerId) -> None:
        if peer in self._claims or self._rows[peer].gone:
            self._aside.add(peer)
        else:
            self._aside.discard(peer)

    def _see(self, peer: PeerId) -> None:
        """A peer has been met: its row is no claim any more, and has not lapsed."""
        row = self._rows[peer]
        if row.gone == LAPSED:
            self._put(replace(row, gone="", gone_since=0.0))
        if self._claims.remove(peer):
            self._active = None
            self._set_aside(peer)

    def _forget_meeting(self, peer: PeerId) -> None:
        meeting = self._met.pop(peer, None)
        if meeting is not None:
            (self._relayed if meeting.relayed else self._direct).leave(peer)
            self._active = None

    def _drop(self, peer: PeerId) -> None:
        self._forget_meeting(peer)
        self._claims.remove(peer)
        self._vouched -= {peer}
        self._aside.discard(peer)
        del self._rows[peer]
        self._active = self._sorted = None

    def _counts(self, row: Member, now: float) -> bool:
        return not row.gone and self._until(row) > now

    def _until(self, row: Member) -> float:
        """Return when a row that is not gone will cease to count, unless its peer is met or vouched for again; mine never."""
        peer = row.record.peer
        meeting = self._met.get(peer)
        if peer in self._vouched or peer == self._me:
            return math.inf if peer == self._me else row.expires
        return -math.inf if meeting is None else min(row.expires, meeting.until)

    def _why_no_room(self, peer: PeerId, carrier: PeerId | None, network: str, room: int) -> str:
        """Return why the record of a peer does not fit, a claim of a `carrier` (None: I have met it); empty if it does."""
        if peer in self._claims:
            return self._claims.why_not_grow(peer, room)
        if peer in self._rows:
            return ""
        if why_not := self._claims.why_not_add(carrier, network, room):
            return why_not
        is_full = self._is_full or not self._claims_fit(room)
        if carrier is None or not is_full or self._claims.to_drop(carrier) is not None:
            return ""
        return "" if self._num_gone and self._claims_fit(room) else f"the table is full: {MAX_MEMBERS} members"

    @property
    def _is_full(self) -> bool:
        """True if no row fits beside mine."""
        return len(self._rows) >= MAX_MEMBERS - (self._me not in self._rows)

    def _claims_fit(self, room: int) -> bool:
        return self._claims.room + room <= MAX_MEMBERS

    @property
    def _num_gone(self) -> int:
        """The rows that are gone and no claims."""
        return len(self._aside) - len(self._claims)

    def _make_room(self, carrier: PeerId | None, room: int) -> None:
        """Drop rows until one more fits: a claim of a `carrier`, or that of a peer that I have met (None).

        First claims give way, then who is gone the longest, and for who was met those who are only vouched for, and then
        who was silent for the longest.
        """
        while self._is_full or not self._claims_fit(room):
            victim = self._claims.to_drop(carrier)
            if victim is None and self._is_full and self._num_gone:
                gone = (self._rows[peer] for peer in self._aside if peer not in self._claims)
                victim = min((row.gone_since, row.peer) for row in gone)[1]
            if victim is None and carrier is None:
                here = (row for row in self if row.peer != self._me)
                met = self._met
                victim = min((met[row.peer].until if row.peer in met else -math.inf, row.peer) for row in here)[1]
            if victim is None:
                return  # A long claim has taken the place of one that was shorter.
            self._drop(victim)
