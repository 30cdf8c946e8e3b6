"""The sketch exchange: which sketches count, which are missing, which are compared, convictions."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from flockstep.collectives.accountability.evidence import Conviction, Pending, Witness, claim_of, judge_claim, look_at
from flockstep.collectives.accountability.statements import MAX_SKETCHES
from flockstep.collectives.agreement.electorate import Electorate
from flockstep.collectives.allreduce.actions import CompareSketch, Send, SketchParts
from flockstep.collectives.allreduce.facts import MessageLog
from flockstep.collectives.allreduce.judge import SketchExchange
from flockstep.collectives.allreduce.roster import RosterView, readies_of
from flockstep.collectives.robust.checks import (
    columns_of,
    commitment,
    num_bytes,
    seed_of,
    sketch_parts,
)
from flockstep.collectives.spec import Terms
from flockstep.collectives.vector.codec import CELL, codec_named
from flockstep.peer import wire
from flockstep.peer.base.digest import digest
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
ROSTER = signed(PEERS[0], wire.Roster(SLOT, bytes(32), NAMES, BOUNDS, seats(4), b"\x0f", bytes(32)))
E = Electorate(dict.fromkeys(NAMES, 1))
CUT, OUTPUTS = b"c" * 32, (b"o" * 32,) * 4
SEED = seed_of(CUT, OUTPUTS)
CODEC = codec_named("int8")
COLUMNS = columns_of(4)
SIZE = num_bytes(4, COLUMNS)


def a_table(facts: MessageLog) -> RosterView:
    roster = wire.opened(ROSTER)
    assert isinstance(roster, wire.Roster)
    return RosterView(ROSTER, roster, NAMES[1], E, facts, readies_of(NAMES, READYS))


def say(facts: MessageLog, peer: int, message: wire.RoundMessage) -> str:
    return facts.add(unsigned(peer, message), message)


def unsigned(peer: int, message: wire.RoundMessage) -> wire.Signed:
    return wire.Signed(NAMES[peer], wire.code_of(message), encode(message), bytes(64))


def test_each_contributor_counts_once_and_what_i_hold_of_it_is_compared_once() -> None:
    facts = MessageLog()
    table = a_table(facts)
    sketches = SketchExchange(facts, table, (0, 1, 3), CUT, OUTPUTS)
    mine = [(1, 0), (1, 1), (1, 3)]
    assert sketches.advance(mine) == [SketchParts(SEED, COLUMNS)]
    assert sketches.sketched(bytes(SIZE)) == [Send(NAMES, wire.Sketch(SLOT, CUT, OUTPUTS, bytes(SIZE)))]
    say(facts, 2, wire.Sketch(SLOT, CUT, OUTPUTS, bytes(SIZE)))  # It has no part in the cut.
    say(facts, 1, wire.Sketch(SLOT, CUT, OUTPUTS, bytes(SIZE)))
    say(facts, 0, wire.Sketch(SLOT, CUT, (b"b" * 32,) * 4, bytes(SIZE)))
    assert sketches.advance(mine) == [CompareSketch(SEED, 1, 1)]
    assert sketches.missing == {0, 3}
    assert sketches.signed(0) is None
    say(facts, 0, wire.Sketch(SLOT, CUT, OUTPUTS, b"\1" * SIZE))
    say(facts, 3, wire.Sketch(SLOT, CUT, OUTPUTS, b"\3" * SIZE))
    assert sketches.advance(mine) == [CompareSketch(SEED, 1, 0), CompareSketch(SEED, 1, 3)]
    assert not sketches.missing
    assert [sketches.tables(index) for index in (0, 1, 3)] == [b"\1" * SIZE, bytes(SIZE), b"\3" * SIZE]
    assert sketches.advance([*mine, (2, 0)]) == [CompareSketch(SEED, 2, 0)]  # A duty that I take over.
    assert sketches.advance([*mine, (2, 0)]) == []


def test_who_contributes_nothing_sketches_nothing() -> None:
    facts = MessageLog()
    assert SketchExchange(facts, a_table(facts), (0, 2, 3), CUT, OUTPUTS).advance([]) == []


def test_the_sketches_that_count_are_those_that_a_word_names() -> None:
    """A liar may have sent the holders another one than me: the one that they name is found, whichever came first."""
    facts = MessageLog()
    sketches = SketchExchange(facts, a_table(facts), (0, 1, 3), CUT, OUTPUTS)
    messages = [wire.Sketch(SLOT, CUT, OUTPUTS, bytes([number]) * SIZE) for number in range(2)]
    short = wire.Sketch(SLOT, b"d" * 32, OUTPUTS, bytes(SIZE - 4))
    assert [say(facts, 3, message) for message in (*messages, short)] == ["new", "conflict", "new"]
    sketches.advance([])
    named = [unsigned(3, message).name for message in (*messages, short)]
    assert [sketches.tables_named(3, name) for name in named] == [bytes(SIZE), b"\1" * SIZE, None]
    assert sketches.tables_named(0, named[0]) is None
    assert sketches.tables(3) == bytes(SIZE)


def test_sketches_of_another_size_are_nobodys() -> None:
    facts = MessageLog()
    sketches = SketchExchange(facts, a_table(facts), (0,), CUT, OUTPUTS)
    say(facts, 0, wire.Sketch(SLOT, CUT, OUTPUTS, bytes(SIZE - 4)))
    assert not sketches.advance([])
    assert sketches.missing == {0}


def test_sketches_are_no_wider_than_a_message_takes() -> None:
    assert {members: columns_of(members) for members in (1, 16, 17, 32, 33, 64)} == {
        1: 128,
        16: 128,
        17: 64,
        32: 64,
        33: 32,
        64: 32,
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
        tables = sketch_parts(CODEC, told, BOUNDS, SEED, COLUMNS)
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
    later = signed(PEERS[2], replace(wire.opened(trial.commit), slot=SLOT.at(1)))
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
    assert kept == 1 + wire.MAX_OUTPUTS  # A full roster's are 57 MB.
    assert (
        sum(len(said.statements) for by_peer in witness._rounds.values() for said in by_peer.values()) == MAX_SKETCHES
    )
