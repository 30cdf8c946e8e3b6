"""The arguments of `flockstep bench utilization`, and the runs that they make."""

import os
import shutil
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from flockstep.peer.base.errors import LocalError, UsageError
from flockstep.scripts.lab import namespaces
from flockstep.scripts.lab.utilization.lines import check_lines, shaped_line
from flockstep.scripts.lab.utilization.options import (
    UtilizationOptions,
    known_modes,
    utilization_options,
)
from flockstep.scripts.lab.utilization.utilization import why_no_baseline
from hypothesis import given
from hypothesis import strategies as st

GIVEN: dict[str, Any] = {
    "peers": 4,
    "params": "25M",
    "rate": ["100"],
    "round_trip_ms": 60.0,
    "loss_percent": 0.0,
    "step_s": "1.0",
    "steps": 100,
    "rounds": 3,
    "modes": ["blocking"],
    "codecs": ["int4"],
    "fragments": None,
    "phase_seconds": 0.0,
    "baseline": [],
    "baseline_python": "",
    "as_json": True,
}


def options(**changed: Any) -> UtilizationOptions:
    return utilization_options(**(GIVEN | changed))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"peers": 1}, "2 to 64 peers"),
        ({"peers": 65}, "2 to 64 peers"),
        ({"params": "many"}, "'many' is not a count"),
        ({"rate": ["fast"]}, "--rate 'fast'"),
        ({"rate": ["100,0"]}, "--rate '0'"),
        ({"rate": ["1e9"]}, "100,000 Mbit/s"),
        ({"round_trip_ms": -1.0}, "round trip"),
        ({"loss_percent": 51.0}, "50 %"),
        ({"step_s": "1,2"}, "2 times of a step for 4 peers"),
        ({"step_s": "nan"}, "--step-s 'nan'"),
        ({"step_s": "1e9"}, "at most a day"),
        ({"step_s": "real", "params": "24M"}, "no gpt has 24000000 parameters"),
        ({"step_s": "real", "baseline": ["hivemind"]}, "no real steps"),
        ({"modes": ["psychic"]}, "no mode 'psychic'"),
        ({"codecs": ["int4/int5"]}, "int5"),
        ({"baseline": ["petals"]}, "no baseline 'petals'"),
        ({"steps": 0}, "steps"),
    ],
)
def test_a_wrong_argument_is_named(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        options(**changed)


def test_every_rate_has_all_modes_and_codecs_and_its_baseline() -> None:
    made = options(rate=["30,100"], codecs=["int4,int8/int4"], baseline=["hivemind"], baseline_python="other")
    cases = [(case.system, case.codec, case.rate, case.python == "other") for case in made.cases()]
    ours = [("flockstep", "int4"), ("flockstep", "int8/int4"), ("hivemind", "fp16")]
    assert cases == [(*one, rate, one[0] == "hivemind") for rate in (30.0, 100.0) for one in ours]


def test_one_time_of_a_step_is_that_of_all() -> None:
    (case,) = options(step_s="0.5").cases()
    assert case.step_seconds == (0.5,) * 4
    (case,) = options(step_s="1,1,1,75").cases()
    assert case.step_seconds == (1.0, 1.0, 1.0, 75.0)
    (case,) = options(step_s="real", params="25M").cases()
    assert case.step_seconds == ()


def test_by_default_all_modes_of_this_version_are_measured() -> None:
    assert options(modes=[]).modes == known_modes()
    assert "blocking" in known_modes()


def test_the_run_has_what_was_asked_for() -> None:
    (case,) = options(codecs=["int8/int4"], steps=7, rounds=5, fragments=4).cases()
    table = tomllib.loads(case.run_toml())
    assert table["inner"]["steps"] == 7
    assert table["outer"].pop("mode", "blocking") == "blocking"
    assert table["outer"] == {"rounds": 6}  # The first one is not measured; a blocking run has no fragments.
    assert table["codec"] == {"contribution": "int8", "result": "int4"}
    assert table["admission"]["min_peers"] == 4  # Else the first one may train alone.
    streaming = replace(case, mode="streaming", fragments=4)
    outer = tomllib.loads(streaming.run_toml())["outer"]
    assert outer == {"rounds": 6, "mode": "streaming", "fragments": 4}
    assert tomllib.loads(replace(case, phase_seconds=9.0).run_toml())["inner"]["seconds"] == 9


@given(st.floats(0.0, 10.0), st.floats(0.0, 0.5))
def test_two_lines_in_a_row_have_the_round_trip_and_the_loss(round_trip: float, loss: float) -> None:
    line = shaped_line(16.7, round_trip, loss)
    assert (line.up, line.down) == (16.7, 16.7)
    assert 4 * line.delay == pytest.approx(round_trip)
    assert 1 - (1 - line.loss) ** 2 == pytest.approx(loss, abs=1e-12)


def test_a_machine_without_the_programs_is_told_which_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda program: None)
    with pytest.raises(LocalError, match="ip and tc not found") as told:
        check_lines(100, 0.06, 0.0)
    assert told.value.remedy == "apt install iproute2"
    assert not isinstance(told.value, UsageError)  # Exit code 1.


def test_without_root_there_is_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda program: f"/usr/bin/{program}")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(LocalError, match="only root") as told:
        namespaces.check_namespaces(("ip", "tc"))
    assert "sudo" in told.value.remedy


def test_a_missing_baseline_is_one_line(tmp_path: Path) -> None:
    bare = tmp_path / "python"  # Without site-packages: the standard library alone.
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "$@"\n')
    bare.chmod(0o755)
    line = why_no_baseline("hivemind", str(bare))
    assert line.startswith(f"hivemind is left out, since it is not installed for {bare}: pip install")
    assert "\n" not in line
    with pytest.raises(LocalError, match="cannot run"):
        why_no_baseline("hivemind", str(tmp_path / "nowhere"))
