"""TensorBoard, wandb and trackio, from events; a logger that fails ends nothing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from flockstep.peer.base.errors import LocalError, UsageError
from flockstep.peer.base.install import how_to_install
from flockstep.peer.log.events import EVENTS
from flockstep.scripts.peers.loggers import CURVES, Curve, Loggers, open_loggers

LINK = "flockstep://" + "a" * 52 + "?via=/ip4/192.0.2.1/tcp/4001/p2p/12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"


def test_the_curves_are_fields_of_events_that_there_are() -> None:
    for curve in CURVES:
        assert {curve.field, curve.over} <= EVENTS[curve.event].fields.keys()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_gets_the_points(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    loggers = open_loggers([f"tensorboard:{tmp_path}"], tmp_path, LINK)
    for step in (1, 2):
        assert loggers.take({"event": "step", "step": step, "loss": 3.0 - step, "tokens_per_s": 10.0}) == ""
    loggers.take({"event": "round.done", "round": 5, "cut": ["a", "b"], "roster": ["a", "b", "c"], "seconds": 2.0})
    assert loggers.close() == ""
    found = accumulator.EventAccumulator(str(tmp_path)).Reload()
    assert [(point.step, point.value) for point in found.Scalars("train/loss")] == [(1, 2.0), (2, 1.0)]
    assert [(point.step, point.value) for point in found.Scalars("round/contributors")] == [(5, 2.0)]


def test_a_logger_that_fails_is_told_once_and_the_others_go_on() -> None:
    class Broken:
        def add(self, curve: Curve, value: float, at: int) -> None:
            raise OSError("the disk is full")

        def close(self) -> None:
            raise AssertionError("it is gone")

    class Counting:
        points = 0

        def add(self, curve: Curve, value: float, at: int) -> None:
            self.points += 1

        def close(self) -> None:
            self.points += 100

    good = Counting()
    loggers = Loggers([Broken(), good])
    assert "the disk is full" in loggers.take({"event": "step", "step": 1, "loss": 1.0})
    assert loggers.take({"event": "step", "step": 2, "loss": 1.0}) == ""
    assert loggers.close() == ""
    assert good.points == 102


TRACKED = """
import json, sys
from pathlib import Path
from flockstep.scripts.peers.loggers import open_loggers
for step in (1, 2):
    loggers = open_loggers(["trackio:mine"], Path("."), sys.argv[1])
    assert loggers.take({"event": "step", "step": step, "loss": 3.0 - step}) == ""
    assert loggers.close() == ""
from trackio.sqlite_storage import SQLiteStorage
print(json.dumps([(point["step"], point["train/loss"]) for point in SQLiteStorage.get_logs("mine", "a" * 8)]))
"""


def test_trackio_gets_the_points_and_goes_on_after_a_restart(tmp_path: Path) -> None:
    pytest.importorskip("trackio")
    where = {"TRACKIO_DIR": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", TRACKED, LINK], env=os.environ | where, capture_output=True, text=True, check=False
    )
    assert done.stdout == "[[1, 2.0], [2, 1.0]]\n", done.stderr  # Nothing of trackio's own.


def test_trackio_that_is_not_installed_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(LocalError, match="--log trackio needs a package") as refused:
        open_loggers(["trackio"], tmp_path, LINK)
    assert refused.value.remedy == how_to_install("trackio")


@pytest.mark.parametrize("name", ["tensorboard", "tensorboard:", "wandb:", "trackio:", "mlflow", ""])
def test_a_logger_that_nobody_knows_is_one_line(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is no logger") as raised:
        open_loggers([name], tmp_path, LINK)
    assert "wandb" in raised.value.remedy


def test_wandb_without_a_login_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with pytest.raises(UsageError, match="not logged in to wandb") as raised:
        open_loggers(["wandb"], tmp_path, LINK)
    assert "wandb login" in raised.value.remedy
