"""The end of an inner phase: all steps, or the deadline that a ready quorum sets."""

import pytest
from flockstep.collectives.chain.quorum import quorum
from flockstep.optim.step.pace import Pace, slowest
from flockstep.peer.base.errors import UsageError

PACE = Pace(steps=50, floor=2, ceiling=60)


@pytest.mark.parametrize(("members", "least"), [(1, 1), (2, 2), (3, 3), (4, 3), (6, 5), (7, 5), (64, 43)])
def test_quorum_is_more_than_two_thirds(members: int, least: int) -> None:
    assert quorum(members) == least
    assert 3 * least > 2 * members >= 3 * (least - 1)


def test_all_steps_end_a_phase_whoever_is_ready() -> None:
    assert PACE.ended(now=0, started=0, step=50, ready_at=[], num_active=4) == (True, "all 50 steps are done")
    assert PACE.ended(now=1e9, started=0, step=49, ready_at=[], num_active=4)[0] is False


@pytest.mark.parametrize(
    ("num_active", "ready_at", "deadline"),
    [
        (1, [], None),  # Alone, nobody waits.
        (2, [40], 50),  # One other and I are a quorum of two.
        (4, [40], None),
        (4, [40, 20], 50),  # The second other and I make three of four: a quarter of 40 s more.
        (4, [80, 20, 40], 50),  # Who comes later changes nothing.
        (4, [4, 4], 6),  # The floor.
        (4, [400, 400], 460),  # The ceiling.
        (4, [-30, -20], 2),  # They were ready before I began: I still have the floor.
    ],
)
def test_deadline(num_active: int, ready_at: list[float], deadline: float | None) -> None:
    assert PACE.deadline(started=0, ready_at=ready_at, num_active=num_active) == deadline


def test_deadline_counts_from_the_start_of_my_phase() -> None:
    assert PACE.deadline(started=1000, ready_at=[1040], num_active=2) == 1050


@pytest.mark.parametrize(("duration", "grace"), [(0, 2), (8, 2), (40, 10), (240, 60), (1e9, 60)])
def test_a_quorum_waits_a_quarter_of_its_own_time(duration: float, grace: float) -> None:
    assert PACE.grace(duration) == grace


def test_phase_ends_at_the_deadline_and_says_why() -> None:
    ready_at = [40.0, 20.0]
    assert PACE.ended(now=49, started=0, step=10, ready_at=ready_at, num_active=4) == (
        False,
        "step 10 of 50, 1.0 s to the round's deadline",
    )
    assert PACE.ended(now=50, started=0, step=10, ready_at=ready_at, num_active=4) == (
        True,
        "the round's deadline passed at step 10 of 50",
    )
    assert PACE.ended(now=50, started=0, step=10, ready_at=[20], num_active=4) == (
        False,
        "step 10 of 50, 1 of 3 others are ready",
    )


@pytest.mark.parametrize(
    ("ready_at", "training", "called"),
    [
        ([], 3, None),
        ([12.0, 11.0, 30.0], 3, (12.0, True)),  # Two of three: a third may be late for ever.
        ([12.0, 11.0, 30.0, 40.0], 4, (30.0, True)),
        ([12.0, 11.0], 2, (12.0, True)),
        ([3.0], 1, (10.0, True)),  # A Ready from before the round began.
        ([10.5], 4, (90.0, False)),  # One that is early waits for twice the usual phase,
        ([10.5, 200.0], 2, (90.0, False)),
        ([200.0], 4, (200.0, False)),  # and is never ready before it is.
    ],
)
def test_a_keeper_is_ready_with_two_thirds_of_those_that_train_or_after_twice_the_usual_phase(
    ready_at: list[float], training: int, called: tuple[float, bool] | None
) -> None:
    everybody = frozenset(map(str, range(training)))
    times = dict(zip(sorted(everybody), ready_at, strict=False))
    assert PACE.called(started=10, ready_at=times, groups=(everybody,), expected=40) == called


@pytest.mark.parametrize(
    ("ready_at", "called"),
    [
        ({"old": 11.0}, (90.0, False)),  # One of tenure that is ready at once,
        ({"a": 11.0, "b": 12.0, "c": 13.0}, (90.0, False)),  # or all but that one.
        ({"a": 11.0, "b": 12.0, "old": 20.0}, (20.0, True)),
        ({"old": 11.0, "a": 12.0, "b": 14.0}, (14.0, True)),
        ({"stranger": 11.0}, None),
    ],
)
def test_a_keeper_waits_for_those_of_tenure_and_where_these_are_few_for_the_others(
    ready_at: dict[str, float], called: tuple[float, bool] | None
) -> None:
    groups = (frozenset({"old"}), frozenset({"old", "a", "b", "c"}))
    assert PACE.called(started=10, ready_at=ready_at, groups=groups, expected=40) == called
    assert slowest(groups, {"old"}) == groups[1]
    assert slowest(groups, {"a", "b", "c"}) == groups[0]


@pytest.mark.parametrize(
    ("seconds", "stated", "usual"),
    [
        (0.0, [], 60.0),  # Before there are any: the ceiling.
        (0.0, [30.0, 40.0, 50.0], 40.0),
        (0.0, [30.0, 40.0, 50.0, 1e9, 1e9], 50.0),  # Two of five: within what honest ones state.
        (0.0, [30.0, 40.0, 50.0, 1e-9, 1e-9], 30.0),
        (0.0, [0.1], 2.0),
        (25.0, [1e9, 1e9], 25.0),  # What the manifest says.
    ],
)
def test_the_usual_phase_is_that_of_the_manifest_or_the_median_of_those_stated(
    seconds: float, stated: list[float], usual: float
) -> None:
    assert Pace(steps=50, seconds=seconds, floor=2, ceiling=60).usual(stated) == usual


@pytest.mark.parametrize(("steps", "floor", "ceiling"), [(0, 1, 2), (1, 3, 2), (1, -1, 2), (1, 0, float("nan"))])
def test_settings_that_make_no_sense_are_refused(steps: int, floor: float, ceiling: float) -> None:
    with pytest.raises(UsageError, match="pace"):
        Pace(steps=steps, floor=floor, ceiling=ceiling)


def test_a_phase_of_seconds_ends_before_a_step_that_would_outlast_it() -> None:
    pace = Pace(steps=50, seconds=100, floor=2, ceiling=60)

    def ended(now: float, step_seconds: float, ready_at: list[float]) -> bool:
        return pace.ended(
            now=now, started=0, step=900, ready_at=ready_at, num_active=4, step_seconds=step_seconds
        )[0]

    assert not ended(98.9, 1.0, [])  # However many steps it has made.
    assert ended(99.1, 1.0, [])
    assert ended(26.0, 75.0, [])
    assert not ended(24.0, 75.0, [])
    # A quorum that is ready early sets its deadline as in a phase of steps, and the next step must end before it, too.
    assert ended(45.0, 6.0, [40.0, 20.0])
    assert not ended(43.0, 6.0, [40.0, 20.0])
