"""The notebook: its cells, run from the first to the last, publish a run and train it."""

import json
import os
import subprocess
from pathlib import Path

from support.commands import Command

NOTEBOOK = Path(__file__).parents[2] / "examples" / "swarm.ipynb"


def test_the_cells_of_the_notebook_publish_a_run_and_train_it(tmp_path: Path) -> None:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    script = tmp_path / "cells.py"
    script.write_text(code)
    environment = {**os.environ, "FLOCKSTEP_HOME": str(tmp_path)}
    with Command(program=script, stderr=subprocess.PIPE, env=environment) as process:
        said, complaints = process.communicate(timeout=240)
    assert process.returncode == 0, complaints
    errors = [float(line.split()[-1]) for line in said.splitlines() if line.startswith("round ")]
    assert len(errors) == 5
    assert errors[-1] < 0.1  # That of a constant is 0.7.
