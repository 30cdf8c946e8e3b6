"""The sketch exchange: which sketches count, completeness, nonces and seed, convictions."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from flockstep.collectives.accountability.evidence import Conviction, Pending, Witness, claim_of, judge_claim, look_at
from flockstep.collectives.accountability.statements import MAX_SKETCHES
from flockstep.collectives.agreement.actions import Note
from flockstep.collectives.agreement.electorate import Electorate
from flockstep.collectives.codec import CELL, codec_named
from flockstep.collectives.robust.checks import (
    CHECK_COLUMNS,
    columns_of,
    commitment,
    num_bytes,
    seed_of,
    sketch_parts,
)
from flockstep.collectives.round.actions import CompareSketch, Send, SketchParts
from flockstep.collectives.round.facts import MessageLog
from flockstep.collectives.round.judge import SketchExchange
from flockstep.collectives.round.roster import RosterView
from flockstep.collectives.spec import Terms
from flockstep.peer import wire
from flockstep.peer.digest import digest
from flockstep.peer.identity import Identity
from flockstep.peer.wire.schema import encode
from flockstep.peer.wire.signed import verify_signed
from support.certificates import LONE, seats, signed

PEERS = [LONE, *(Identity.from_seed(bytes([number]) * 32) for number in range(2, 5))]
NAMES = tuple(identity.peer_id for identity in PEERS)
SLOT = wire.Slot("a" * 52, 1, bytes(32))
BOUNDS = (0, 2, 4, 4, 6)
READYS = tuple(
    encode(signed(peer, wire.Ready(SLOT, bytes(32), 1, 1.0, 1.0, commitment(bytes([number]) * 32))))
    for number, peer in enumerate(PEERS)
)
ROSTER = signed(PEERS[0], wire.Roster(SLOT, bytes(32), NAMES, BOUNDS, seats(4), READYS, (b"",)))
E = Electorate(dict.fromkeys(NAMES, 1))
CUT, OUTPUTS = b"c" * 32, (b"o" * 32,) * 4
SEED = seed_of(CUT, OUTPUTS)
CODEC = codec_named("int8")
SIZE = num_bytes(4, CHECK_COLUMNS)


def a_table(facts: MessageLog) -> RosterView:
    roster = wire.opened(ROSTER)
    assert isinstance(roster, wire.Roster)
    return RosterView(ROSTER, roster, NAMES[1], E, facts)


def say(facts: MessageLog, peer: int, message: wire.RoundMessage) -> str:
    return facts.add(wire.Signed(NAMES[peer], wire.code_of(message), encode(message), bytes(64)), message)


def test_it_is_complete_once_all_have_spoken_and_what_i_hold_is_true() -> None:
    facts = MessageLog()
    sketches = SketchExchange(facts, a_table(facts), (0, 1, 3), CUT, OUTPUTS)
    assert sketches.advance([1]) == [SketchParts(SEED, CHECK_COLUMNS)]
    assert sketches.sketched(bytes(SIZE)) == [Send(NAMES, wire.Sketch(SLOT, CUT, OUTPUTS, bytes(SIZE)))]
    say(facts, 2, wire.Sketch(SLOT, CUT, OUTPUTS, bytes(SIZE)))  # It has no part in the cut.
    say(facts, 1, wire.Sketch(SLOT, CUT, OUTPUTS, bytes(SIZE)))
    say(facts, 0, wire.Sketch(SLOT, CUT, (b"b" * 32,) * 4, bytes(SIZE)))
    assert sketches.advance([1]) == []
    assert sketches.missing == {0, 3}
    say(facts, 0, wire.Sketch(SLOT, CUT, OUTPUTS, b"\1" * SIZE))
    say(facts, 3, wire.Sketch(SLOT, CUT, OUTPUTS, b"\3" * SIZE))
    assert sketches.advance([1]) == [CompareSketch(SEED, 1, 0), CompareSketch(SEED, 1, 3)]
    assert not sketches.missing
    sketches.is_true(1, 0)
    assert not sketches.is_complete
    sketches.is_true(1, 3)
    assert sketches.is_complete
    assert sketches.tables == (b"\1" * SIZE, bytes(SIZE), b"\3" * SIZE)
    assert sketches.advance([1, 2]) == [CompareSketch(SEED, 2, 0), CompareSketch(SEED, 2, 3)]
    assert not sketches.is_complete


def test_sketches_of_another_size_are_nobodys() -> None:
    facts = MessageLog()
    sketches = SketchExchange(facts, a_table(facts), (0,), CUT, OUTPUTS)
    say(facts, 0, wire.Sketch(SLOT, CUT, OUTPUTS, bytes(SIZE - 4)))
    (note,) = sketches.advance([])
    assert isinstance(note, Note)
    assert (note.event, note.peer) == ("peer.charged", NAMES[0])
    assert sketches.missing == {0}


def test_a_cut_fits_its_roster_and_has_enough_voters() -> None:
    table = a_table(MessageLog())
    nonces = ((0, bytes(32)), (1, bytes([1]) * 32))
    cut = wire.Cut(SLOT, table.hash, 0, (0, 1, 3), bytes(32), nonces)
    assert table.why_not_cut(cut) is None
    for order in ((1, 0, 3), (0, 1, 1, 3), (0, 1, 4)):
        assert table.why_not_cut(replace(cut, contributors=order)) == "a cut that does not fit its roster"
    assert table.why_not_cut(replace(cut, roster=bytes(32))) == "a cut that does not fit its roster"
    assert "leaves out too many" in str(table.why_not_cut(replace(cut, contributors=(0, 1))))


@pytest.mark.parametrize(
    ("nonces", "flaw"),
    [
        ([0, 1], None),
        ([3], "a third of the owners"),
        ([], "a third of the owners"),
        ([0, 1, 9], "a third of the owners"),
    ],
)
def test_a_cut_has_the_nonces_of_more_than_a_third_of_the_owners(nonces: list[int], flaw: str | None) -> None:
    table = a_table(MessageLog())
    cut = wire.Cut(SLOT, table.hash, 0, (0, 1, 3), bytes(32), tuple((index, bytes([index]) * 32) for index in nonces))
    found = table.why_not_cut(cut)
    assert (found is None) == (flaw is None)
    assert flaw is None or (found is not None and flaw in found)
    other = replace(cut, nonces=((0, bytes(32)), (1, b"x" * 32)))
    assert table.why_not_cut(other) == f"a cut with a nonce that {NAMES[1]} has not committed to"


def test_sketches_are_no_wider_than_a_message_takes() -> None:
    assert {members: columns_of(members) for members in (1, 16, 17, 32, 33, 64)} == {
        1: 128, 16: 128, 17: 64, 32: 64, 33: 32, 64: 32,
    }
    assert max(num_bytes(members, columns_of(members)) for members in range(1, 65)) == wire.MAX_SKETCH_BYTES


class Trial:
    """A sender's commit and sketch of a vector, and the claims that may be made about them."""

    def __init__(self, of: float = 1.0) -> None:
        vector = np.random.default_rng(0).normal(size=6 * CELL).astype(np.float32)
        self.parts, told = (
            [bytes(CODEC.encode(gain * vector[low * CELL : high * CELL])) for low, high in pairwise(BOUNDS)]
            for gain in (1.0, of)
        )
        self.commit = signed(PEERS[2], wire.Commit(SLOT, ROSTER.hash, 1, 1, 0.0, tuple(map(digest, self.parts))))
        tables = sketch_parts(CODEC, told, BOUNDS, SEED, CHECK_COLUMNS)
        self.sketch = signed(PEERS[2], wire.Sketch(SLOT, CUT, OUTPUTS, tables))
        self.terms = Terms("a" * 52, 6, CODEC, CODEC)

    def found(self, *statements: wire.Signed, part: int = 1) -> Conviction | Pending:
        return judge_claim(NAMES[0], claim_of("a" * 52, statements, part), self.terms, verify_signed)


