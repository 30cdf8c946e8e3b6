"""Statements of a run's owner: whom it vouches for, revokes, bans and pardons. Pure.

Theory of operation. The manifest cannot change, since its hash is the run id. What the owner decides later it states in
records of kind `owner`, each about one peer, or about itself, that is about the run:

    vouch   the owner vouches for the peer           revoke   it is no longer admitted to a closed run, nor vouched for
    ban     nobody exchanges anything with the peer  pardon   lifts that, and convictions by evidence up to a round
    revise  these settings of the run become others (`revision`), once a certificate names this statement
    succeed the run ends, and goes on as another one (`succession`)

`vouch` and `revoke` replace each other, and so do `ban` and `pardon`: of the two the later statement about a peer holds.
A ban is therefore never lifted by a statement about admission. `revoke` may also name the public key of an invitation.
Each `revise` and each `succeed` replaces the one before it. A statement with another verb is malformed.

The statements of a run are a *log*: numbered from 1 without a gap, at most `MAX_OWNER_STATEMENTS`. Peers hold a prefix
of it, and merging takes the longer one: an old copy rolls nothing back, and whoever withholds statements can hide the
newest ones only. If an owner signs two statements of one number (two computers with its key), the one with the
smaller signature holds, so that all copies become equal. In the directory the log stands in *pages* of fixed numbers, and
of two pages the longer one is the newer.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property, lru_cache
from typing import Annotated, Self

from ...peer.base.digest import digest
from ...peer.base.errors import LocalError, MalformedMessage, ProtocolViolation, RemoteError
from ...peer.base.transport import PeerId
from ...peer.identity import Identity, is_peer_id
from ...peer.wire import MAX_COUNT, MAX_REVISION_BYTES, MAX_VOUCHER_BYTES
from ...peer.wire.schema import Between, Size, decode, encode
from ..records import MAX_LIFETIME, Record

OWNER_KIND = "owner"
MAX_OWNER_STATEMENTS = 4096
"""As many as the members that a member table holds."""
STATEMENTS_PER_PAGE = 64
"""A page has 61 kB at most, within the limit of 64 kB of a directory record, and takes 6 ms to verify, like a head."""
MAX_STATED_REASON = 160
"""Bytes of UTF-8: one line."""
MAX_REVISION_SETTINGS_BYTES = 480
"""Of JSON: some twenty numbers, or one long source of data. Every certificate carries it from then on."""
MAX_OWNER_STATEMENT_BYTES = 740
MAX_STATEMENT_RECORD_BYTES = MAX_REVISION_BYTES
"""The statement in its envelope: run, kind, owner and signature take some 210 bytes."""
MAX_OWNER_LOG_BYTES = MAX_OWNER_STATEMENTS * (MAX_STATEMENT_RECORD_BYTES + 3) + 8


class OwnerVerb(StrEnum):
    """What a statement of the owner does."""

    VOUCH = "vouch"
    REVOKE = "revoke"
    BAN = "ban"
    PARDON = "pardon"
    REVISE = "revise"
    SUCCEED = "succeed"


ABOUT_RUN = frozenset({OwnerVerb.REVISE, OwnerVerb.SUCCEED})
"""The verbs of statements about the owner itself, that is about the run."""
_REPLACES: Mapping[str, str] = {OwnerVerb.REVOKE: OwnerVerb.VOUCH, OwnerVerb.PARDON: OwnerVerb.BAN}
"""The verb that each of these replaces, and is replaced by; all others replace their own kind."""


@dataclass(frozen=True, slots=True)
class OwnerStatement:
    """One decision of the owner about one peer. Raises `MalformedMessage` for fields that make no statement."""

    verb: Annotated[str, Size(8)]
    """An `OwnerVerb`."""
    peer: Annotated[PeerId, Size(64)]
    """The peer, or the public key of the invitation that is revoked, written as a peer id."""
    reason: Annotated[str, Size(MAX_STATED_REASON)] = ""
    """Why, for people; others see it."""
    until_round: Annotated[int, Between(0, MAX_COUNT)] = 0
    """The last round whose evidence a pardon covers: what the peer signs in later rounds convicts it again."""
    settings: Annotated[str, Size(MAX_REVISION_SETTINGS_BYTES)] = ""
    """Of `revise` all settings of the run that differ from its manifest, in canonical JSON; of `succeed` the id of the run
    that it goes on as, empty where that is not made yet."""

    def __post_init__(self) -> None:
        if self.verb not in set(OwnerVerb):
            raise MalformedMessage(f"OwnerStatement: {self.verb!r} is nothing that an owner states")
        object.__setattr__(self, "verb", str(self.verb))  # A schema field is exactly a str.
        if not is_peer_id(self.peer):
            raise MalformedMessage(f"OwnerStatement: {self.peer!r} is not a peer id")


@dataclass(frozen=True, slots=True)
class StatementRecords:
    """Records of consecutive statements, in order: a page of the directory, or the whole log as members exchange it."""

    records: Annotated[
        tuple[Annotated[bytes, Size(MAX_STATEMENT_RECORD_BYTES)], ...], Size(MAX_OWNER_STATEMENTS, least=1)
    ]


@lru_cache(maxsize=2 * MAX_OWNER_STATEMENTS)  # A log is opened at each merge; a signature check takes 0.1 ms.
def open_statement(record: Record) -> OwnerStatement:
    """Decode a record of the kind `owner` and check its signature. Raises `RemoteError`."""
    if record.kind != OWNER_KIND:
        raise ProtocolViolation(f"expected an {OWNER_KIND!r} record, got {record.kind!r}")
    if not 1 <= record.sequence <= MAX_OWNER_STATEMENTS:
        raise ProtocolViolation(f"an owner's statement of the number {record.sequence}")
    statement = decode(OwnerStatement, record.body, max_bytes=MAX_OWNER_STATEMENT_BYTES)
    if why_not := _why_not_about(statement, record.peer):
        raise ProtocolViolation(why_not)
    record.check()
    return statement


def _why_not_about(statement: OwnerStatement, owner: PeerId) -> str:
    """Return why an owner does not state this about that peer; empty if it may."""
    is_about_run = statement.verb in ABOUT_RUN
    if is_about_run == (statement.peer == owner):
        return ""
    return "this is stated about the owner" if is_about_run else "the owner of a run states nothing about itself"


@lru_cache(maxsize=4096)  # Comes with every Ready, roster and certificate of its holder.
def is_voucher(data: bytes, owner: PeerId, run: str, peer: PeerId) -> bool:
    """Return True if these bytes are a statement by which the owner of a run vouches for a peer."""
    try:
        record = Record.decode(data)
        statement = open_statement(record)
    except RemoteError:
        return False
    return (record.run, record.peer, statement.verb, statement.peer) == (run, owner, OwnerVerb.VOUCH, peer)


def unpack_statements(data: bytes | bytearray) -> tuple[Record, ...]:
    """Decode a page or a log, its signatures not yet checked. Raises `MalformedMessage`."""
    packed = decode(StatementRecords, bytes(data), max_bytes=MAX_OWNER_LOG_BYTES)
    return tuple(map(Record.decode, packed.records))


def validate_page(run: str, owner: PeerId, page: str, value: bytes) -> int:
    """Return the number of statements of a valid page in the directory. Raises `RemoteError` for any other value.

    That `owner` owns the run is not known here: who reads a page asks for that of the manifest's owner.
    """
    known = [str(number) for number in range(MAX_OWNER_STATEMENTS // STATEMENTS_PER_PAGE)]
    if page not in known:
        raise ProtocolViolation(f"there is no page {page!r} of an owner's statements")
    records = unpack_statements(value)
    first = known.index(page) * STATEMENTS_PER_PAGE + 1
    numbers = range(first, first + min(len(records), STATEMENTS_PER_PAGE))
    if [record.sequence for record in records] != list(numbers):
        raise ProtocolViolation(f"a page of statements that does not begin with {first}, has a gap, or is too long")
    for record in records:
        if (record.run, record.peer) != (run, owner):
            raise ProtocolViolation(f"a statement of {record.peer!r} does not belong to {owner!r} in this run")
        open_statement(record)
    return len(records)


@dataclass(frozen=True)
class OwnerStatements:
    """What one peer holds of a run's log of statements."""

    run: str
    owner: PeerId
    records: tuple[Record, ...] = ()
    """Statements 1, 2, … in order; each is valid."""

    def __len__(self) -> int:
        return len(self.records)

    def sign(self, identity: Identity, statement: OwnerStatement) -> Self:
        """Append a statement. Raises `LocalError` if that is not the owner's to sign, or there is no room."""
        if identity.peer_id != self.owner:
            raise LocalError(f"only the owner {self.owner} states anything about its run, not {identity.peer_id}")
        if why_not := _why_not_about(statement, self.owner):
            raise LocalError(why_not)
        if len(self) >= MAX_OWNER_STATEMENTS - (0 if statement.verb == OwnerVerb.SUCCEED else 2):  # There is room to end it.
            remedy = "what is stated stays in force; it can go on as a new run, with `flockstep run succeed`"
            raise LocalError(f"this run has {MAX_OWNER_STATEMENTS} statements of its owner, and takes no more", remedy=remedy)
        body = encode(statement)
        record = Record.sign(
            identity, run=self.run, kind=OWNER_KIND, sequence=len(self) + 1, lifetime=MAX_LIFETIME, body=body
        )
        return replace(self, records=(*self.records, record))

    def merge(self, records: Iterable[Record]) -> Self:
        """Return the union with other statements. Raises `RemoteError` if one is not valid, or not of this run's owner."""
        known = {record.sequence: record for record in self.records}
        for record in records:
            if (record.run, record.peer) != (self.run, self.owner):
                raise ProtocolViolation(f"a statement of {record.peer!r} about run {record.run!r}")
            held = known.get(record.sequence)
            if held != record:
                open_statement(record)
                if held is None or record.signature < held.signature:
                    known[record.sequence] = record
        whole = range(1, len(known) + 1)
        end = next((number for number in whole if number not in known), len(known) + 1)
        return replace(self, records=tuple(known[number] for number in range(1, end)))

    @cached_property
    def packed(self) -> bytes:
        """The whole log as members exchange it; empty without statements."""
        return encode(StatementRecords(tuple(record.encode() for record in self.records))) if self.records else b""

    @cached_property
    def hash(self) -> bytes:
        """The hash of `packed`: equal for equal logs."""
        return digest(self.packed)

    @cached_property
    def statements(self) -> Sequence[OwnerStatement]:
        """The statements in order."""
        return [open_statement(record) for record in self.records]

    @cached_property
    def in_force(self) -> Mapping[int, OwnerStatement]:
        """The statements by their numbers, in order, but for those that a later one has replaced."""
        numbered = enumerate(self.statements, 1)
        newest = {(stated.peer, _REPLACES.get(stated.verb, stated.verb)): number for number, stated in numbered}
        return {number: self.statements[number - 1] for number in sorted(newest.values())}

    @cached_property
    def bans(self) -> Mapping[PeerId, str]:
        """The peers that the owner bans, with the reasons."""
        return {stated.peer: stated.reason for stated in self._of(OwnerVerb.BAN)}

    @cached_property
    def pardons(self) -> Mapping[PeerId, int]:
        """The peers that the owner pardons, each with the last round whose evidence is void."""
        return {stated.peer: stated.until_round for stated in self._of(OwnerVerb.PARDON)}

    @cached_property
    def vouched(self) -> frozenset[PeerId]:
        """The peers for which the owner vouches; no banned ones."""
        return frozenset(stated.peer for stated in self._of(OwnerVerb.VOUCH)) - self.bans.keys()

    @cached_property
    def revoked(self) -> frozenset[PeerId]:
        """The peers, and the keys of invitations, that are no longer admitted."""
        return frozenset(stated.peer for stated in self._of(OwnerVerb.REVOKE))

    @cached_property
    def revision(self) -> bytes:
        """The owner's newest statement that revises the run's settings, encoded; empty if there is none."""
        newest = [number for number, stated in self.in_force.items() if stated.verb == OwnerVerb.REVISE]
        return self.records[newest[-1] - 1].encode() if newest else b""

    def voucher(self, peer: PeerId) -> bytes:
        """The owner's newest statement that vouches for a peer, encoded, for it to show; empty if there is none."""
        for number, stated in self.in_force.items():
            if (stated.peer, stated.verb) == (peer, OwnerVerb.VOUCH):
                record = self.records[number - 1].encode()
                return record if len(record) <= MAX_VOUCHER_BYTES else b""
        return b""

    def _of(self, verb: OwnerVerb) -> Iterator[OwnerStatement]:
        return (stated for stated in self.in_force.values() if stated.verb == verb)


def next_page(statements: OwnerStatements) -> int:
    """Return the page of the directory in which the next statement stands: the first one that may hold more than these."""
    return min(len(statements), MAX_OWNER_STATEMENTS - 1) // STATEMENTS_PER_PAGE


def pages_of(statements: OwnerStatements) -> Iterator[tuple[int, bytes]]:
    """Yield the number and the bytes of every page for the directory."""
    for start in range(0, len(statements), STATEMENTS_PER_PAGE):
        records = statements.records[start : start + STATEMENTS_PER_PAGE]
        yield start // STATEMENTS_PER_PAGE, encode(StatementRecords(tuple(record.encode() for record in records)))
