"""What bootstraps name, and what a newcomer makes of it."""

from dataclasses import replace

import pytest
from flockstep.collectives.light.marks import (
    MARKS_EACH,
    MAX_MARKS,
    MAX_MARKS_BYTES,
    Mark,
    Marks,
    agreement_of,
    decode_marks,
    thinned,
)
from flockstep.peer.base.digest import keyed
from flockstep.peer.base.errors import MalformedMessage
from flockstep.peer.wire.schema import encode
from hypothesis import given
from hypothesis import strategies as st

RUN = "a" * 52


def mark(round_: int, branch: str = "", since: int = 0) -> Mark:
    """The certificate of a round, on another branch from round `since` on."""
    return Mark(round_, keyed("hash of a test", str(round_).encode(), (branch if round_ >= since else "").encode()))


def chain(head: int, branch: str = "", since: int = 1, first: int = 0) -> Marks:
    """What a bootstrap names that has followed all rounds from `first` on."""
    kept: tuple[Mark, ...] = ()
    for round_ in range(first, head + 1):
        kept = thinned((*kept, mark(round_, branch, since)), round_)
    return Marks(RUN, kept)


def test_the_newest_rounds_are_all_there_older_ones_ever_more_rarely() -> None:
    named = chain(3000)
    rounds = [mark.round for mark in named.marks]
    assert rounds[-MARKS_EACH:] == list(range(3000 - MARKS_EACH + 1, 3001))
    assert rounds == sorted(set(rounds))
    assert rounds[0] == 0
    assert len(rounds) < 28 * 4 + MARKS_EACH
    assert {2752, 2048, 1024} <= set(rounds)
    assert not {2751, 2000} & set(rounds)


@given(st.integers(1, 400), st.integers(0, 2000))
def test_two_honest_bootstraps_agree_on_a_round_near_the_older_head(older: int, behind: int) -> None:
    named = {"a": chain(older), "b": chain(older + behind)}
    start = agreement_of(named).start
    assert start is not None
    assert start.round >= older - max(0, behind) // 2 - 1
    assert (start.round == older) or behind >= MARKS_EACH
    assert agreement_of(named).outvoted == ()


def test_one_bootstrap_alone_is_believed() -> None:
    assert agreement_of({"a": chain(70)}).start == mark(70)


def test_one_of_three_that_names_a_fork_is_outvoted_and_named() -> None:
    found = agreement_of({"a": chain(70), "b": chain(72, "fork", since=60), "c": chain(71)})
    assert (found.start, found.outvoted) == (mark(70), ("b",))


def test_one_of_three_that_invents_a_head_far_ahead_moves_nobody() -> None:
    liar = Marks(RUN, (*chain(70).marks, mark(10**9, "invented")))
    assert agreement_of({"a": chain(70), "b": liar, "c": chain(71)}).start == mark(70)
    alone = Marks(RUN, (mark(10**9, "invented"),))
    found = agreement_of({"a": chain(70), "b": alone, "c": chain(71)})
    assert (found.start, found.outvoted) == (mark(70), ("b",))


def test_one_of_three_that_names_an_old_head_holds_nobody_back() -> None:
    assert agreement_of({"a": chain(3000), "b": chain(5), "c": chain(3001)}).start == mark(3000)


def test_two_that_name_different_chains_disagree() -> None:
    assert agreement_of({"a": chain(70), "b": chain(72, "fork", since=60)}).start is None
    assert agreement_of({"a": chain(70), "b": Marks(RUN, (mark(10**9, "invented"),))}).start is None


def test_two_against_two_disagree_whatever_they_had_in_common() -> None:
    forks = {name: chain(70 + index, "fork" if index > 1 else "", since=60) for index, name in enumerate("abcd")}
    assert agreement_of(forks).start is None


def test_where_most_know_of_no_round_yet_nothing_is_named() -> None:
    start = agreement_of({"a": chain(0), "b": chain(0), "c": chain(50, "invented")}).start
    assert start is not None
    assert start.round == 0


@given(st.binary(max_size=200))
def test_junk_is_refused(data: bytes) -> None:
    with pytest.raises(MalformedMessage):
        decode_marks(data, RUN)


def test_only_marks_of_this_run_in_order_and_within_their_limits_are_taken() -> None:
    good = chain(70)
    assert decode_marks(encode(good), RUN) == good
    for bad in (
        encode(replace(good, run="b" * 52)),
        encode(replace(good, marks=good.marks[::-1])),
        encode(replace(good, marks=(*good.marks, good.marks[-1]))),
        encode(good)[:-1],
        encode(good) + b"\0",
        bytes(MAX_MARKS_BYTES + 1),
    ):
        with pytest.raises(MalformedMessage):
            decode_marks(bad, RUN)


def test_the_longest_chain_fits_into_its_limits() -> None:
    head = 1 << 62
    spacings = [8**level for level in range(21)]
    rounds = {head - head % spacing - back * spacing for spacing in spacings for back in range(MARKS_EACH)}
    kept = thinned((mark(round_) for round_ in sorted(rounds) if round_ >= 0), head)
    assert len(kept) > 28 * 19
    assert len(kept) <= MAX_MARKS
    assert len(encode(Marks("a" * 64, kept))) <= MAX_MARKS_BYTES
