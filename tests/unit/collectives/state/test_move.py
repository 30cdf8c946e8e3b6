"""A checkpoint that is moved on in its place: whole after a kill at any moment."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[3]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the processes that are killed are forked")
@pytest.mark.parametrize("memory", ["as certified", "moved on"])
def test_a_kill_at_any_write_leaves_a_state_that_is_whole_and_of_one_round(tmp_path: Path, memory: str) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "support.killed_moves", str(tmp_path), memory]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 30
