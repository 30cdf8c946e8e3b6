"""Evidence of misbehaviour that anybody can verify: equivocation and invalid bytes. Pure.

Theory of operation. An honest peer never equivocates, that is, signs two different statements on one subject: in a slot
one Ready, one roster, one commit, two cuts, one output of a part of a cut, one Propose, Prevote and Precommit
(`statements`). That holds across restarts, since a peer takes part in no slot that it may have signed in
before (`signing`). So two such statements convict their author, no matter who shows them or when. Likewise a commit or
a result binds its author to bytes, by their hash. If these do not encode a part of its size, or do not match a sketch
that the author signed, the statements and the bytes convict it.

A *claim* is the statements, signed by the accuser. `judge_claim` convicts somebody of every claim: the author of the
statements if they prove it, else the accuser. So a false accusation costs its author, and no vote is needed.

What only looks bad (slowness, refusals, an odd direction of a contribution, a malformed message) is no evidence: a bad
connection may have caused it, and it leads to no ban.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import TypeAlias

from ...peer import wire
from ...peer.base.errors import MalformedMessage, NetworkError
from ...peer.base.transport import PeerId
from ...peer.wire import Claim
from ...peer.wire.schema import decode, encode
from ...peer.wire.signed import Verify
from ..robust.checks import columns_of, is_true, num_bytes
from ..spec import Terms
from ..vector.codec import Codec, Encoded
from ..vector.partition import num_parts
from .statements import MAX_SKETCHES, STATEMENTS

ROUNDS_BACK = 2
"""Rounds before the present one whose statements are remembered: a late message of them may still arrive."""
MAX_STATEMENTS = 512
"""The subjects of one peer in one round: a result for each part in a few attempts."""
MAX_WITNESSED_BYTES = 64 << 20
"""The limit of all that a witness remembers: a round of 64 has some 5 MB, most of it sketches."""


@dataclass(frozen=True, slots=True)
class Exhibit:
    """The bytes that a claim is about: their hash, and the codec and number of cells that they should encode."""

    hash: bytes
    codec: Codec
    num_cells: int

    @property
    def num_bytes(self) -> int:
        """The size of the bytes; `peer.node.bulk` accepts no other size, so no other bytes can be an exhibit."""
        return self.codec.num_bytes(self.num_cells)


@dataclass(frozen=True, slots=True)
class Conviction:
    """The judgement of a claim: the guilty peer, and the reason in one line."""

    guilty: PeerId
    reason: str


@dataclass(frozen=True, slots=True)
class Pending:
    """An open judgement: the statements hold, and an exhibit decides whether their `author` or the accuser is guilty."""

    author: PeerId
    exhibit: Exhibit
    what: str
    sketch: wire.Sketch | None = None
    """The author's sketch of the exhibit, if the accusation is that it is false."""
    bounds: tuple[int, ...] = ()
    part: int = 0


Subject: TypeAlias = tuple[int, int, object]
"""The attempt of a statement, the code of its message, and what it is about."""


@dataclass(slots=True)
class Testimony:
    """What a witness remembers of one peer in one round."""

    statements: dict[Subject, wire.Signed] = field(default_factory=dict)
    num_bytes: int = 0

    def add(self, subject: Subject, signed: wire.Signed) -> None:
        """Remember a statement."""
        self.statements[subject] = signed
        self.num_bytes += len(signed.payload)

    def forget(self, attempt: int, code: int | None = None) -> None:
        """Forget the statement (of a code) whose attempt is farthest from `attempt`.

        Of equally far ones it is one of the most frequent kind, and of these the oldest. So the kinds that a peer states
        once in an attempt are pushed out by nothing that it may state often.
        """
        among = [subject for subject in self.statements if code in (None, subject[1])]
        alike = Counter(subject[:2] for subject in among)
        farthest = max(among, key=lambda subject: (abs(subject[0] - attempt), alike[subject[:2]]))
        self.num_bytes -= len(self.statements.pop(farthest).payload)


