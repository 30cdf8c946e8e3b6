"""Evidence: what proves to anybody that a peer broke the rules, from bytes alone. Pure.

Theory of operation. A peer that keeps to the protocol never signs two different statements on one subject: in a slot one
word that it is ready, one roster, one acknowledgement of a roster, one commit, one result, one cut of each version, one
output of a part of a cut (`SUBJECTS`). It keeps to that across its restarts, too, since it takes part in no slot in
which it may have spoken before (`promises`). So two such statements convict their author, whoever shows them, whenever.
Likewise a commit or a result binds its author to bytes, by their hash: where these are no encoding of a part of its
size, or a sketch that it has signed is not theirs, the signed statements and the bytes convict it.

A *claim* is the statements, signed by the accuser. `judge` finds somebody guilty of every claim: the author of the
statements if they prove what they are said to, else the accuser. So a false accusation costs its author, and
there is nothing to weigh, to vote on, or to wait for.

What only looks bad (slowness, refusals, an odd direction of a contribution, a message that is not well-formed) is
nobody's evidence: it may have come from a bad road, and it leads to no ban.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from ...peer import wire
from ...peer.claim import Claim
from ...peer.errors import MalformedMessage
from ...peer.transport import PeerId
from ...peer.wire.schema import decode, encode
from ..chain.certificate import Verify
from ..codec import Codec, Encoded
from ..robust.checks import CHECK_COLUMNS, columns_of, is_true, num_bytes
from ..round.roster import MAX_SKETCHES

SUBJECTS: Mapping[type, Callable[[Any], object]] = {
    wire.Ready: lambda _: None,
    wire.Roster: lambda _: None,
    wire.RosterAck: lambda _: None,
    wire.Commit: lambda _: None,
    wire.Cut: attrgetter("version"),
    wire.Sketch: attrgetter("after"),
    wire.Result: attrgetter("cut", "part"),
    wire.ResultAck: lambda _: None,
}
"""About what a peer makes only one statement in a slot. All other words may be said again with other content."""
ROUNDS_BACK = 2
"""How many rounds before the present one statements are remembered: a late word of them may still come."""
MAX_STATEMENTS = 512
"""Of one peer in one round: a result for each part and re-cut of a few attempts. More are not remembered."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What the manifest says of a run's contributions and outputs, as far as it decides what is well-formed."""

    run: str
    num_cells: int
    contribution: Codec
    output: Codec


@dataclass(frozen=True, slots=True)
class Exhibit:
    """The bytes that a claim is about: their hash and size, and what they should be an encoding of."""

    hash: bytes
    codec: Codec
    num_cells: int

    @property
    def num_bytes(self) -> int:
        """Their size; bytes of any other are not taken from anybody (`peer.bulk`), so they cannot be an exhibit."""
        return self.codec.num_bytes(self.num_cells)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Who is guilty of a claim, and of what; one line for a person."""

    guilty: PeerId
    reason: str


@dataclass(frozen=True, slots=True)
class Pending:
    """The statements hold: whether they convict their `author` or the accuser, the bytes of an exhibit decide."""

    author: PeerId
    exhibit: Exhibit
    what: str
    sketch: wire.Sketch | None = None
    """What its author says of the exhibit, where that is what it is accused of."""
    bounds: tuple[int, ...] = ()
    part: int = 0


class Witness:
    """Remembers the first statement of each peer on each subject of the latest rounds."""

    def __init__(self) -> None:
        self._rounds: dict[int, dict[PeerId, dict[object, wire.Signed]]] = {}

    def advance(self, round_: int) -> None:
        """The present round: what was said in much earlier ones is forgotten."""
        for old in [number for number in self._rounds if number < round_ - ROUNDS_BACK]:
            del self._rounds[old]

    def see(self, signed: wire.Signed, message: wire.RoundMessage, present: int) -> wire.Signed | None:
        """An earlier statement that a statement, its signature checked, contradicts; None if there is none.

        `present`: my round; statements of others than the latest rounds and the next one are not looked at.
        """
        about = SUBJECTS.get(type(message))
        slot = message.slot
        if about is None or not present - ROUNDS_BACK <= slot.round <= present + 1:
            return None
        said = self._rounds.setdefault(slot.round, {}).setdefault(signed.sender, {})
        subject = (slot.attempt, signed.code, about(message))
        earlier = said.get(subject)
        if earlier is None:
            alike = sum(other.code == signed.code for other in said.values()) if type(message) is wire.Sketch else 0
            if len(said) < MAX_STATEMENTS and alike < MAX_SKETCHES:
                said[subject] = signed
            return None
        return earlier if earlier.payload != signed.payload else None


def claim_of(run: str, statements: tuple[wire.Signed, ...], part: int = 0) -> Claim:
    """A claim, for its accuser to sign."""
    return Claim(run, tuple(map(encode, statements)), part)


def judge(accuser: PeerId, claim: Claim, terms: Terms, verify: Verify) -> Verdict | Pending:
    """Who is guilty of a claim that `accuser` has signed, or what else must be looked at to tell (see `look_at`)."""
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
            about = SUBJECTS.get(type(first))
            alike = statements[1].sender == author and first.slot == second.slot
            if about is None or not alike or about(first) != about(second) or not verify(statements[1]):
                return _false(accuser, "two statements that can both be made")
            if statements[0].payload == statements[1].payload:
                return _false(accuser, "the same statement twice")
            slot = first.slot
            what = f"two different {type(first).__name__}s"
            return Verdict(author, f"it signed {what} in round {slot.round}, attempt {slot.attempt}")
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


def look_at(accuser: PeerId, pending: Pending, data: Encoded) -> Verdict:
    """Who is guilty once the bytes of the exhibit, which have its hash, are here."""
    codec, sketch = pending.exhibit.codec, pending.sketch
    try:
        codec.check(data, pending.exhibit.num_cells)
    except MalformedMessage as error:
        return Verdict(pending.author, f"{pending.what}: {error}")
    if sketch is not None and not is_true(sketch, pending.bounds, pending.part, codec, data):
        return Verdict(pending.author, pending.what)
    return _false(accuser, "bytes that are as they should be")


def _cells(roster: wire.Roster, part: int, terms: Terms) -> int | None:
    """How many cells a part of a roster has; None for a part or a roster that nobody who is honest would speak of."""
    if part + 1 >= len(roster.bounds) or part >= len(roster.members):
        return None
    cells = roster.bounds[part + 1] - roster.bounds[part]
    return cells if 0 < cells <= terms.num_cells else None


def _false(accuser: PeerId, of_what: str) -> Verdict:
    return Verdict(accuser, f"it made a false accusation: {of_what}")
