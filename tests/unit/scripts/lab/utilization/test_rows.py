"""The rows of `flockstep bench utilization`: JSON and table."""

import json
import re
from dataclasses import replace
from typing import Any

import pytest
from flockstep.scripts.lab.utilization.cases import UtilizationCase
from flockstep.scripts.lab.utilization.figures import Boundary, LineSample
from flockstep.scripts.lab.utilization.measure import UtilizationRow, figures_of, row_of
from flockstep.scripts.lab.utilization.utilization import utilization_table

CASE = UtilizationCase(
    mode="blocking",
    codec="int4",
    peers=2,
    params=25_000_000,
    rate=100.0,
    round_trip=0.06,
    loss=0.0,
    step_seconds=(1.0, 1.0),
    steps=10,
    rounds=2,
    fragments=None,
)
BOUNDARIES = [[Boundary(100.0, 0.0, 1), Boundary(200.0, 80.0, 3)], [Boundary(100.0, 0.0, 1), Boundary(200.0, 60.0, 3)]]
STALLS = [[(95.0, 100.0), (140.0, 150.0), (190.0, 200.0)]] * 2
SAMPLES = [
    [LineSample(second, round(speed * second), round(2 * speed * second)) for second in map(float, range(50, 250))]
    for speed in (5e5, 2.5e5)
]
LOG: list[dict[str, Any]] = [{"event": "round.done", "time": 150.0, "round": number, "attempt": 0} for number in (1, 2, 3)]
LOG.append({"event": "round.void", "time": 120.0, "round": 2, "attempt": 0})


def row(**changes: Any) -> UtilizationRow:
    case = replace(CASE, **changes)
    return row_of(case, **figures_of(case, BOUNDARIES, STALLS, SAMPLES, [LOG, LOG]))


FAILED = row_of(replace(CASE, mode="streaming"), reason="peer-1 ended: <no group>")


def test_a_row_is_one_json_object_with_the_same_fields_where_it_failed() -> None:
    made = row()
    assert json.loads(json.dumps(made)) == made
    assert FAILED.keys() == made.keys()
    assert (FAILED["utilization"], FAILED["steps_taken"], FAILED["rounds_certified"]) == (None, None, 0)


def test_the_figures_of_a_row() -> None:
    made = row()
    assert made["utilization_of_peers"] == [0.8, 0.6]
    assert made["utilization"] == pytest.approx(0.7)
    assert made["peak_rate_share"] == pytest.approx(0.08)  # 1 MB/s received on 100 Mbit/s.
    assert made["idle_s_per_round"] == pytest.approx(15.0)
    assert made["stalled_s_per_round"] == pytest.approx(10.0)  # 20 s in two rounds; the first wait was before.
    assert made["steps_taken"] == pytest.approx(35.0)  # 70 steps of a second in two rounds.
    assert row(mode="streaming", fragments=5)["steps_taken"] == pytest.approx(175.0)
    assert made["sent_bytes_of_peers"] == [50_000_000, 25_000_000]
    assert made["line_s_per_round"] == pytest.approx(3.0)  # 75 MB in two rounds, the mean of what was received.
    assert (made["rounds_certified"], made["rounds_void"], made["results_missed"]) == (2, 1, 0)


@pytest.mark.parametrize(
    ("change", "measured"),
    [  # Of docs/log.md, "The time of a round by its bytes" and "Utilization in streaming mode".
        ({"params": 5_000_000, "rate": 3.34, "steps": 30}, 0.702),
        ({"params": 5_000_000, "rate": 16.7, "steps": 30}, 0.899),
        ({"params": 5_000_000, "rate": 3.34, "steps": 100, "step_seconds": (0.3,) * 4, "mode": "streaming"}, 0.939),
        ({"params": 25_000_000, "rate": 5.0, "steps": 100, "mode": "streaming"}, 0.973),
        ({"params": 25_000_000, "rate": 16.7, "steps": 100}, 0.858),
    ],
)
def test_the_plan_is_within_a_tenth_of_what_was_measured(change: dict[str, Any], measured: float) -> None:
    case = replace(CASE, **{"peers": 4, "step_seconds": (1.0,) * 4, **change})
    assert case.planned_share == pytest.approx(measured, rel=0.1)
    assert row_of(case)["planned_utilization"] == pytest.approx(case.planned_share, abs=1e-4)
    assert replace(case, step_seconds=(0.1, 7.5)).planned_share is None


def test_a_table_tells_what_failed_and_why() -> None:
    text = "\n".join(utilization_table([row() | {"round_s": {"gather": 0.5}}, FAILED, row(mode="streaming", fragments=5)]))
    assert "2 peers × 25M parameters, H = 10, steps of 1 s; round trip 60 ms" in text
    assert re.search(r"blocking int4 +100 +70\.0% +81\.3% +60\.0% +35 +8% +15\.00 +3\.00 +2 of 2 +1\b", text)
    assert re.search(r"streaming int4 .* of 10 ", text)
    assert "streaming int4, 100 Mbit/s: peer-1 ended: <no group>" in text
    assert "blocking int4, 100 Mbit/s, seconds of a round: gather 0.50" in text