@pytest.mark.parametrize(("of", "guilty"), [(1.0, 0), (0.5, 2), (-1.0, 2), (1.01, 2)])
def test_a_sketch_convicts_its_author_or_whoever_accuses_it(of: float, guilty: int) -> None:
    trial = Trial(of)
    pending = trial.found(trial.sketch, trial.commit, ROSTER)
    assert isinstance(pending, Pending)
    assert pending.exhibit.hash == digest(trial.parts[1])
    assert look_at(NAMES[0], pending, trial.parts[1]).guilty == NAMES[guilty]


def test_what_does_not_belong_to_a_sketch_proves_nothing() -> None:
    trial = Trial(0.5)
    later = signed(PEERS[2], replace(wire.opened(trial.commit), slot=SLOT.at(0, 1)))
    other = signed(PEERS[3], wire.opened(trial.commit))
    forged = wire.Signed(NAMES[2], trial.commit.code, trial.commit.payload, bytes(64))
    short = signed(PEERS[2], wire.Sketch(SLOT, CUT, OUTPUTS, bytes(12)))
    for statements in (
        *((trial.sketch, commit, ROSTER) for commit in (later, other, forged)),
        (short, trial.commit, ROSTER),
        (trial.sketch, ROSTER, trial.commit),
        (trial.sketch, trial.commit),
    ):
        assert trial.found(*statements) == Conviction(NAMES[0], trial.found(*statements).reason)  # type: ignore[union-attr]
    for part in (2, 4, 63):  # An empty one, and none.
        assert trial.found(trial.sketch, trial.commit, ROSTER, part=part).guilty == NAMES[0]  # type: ignore[union-attr]


def test_two_sketches_under_one_seed_convict_and_few_are_kept() -> None:
    witness, facts = Witness(), MessageLog()
    first, second = (wire.Sketch(SLOT, CUT, OUTPUTS, bytes([number]) * SIZE) for number in range(2))
    assert witness.see(signed(PEERS[2], first), first, SLOT) is None
    assert witness.see(signed(PEERS[2], second), second, SLOT) == signed(PEERS[2], first)
    kept = 0
    for number in range(2 * MAX_SKETCHES):
        sketch = wire.Sketch(SLOT, bytes([number]) * 32, OUTPUTS, bytes(SIZE))
        kept += say(facts, 2, sketch) == "new"
        witness.see(signed(PEERS[2], sketch), sketch, SLOT)
    assert kept == MAX_SKETCHES
    assert sum(len(said.statements) for by_peer in witness._rounds.values() for said in by_peer.values()) == MAX_SKETCHES
