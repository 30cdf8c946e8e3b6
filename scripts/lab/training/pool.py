"""Several trainings at a time, a process each."""

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

_Case = TypeVar("_Case")
_Outcome = TypeVar("_Outcome")


def each_trained(
    train: Callable[[_Case], _Outcome], trainings: Sequence[_Case], jobs: int
) -> Iterator[tuple[_Case, _Outcome]]:
    """Train each case and yield what it came to, in order. `train` is a function at the top of a module."""
    if jobs == 1:
        yield from ((training, train(training)) for training in trainings)
        return
    # Spawned: a forked child of a process with torch's threads may hang.
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        yield from zip(trainings, pool.map(train, trainings), strict=True)
