"""Vectors that two processes share: one piece of memory, of which no name is left."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from flockstep.peer.base.errors import LocalError
from flockstep.peer.process.shared import SharedVectors, VectorShape, bytes_of

SHAPES = {"theta": VectorShape(1000, np.float32), "residual": VectorShape(7, np.uint16)}
CHILD = """
import sys
from pathlib import Path
import numpy as np
from flockstep.peer.process.shared import SharedVectors, VectorShape
shapes = {"theta": VectorShape(1000, np.float32), "residual": VectorShape(7, np.uint16)}
shared = SharedVectors.attach(Path(sys.argv[1]), shapes)
shared["theta"][3] += 1
shared["residual"][6] += 5
"""


def add_one(path: Path) -> None:
    subprocess.run([sys.executable, "-c", CHILD, str(path)], check=True)


def test_what_a_child_writes_is_here() -> None:
    shared = SharedVectors.create(SHAPES)
    assert bytes_of(SHAPES) == 4014
    add_one(shared.path)
    assert (shared["theta"][3], shared["residual"][6]) == (1, 5)


@pytest.mark.parametrize("on_disk", [False, True])
def test_no_name_is_left(tmp_path: Path, on_disk: bool) -> None:
    shared = SharedVectors.create(SHAPES, tmp_path / "run" if on_disk else None)
    assert len([*tmp_path.glob("run/*")]) == on_disk
    add_one(shared.path)
    shared.unlink()
    assert not [*tmp_path.glob("run/*")]
    assert (shared["theta"][3], shared["residual"][6]) == (1, 5)


def test_vectors_that_do_not_fit_are_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(LocalError, match=r"no room for 4000000000000 MB of shared vectors in"):
        SharedVectors.create({"theta": VectorShape(10**18, np.float32)}, tmp_path)
    assert not [*tmp_path.iterdir()]
    with pytest.raises(LocalError, match="cannot map the shared vectors"):
        SharedVectors.attach(tmp_path / "gone", SHAPES)
