"""Evidence: which bytes convict which author, and that no others do."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from flockstep.collectives.accountability.evidence import (
    MAX_STATEMENTS,
    MAX_WITNESSED_BYTES,
    Conviction,
    Exhibit,
    Pending,
    Witness,
    claim_of,
    judge_claim,
    look_at,
)
from flockstep.collectives.accountability.statements import STATEMENTS
from flockstep.collectives.robust.checks import seed_of
from flockstep.collectives.spec import Terms
from flockstep.collectives.vector.codec import CELL, codec_named
from flockstep.collectives.vector.mixed import codecs_named
from flockstep.peer import wire
from flockstep.peer.base.digest import digest
from flockstep.peer.base.errors import NetworkError
from flockstep.peer.identity import Identity
from flockstep.peer.wire import Claim
from flockstep.peer.wire.schema import encode
from flockstep.peer.wire.signed import verify_signed
from hypothesis import given
from hypothesis import strategies as st
from support.certificates import RUN, seats, signed

LIAR, ACCUSER, OTHER = (Identity.from_seed(bytes([n]) * 32) for n in (1, 2, 3))
TERMS = Terms(RUN, 4, codec_named("int4"), codec_named("int4"))
SLOT = wire.Slot(RUN, 3, b"p" * 32, 1)
ZERO, NAME = bytes(32), bytes(wire.NAME_BYTES)
ROSTER = wire.Roster(SLOT, ZERO, (LIAR.peer_id, OTHER.peer_id), (0, 3, 4), seats(2), b"\3", ZERO)
OPENING = signed(OTHER, ROSTER)
GOOD = bytes(TERMS.contribution.encode(np.linspace(-1, 1, 3 * CELL).astype(np.float32)))
BAD = b"\xff" * len(GOOD)
SEED = seed_of(b"c" * 32, (b"o" * 32,) * 2)

SAID: Any = ((0, NAME),), (0,), (b"", b"")
"""What a Cut holds beside its holders."""
WORDS: tuple[tuple[wire.RoundMessage, wire.RoundMessage], ...] = (
    (ROSTER, replace(ROSTER, bounds=(0, 1, 4))),
    (wire.Ready(SLOT, ZERO, 1, 1.0, 1.0, ZERO), wire.Ready(SLOT, ZERO, 1, 1.0, 1.0, ZERO, b"invite")),
    (wire.Commit(SLOT, ZERO, 1, 1, 0.5, (ZERO,)), wire.Commit(SLOT, ZERO, 2, 1, 0.5, (ZERO,))),
    (wire.Cut(SLOT, ZERO, b"", (0, 1), *SAID), wire.Cut(SLOT, ZERO, b"", (1, 1), *SAID)),
    (wire.Result(SLOT, ZERO, 1, ZERO), wire.Result(SLOT, ZERO, 1, b"1" * 32)),
    (wire.Cut(SLOT, ZERO, ZERO, (0, 1), *SAID), wire.Cut(SLOT, ZERO, b"1" * 32, (0, 1), *SAID)),
    (wire.Sketch(SLOT, ZERO, (), b"1"), wire.Sketch(SLOT, ZERO, (), b"2")),
    (wire.Outputs(SLOT, ZERO, 0, (ZERO,), ()), wire.Outputs(SLOT, ZERO, 0, (ZERO,), (0,))),
    (wire.Propose(SLOT, b"value", ZERO), wire.Propose(SLOT, b"value", b"", (b"ready",))),
    (wire.Prevote(SLOT, ZERO), wire.Prevote(SLOT, b"1" * 32)),
    (wire.Precommit(SLOT, ZERO), wire.Precommit(SLOT, b"1" * 32)),
)
"""Of each kind two statements that nobody honest makes both."""
COMMITS, CUTS, RESULTS = WORDS[2:5]
COMPATIBLE: tuple[tuple[wire.RoundMessage, wire.RoundMessage], ...] = (
    (CUTS[0], wire.Cut(SLOT, ZERO, ZERO, (0, 1), *SAID)),
    (RESULTS[0], wire.Result(SLOT, ZERO, 0, b"1" * 32)),
    (RESULTS[0], wire.Result(SLOT, b"2" * 32, 1, b"1" * 32)),
    (wire.Outputs(SLOT, ZERO, 0, (ZERO,), ()), wire.Outputs(SLOT, ZERO, 1, (ZERO,), (0,))),
    (wire.Outputs(SLOT, ZERO, 0, (ZERO,), ()), wire.Outputs(SLOT, b"1" * 32, 0, (ZERO,), (0,))),
    (wire.Have(SLOT, ZERO, b"", ((0, (0,)),), NAME, ZERO), wire.Have(SLOT, ZERO, b"", (), b"", ZERO)),
    (wire.Have(SLOT, ZERO, b"", ((0, (0,)),), NAME, ZERO), wire.Have(SLOT, ZERO, b"", ((0, (0,)),), b"n" * 16, ZERO)),
    (wire.Void(SLOT, "one"), wire.Void(SLOT, "two")),
    (wire.Prevote(SLOT, ZERO), wire.Precommit(SLOT, b"1" * 32)),
    (wire.Sketch(SLOT, ZERO, (), b"1"), wire.Sketch(SLOT, ZERO, (ZERO,), b"2")),
    *(
        (COMMITS[0], replace(COMMITS[1], slot=slot))
        for slot in (SLOT.at(2), replace(SLOT, round=4), replace(SLOT, previous=ZERO))
    ),
)


def tried(*statements: wire.Signed, part: int = 0) -> Conviction | Pending:
    return judge_claim(ACCUSER.peer_id, claim_of(RUN, statements, part), TERMS, verify_signed)


def guilty(*statements: wire.Signed, part: int = 0) -> str:
    found = tried(*statements, part=part)
    assert isinstance(found, Conviction)
    return found.guilty


@pytest.mark.parametrize(("first", "second"), WORDS)
def test_two_statements_on_one_subject_convict_their_author(
    first: wire.RoundMessage, second: wire.RoundMessage
) -> None:
    assert guilty(signed(LIAR, first), signed(LIAR, second)) == LIAR.peer_id


def test_every_convicting_kind_is_tried_here() -> None:
    assert {type(first) for first, _ in WORDS} == {kind for kind, rules in STATEMENTS.items() if rules.convicts}


@pytest.mark.parametrize(("first", "second"), COMPATIBLE)
def test_statements_that_can_both_be_made_convict_the_accuser(
    first: wire.RoundMessage, second: wire.RoundMessage
) -> None:
    assert guilty(signed(LIAR, first), signed(LIAR, second)) == ACCUSER.peer_id


def test_whatever_is_not_the_same_peers_signed_word_in_this_run_convicts_the_accuser() -> None:
    first, second = (signed(LIAR, word) for word in COMMITS)
    forged = replace(second, signature=bytes(64))
    elsewhere = [signed(LIAR, replace(word, slot=replace(SLOT, run="other"))) for word in COMMITS]
    for statements in (
        (first, first),
        (first, forged),
        (forged, first),
        (first, signed(OTHER, COMMITS[1])),
        (first, signed(LIAR, CUTS[0])),
        tuple(elsewhere),
    ):
        assert guilty(*statements) == ACCUSER.peer_id


@given(st.lists(st.binary(max_size=200), min_size=2, max_size=3), st.integers(0, 63))
def test_no_bytes_break_the_judge(statements: list[bytes], part: int) -> None:
    found = judge_claim(ACCUSER.peer_id, Claim(RUN, tuple(statements), part), TERMS, verify_signed)
    assert isinstance(found, Conviction)
    assert found.guilty == ACCUSER.peer_id


@pytest.mark.parametrize(("data", "culprit"), [(BAD, LIAR), (GOOD, ACCUSER)])
def test_the_bytes_of_a_commit_decide_who_is_guilty(data: bytes, culprit: Identity) -> None:
    commit = signed(LIAR, wire.Commit(SLOT, OPENING.hash, 1, 1, 0.5, (digest(data), ZERO)))
    found = tried(commit, OPENING)
    assert isinstance(found, Pending)
    assert found.exhibit == Exhibit(digest(data), TERMS.contribution, 3)
    assert found.exhibit.num_bytes == len(data)
    assert look_at(ACCUSER.peer_id, found, data).guilty == culprit.peer_id


def test_the_bytes_of_a_commit_are_judged_in_the_codec_that_it_states() -> None:
    terms = replace(TERMS, contribution=codecs_named(["int4", "lloyd2"]))
    data = codec_named("lloyd2").encode(np.ones(3 * CELL, np.float32))
    commit = signed(LIAR, wire.Commit(SLOT, OPENING.hash, 1, 1, 0.5, (digest(data), ZERO), codec="lloyd2"))
    found = judge_claim(ACCUSER.peer_id, claim_of(RUN, (commit, OPENING), 0), terms, verify_signed)
    assert isinstance(found, Pending)
    assert found.exhibit == Exhibit(digest(data), codec_named("lloyd2", contributed=True), 3)
    assert look_at(ACCUSER.peer_id, found, data).guilty == ACCUSER.peer_id
    assert look_at(ACCUSER.peer_id, found, bytes(len(data) - 1) + b"!").guilty == LIAR.peer_id
    assert guilty(commit, OPENING) == ACCUSER.peer_id  # In a run without that codec it names no part.


@pytest.mark.parametrize(("data", "culprit"), [(BAD, LIAR), (GOOD, ACCUSER)])
def test_the_bytes_of_an_output_decide_who_is_guilty(data: bytes, culprit: Identity) -> None:
    cut = signed(OTHER, wire.Cut(SLOT, OPENING.hash, b"", (0, 1), ((0, NAME), (1, NAME)), (0, 1), (b"",) * 2))
    result = signed(LIAR, wire.Result(SLOT, cut.hash, 0, digest(data)))
    found = tried(result, cut, OPENING)
    assert isinstance(found, Pending)
    assert look_at(ACCUSER.peer_id, found, data).guilty == culprit.peer_id
    assert guilty(result, OPENING, cut) == ACCUSER.peer_id


ABOUT_ANOTHER: Mapping[str, dict[str, Any]] = {
    "part": {"tables": ((1, b""),)},
    "contributor": {"contributor": 0},
    "nobody": {"contributor": 2},
    "commit": {"commit": NAME},
    "slot": {"slot": SLOT.at(2)},
}


def test_where_the_codecs_of_a_round_are_not_known_bytes_convict_nobody_and_contradictions_do() -> None:
    assert isinstance(COMMITS[0], wire.Commit)
    commit = signed(LIAR, replace(COMMITS[0], roster=OPENING.hash, parts=(digest(BAD), ZERO)))
    with pytest.raises(NetworkError, match="the codecs of round"):
        judge_claim(ACCUSER.peer_id, claim_of(RUN, (commit, OPENING), 0), None, verify_signed)
    twice = tuple(signed(LIAR, word) for word in COMMITS)
    found = judge_claim(ACCUSER.peer_id, claim_of(RUN, twice, 0), None, verify_signed)
    assert isinstance(found, Conviction)
    assert found.guilty == LIAR.peer_id


def test_nobody_can_make_me_fetch_more_than_a_part() -> None:
    """A roster that nobody accepts may say anything: an exhibit is never larger than the vector of the run."""
    huge = signed(LIAR, replace(ROSTER, bounds=(0, 1 << 40, 1 << 41)))
    for opening, part in ((huge, 0), (OPENING, 1), (OPENING, 5)):
        commit = signed(LIAR, wire.Commit(SLOT, opening.hash, 1, 1, 0.5, (ZERO, ZERO)))
        found = tried(commit, opening, part=part)
        assert isinstance(found, Conviction if part != 1 else Pending)
        if isinstance(found, Pending):
            assert found.exhibit.num_cells == 1


def test_a_witness_remembers_the_first_statement_and_forgets_old_rounds() -> None:
    witness = Witness()
    for (first, second), present in zip(WORDS, (3, 2, 4, 5, 3, 3, 3, 2, 4, 5, 3), strict=True):
        one, two = signed(LIAR, first), signed(LIAR, second)
        assert witness.see(one, first, at(present)) is None
        assert witness.see(one, first, at(present)) is None
        assert witness.see(signed(OTHER, second), second, at(present)) is None
        assert witness.see(two, second, at(present)) is one
    for first, second in COMPATIBLE:
        witness = Witness()
        assert witness.see(signed(LIAR, first), first, at(3)) is None
        assert witness.see(signed(LIAR, second), second, at(3)) is None
    one, two = (signed(LIAR, word) for word in COMMITS)
    for present in (1, 6):
        assert witness.see(two, COMMITS[1], at(present)) is None
    witness = Witness()
    witness.see(one, COMMITS[0], at(3))
    witness.advance(6)
    assert witness.see(two, COMMITS[1], at(5)) is None


@pytest.mark.parametrize("attempt", [0, 1, 2])
def test_harmless_statements_in_any_attempt_push_out_no_contradiction(
    attempt: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A liar fills its memory first (or between its two statements), with what it may state as often as it likes."""
    monkeypatch.setattr("flockstep.collectives.accountability.evidence.MAX_STATEMENTS", most := 20)
    slot = SLOT.at(attempt)
    for one, two in zip(signed_by_liar(0), signed_by_liar(1), strict=True):
        witness = Witness()
        for number in range(most):
            witness.see(*junk(slot, number), SLOT)
        assert witness.see(*one, SLOT) is None
        for number in range(most, 2 * most):
            witness.see(*junk(slot, number), SLOT)
        assert witness.see(*two, SLOT) is one[0]
        said = witness._rounds[3][LIAR.peer_id]
        assert len(said.statements) == most
        assert witness.num_bytes == said.num_bytes == sum(len(word.payload) for word in {*said.statements.values()})


