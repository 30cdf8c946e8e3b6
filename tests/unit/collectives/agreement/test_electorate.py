"""Votes: quorums, conveners, and how far enough voters are."""

from itertools import combinations
from random import Random

import pytest
from flockstep.collectives.agreement.electorate import NOBODY, Electorate
from flockstep.peer.errors import LocalError
from hypothesis import given
from hypothesis import strategies as st

VOTES = st.dictionaries(st.text("abcdefgh", min_size=1, max_size=3), st.integers(1, 50), min_size=1, max_size=10)


@pytest.mark.parametrize(
    ("n", "quorum", "third", "majority"), [(1, 1, 1, 1), (2, 2, 1, 2), (3, 3, 2, 2), (4, 3, 2, 3), (10, 7, 4, 6)]
)
def test_a_quorum_is_more_than_two_thirds_of_all(n: int, quorum: int, third: int, majority: int) -> None:
    votes = {f"v{number}": 1 for number in range(n)}
    assert (Electorate(votes).quorum, Electorate(votes).third) == (quorum, third)
    assert Electorate(votes, is_majority=True).quorum == majority


@given(VOTES, st.data())
def test_two_quorums_share_more_than_liars_can_hold(votes: dict[str, int], data: st.DataObject) -> None:
    full, half = Electorate(votes), Electorate(votes, is_majority=True)
    some = st.sets(st.sampled_from(sorted(votes)))
    one, other = data.draw(some), data.draw(some)
    if full.is_quorum(one) and full.is_quorum(other):
        assert full.votes_of(one & other) >= full.third
    if half.is_quorum(one) and half.is_quorum(other):
        assert one & other


@given(VOTES, st.integers(0, 1000), st.integers(0, 1000), st.randoms())
def test_invariant_5_all_copies_of_one_electorate_name_the_same_convener(
    votes: dict[str, int], round_: int, attempt: int, chance: Random
) -> None:
    items = list(votes.items())
    chance.shuffle(items)
    one, other = Electorate(votes), Electorate(dict(items))
    assert one == other
    assert hash(one) == hash(other)
    assert (one.quorum, one.voters) == (other.quorum, other.voters)
    assert one.convener(round_, attempt) == other.convener(round_, attempt)
    turns = {one.convener(round_, attempt + turn) for turn in range(len(votes))}
    assert turns == set(votes)  # Nobody is left out, and nobody comes twice.


@given(VOTES, st.booleans())
def test_no_fewer_voters_are_a_quorum(votes: dict[str, int], is_majority: bool) -> None:
    electorate = Electorate(votes, is_majority=is_majority)
    sizes = [count for count in range(len(votes) + 1) for some in combinations(votes, count) if electorate.is_quorum(some)]
    assert electorate.fewest == min(sizes)


def test_nobody_never_decides() -> None:
    assert not NOBODY.is_quorum(["A", "B", "C"])
    assert NOBODY.frontier({"A": 3, "B": 3}) is None


def test_others_than_voters_and_repeated_ones_count_nothing() -> None:
    electorate = Electorate({"A": 1, "B": 1, "C": 1, "D": 1})
    assert electorate.votes_of(["A", "A", "B", "X", "Y"]) == 2
    assert not electorate.is_quorum(["A", "B", "B", "X"])


@given(VOTES, st.data())
def test_voters_block_a_quorum_or_the_others_are_one(votes: dict[str, int], data: st.DataObject) -> None:
    electorate, some = Electorate(votes), data.draw(st.sets(st.sampled_from(sorted(votes))))
    assert (electorate.votes_of(some) >= electorate.blocking) is not electorate.is_quorum(votes.keys() - some)


def test_the_frontier_is_where_more_than_a_third_is_at_least() -> None:
    electorate = Electorate({"A": 1, "B": 1, "C": 1, "D": 1})
    assert electorate.frontier({}) is None
    assert electorate.frontier({"A": 9}) is None
    assert electorate.frontier({"A": 10**18, "B": 2}) == 2
    assert electorate.frontier({"A": 9, "B": 2, "C": 5, "D": 0}) == 5
    assert electorate.frontier({"X": 9, "Y": 9, "Z": 9}) is None


@pytest.mark.parametrize("votes", [{}, {"A": 0}, {"A": 2, "B": -1}])
def test_an_electorate_without_votes_is_refused(votes: dict[str, int]) -> None:
    with pytest.raises(LocalError, match="at least one vote"):
        Electorate(votes)
