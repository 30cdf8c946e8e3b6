"""Writes a checkpoint beside an older one in processes that are killed at every call that writes, torn in the middle.

`python -m support.killed_writes FOLDER` prints how many were killed. A process of its own, since it forks.
"""

import os
import shutil
import signal
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from flockstep.collectives.chain.chain import ChainPosition, position_after, start_of_run
from flockstep.collectives.state import merkle
from flockstep.collectives.state.checkpoint_file import Draft, load_checkpoint
from flockstep.collectives.vector.arrays import Floats
from support.certificates import RUN, grow

SIZE = 2560


def write(folder: Path, place: ChainPosition, state: tuple[Floats, Floats], run: str = RUN) -> None:
    """Write a checkpoint of a state."""
    draft = Draft(folder / str(place.round), state[0].size)
    spans = [merkle.leaf_bytes(vector, *span) for vector in state for span in merkle.leaf_spans(vector.size)]
    for index, piece in enumerate(spans):
        draft.put(index, bytes(piece))
    draft.finish(run, place, (), merkle.leaves(state[0]) + merkle.leaves(state[1]))


def killed_at(number: int, work: Callable[[], Any]) -> bool:
    """Carry out `work` in a child that is killed in the middle of its n-th write. Returns whether it came so far."""
    child = os.fork()
    if child == 0:
        left = count(1 - number)
        for real in (os.write, os.fsync, os.replace, os.unlink, os.rmdir):

            def call(*arguments: Any, real: Callable[..., Any] = real, **named: Any) -> Any:
                if next(left) == 0:
                    if real.__name__ == "write":
                        real(arguments[0], arguments[1][: len(arguments[1]) // 2])
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*arguments, **named)

            setattr(os, real.__name__, call)
        try:
            work()
        finally:
            os._exit(0)
    return os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL


def main(home: Path) -> int:
    merkle.LEAF_ELEMENTS = 1024
    random = np.random.default_rng(0)
    old, new = ([random.normal(size=SIZE).astype(np.float32) for _ in range(2)] for _ in range(2))
    roots = [merkle.root(merkle.leaves(theta) + merkle.leaves(momentum)) for theta, momentum in (old, new)]
    place = position_after(grow(None, 3, mark=roots[1])[-1], RUN)
    write(home / "first", start_of_run(roots[0]), (old[0], old[1]))
    for number in count(1):
        folder = home / "checkpoints"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(home / "first", folder)

        def replace(folder: Path = folder) -> None:
            write(folder, place, (new[0], new[1]))
            shutil.rmtree(folder / "0", ignore_errors=True)

        was_killed = killed_at(number, replace)
        newest = max((path for path in folder.iterdir() if path.name.isdecimal()), key=lambda path: int(path.name))
        assert load_checkpoint(newest).place.root in roots, number
        replace()  # Over whatever the kill left.
        (left,) = folder.iterdir()
        assert load_checkpoint(left).place.root == roots[1], number
        if not was_killed:
            return number - 1
    raise AssertionError("unreachable")


if __name__ == "__main__":
    print(main(Path(sys.argv[1])))  # noqa: T201
