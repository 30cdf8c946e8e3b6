"""Votes: quorums, proposers, and how far enough voters are."""

from itertools import combinations
from random import Random

import pytest
from flockstep.collectives.agreement.electorate import LIAR_PROOF, NOBODY, Electorate
from flockstep.peer.base.errors import LocalError
from hypothesis import given
from hypothesis import strategies as st

VOTES = st.dictionaries(st.text("abcdefgh", min_size=1, max_size=3), st.integers(1, 50), min_size=1, max_size=10)


@pytest.mark.parametrize(("n", "quorum", "third"), [(1, 1, 1), (2, 2, 1), (3, 2, 2), (4, 3, 2), (10, 7, 4)])
def test_a_quorum_is_more_than_two_thirds_of_all_and_of_three_two(n: int, quorum: int, third: int) -> None:
    electorate = Electorate({f"v{number}": 1 for number in range(n)})
    assert (electorate.quorum, electorate.third) == (quorum, third)


@given(VOTES, st.data())
def test_two_quorums_share_more_than_liars_can_hold(votes: dict[str, int], data: st.DataObject) -> None:
    electorate = Electorate(votes)
    some = st.sets(st.sampled_from(sorted(votes)))
    one, other = data.draw(some), data.draw(some)
    if electorate.is_quorum(one) and electorate.is_quorum(other):
        assert one & other
        assert len(votes) < LIAR_PROOF or electorate.votes_of(one & other) >= electorate.third


@given(VOTES, st.integers(0, 1000), st.integers(0, 1000), st.randoms())
def test_invariant_5_all_copies_of_one_electorate_name_the_same_proposer(
    votes: dict[str, int], round_: int, attempt: int, chance: Random
) -> None:
    items = list(votes.items())
    chance.shuffle(items)
    one, other = Electorate(votes), Electorate(dict(items))
    assert one == other
    assert hash(one) == hash(other)
    assert (one.quorum, one.voters) == (other.quorum, other.voters)
    assert one.proposer(round_, attempt) == other.proposer(round_, attempt)
    turns = {one.proposer(round_, attempt + turn) for turn in range(len(votes))}
    assert turns == set(votes)  # Nobody is left out, and nobody comes twice.


@given(VOTES)
def test_no_fewer_voters_are_a_quorum(votes: dict[str, int]) -> None:
    electorate = Electorate(votes)
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
    if len(votes) >= LIAR_PROOF:
        assert (electorate.votes_of(some) >= electorate.blocking) is not electorate.is_quorum(votes.keys() - some)
    else:
        assert Electorate(dict.fromkeys(votes, 1)).blocking == 1  # None of them lies.


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