def test_what_is_nearest_to_my_attempt_is_remembered() -> None:
    witness = Witness()
    for attempt in range(MAX_STATEMENTS + 7):
        word = wire.Prevote(SLOT.at(attempt), ZERO)
        witness.see(signed(LIAR, word), word, SLOT.at(7))
    kept = [subject[0] for subject in witness._rounds[3][LIAR.peer_id].statements]
    assert kept == [*range(MAX_STATEMENTS - 1), MAX_STATEMENTS + 6]


def test_what_all_peers_say_takes_a_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flockstep.collectives.accountability.evidence.MAX_WITNESSED_BYTES", 10_000)
    assert MAX_WITNESSED_BYTES == 64 << 20
    witness = Witness()
    one, two = (signed(OTHER, word) for word in COMMITS)
    witness.see(one, COMMITS[0], SLOT)
    for number in range(200):
        for peer in ("a", "b", "c"):
            word, message = junk(SLOT, number)
            witness.see(replace(word, sender=peer), message, SLOT)  # The loudest ones make room.
    assert 9_000 < witness.num_bytes <= 10_000
    assert witness.see(two, COMMITS[1], SLOT) is one
    witness.advance(9)
    assert witness.num_bytes == 0


def at(round_: int) -> wire.Slot:
    return wire.Slot(RUN, round_, ZERO)


def junk(slot: wire.Slot, number: int) -> tuple[wire.Signed, wire.RoundMessage]:
    word = wire.Result(slot, number.to_bytes(32), 0, ZERO)
    return wire.Signed(LIAR.peer_id, wire.code_of(word), encode(word), bytes(64)), word


def signed_by_liar(index: int) -> list[tuple[wire.Signed, wire.RoundMessage]]:
    return [(signed(LIAR, pair[index]), pair[index]) for pair in WORDS if not isinstance(pair[index], wire.Result)]
