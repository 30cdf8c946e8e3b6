"""The arguments of `flockstep bench utilization`, and the runs that they make."""

import os
import shutil
import tomllib
from dataclasses import replace
from typing import Any

import pytest
from flockstep.peer.base.errors import LocalError, UsageError
from flockstep.scripts.lab import namespaces
from flockstep.scripts.lab.utilization.cases import UtilizationCase, utilization_cases
from flockstep.scripts.lab.utilization.measure import patience
from flockstep.scripts.lab.utilization.utilization import run_utilization

GIVEN: dict[str, Any] = {
    "peers": 4,
    "params": "25M",
    "rate": ["100"],
    "round_trip_ms": 60.0,
    "step_s": 1.0,
    "steps": 100,
    "rounds": 3,
    "modes": ["blocking"],
    "codecs": ["int4"],
}


def cases(**changed: Any) -> list[UtilizationCase]:
    return utilization_cases(**(GIVEN | changed))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"params": "some"}, "--params 'some'"),
        ({"rate": ["0"]}, "--rate '0'"),
        ({"rate": ["x"]}, "--rate 'x'"),
        ({"modes": ["psychic"]}, "psychic"),
        ({"codecs": ["int4/int5"]}, "int5"),
        ({"steps": 0}, "steps"),
    ],
)
def test_a_wrong_argument_is_named(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        cases(**changed)


def test_every_rate_has_all_modes_and_codecs() -> None:
    made = cases(rate=["30,100"], modes=["blocking,streaming"], codecs=["int4,int8/int4"])
    assert [(case.mode, case.codec, case.rate) for case in made] == [
        (mode, codec, rate)
        for rate in (30.0, 100.0)
        for mode in ("blocking", "streaming")
        for codec in ("int4", "int8/int4")
    ]


def test_the_run_has_what_was_asked_for() -> None:
    (case,) = cases(codecs=["int8/int4"], steps=7, rounds=5)
    table = tomllib.loads(case.run_toml())
    assert table["inner"]["steps"] == 7
    assert table["outer"] == {"rounds": 6, "mode": "blocking"}  # The first one is not measured.
    assert table["codec"] == {"contribution": "int8", "result": "int4"}
    assert table["admission"]["min_peers"] == 4  # Else the first one may train alone.


def test_a_machine_without_the_programs_is_told_which_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda program: None)
    with pytest.raises(LocalError, match="ip and tc not found") as told:
        run_utilization(cases(), print, print, as_json=True)
    assert told.value.remedy == "apt install iproute2"
    assert not isinstance(told.value, UsageError)  # Exit code 1.


def test_without_root_there_is_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda program: f"/usr/bin/{program}")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(LocalError, match="only root") as told:
        namespaces.check_namespaces(("ip", "tc"))
    assert "sudo" in told.value.remedy


def test_patience_grows_with_everything_that_takes_long() -> None:
    (case,) = cases()
    assert patience(replace(case, step_seconds=2.0)) > patience(case)
    assert patience(replace(case, rate=1.0)) > patience(case)
