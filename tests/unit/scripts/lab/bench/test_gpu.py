"""`bench gpu`: its commands, its rows, and what it says without a GPU."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from flockstep.peer.base.errors import UsageError
from flockstep.scripts.cli.main import app
from flockstep.scripts.lab.bench.gpu import RUNS, GpuRun, arguments, gpu_lines, joined_rows, rows_of, run_gpu
from typer.main import get_command

needs_libraries = pytest.mark.skipif(
    any(find_spec(name) is None for name in ("bitsandbytes", "peft", "transformers")), reason="bitsandbytes is not installed"
)


@pytest.mark.parametrize("run", [each for run in RUNS for each in (run, run.rehearsed())])
def test_each_run_can_be_published_and_each_join_takes_its_options(run: GpuRun, tmp_path: Path) -> None:
    assert run.manifest().admission.min_peers == len(run.peers)
    join = get_command(app).commands["join"]  # type: ignore[attr-defined]  # a group
    for options in run.peers.values():
        parsed = join.make_context("join", arguments("flockstep://x", tmp_path, "cuda", options)[1:]).params
        assert parsed["device"] == ("cpu" if "cpu" in options else "cuda")
        assert parsed["home"] == tmp_path


def test_what_is_tried_is_what_the_table_of_devices_names() -> None:
    options = {option for run in RUNS for peer in run.peers.values() for option in peer}
    assert {"bf16", "fp16", "fp32", "cpu", "--optimizer-8bit", "--load-in-4bit", "--compile"} <= options


def test_without_a_gpu_one_line_says_what_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match="no CUDA GPU") as caught:
        run_gpu(print, print, cpu=False, as_json=False)
    assert "--cpu" in caught.value.remedy


def events(loss: float, root: str = "a", **fields: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [{"event": "device.bench", "tokens_per_s": 2000.0, "memory_used": 10**9, **fields}]
    for number in range(1, 5):
        time, phase = 10.0 * number, {"tokens": 8192, "loss": 9.0 if number < 3 else loss}
        found.append({"event": "phase.end", "time": time, "round": number, **phase})
        found.append({"event": "round.done", "time": time + 1, "round": number, "root": f"{root}{number}"})
    return found


def test_a_row_has_the_later_loss_both_speeds_and_the_memory_beside_the_plan() -> None:
    first, other = rows_of(RUNS[0], {"fp32": events(2.0), "bf16": events(2.004)})
    assert (first["loss"], first["rounds"], first["reason"]) == (2.0, 4, "")
    assert (first["tokens_per_s_alone"], first["tokens_per_s"]) == (2000, 819)  # 3 phases of 8,192 in 30 s.
    assert first["peak_bytes"] == 10**9
    assert first["planned_bytes"] == pytest.approx(16 * 1.1e6, rel=0.2)  # Weights, gradients and two moments.
    assert (other["apart"], other["reason"]) == (0.002, "")


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (events(2.02), "its loss is +1.00% apart"),
        (events(2.0, root="b"), "state roots differ"),
        ([*events(2.0), {"event": "device.uncompiled", "reason": "no cc"}], "not compiled: no cc"),
        ([], "it ended no phase"),
    ],
)
def test_what_is_wrong_with_a_peer_is_its_reason(other: list[dict[str, Any]], reason: str) -> None:
    rows = rows_of(RUNS[0], {"fp32": events(2.0), "bf16": other})
    assert rows[1]["reason"] == reason
    table = [*gpu_lines({"device": "x", "torch": "2", "seconds": 1, "joins": rows})]
    assert any(line.startswith("bf16") and line.endswith(reason) for line in table)


@pytest.mark.explore
@needs_libraries
@pytest.mark.parametrize("run", RUNS, ids=lambda run: next(iter(run.peers)))
def test_real_peers_train_each_run_in_its_tiny_size(run: GpuRun) -> None:
    rows = joined_rows(run.rehearsed(), "cpu")
    assert [(row["peer"], row["reason"]) for row in rows] == [(name, "") for name in run.peers]
    assert all(row["rounds"] and row["loss"] and row["tokens_per_s_alone"] for row in rows)
