"""The notebook: its cells, run from the first to the last, publish a run and train it."""

import json
import os
import subprocess
import sys
from pathlib import Path

NOTEBOOK = Path(__file__).parents[2] / "examples" / "swarm.ipynb"


def test_the_cells_of_the_notebook_publish_a_run_and_train_it(tmp_path: Path) -> None:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    environment = {**os.environ, "FLOCKSTEP_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    errors = [float(line.split()[-1]) for line in done.stdout.splitlines() if line.startswith("round ")]
    assert len(errors) == 5
    assert errors[-1] < 0.1  # That of a constant is 0.7.
