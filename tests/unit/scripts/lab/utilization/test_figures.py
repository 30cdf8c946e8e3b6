"""Utilization and peak rates: arithmetic that holds for any recording."""

import itertools

import pytest
from flockstep.peer.log.telemetry import Event
from flockstep.scripts.lab.utilization.figures import (
    ROUND_PARTS,
    Boundary,
    StepClock,
    interface_counters,
    means_of,
    measured,
    peak_rate,
    round_parts,
    rounds_ended,
    stalled_between,
)
from hypothesis import given
from hypothesis import strategies as st

PIECES = st.lists(st.tuples(st.floats(0.01, 3.0), st.integers(0, 10**7)), min_size=1, max_size=40)
"""A counter as (seconds, bytes) between two samples."""


def counter_of(pieces: list[tuple[float, int]]) -> list[tuple[float, float]]:
    samples = [(100.0, 5.0)]
    for seconds, size in pieces:
        samples.append((samples[-1][0] + seconds, samples[-1][1] + size))
    return samples


@given(PIECES)
def test_the_peak_lies_between_the_mean_and_the_steepest_piece(pieces: list[tuple[float, int]]) -> None:
    samples = counter_of(pieces)
    seconds, size = samples[-1][0] - samples[0][0], samples[-1][1] - samples[0][1]
    steepest = max(size / seconds for seconds, size in pieces)
    peak = peak_rate(samples)
    assert 0 <= peak <= steepest * (1 + 1e-6) + 1e-6
    if seconds <= 1:
        assert peak == pytest.approx(size / seconds)
    for (begun, before), (ended, after) in itertools.combinations(samples, 2):
        if ended - begun == 1:
            assert peak >= after - before


def test_a_burst_within_a_window_counts_for_all_of_it() -> None:
    every = [tick / 16 for tick in range(180)]
    samples = [(moment, 0.0 if moment <= 3.0 else 1000.0) for moment in every]
    assert peak_rate(samples) == pytest.approx(1000.0, rel=0.06)
    assert peak_rate(samples, window=1 / 16) == pytest.approx(16_000.0)


@pytest.mark.parametrize("samples", [[], [(1.0, 5.0)], [(1.0, 5.0), (1.0, 5.0)]])
def test_without_time_there_is_no_rate(samples: list[tuple[float, float]]) -> None:
    assert peak_rate(samples) == 0.0


def test_streaming_is_measured_after_a_round_of_each_fragment_as_blocking_after_one() -> None:
    """Three rounds of five fragments after a first one are 15: 19 would send a quarter more than three blocking ones."""
    every = [Boundary(float(round_), 0.0, round_) for round_ in range(1, 21)]
    assert [boundary.round for boundary in measured(every, 5)] == list(range(5, 21))
    assert measured(every, 1) == tuple(every)
    missed = [boundary for boundary in every if boundary.round not in (5, 6)]  # Its result came with a later one.
    assert measured(missed, 5)[0].round == 7


@given(st.floats(0.01, 5.0), st.lists(st.tuples(st.floats(0.0, 0.5), st.floats(0.0, 3.0)), min_size=1, max_size=30))
def test_late_wakings_do_not_add_up(seconds: float, steps: list[tuple[float, float]]) -> None:
    clock, now = StepClock(seconds, 0.0), 0.0
    for late, blocked in steps:
        late = min(late, seconds)
        now += clock.wait(now) + late + blocked
        clock.blocked(blocked)
    # The wall time is that of the steps and of what blocked them; of all that was late the last one's remains.
    due = len(steps) * seconds + sum(blocked for _, blocked in steps)
    assert due - 1e-6 <= now <= due + min(steps[-1][0], seconds) + 1e-6


def test_a_wait_counts_as_far_as_it_lies_inside() -> None:
    stalls = [(0.0, 5.0), (9.0, 12.0), (20.0, 21.0), (29.0, 40.0), (50.0, 60.0)]
    assert stalled_between(stalls, 10.0, 30.0) == pytest.approx(2.0 + 1.0 + 1.0)


def test_the_counters_of_one_device() -> None:
    table = """Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compressed
    lo:     100       1    0    0    0     0          0         0      100       1    0    0    0     0       0          0
  eth0:  123456      12    0    0    0     0          0         0   654321      21    0    0    0     0       0          0
"""
    assert interface_counters(table, "eth0") == (654321, 123456)
    assert interface_counters(table, "eth1") is None


def event(name: str, moment: float, number: int, **fields: int | str) -> Event:
    return {"event": name, "time": moment, "round": number, **fields}


def test_what_became_of_the_measured_rounds() -> None:
    one = [event("round.done", 1.0, 1, attempt=0), event("round.void", 2.0, 2, attempt=0)]
    one += [event("round.done", 3.0, 2, attempt=1), event("round.done", 9.0, 4, attempt=0)]
    two = [event("round.void", 2.5, 2, attempt=0), event("round.done", 3.0, 2, attempt=1), event("round.missed", 4.0, 3)]
    assert rounds_ended([one, two], 2, 3) == (1, 1, 1)


def round_log(start: float, number: int, attempt: int = 0) -> list[Event]:
    steps = ("Commit", "Have", "Sketch", "Have", "Result", "Sketch", "Prevote", "Precommit")
    said = [event("round.said", start + 1 + index, number, step=step, attempt=attempt) for index, step in enumerate(steps)]
    return [event("phase.end", start, number), *said, event("round.done", start + 10, number, attempt=attempt)]


def test_where_the_time_of_a_round_goes() -> None:
    log = round_log(100.0, 1) + round_log(200.0, 2) + round_log(300.0, 3, attempt=1) + round_log(400.0, 4)
    stalls = [(99.0, 112.0), (199.5, 213.0), (299.0, 320.0)]
    found = round_parts(log, stalls, 2, 4)  # The third had a void attempt, and nobody waited for the fourth.
    assert found == [[0.5, 1.0, 1.0, 3.0, 1.0, 1.0, 3.0, 3.0]]
    assert sum(found[0]) == pytest.approx(213.0 - 199.5)
    hurried = [one for one in log if one.get("step") not in ("Prevote", "Precommit")]  # The certificate came first.
    assert round_parts(hurried, stalls, 2, 4) == [[0.5, 1.0, 1.0, 3.0, 1.0, 4.0, 0.0, 3.0]]
    assert means_of([*found, [0.5] * 8])["outputs"] == pytest.approx(0.75)
    assert list(means_of(found)) == list(ROUND_PARTS)
    assert means_of([]) == {}
