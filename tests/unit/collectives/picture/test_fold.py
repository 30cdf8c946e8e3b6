"""The fold of certificates: the same rows whatever the order of arrival, and nothing that no quorum has signed."""

from collections.abc import Sequence

import pytest
from flockstep.collectives.accountability import credit
from flockstep.collectives.chain.certificate import value_of
from flockstep.collectives.picture import fold as limits
from flockstep.collectives.picture.fold import NOT_CUT, VOTED, ChainFold
from flockstep.collectives.picture.picture import NOT_COUNTED
from flockstep.collectives.spec import charter_of
from flockstep.dht.run.manifest import EvalSettings
from flockstep.peer import wire
from hypothesis import given, settings
from hypothesis import strategies as st
from support.keepers import key
from support.light import KEEPERS, SIGNED, chain_of
from support.pictures import crowd, round_of

CHAIN = chain_of(40)
LIARS = [key(50 + number) for number in range(4)]


def empty() -> ChainFold:
    return ChainFold(charter_of(SIGNED), lambda certificate: EvalSettings(7))


def folded(chain: Sequence[wire.Certificate]) -> ChainFold:
    fold = empty()
    fold.extend(chain)
    return fold


def shown(fold: ChainFold) -> object:
    return fold.view()


WHOLE = shown(folded(CHAIN))


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 40), st.lists(st.tuples(st.booleans(), st.integers(1, 16)), max_size=20))
def test_forwards_and_backwards_in_pages_of_any_size_make_the_same(start: int, moves: list[tuple[bool, int]]) -> None:
    fold = empty()
    fold.begin(CHAIN[start - 1])
    for forwards, size in [*moves, *((True, 16), (False, 16)) * 3]:
        head, first = fold.head.round, fold.view().first
        if forwards:
            fold.extend(CHAIN[head : head + size])
        elif first > 1:
            assert fold.prepend(CHAIN[max(0, first - 1 - size) : first - 1])
    assert shown(fold) == WHOLE


def test_what_is_held_already_is_no_news_and_a_gap_is_refused() -> None:
    fold = folded(CHAIN[:10])
    before = shown(fold)
    for page in (CHAIN[5:8], CHAIN[11:13], chain_of(3, CHAIN[7], mark=b"twice"), chain_of(3, mark=b"another")):
        fold.extend(page)
    assert shown(fold) == before


def test_what_is_before_another_certificate_is_not_taken() -> None:
    later = empty()
    assert not later.prepend(CHAIN[:9])
    later.begin(CHAIN[9])
    assert not later.prepend(CHAIN[:8])
    assert not later.prepend(chain_of(9, mark=b"another"))
    assert later.view().first == 10


def test_credit_and_due_evaluations_are_those_of_the_chain_that_is_held() -> None:
    first = round_of(None, KEEPERS, contributors=[0, 1, 3], flagged=[3])
    chain = [first, *chain_of(6, first)]
    names = value_of(first).members
    for fold in (folded(chain), empty()):
        if not fold.head.round:
            fold.begin(chain[6])
            fold.prepend(chain[:6])
        found = {one.peer: (one.tokens, one.rounds) for one in fold.view().credit}
        assert found == {names[0]: (250_150, 7), names[1]: (250_150, 7), names[2]: (150, 6), names[3]: (150, 7)}
        assert [due.round for due in fold.view().due] == [7]
        fold.begin(chain[2])
        assert ([one.rounds for one in fold.view().credit], fold.view().due, fold.head.round) == ([1] * 4, (), 3)


def test_of_ever_other_contributors_those_with_the_most_tokens_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(credit, "MAX_CONTRIBUTORS", 12)
    fold, everybody = empty(), crowd(44)
    for start in range(4, 44, 4):
        roster = [*KEEPERS, *everybody[start : start + 4]]
        fold.extend([round_of(fold.newest, roster, contributors=range(8))])
        found = fold.view().credit
        assert len(found) <= 12
        assert {one.peer for one in found[:4]} == {keeper.peer_id for keeper in KEEPERS} or start == 4
    assert [(one.tokens, one.rounds) for one in found[:5]] == [(2_500_000, 10)] * 4 + [(250_000, 1)]


def test_memory_is_bounded_and_the_newest_rounds_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_ROWS", 12)
    monkeypatch.setattr(limits, "MAX_RECENT", 6)
    monkeypatch.setattr(limits, "KEPT_WHOLE", 4)
    fold = folded(CHAIN)
    assert [row.round for row in fold.view().rows] == list(range(29, 41))
    assert [row.round for row in fold.view().recent] == [40, 39, 38, 37, 36, 35]
    assert not fold.prepend(CHAIN[20:28])
    assert fold.view().first == 29


def test_who_was_away_is_named_with_the_reason() -> None:
    roster = crowd(8)
    fold = empty()
    certificate = round_of(None, roster, contributors=[1, 2, 5], flagged=[5])
    fold.extend([certificate], {1: 2.5}, 5.0)
    (row,), (recent,) = fold.view().rows, fold.view().recent
    members = value_of(certificate).members
    assert (row.time, row.loss, row.members, row.contributors, row.flagged, row.voters) == (5.0, 2.5, 8, 3, 1, 4)
    assert recent.cut == tuple(members[place] for place in (1, 2, 5))
    keepers = {keeper.peer_id for keeper in KEEPERS}  # Which decide in this run, and have signed: no word of today counts.
    without = [members[place] for place in (0, 3, 4, 6, 7)]
    assert dict(recent.away) == {members[5]: NOT_COUNTED} | {
        peer: VOTED if peer in keepers else NOT_CUT for peer in without
    }
    assert {VOTED, NOT_CUT} <= {reason for _, reason in recent.away}
    assert (recent.quorum, recent.total) == (3, 4)
