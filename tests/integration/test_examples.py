"""The examples, started as their docstrings say: alone on their own run, and with others."""

import os
import runpy
import subprocess
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from flockstep.dht.run.layout import UNPINNED
from support.commands import Command

EXAMPLES = Path(__file__).parents[2] / "examples"


def started(name: str, home: Path, *arguments: str) -> Command:
    environment = {**os.environ, "FLOCKSTEP_HOME": str(home)}
    return Command(*arguments, program=EXAMPLES / name, stderr=subprocess.STDOUT, env=environment)


def said(process: Command) -> str:
    with process:
        output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    return output


def test_the_cnn_learns_with_another_peer_and_the_plain_loop_becomes_a_swarms(
    publish: Callable[..., str], tmp_path: Path
) -> None:
    run = runpy.run_path(str(EXAMPLES / "cnn.py"))["RUN"]
    first = started("cnn.py", tmp_path / "0", "2")
    assert first.stdout is not None
    link = first.stdout.readline().split("'")[1]
    second = started("cnn.py", tmp_path / "1", link)
    after = started("loop/after.py", tmp_path / "after", publish(run.replace('name = "shapes"', 'name = "loop"'), "after"))
    before = started("loop/before.py", tmp_path)
    for process in (first, second):
        assert "round 6: " in said(process)
    told = said(after)
    assert "error 0.0" in told
    assert told.count(f"flockstep: {UNPINNED}\n") == 1
    assert "error 0.0" in said(before)


@pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed")
def test_lora_publishes_a_run_by_itself_and_learns(tmp_path: Path) -> None:
    output = said(started("lora.py", tmp_path))
    assert "join with: python" in output
    assert UNPINNED not in output
    assert float(output.split("round 5: loss ")[1].split()[0]) < 1.5


def test_examples_are_short() -> None:
    lines = {path.name: len(path.read_text(encoding="utf-8").splitlines()) for path in EXAMPLES.rglob("*.py")}
    assert {name: count for name, count in lines.items() if count >= 100} == {}
