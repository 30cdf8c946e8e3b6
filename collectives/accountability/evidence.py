"""Evidence of misbehaviour that anybody can verify: equivocation and invalid bytes. Pure.

Theory of operation. An honest peer never equivocates, that is, signs two different statements on one subject: in a slot
one Ready, one roster, one acknowledgement of a roster, one commit, one result, one cut of each version, one output of a
part of a cut (`statements`). That holds across restarts, since a peer takes part in no slot that it may have signed in
before (`promises`). So two such statements convict their author, no matter who shows them or when. Likewise a commit or
a result binds its author to bytes, by their hash. If these do not encode a part of its size, or do not match a sketch
that the author signed, the statements and the bytes convict it.

A *claim* is the statements, signed by the accuser. `judge_claim` convicts somebody of every claim: the author of the
statements if they prove it, else the accuser. So a false accusation costs its author, and no vote is needed.

What only looks bad (slowness, refusals, an odd direction of a contribution, a malformed message) is no evidence: a bad
connection may have caused it, and it leads to no ban.
"""

from collections import Counter
from dataclasses import dataclass

from ...peer import wire
from ...peer.errors import MalformedMessage
from ...peer.transport import PeerId
from ...peer.wire import Claim
from ...peer.wire.schema import decode, encode
from ...peer.wire.signed import Verify
from ..codec import Codec, Encoded
from ..robust.checks import CHECK_COLUMNS, columns_of, is_true, num_bytes
from ..spec import Terms
from .statements import MAX_SKETCHES, STATEMENTS

ROUNDS_BACK = 2
"""Rounds before the present one whose statements are remembered: a late message of them may still arrive."""
MAX_WITNESS_BYTES = 64 << 20
"""The limit of all: four rounds of a full roster, of which each member has signed 100 kB or less, and twice as much again."""
MAX_STATEMENTS = 512
"""The limit of one peer in one round: a result for each part and re-cut of a few attempts. More are not remembered."""


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


class Witness:
    """Detects equivocation: remembers the first statement of each peer on each subject of the latest rounds."""

    def __init__(self) -> None:
        self._rounds: dict[int, dict[PeerId, dict[object, wire.Signed]]] = {}
        self._num_bytes: Counter[tuple[int, PeerId]] = Counter()
        self.num_bytes = 0
        """The bytes of all statements."""

    def advance(self, round_: int) -> None:
        """Enter a round, and forget the statements of rounds older than `ROUNDS_BACK`."""
        for old in [number for number in self._rounds if number < round_ - ROUNDS_BACK]:
            del self._rounds[old]
        self._num_bytes = Counter({key: size for key, size in self._num_bytes.items() if key[0] in self._rounds})
        self.num_bytes = self._num_bytes.total()

    def see(self, signed: wire.Signed, message: wire.RoundMessage, present: int) -> wire.Signed | None:
        """Return an earlier statement that contradicts this one, whose signature is checked; None if there is none.

        `present`: my round. Only statements of the latest rounds and the next one are examined.
        """
        kind = STATEMENTS[type(message)]
        slot = message.slot
        if not kind.convicts or not present - ROUNDS_BACK <= slot.round <= present + 1:
            return None
        seen = self._rounds.setdefault(slot.round, {}).setdefault(signed.sender, {})
        subject = (slot.attempt, signed.code, kind.subject(message))
        earlier = seen.get(subject)
        if earlier is None:
            alike = sum(other.code == signed.code for other in seen.values()) if type(message) is wire.Sketch else 0
            if len(seen) < MAX_STATEMENTS and alike < MAX_SKETCHES:
                seen[subject] = signed
                self._num_bytes[slot.round, signed.sender] += len(signed.payload)
                self.num_bytes += len(signed.payload)
                self._keep_limit()
            return None
        return earlier if earlier.payload != signed.payload else None

    def _keep_limit(self) -> None:
        """Forget the statements of the peer that has signed most in a round, where all together are too many."""
        if self.num_bytes > MAX_WITNESS_BYTES:
            round_, peer = max(self._num_bytes, key=self._num_bytes.__getitem__)
            del self._rounds[round_][peer]
            self.num_bytes -= self._num_bytes.pop((round_, peer))


def claim_of(run: str, statements: tuple[wire.Signed, ...], part: int = 0) -> Claim:
    """Return a claim, for its accuser to sign."""
    return Claim(run, tuple(map(encode, statements)), part)


def judge_claim(accuser: PeerId, claim: Claim, terms: Terms, verify: Verify) -> Conviction | Pending:
    """Judge a claim that `accuser` has signed; returns a conviction, or what `look_at` needs an exhibit to decide."""
    try:
        statements = tuple(decode(wire.Signed, data, max_bytes=wire.MAX_SIGNED_BYTES) for data in claim.statements)
        messages = tuple(map(wire.opened, statements))
    except MalformedMessage as error:
        return _false(accuser, f"statements that do not decode: {error}")
    author = statements[0].sender
    if not verify(statements[0]) or messages[0].slot.run != terms.run:
        return _false(accuser, "a statement that was not signed, or not in this run")
    match messages:
        case (first, second) if type(first) is type(second):
            kind = STATEMENTS[type(first)]
            alike = statements[1].sender == author and first.slot == second.slot
            if not kind.convicts or not alike or kind.subject(first) != kind.subject(second) or not verify(statements[1]):
                return _false(accuser, "two statements that can both be made")
            if statements[0].payload == statements[1].payload:
                return _false(accuser, "the same statement twice")
            slot = first.slot
            what = f"two different {type(first).__name__}s"
            return Conviction(author, f"it signed {what} in round {slot.round}, attempt {slot.attempt}")
        case (wire.Sketch() as sketch, wire.Commit() as commit, wire.Roster() as roster):
            alike = statements[1].sender == author and verify(statements[1]) and sketch.slot == commit.slot
            bound = commit.roster == statements[2].hash and len(commit.parts) == len(roster.members)
            sizes = {num_bytes(len(roster.members), columns) for columns in (CHECK_COLUMNS, columns_of(len(roster.members)))}
            if alike and bound and len(sketch.tables) in sizes and (cells := _cells(roster, claim.part, terms)) is not None:
                exhibit = Exhibit(commit.parts[claim.part], terms.contribution, cells)
                what = f"its sketch is not of what it committed to in round {commit.slot.round}"
                return Pending(author, exhibit, what, sketch, roster.bounds, claim.part)
        case (wire.Commit() as commit, wire.Roster() as roster):
            bound = commit.roster == statements[1].hash and len(commit.parts) == len(roster.members)
            if bound and (cells := _cells(roster, claim.part, terms)) is not None:
                exhibit = Exhibit(commit.parts[claim.part], terms.contribution, cells)
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
    if part + 1 >= len(roster.bounds) or part >= len(roster.members):
        return None
    cells = roster.bounds[part + 1] - roster.bounds[part]
    return cells if 0 < cells <= terms.num_cells else None


def _false(accuser: PeerId, of_what: str) -> Conviction:
    return Conviction(accuser, f"it made a false accusation: {of_what}")
