"""`flockstep simulate`: churn by sessions, kills and partitions: where too few voters are here, the run waits."""

from dataclasses import replace

import pytest
from flockstep.peer.base.errors import UsageError
from flockstep.scripts.lab.simulate.check import RoundRow
from flockstep.scripts.lab.simulate.options import Kill, Partition, SimulateOptions, Span, Strike
from flockstep.scripts.lab.simulate.report import Report
from flockstep.scripts.lab.simulate.world import simulate
from support.simulations import CALM

BARE = replace(CALM, rule="mean", tensors=False, steps_time=Span(10.0, 12.0))
APART = 60.0
"""Seconds of a partition, or until the killed are back."""


def row_of(report: Report, number: int) -> RoundRow:
    return next(row for row in report.rows if row.number == number)


def lasted(report: Report, number: int) -> float:
    row = row_of(report, number)
    assert row.certified
    return row.certified - row.began


@pytest.mark.parametrize("seconds", [5.0, 8.0, 12.0])
def test_two_that_lose_each_other_for_seconds_decide_together_when_they_hear_each_other_again(seconds: float) -> None:
    """Too soon to say that one of them is away."""
    for seed in range(4):
        struck = replace(BARE, peers=2, rounds=4, seed=seed, strikes=(Strike(3, "Roster", "stall", "proposer", seconds),))
        report = simulate(struck)
        assert not report.violations
        assert report.stalls()["rounds"] == 0
        assert row_of(report, 3).void


def test_a_run_goes_on_as_soon_as_enough_are_back() -> None:
    report = simulate(replace(BARE, peers=8, rounds=4, kills=(Kill(4, 2, APART),)))
    assert not report.violations
    assert report.living == 8
    assert APART < lasted(report, 2) < APART + 40.0
    assert report.stalls()["rounds"] == 1


@pytest.mark.parametrize(("groups", "waits"), [((3, 2), True), ((4, 1), False)])
def test_through_a_partition_there_is_one_chain_and_it_goes_on_where_a_quorum_is(
    groups: tuple[int, int], waits: bool
) -> None:
    split = Partition(groups, 2, 2, APART)
    report = simulate(replace(BARE, peers=sum(groups), rounds=9, partitions=(split,)))
    assert not report.violations
    assert (lasted(report, 2) > APART - 15.0) == waits
    assert len(set(row_of(report, 9).holders.values())) == 1


def test_who_is_ready_long_before_the_others_waits_for_them_and_does_not_decide_alone() -> None:
    report = simulate(replace(BARE, peers=5, rounds=4, steps_time=Span(20.0, 90.0), seed=3))
    assert not report.violations
    assert report.stalls()["rounds"] == 0


def leaving(names: tuple[int, ...]) -> SimulateOptions:
    strikes = tuple(Strike.parse(f"round=2,after=Precommit,leave={name}", 4) for name in names)
    return replace(BARE, peers=4, rounds=5, strikes=strikes)


def test_who_leaves_in_order_costs_no_stall_and_has_no_vote_that_is_missed() -> None:
    report = simulate(leaving((0, 1)))
    assert not report.violations
    assert not report.unmet
    assert report.living == 2
    assert report.stalls()["rounds"] == 0
    assert all(row.certified for row in report.rows)


def test_sessions_keep_the_number_of_peers_and_the_invariants() -> None:
    report = simulate(replace(BARE, peers=6, rounds=12, session=6.0, orderly=0.7, seed=3))
    assert not report.violations
    assert 5 <= report.living <= 7
    lines: list[str] = []
    report.show(lines.append, as_json=False)
    assert any("of 12 rounds stalled" in line for line in lines)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("4", "does not say who"),
        ("8@round=2", "1 to 7 of 8"),
        ("0@round=2", "1 to 7 of 8"),
        ("4@round=2,for=9x", "unit"),
    ],
)
def test_kills_that_make_no_sense_are_refused(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Kill.parse(text, 8)


def test_kills_and_rules_are_parsed() -> None:
    assert Kill.parse("4@round=3,for=60s", 8) == Kill(4, 3, 60.0)
    assert Partition.parse("4+4@round=2,for=1min", 8) == Partition((4, 4), 2, 2, 60.0)
    with pytest.raises(UsageError, match="orderly must be 0 to 1"):
        replace(CALM, orderly=1.5)
    with pytest.raises(UsageError, match="the rounds are 1 to 3"):
        replace(CALM, kills=(Kill(1, 4),))
