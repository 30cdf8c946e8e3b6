"""Votes earned by work: exact whole numbers, and the electorate of one certificate."""

from dataclasses import replace
from fractions import Fraction
from math import floor

from flockstep.collectives.agreement.electorate import Electorate
from flockstep.collectives.chain.balances import balance_after, balances_of, shares_of
from flockstep.collectives.chain.voters import MAX_WORKING_VOTERS, electorate_after
from flockstep.dht.run.admission import Charter
from flockstep.peer import wire
from flockstep.peer.identity import Identity
from flockstep.peer.wire.schema import decode, encode
from hypothesis import given
from hypothesis import strategies as st
from support.certificates import RUN

WORK = Charter(RUN, founders=frozenset({"the founder"}), by_work=True)
FOUNDER = Electorate({"the founder": 1})
IDS = tuple(sorted(Identity.from_seed(bytes([number, 3]) * 16).peer_id for number in range(64)))
PORTIONS = st.integers(0, wire.WHOLE_SHARE)
WEIGHTS = st.floats(-2.0, 2.0, allow_nan=False, width=64)


def valued(balances: list[int], shares: list[int], leaving: frozenset[int] = frozenset()) -> wire.Value:
    """The value of a round whose first members contributed."""
    count = len(balances)
    seats = tuple(wire.Seat(1.0, 20, balance=held, is_leaving=at in leaving) for at, held in enumerate(balances))
    return wire.Value(
        *(RUN, 3, b"p" * 32, bytes(32), IDS[:count], tuple(range(count + 1)), seats, b"c" * 32),
        *(tuple(range(len(shares))), (b"o" * 32,) * count, b"n" * 32, 900),
        shares=tuple(shares),
    )


VALUES = st.lists(PORTIONS, min_size=1, max_size=64).flatmap(
    lambda balances: st.builds(
        valued,
        st.just(balances),
        st.lists(PORTIONS, min_size=1, max_size=len(balances)),
        st.frozensets(st.integers(0, len(balances) - 1)),
    )
)


@given(PORTIONS, PORTIONS)
def test_a_balance_moves_by_the_floor_of_a_32nd_of_its_distance_to_the_share(balance: int, share: int) -> None:
    after = balance_after(balance, share)
    assert after == balance + floor(Fraction(share - balance, 32))
    assert 0 <= after <= wire.WHOLE_SHARE
    assert min(balance, share) <= after <= max(balance, share)


@given(PORTIONS, st.integers(0, 60))
def test_who_is_away_loses_in_each_round_as_who_is_here_without_a_share(balance: int, rounds: int) -> None:
    here = balance
    for _ in range(rounds):
        here = balance_after(here, 0)
    assert balance_after(balance, rounds=rounds) == here


def test_a_balance_ends_at_zero() -> None:
    assert balance_after(wire.WHOLE_SHARE, rounds=700) == 0
    assert balance_after(1) == 0


@given(st.integers(1, 6).flatmap(lambda n: st.lists(st.lists(WEIGHTS, min_size=n, max_size=n), min_size=1, max_size=6)))
def test_shares_are_the_weights_by_cells_and_never_more_than_the_whole(weights: list[list[float]]) -> None:
    bounds = [0, *(number * (number + 1) // 2 for number in range(1, len(weights) + 1))]
    shares = shares_of(weights, bounds)
    assert min(shares) >= 0
    assert sum(shares) <= wire.WHOLE_SHARE
    exact = [Fraction(0)] * len(weights[0])
    for row, low, high in zip(weights, bounds, bounds[1:], strict=False):
        exact = [part + (high - low) * Fraction(max(0.0, weight)) for part, weight in zip(exact, row, strict=True)]
    if sum(exact) > len(weights) * bounds[-1] * Fraction(1, 1000):
        for share, part in zip(shares, exact, strict=True):
            assert abs(Fraction(share, wire.WHOLE_SHARE) - part / sum(exact)) < Fraction(1, 1 << 17)


def test_of_weights_that_are_all_nothing_nobody_earns_a_share() -> None:
    assert shares_of([[0.0, -1.0]], [0, 8]) == (0, 0)


@given(VALUES)
def test_one_certificate_gives_one_electorate_to_whoever_holds_it(value: wire.Value) -> None:
    copy = decode(wire.Value, encode(value), max_bytes=wire.MAX_VALUE_BYTES)
    electorate = electorate_after(value, WORK)
    assert electorate_after(copy, WORK) == electorate
    if electorate == FOUNDER:
        return
    balances = dict(zip(value.members, balances_of(value), strict=True))
    assert all(balances[voter] == votes > 0 for voter, votes in electorate.votes.items())
    assert len(electorate.votes) <= MAX_WORKING_VOTERS
    leaving = {peer for peer, seat in zip(value.members, value.seats, strict=True) if seat.is_leaving}
    assert not leaving & electorate.votes.keys() or len(leaving) == len(value.members)
    least = min(electorate.votes.values())
    rest = [balances[peer] for peer in value.members if peer not in electorate.votes and peer not in leaving]
    assert len(electorate.votes) == MAX_WORKING_VOTERS or not any(rest)
    assert max(rest, default=0) <= least


def test_votes_are_what_is_earned_and_a_key_without_a_share_has_none() -> None:
    whole = wire.WHOLE_SHARE
    value = valued([0, 3200, 0], [whole // 2, 3200])
    assert dict(electorate_after(value, WORK).votes) == {IDS[0]: whole // 64, IDS[1]: 3200}
    assert electorate_after(replace(value, shares=(0, 0)), WORK).voters == IDS[1:2]
    assert electorate_after(valued([0], [0]), WORK) == FOUNDER


def test_more_than_forty_do_not_vote_however_much_each_has_earned() -> None:
    electorate = electorate_after(valued([1 << 20] * 24 + [1 << 21] * 40, [0]), WORK)
    assert electorate.voters == IDS[24:]
    assert len(electorate.voters) == MAX_WORKING_VOTERS
