"""The rows of `flockstep bench utilization`: JSON and table."""

import io
import json
import re
from dataclasses import replace
from typing import Any

import pytest
from flockstep.scripts.lab.utilization.figures import Boundary, PeerFigures
from flockstep.scripts.lab.utilization.measure import PeerTrace, UtilizationRow, patience
from flockstep.scripts.lab.utilization.options import UtilizationCase
from flockstep.scripts.lab.utilization.utilization import utilization_notes, utilization_table
from rich.console import Console

CASE = UtilizationCase(
    system="flockstep",
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
    phase_seconds=0.0,
    python="python",
)
ONE = PeerFigures(0.8, 2, 100.0, 80.0, 50_000_000, 40_000_000, 6e6, 5e6)
OTHER = PeerFigures(0.6, 2, 100.0, 60.0, 30_000_000, 40_000_000, 3e6, 10e6)
BOUNDARIES = (Boundary(100.0, 0.0, 1), Boundary(200.0, 80.0, 3))
TRACE = PeerTrace(BOUNDARIES, ((95.0, 100.0), (140.0, 150.0), (190.0, 200.0)))
ROW = UtilizationRow(
    case=CASE, peers=(ONE, OTHER), traces=(TRACE, TRACE), certified=2, void=1, round_seconds={"gather": 0.5}
)
FAILED = UtilizationRow(case=replace(CASE, system="hivemind", mode="delayed"), failure="hivemind-0 ended: <no group>")

FIELDS: dict[str, type | tuple[type, ...]] = {
    "system": str,
    "mode": str,
    "codec": str,
    "peers": int,
    "params": int,
    "rate_mbit": float,
    "round_trip_ms": float,
    "loss_percent": float,
    "step_s": (list, str),
    "steps": int,
    "steps_taken": (float, type(None)),
    "rounds": int,
    "fragments": (int, type(None)),
    "phase_s": float,
    "utilization": (float, type(None)),
    "planned_utilization": (float, type(None)),
    "utilization_of_peers": list,
    "peak_rate_share": (float, type(None)),
    "idle_s_per_round": (float, type(None)),
    "stalled_s_per_round": (float, type(None)),
    "line_s_per_round": (float, type(None)),
    "round_s": dict,
    "sent_bytes_of_peers": list,
    "received_bytes_of_peers": list,
    "rounds_certified": int,
    "rounds_void": int,
    "results_missed": int,
    "reason": str,
}


@pytest.mark.parametrize("row", [ROW, FAILED])
def test_a_row_is_one_json_object_with_these_fields(row: UtilizationRow) -> None:
    text = json.dumps(row.as_json())
    assert "\n" not in text
    values = json.loads(text)
    assert values.keys() == FIELDS.keys()
    assert all(isinstance(values[name], kind) for name, kind in FIELDS.items())


def test_the_figures_of_a_row() -> None:
    assert ROW.utilization == pytest.approx(0.7)
    assert ROW.peak_rate_share == pytest.approx(0.8)  # 10 MB/s received on 100 Mbit/s.
    assert ROW.idle_seconds == pytest.approx(15.0)
    assert ROW.stalled_seconds == pytest.approx(10.0)  # 20 s in two rounds; the first wait was before.
    assert ROW.steps_taken == pytest.approx(35.0)  # 70 steps of a second in two rounds.
    assert replace(ROW, case=replace(CASE, mode="streaming", fragments=5)).steps_taken == pytest.approx(175.0)
    assert ROW.line_seconds == pytest.approx(1.8)  # 45 MB in two rounds.
    assert ROW.as_json()["utilization"] == 0.7
    assert FAILED.as_json()["utilization"] is None


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
    assert UtilizationRow(case=case).as_json()["planned_utilization"] == pytest.approx(case.planned_share, abs=1e-4)
    assert replace(case, system="hivemind").planned_share is None
    assert replace(case, step_seconds=(0.1, 7.5)).planned_share is None
    assert replace(case, step_seconds=()).planned_share is None


def test_a_table_tells_what_failed_and_why() -> None:
    console = Console(file=io.StringIO(), width=140)
    console.print(utilization_table([ROW, FAILED]))
    for line in utilization_notes([ROW, FAILED]):
        console.print(line, markup=False)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "2 peers × 25M parameters, H = 10, steps of 1 s; round trip 60 ms" in text
    assert re.search(r"blocking int4 +100 +70\.0% +81\.3% +60\.0% +35 +80% +15\.00 +1\.80 +2 of 2 +1\b", text)
    assert "hivemind delayed int4: hivemind-0 ended: <no group>" in text
    assert "gather 0.50" in text


def test_a_row_of_fragments_counts_their_rounds() -> None:
    row = replace(ROW, case=replace(CASE, mode="streaming", fragments=5), certified=10)
    console = Console(file=io.StringIO(), width=140)
    console.print(utilization_table([row]))
    assert "10 of 10" in console.file.getvalue()  # type: ignore[attr-defined]
    assert replace(row.case, system="hivemind", mode="delayed").cycle == 1


def test_patience_grows_with_everything_that_takes_long() -> None:
    assert patience(replace(CASE, step_seconds=(1.0, 75.0))) > patience(CASE)
    assert patience(replace(CASE, rate=1.0)) > patience(CASE)
    assert patience(replace(CASE, step_seconds=())) > patience(CASE)
