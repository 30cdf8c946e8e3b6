"""The figures of `flockstep bench join` from the logs that it reads."""

import json
from pathlib import Path

import pytest
from flockstep.peer.base.errors import LocalError
from flockstep.peer.log.telemetry import log_path
from flockstep.scripts.lab.bench.join import (
    Coming,
    JoinOptions,
    Trainer,
    join_summary,
    quiet_round,
    split_cores,
    written,
)


class Running:
    """A process that runs for as long as the test."""

    name = "member"
    code = None

    def died(self) -> LocalError:
        return LocalError("member ended")


def trainer(home: Path, *events: dict[str, object]) -> Trainer:
    log_path(home).parent.mkdir(parents=True, exist_ok=True)
    log_path(home).write_text("".join(json.dumps(event) + "\n" for event in events))
    return Trainer(Running(), home)  # type: ignore[arg-type]


def test_steps_between_two_moments_are_those_between_the_reports_around_them(tmp_path: Path) -> None:
    reports = [(10.0, 100), (11.0, 104), (13.0, 110), (14.0, 118)]
    member = trainer(tmp_path, *({"event": "step", "time": when, "step": step} for when, step in reports))
    assert member.steps_between(11.0, 13.0) == pytest.approx(6)
    assert member.steps_between(10.5, 12.0) == pytest.approx(107 - 102)
    assert member.steps_between(12.0, 13.5) == pytest.approx(114 - 107)


def test_a_round_with_a_newcomer_or_one_missed_is_not_quiet(tmp_path: Path) -> None:
    def done(when: float, number: int, cut: list[str]) -> dict[str, object]:
        return {"event": "round.done", "time": when, "round": number, "cut": cut}

    first = [done(1, 1, ["a", "b"]), done(2, 2, ["a", "b", "c"]), done(3, 3, ["a"]), done(4, 4, ["a", "b"])]
    second = [done(1.1, 1, ["a", "b"]), done(2.1, 2, ["a", "b", "c"]), done(4.1, 4, ["a", "b"])]
    members = [trainer(tmp_path / "1", *first), trainer(tmp_path / "2", *second)]
    told: list[str] = []
    assert quiet_round(members, 0.0, told.append) == 4.1
    assert told == [f"round {number} is over, {here} took part" for number, here in ((1, 2), (2, 3), (3, 1), (4, 2))]


def test_medians_and_what_torch_takes_to_load() -> None:
    options = JoinOptions(members=3, size="25m", steps=100, repeat=3, as_json=False)
    comings = [Coming(seconds, 1.0, 50_000_000, 10.0, rate) for seconds, rate in ((7.0, 9.5), (8.0, 9.0), (6.5, 10.5))]
    figures = join_summary(options, comings, 2.5, apart=True)
    assert figures["first_inner_step_s"] == 4.5
    assert figures["members_slowdown"] == 0.05
    assert figures["all_members_slowdown"] == [0.05, 0.1, -0.05]
    text = "\n".join(written(figures))
    assert "4.50 s" in text
    assert "5.0%" in text


def test_members_and_newcomers_share_no_core_where_there_are_two() -> None:
    members, newcomers = split_cores()
    if len(set(members) | set(newcomers)) > 1:
        assert not set(members) & set(newcomers)
    assert members
    assert newcomers
