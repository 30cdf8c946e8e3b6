"""The figures of `flockstep bench join` from the logs that it reads."""

import json
from pathlib import Path

from flockstep.peer.base.errors import LocalError
from flockstep.peer.log.telemetry import log_path
from flockstep.scripts.lab.bench.join import Coming, JoinOptions, Trainer, join_summary, quiet_round, written


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
    figures = join_summary(options, [Coming(seconds, 1.0, 50_000_000) for seconds in (7.0, 8.0, 6.5)], 2.5)
    assert (figures["first_inner_step_s"], figures["all_first_inner_step_s"]) == (4.5, [4.5, 5.5, 4.0])
    assert "4.50 s" in "\n".join(written(figures))
