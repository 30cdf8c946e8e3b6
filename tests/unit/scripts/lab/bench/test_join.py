"""The figures of `flockstep bench join` from the logs that it reads."""

import json
from pathlib import Path

from flockstep.peer.base.errors import LocalError
from flockstep.peer.log.telemetry import log_path
from flockstep.scripts.lab.bench.join import Coming, JoinOptions, Trainer, join_summary, round_over


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


def test_a_round_is_over_when_the_last_member_has_ended_it(tmp_path: Path) -> None:
    times = [(1.0, 2.0, 4.0), (1.1, 2.1, 4.1)]
    logs = [[{"event": "round.done", "time": when} for when in those] for those in times]
    members = [trainer(tmp_path / str(at), *log) for at, log in enumerate(logs)]
    assert [round_over(members, after) for after in (0.0, 1.5, 2.05)] == [1.1, 2.1, 4.0]


def test_medians_and_what_torch_takes_to_load() -> None:
    options = JoinOptions(members=3, size="25m", steps=100, repeat=3, as_json=False)
    figures = join_summary(options, [Coming(seconds, 1.0, 50_000_000) for seconds in (7.0, 8.0, 6.5)], 2.5)
    assert (figures["first_inner_step_s"], figures["all_first_inner_step_s"]) == (4.5, [4.5, 5.5, 4.0])
