"""The rows of `flockstep bench utilization`: JSON and table."""

import json
import re
from dataclasses import replace
from typing import Any

import pytest
from flockstep.peer.base.errors import LocalError
from flockstep.scripts.lab.utilization.cases import UtilizationCase
from flockstep.scripts.lab.utilization.measure import Boundary, UtilizationRow, figures_of, row_of
from flockstep.scripts.lab.utilization.utilization import utilization_table

CASE = UtilizationCase(
    mode="blocking",
    codec="int4",
    peers=2,
    params=25_000_000,
    rate=100.0,
    round_trip=0.06,
    step_seconds=1.0,
    steps=10,
    rounds=2,
)
BOUNDARIES: list[list[Boundary]] = [[(100.0, 0.0, 1), (200.0, 80.0, 3)], [(100.0, 0.0, 1), (200.0, 60.0, 3)]]
LOG: list[dict[str, Any]] = [{"event": "round.done", "round": number, "attempt": 0} for number in (1, 2, 3, 4)]
LOG += [{"event": "round.void", "round": 2, "attempt": 0}, {"event": "round.void", "round": 1, "attempt": 0}]


def row(**changes: Any) -> UtilizationRow:
    case = replace(CASE, **changes)
    return row_of(case, **figures_of(case, BOUNDARIES, [LOG, LOG]))


FAILED = row_of(replace(CASE, mode="streaming"), reason="peer-1 ended: <no group>")


def test_a_row_is_one_json_object_with_the_same_fields_where_it_failed() -> None:
    made = row()
    assert json.loads(json.dumps(made)) == made
    assert FAILED.keys() == made.keys()
    assert (FAILED["utilization"], FAILED["steps_taken"], FAILED["rounds_certified"]) == (None, None, None)


def test_the_figures_of_a_row() -> None:
    made = row()
    assert made["utilization_of_peers"] == [0.8, 0.6]
    assert made["utilization"] == pytest.approx(0.7)
    assert made["idle_s_per_round"] == pytest.approx(15.0)
    assert made["steps_taken"] == pytest.approx(35.0)  # 70 steps of a second in two rounds.
    assert (made["rounds_certified"], made["rounds_void"]) == (2, 1)  # The first one is not measured.


def test_streaming_is_measured_after_a_round_of_each_fragment_as_blocking_after_one() -> None:
    case = replace(CASE, mode="streaming")
    cycle = case.cycle
    early: list[Boundary] = [(float(round_), 0.5 * round_, round_) for round_ in range(1, cycle)]
    those: list[Boundary] = [(100.0, 0.0, cycle), (200.0, 80.0, 2 * cycle)]
    found = figures_of(case, [[*early, *those]], [])
    assert found["utilization"] == 0.8
    assert found["steps_taken"] == pytest.approx(80.0)
    with pytest.raises(LocalError, match="takes two"):
        figures_of(case, [[*early, those[0]]], [])


@pytest.mark.parametrize(
    ("change", "measured"),
    [  # Of docs/log.md, "The time of a round by its bytes" and "Utilization in streaming mode".
        ({"params": 5_000_000, "rate": 3.34, "steps": 30}, 0.702),
        ({"params": 5_000_000, "rate": 16.7, "steps": 30}, 0.899),
        ({"params": 5_000_000, "rate": 3.34, "steps": 100, "step_seconds": 0.3, "mode": "streaming"}, 0.939),
        ({"params": 25_000_000, "rate": 5.0, "steps": 100, "mode": "streaming"}, 0.973),
        ({"params": 25_000_000, "rate": 16.7, "steps": 100}, 0.858),
    ],
)
def test_the_plan_is_within_a_tenth_of_what_was_measured(change: dict[str, Any], measured: float) -> None:
    case = replace(CASE, **{"peers": 4, **change})
    assert case.planned_share == pytest.approx(measured, rel=0.1)
    assert row_of(case)["planned_utilization"] == pytest.approx(case.planned_share, abs=1e-4)


def test_a_table_tells_what_failed_and_why() -> None:
    text = "\n".join(utilization_table([row(), FAILED]))
    assert "2 peers × 25M parameters, H = 10, steps of 1 s; round trip 60 ms" in text
    assert re.search(r"blocking int4 +100 +70\.0% +\d+\.\d% +60\.0% +35 +15\.00 +2 of 2 +1\b", text)
    assert re.search(r"streaming int4 .* peer-1 ended: <no group>", text)
