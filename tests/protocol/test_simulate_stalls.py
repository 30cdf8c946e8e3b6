"""`flockstep simulate`: stalls, kills and partitions: where too few voters are here, the run waits."""

from dataclasses import replace

import pytest
from flockstep.scripts.lab.simulate.check import RoundRow
from flockstep.scripts.lab.simulate.options import Partition, SimulateOptions, Span, Strike
from flockstep.scripts.lab.simulate.report import Report
from flockstep.scripts.lab.simulate.world import simulate
from support.simulations import CALM

BARE = replace(CALM, rule="mean", steps_time=Span(10.0, 12.0))
APART = 60.0
"""Seconds of a partition, or until the killed are back."""


def row_of(report: Report, number: int) -> RoundRow:
    return next(row for row in report.rows if row.number == number)


def lasted(report: Report, number: int) -> float:
    row = row_of(report, number)
    assert row.certified
    return row.certified - row.began


@pytest.mark.parametrize("seconds", [5.0, 12.0])
def test_two_that_lose_each_other_for_seconds_decide_together_when_they_hear_each_other_again(seconds: float) -> None:
    """Too soon to say that one of them is away."""
    for seed in range(2):
        struck = replace(BARE, peers=2, rounds=4, seed=seed, strikes=(Strike(3, "Roster", "stall", "proposer", seconds),))
        report = simulate(struck)
        assert not report.violations
        assert not report.stalled
        assert row_of(report, 3).void


def test_a_run_goes_on_as_soon_as_enough_are_back() -> None:
    kills = tuple(Strike(2, "Ready", "kill", number, APART) for number in range(4, 8))
    report = simulate(replace(BARE, peers=8, rounds=4, strikes=kills))
    assert not report.violations
    assert report.living == 8
    assert APART < lasted(report, 2) < APART + 40.0
    assert len(report.stalled) == 1


@pytest.mark.parametrize(("groups", "waits"), [((3, 2), True), ((4, 1), False)])
def test_through_a_partition_there_is_one_chain_and_it_goes_on_where_a_quorum_is(
    groups: tuple[int, int], waits: bool
) -> None:
    split = Partition(groups, 2, APART)
    report = simulate(replace(BARE, peers=sum(groups), rounds=9, partitions=(split,)))
    assert not report.violations
    assert (lasted(report, 2) > APART - 15.0) == waits
    assert len(set(row_of(report, 9).holders.values())) == 1


def test_who_is_ready_long_before_the_others_waits_for_them_and_does_not_decide_alone() -> None:
    report = simulate(replace(BARE, peers=5, rounds=4, steps_time=Span(20.0, 90.0), seed=3))
    assert not report.violations
    assert not report.stalled


def leaving(names: tuple[int, ...]) -> SimulateOptions:
    strikes = tuple(Strike.parse(f"round=2,after=Precommit,leave={name}", 4) for name in names)
    return replace(BARE, peers=4, rounds=5, strikes=strikes)


def test_who_leaves_in_order_costs_no_stall_and_has_no_vote_that_is_missed() -> None:
    report = simulate(leaving((0, 1)))
    assert not report.violations
    assert not report.unmet
    assert report.living == 2
    assert not report.stalled
    assert all(row.certified for row in report.rows)
