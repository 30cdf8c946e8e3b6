"""Deadlines adapt like TCP's retransmission timer."""

import pytest
from flockstep.collectives.allreduce.actions import Phase
from flockstep.collectives.round.deadlines import Deadlines, Estimate
from hypothesis import given
from hypothesis import strategies as st


def test_the_first_measurement_counts_whole_and_its_half_is_the_deviation() -> None:
    estimate = Estimate(1.0)
    estimate.add(8.0)
    assert estimate.deadline(guess=100.0) == 8.0 + 4 * 4.0


def test_later_ones_count_as_rfc_6298_says() -> None:
    estimate = Estimate(1.0)
    for seconds in (8.0, 16.0):
        estimate.add(seconds)
    assert (estimate.mean, estimate.deviation) == (9.0, 5.0)
    assert estimate.deadline(0.0) == 29.0


def test_before_anything_is_measured_the_guess_stands_in() -> None:
    assert Estimate(1.0).deadline(guess=7.0) == 7.0


@given(st.lists(st.floats(0.1, 100), min_size=200, max_size=200))
def test_what_never_changes_is_waited_for_hardly_longer_than_it_takes(noise: list[float]) -> None:
    estimate = Estimate(1.0)
    for seconds in noise:
        estimate.add(seconds)
    for _ in range(200):
        estimate.add(5.0)
    assert estimate.deadline(0.0) == pytest.approx(5.0, rel=0.01)


def test_every_deadline_stays_within_floor_and_ceiling() -> None:
    deadlines = Deadlines(floor=2.0, ceiling=60.0)
    timing = deadlines.timing(grace=0.0, transfer=0.001)
    assert (timing.gather, timing.control, timing.transfer, timing.patience) == (2.0, 2.0, 2.0, 60.0)
    assert deadlines.timing(grace=1000.0, transfer=1000.0).gather == 60.0
    assert deadlines.timing(grace=1000.0, transfer=1000.0).transfer == 60.0


def test_a_transfer_of_which_nothing_is_known_gets_four_times_what_the_bandwidth_says() -> None:
    assert Deadlines(2.0, 60.0).timing(grace=0.0, transfer=5.0).transfer == 20.0


def test_small_messages_and_transfers_are_learned_apart() -> None:
    deadlines = Deadlines(0.1, 600.0)
    deadlines.learn({Phase.GATHER: 500.0, Phase.CONFIRM: 1.0, Phase.COLLECT: 10.0, Phase.REDUCE: 10.0})
    timing = deadlines.timing(grace=0.0, transfer=0.0)
    assert timing.control == 4 * 1.0 + 4 * 0.5
    assert timing.transfer == 4 * 10.0 + 4 * 3.75


def test_a_deadline_that_passed_is_doubled_until_a_round_succeeds_and_never_beyond_the_ceiling() -> None:
    deadlines = Deadlines(1.0, 60.0)
    deadlines.learn({Phase.COLLECT: 1.0})
    assert deadlines.timing(grace=0.0, transfer=0.0).transfer == 6.0
    deadlines.give_more_time(Phase.REDUCE)
    assert deadlines.timing(grace=0.0, transfer=0.0).transfer == 12.0
    assert deadlines.timing(grace=0.0, transfer=0.0).control == 1.0
    for _ in range(5000):
        deadlines.give_more_time(Phase.REDUCE)
    assert deadlines.timing(grace=0.0, transfer=0.0).transfer == 60.0
    deadlines.learn({Phase.COLLECT: 1.0})
    assert deadlines.timing(grace=0.0, transfer=0.0).transfer < 6.0


def test_what_is_not_measured_is_not_stated() -> None:
    deadlines = Deadlines(0.1, 600.0)
    assert deadlines.stated() == (0.0, 0.0)
    deadlines.learn({Phase.CONFIRM: 1.0})
    assert deadlines.stated() == (6.0, 0.0)
    deadlines.learn({Phase.COLLECT: 1.0})
    assert deadlines.stated() == (6.0, 6.0)
