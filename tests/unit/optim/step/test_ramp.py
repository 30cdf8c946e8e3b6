"""How many batches make one optimizer step, and after which of a phase it comes."""

import pytest
from flockstep.optim.step.ramp import batches_a_step, is_step


@pytest.mark.parametrize(
    ("ramp", "rounds", "expected"),
    [
        (8, 4, [1, 2, 4, 8]),
        (8, 8, [1, 1, 2, 2, 4, 4, 8, 8]),
        (8, 7, [1, 1, 2, 2, 4, 4, 8]),
        (8, 1, [1]),
        (8, 2, [1, 4]),
        (3, 4, [1, 2, 3, 3]),
        (1, 4, [1, 1, 1, 1]),
        (0, 4, [1, 1, 1, 1]),
    ],
)
def test_batches_a_step_double_by_quarters_of_the_run_up_to_the_ramp(ramp: int, rounds: int, expected: list[int]) -> None:
    assert [batches_a_step(ramp, round_ + 1, rounds) for round_ in range(rounds)] == expected


def test_a_run_that_was_shortened_to_less_than_it_has_behind_it_stays_at_the_ramp() -> None:
    assert batches_a_step(8, 10**6, 1) == 8


@pytest.mark.parametrize(
    ("phase", "n", "after"),
    [
        (30, 8, [8, 15, 23, 30]),
        (10, 4, [5, 10]),
        (10, 8, [10]),
        (5, 8, [5]),
        (8, 8, [8]),
        (3, 1, [1, 2, 3]),
    ],
)
def test_the_steps_of_a_phase_are_spread_evenly_and_the_last_follows_its_last_batch(
    phase: int, n: int, after: list[int]
) -> None:
    assert [batch for batch in range(1, phase + 1) if is_step(batch, n, phase)] == after
    # A phase that goes on, since its round was void, goes on in the same way.
    longer = [batch for batch in range(1, 2 * phase + 1) if is_step(batch, n, phase)]
    assert longer == after + [phase + batch for batch in after]