class Witness:
    """Detects equivocation: remembers the first statement of each peer on each subject of the latest rounds.

    Its memory is bounded for each peer and in all. A new statement is always remembered, and those farthest from the
    present attempt are forgotten: otherwise harmless ones said first would make room for any contradiction.
    """

    def __init__(self) -> None:
        self._rounds: dict[int, dict[PeerId, Testimony]] = {}
        self.num_bytes = 0
        """The bytes of all remembered statements."""

    def advance(self, round_: int) -> None:
        """Enter a round, and forget the statements of rounds older than `ROUNDS_BACK`."""
        for old in [number for number in self._rounds if number < round_ - ROUNDS_BACK]:
            self.num_bytes -= sum(said.num_bytes for said in self._rounds.pop(old).values())

    def see(self, signed: wire.Signed, message: wire.RoundMessage, present: wire.Slot) -> wire.Signed | None:
        """Return an earlier statement that contradicts this one, whose signature is checked; None if there is none.

        `present`: my slot. Only statements of the latest rounds and the next one are examined.
        """
        kind, slot = STATEMENTS[type(message)], message.slot
        if not kind.convicts or not present.round - ROUNDS_BACK <= slot.round <= present.round + 1:
            return None
        peers = self._rounds.setdefault(slot.round, {})
        said = peers.get(signed.sender) or peers.setdefault(signed.sender, Testimony())
        subject = slot.attempt, signed.code, (slot.previous, kind.subject(message))
        if (earlier := said.statements.get(subject)) is not None:
            return earlier if earlier.payload != signed.payload else None
        near, before = present.attempt if slot.round == present.round else 0, said.num_bytes
        if type(message) is wire.Sketch and sum(known[1] == signed.code for known in said.statements) >= MAX_SKETCHES:
            said.forget(near, signed.code)
        while len(said.statements) >= MAX_STATEMENTS:
            said.forget(near)
        said.add(subject, signed)
        self.num_bytes += said.num_bytes - before
        while self.num_bytes > MAX_WITNESSED_BYTES:
            self._make_room(present)
        return None

    def _make_room(self, present: wire.Slot) -> None:
        """Forget a statement of the peer that takes the most memory in one round."""
        number, peer = max(
            ((number, peer) for number, peers in self._rounds.items() for peer in peers),
            key=lambda place: self._rounds[place[0]][place[1]].num_bytes,
        )
        said = self._rounds[number][peer]
        self.num_bytes -= said.num_bytes
        said.forget(present.attempt if number == present.round else 0)
        self.num_bytes += said.num_bytes


def claim_of(run: str, statements: tuple[wire.Signed, ...], part: int = 0) -> Claim:
    """Return a claim, for its accuser to sign."""
    return Claim(run, tuple(map(encode, statements)), part)


def slot_of(claim: Claim) -> wire.Slot | None:
    """Return the slot of the statement whose author a claim accuses; None if there is none."""
    try:
        return wire.opened(decode(wire.Signed, claim.statements[0], max_bytes=wire.MAX_SIGNED_BYTES)).slot
    except MalformedMessage:
        return None


def round_of(claim: Claim) -> int:
    """Return the round of the statement whose author a claim accuses; 0 if there is none."""
    slot = slot_of(claim)
    return 0 if slot is None else slot.round


