"""When a volunteer's computer trains: hours, other programs, pause and resume."""

import threading
from pathlib import Path

import pytest
from flockstep.optim.models.machine import OthersLoad
from flockstep.peer.base.errors import LocalError, UsageError
from flockstep.scripts.volunteer.availability import LOAD_SECONDS, Availability, await_shift, shift
from flockstep.scripts.volunteer.control import pause, pause_file, resume, training_here
from flockstep.scripts.volunteer.hours import Hours
from flockstep.scripts.volunteer.idle import BUSY_SECONDS, CALM_SECONDS, GAP_SECONDS, IdleWatch
from flockstep.scripts.volunteer.policy import Policy


@pytest.mark.parametrize(
    ("text", "within", "outside"),
    [
        ("22-7", [22 * 60, 0, 6 * 60 + 59], [7 * 60, 12 * 60, 22 * 60 - 1]),
        ("9-17", [9 * 60, 16 * 60 + 59], [0, 9 * 60 - 1, 17 * 60]),
        ("22:30-6:45", [22 * 60 + 30, 6 * 60 + 44], [22 * 60 + 29, 6 * 60 + 45]),
        ("18-24", [18 * 60, 24 * 60 - 1], [0, 18 * 60 - 1]),
        ("0-24:00", [], []),
    ],
)
def test_hours_may_cross_midnight(text: str, within: list[int], outside: list[int]) -> None:
    if not within:
        with pytest.raises(UsageError, match="begin when they end"):
            Hours.parse(text)
        return
    hours = Hours.parse(text)
    assert all(hours.hold(minute) for minute in within)
    assert not any(hours.hold(minute) for minute in outside)
    assert Hours.parse(str(hours)) == hours


@pytest.mark.parametrize("text", ["", "22", "7-25", "24-3", "7:60-8", "8-8", "seven-eight", "-1-3", "22-7-9", "1:1-2"])
def test_hours_that_make_no_sense_are_one_line_with_the_remedy(text: str) -> None:
    with pytest.raises(UsageError, match=f"--hours '{text}'") as raised:
        Hours.parse(text)
    assert raised.value.remedy


def fed(watch: IdleWatch, start: float, seconds: float, share: float) -> float:
    """Add samples of one share for so many seconds; returns the time of the last one."""
    now = start
    while now < start + seconds:
        now += LOAD_SECONDS
        watch.add(now, share)
    return now


def test_a_busy_computer_is_left_late_and_an_idle_one_returned_to_later() -> None:
    watch = IdleWatch()
    now = fed(watch, 0.0, BUSY_SECONDS - LOAD_SECONDS, 0.9)
    assert not watch.is_busy
    now = fed(watch, now, 2 * LOAD_SECONDS, 0.9)
    assert watch.is_busy
    now = fed(watch, now, CALM_SECONDS - LOAD_SECONDS, 0.0)
    assert watch.is_busy
    now = fed(watch, now, 2 * BUSY_SECONDS, 0.0)
    assert not watch.is_busy
    now = fed(watch, now, 10 * CALM_SECONDS, 0.2)  # Between the two thresholds nothing changes.
    assert not watch.is_busy
    now = fed(watch, now, 2 * BUSY_SECONDS, 0.9)
    assert watch.is_busy
    fed(watch, now, 10 * CALM_SECONDS, 0.2)
    assert watch.is_busy


def test_samples_from_before_a_sleep_do_not_count() -> None:
    watch = IdleWatch()
    now = fed(watch, 0.0, BUSY_SECONDS - LOAD_SECONDS, 0.9)
    watch.add(now + 2 * GAP_SECONDS, 0.9)
    assert not watch.is_busy


def test_what_this_peer_uses_itself_is_not_the_load_of_others() -> None:
    load = OthersLoad()
    assert load() == 0.0
    assert 0.0 <= load() <= 1.0


def test_a_peer_is_away_for_one_reason_at_a_time(tmp_path: Path) -> None:
    now, minute, share, policy = 0.0, 23 * 60, 0.0, Policy(when_idle=True)
    availability = Availability(
        tmp_path, Hours.parse("22-7"), policy, clock=lambda: now, minute=lambda: minute, load=lambda: share
    )
    assert availability.judge().away == ""
    minute = 8 * 60
    assert "outside of its hours, 22-7" in availability.judge().away
    pause_file(tmp_path).touch()
    assert "its user has paused it" in availability.judge().away
    pause_file(tmp_path).unlink()
    minute, share = 6 * 60, 0.5
    for _ in range(10):
        now += LOAD_SECONDS
        reason = availability.judge().away
    assert "other programs" in reason


def test_a_shift_ends_when_the_peer_is_paused_and_the_next_one_waits_for_resume(tmp_path: Path) -> None:
    stop, told = threading.Event(), list[tuple[str, str]]()
    availability = Availability(tmp_path)
    with training_here(tmp_path):
        with shift(availability, stop) as now:
            assert not now.over.is_set()
            pause(tmp_path, lambda line: None)
            assert now.over.wait(30)
            assert "paused" in now.reason

        def tell(event: str, reason: str) -> None:
            told.append((event, reason))
            if event == "peer.paused":
                resume(tmp_path, lambda line: None)

        availability.note = tell
        await_shift(availability, stop)
    assert [event for event, _ in told] == ["peer.paused", "peer.resumed"]


def test_a_shift_ends_with_its_users_stop_for_no_reason_of_its_own(tmp_path: Path) -> None:
    stop = threading.Event()
    with shift(Availability(tmp_path), stop) as now:
        stop.set()
        assert now.over.wait(30)
        assert now.reason == ""


def test_pause_is_for_a_peer_that_runs_and_outlasts_it(tmp_path: Path) -> None:
    said: list[str] = []
    with pytest.raises(LocalError, match="no peer that trains runs with the home folder") as raised:
        pause(tmp_path, said.append)
    assert raised.value.remedy
    assert not pause_file(tmp_path).exists()
    with pytest.raises(LocalError, match="no peer is paused"):
        resume(tmp_path, said.append)
    with training_here(tmp_path):
        pause(tmp_path, said.append)
        pause(tmp_path, said.append)
        with pytest.raises(LocalError, match="another process"), training_here(tmp_path):
            pass
    assert Availability(tmp_path).judge().away
    resume(tmp_path, said.append)
    assert Availability(tmp_path).judge().away == ""
    assert ["Paused" in said[0], "already" in said[1], "next `flockstep join`" in said[2]] == [True] * 3
