"""Moves a checkpoint on in processes that are killed at every call that writes, torn in the middle; then completes it.

`python -m support.killed_moves FOLDER` prints how many were killed. A process of its own, since it forks.
"""

import os
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from flockstep.collectives.chain.chain import ChainPosition, position_after, start_of_run
from flockstep.collectives.chain.kept_outputs import OutputIndex, _packed
from flockstep.collectives.state import merkle
from flockstep.collectives.state.checkpoint_file import Draft, load_checkpoint
from flockstep.collectives.state.move import Mover, PlannedRound, is_moving
from flockstep.collectives.vector.arrays import Floats
from flockstep.collectives.vector.codec import CELL, codec_named
from flockstep.dht.run.manifest import Manifest
from flockstep.optim.member.apply import leaf_step
from flockstep.optim.step.outer import OuterSettings
from flockstep.peer.base.digest import digest
from support.certificates import RUN, grow

CELLS, ROUNDS = 10, 3
CODEC = codec_named("int4")
MANIFEST = Manifest.from_toml('name = "moved"\n[data]\nsource = "text:{stdlib}"\n', where="", owner="")
REVISED = {b"": MANIFEST, b"slower": replace(MANIFEST, outer=replace(MANIFEST.outer, lr=0.3))}
STEP = leaf_step(OuterSettings(lr=2.0, momentum=0.1), codec_named("fp32"), REVISED.__getitem__)
State = tuple[Floats, Floats]


def leaves_of(state: State) -> list[bytes]:
    return merkle.leaves(state[0]) + merkle.leaves(state[1])


def start(folder: Path, run: str = RUN) -> State:
    """Write a checkpoint of round 0."""
    random = np.random.default_rng(0)
    state = random.normal(size=CELLS * CELL).astype(np.float32), random.normal(size=CELLS * CELL).astype(np.float32)
    draft = Draft(folder / "0", CELLS * CELL)
    spans = [merkle.leaf_bytes(vector, *span) for vector in state for span in merkle.leaf_spans(CELLS * CELL)]
    for index, piece in enumerate(spans):
        draft.put(index, bytes(piece))
    draft.finish(run, start_of_run(merkle.root(leaves_of(state))), (), leaves_of(state))
    return state


def train(state: State, folder: Path, revised: bytes = b"") -> tuple[PlannedRound, ...]:
    """Make the outer steps of some rounds, of two parts each, and write their outputs; the last under `revised`."""
    random, bounds = np.random.default_rng(1), (0, 4, CELLS)
    rounds = []
    for number in range(1, ROUNDS + 1):
        mean = random.normal(size=CELLS * CELL).astype(np.float32)
        outputs = [bytes(CODEC.encode(mean[low * CELL : high * CELL])) for low, high in pairwise(bounds)]
        by_key = {digest(data): data for data in outputs}
        (folder / str(number)).mkdir(parents=True)
        index = OutputIndex(tuple(by_key), tuple(map(len, by_key.values())))
        with (folder / str(number) / "outputs").open("wb") as file:
            file.writelines(_packed(index, by_key))
        revision = revised if number == ROUNDS else b""
        rounds.append(PlannedRound(number, bounds, tuple(digest(data) for data in outputs), revision))
        STEP(*state, 0, rounds[-1], outputs)
    return tuple(rounds)


def killed_at(number: int, work: Callable[[], Any]) -> bool:
    """Carry out `work` in a child that is killed in the middle of its n-th write. Returns whether it came so far."""
    child = os.fork()
    if child == 0:
        left = count(1 - number)
        for real in (os.write, os.fsync, os.replace, os.unlink):

            def call(*arguments: Any, real: Callable[..., Any] = real) -> Any:
                if next(left) == 0:
                    if real.__name__ == "write":
                        real(arguments[0], arguments[1][: len(arguments[1]) // 2])
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*arguments)

            setattr(os, real.__name__, call)
        try:
            work()
        finally:
            os._exit(0)
    return os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL


def main(home: Path, is_moved_on: bool) -> int:
    merkle.LEAF_ELEMENTS = 1024
    before, outputs = start(home / "first"), home / "outputs"
    old = merkle.root(leaves_of(before))
    state = before[0].copy(), before[1].copy()
    rounds = train(state, outputs, b"slower")
    leaves = leaves_of(state)
    place: ChainPosition = position_after(grow(None, ROUNDS, mark=merkle.root(leaves))[-1], RUN)
    if is_moved_on:  # A later round has changed most of the memory.
        state[0][1500:] += 1
        state[1][1500:] += 1
    mover = Mover(outputs, STEP)
    for number in count(1):
        folder = home / "checkpoints"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(home / "first", folder)

        def move(folder: Path = folder) -> None:
            assert mover.begin(load_checkpoint(folder / "0"), place, leaves, rounds)
            mover.complete(folder / "0", state)

        def complete(folder: Path = folder) -> None:
            for path in folder.iterdir():
                if is_moving(path):
                    mover.complete(path)

        was_killed = killed_at(number, move)
        killed_at(1 + number // 2, complete)  # And once more.
        complete()
        (left,) = folder.iterdir()
        root = load_checkpoint(left).place.root
        assert root in (old, place.root), number
        assert not is_moving(left)
        if not was_killed:
            assert root == place.root
            return number - 1
    raise AssertionError("unreachable")


if __name__ == "__main__":
    print(main(Path(sys.argv[1]), sys.argv[2] == "moved on"))  # noqa: T201
