"""`flockstep doctor` and `join` as commands, on a computer that cannot hold the run's model."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from flockstep.scripts.cli import main
from flockstep.scripts.processes import descendants, running

HUGE = """
name = "huge"
[model]
layers = 1000
width = 65536
heads = 64
[data]
source = "text:{stdlib}"
"""
"""52 T parameters: more memory than any computer has, and more disk."""


def said(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[object, str, str]:
    """Exit code, stdout and stderr of a command."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["flockstep", *words, "--host", "127.0.0.1", "--port", "0", "--no-upnp"])
        with pytest.raises(SystemExit) as ended:
            main.main()
    return ended.value.code, *capsys.readouterr()


def test_too_little_memory_and_disk(
    publish: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    link, home = publish(HUGE), tmp_path / "never made"
    code, out, err = said(capsys, "doctor", link, "--home", str(home), "--json")
    assert (code, err) == (1, "")
    assert not home.exists()
    checks = [json.loads(line) for line in out.splitlines()]
    assert all(set(check) == {"name", "ok", "cause", "remedy"} for check in checks)
    (router,) = [check for check in checks if check["name"] == "UPnP"]
    assert (router["ok"], router["cause"]) == (None, "switched off by --no-upnp")
    failed = {check["name"]: check for check in checks if check["ok"] is False}
    assert set(failed) == {"memory", "disk", "line and run"}

    code, told, error = said(capsys, "join", link, "--home", str(tmp_path / "home"))
    assert code == 1
    for name, words, output in (
        ("memory", "too little memory: the run's model of 51,539.6 G parameters needs 1.3 PB", error),
        ("disk", "free, the checkpoint and results of the run need 713.5 TB", told),
    ):
        (line,) = [line for line in output.splitlines() if words in line]
        assert words in failed[name]["cause"]
        assert failed[name]["remedy"] in line


@pytest.mark.skipif(os.name == "nt", reason="Windows has no sched_yield")
def test_a_doctor_that_is_killed_leaves_no_process(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "flockstep", "doctor", "--home", str(tmp_path / "home"), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as doctor:
        while not (children := descendants(doctor.pid)):
            assert doctor.poll() is None
        doctor.kill()
    while children & running():
        os.sched_yield()
    assert not list(tmp_path.iterdir())