def judge_claim(accuser: PeerId, claim: Claim, terms: Terms | None, verify: Verify) -> Conviction | Pending:
    """Judge a claim that `accuser` has signed; returns a conviction, or what `look_at` needs an exhibit to decide.

    `terms` are those of the round that it is about; None if they are not known here. Raises `NetworkError` for a claim
    about bytes of a round whose terms are not known: then it can judge neither side.
    """
    try:
        statements = tuple(decode(wire.Signed, data, max_bytes=wire.MAX_SIGNED_BYTES) for data in claim.statements)
        messages = tuple(map(wire.opened, statements))
    except MalformedMessage as error:
        return _false(accuser, f"statements that do not decode: {error}")
    author = statements[0].sender
    if not verify(statements[0]) or messages[0].slot.run != claim.run:
        return _false(accuser, "a statement that was not signed, or not in this run")
    match messages:
        case (first, second) if type(first) is type(second):
            kind = STATEMENTS[type(first)]
            alike = statements[1].sender == author and first.slot == second.slot
            alike = alike and kind.subject(first) == kind.subject(second)
            if not kind.convicts or not alike or not verify(statements[1]):
                return _false(accuser, "two statements that can both be made")
            if statements[0].payload == statements[1].payload:
                return _false(accuser, "the same statement twice")
            slot = first.slot
            what = f"two different {type(first).__name__}s"
            return Conviction(author, f"it signed {what} in round {slot.round}, attempt {slot.attempt}")
    if terms is None:
        raise NetworkError(f"the codecs of round {messages[0].slot.round} are not known here")
    match messages:
        case (wire.Sketch() as sketch, wire.Commit() as commit, wire.Roster() as roster):
            alike = statements[1].sender == author and verify(statements[1]) and sketch.slot == commit.slot
            parts = num_parts(roster.members)
            bound = commit.roster == statements[2].hash and len(commit.parts) == parts
            size = num_bytes(parts, columns_of(parts))
            fits, codec = alike and bound and len(sketch.tables) == size, terms.contribution.of(commit.codec)
            if fits and codec is not None and (cells := _cells(roster, claim.part, terms)) is not None:
                exhibit = Exhibit(commit.parts[claim.part], codec, cells)
                what = f"its sketch is not of what it committed to in round {commit.slot.round}"
                return Pending(author, exhibit, what, sketch, roster.bounds, claim.part)
        case (wire.Commit() as commit, wire.Roster() as roster):
            bound = commit.roster == statements[1].hash and len(commit.parts) == num_parts(roster.members)
            codec = terms.contribution.of(commit.codec)
            if bound and codec is not None and (cells := _cells(roster, claim.part, terms)) is not None:
                exhibit = Exhibit(commit.parts[claim.part], codec, cells)
                return Pending(author, exhibit, f"it committed to bytes that are no part in round {commit.slot.round}")
        case (wire.Result() as result, wire.Cut() as cut, wire.Roster() as roster):
            bound = (result.cut, cut.roster) == (statements[1].hash, statements[2].hash)
            if bound and (cells := _cells(roster, result.part, terms)) is not None:
                exhibit = Exhibit(result.output, terms.output, cells)
                return Pending(author, exhibit, f"it made an output that is no part in round {result.slot.round}")
    return _false(accuser, "statements that do not belong together")


def look_at(accuser: PeerId, pending: Pending, data: Encoded) -> Conviction:
    """Judge a pending claim by the bytes of its exhibit, whose hash was checked."""
    codec, sketch = pending.exhibit.codec, pending.sketch
    try:
        codec.check(data, pending.exhibit.num_cells)
    except MalformedMessage as error:
        return Conviction(pending.author, f"{pending.what}: {error}")
    if sketch is not None and not is_true(sketch, pending.bounds, pending.part, codec, data):
        return Conviction(pending.author, pending.what)
    return _false(accuser, "bytes that are as they should be")


def _cells(roster: wire.Roster, part: int, terms: Terms) -> int | None:
    """Return the number of cells of a part; None if no honest peer would name that part or that roster."""
    if part + 1 >= len(roster.bounds) or part >= num_parts(roster.members):
        return None
    cells = roster.bounds[part + 1] - roster.bounds[part]
    return cells if 0 < cells <= terms.num_cells else None


def _false(accuser: PeerId, of_what: str) -> Conviction:
    return Conviction(accuser, f"it made a false accusation: {of_what}")
