"""Several trainings at a time, a process each."""

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from typing import TypeVar

from rich.console import Console

_Case = TypeVar("_Case")
_Outcome = TypeVar("_Outcome")


def each_trained(
    train: Callable[[_Case], _Outcome], trainings: Sequence[_Case], jobs: int | None
) -> Iterator[tuple[_Case, _Outcome]]:
    """Train each case and yield its outcome, in order; a terminal shows which one is awaited.

    `train` is a function at the top of a module; None stands for as many jobs as there are cores.
    """
    jobs = jobs or os.cpu_count() or 1
    console = Console(stderr=True)
    with ExitStack() as stack:
        if jobs == 1:
            outcomes: Iterator[_Outcome] = map(train, trainings)
        else:  # Spawned: a forked child of a process with torch's threads may hang.
            pool = stack.enter_context(ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")))
            outcomes = pool.map(train, trainings)
        for number, training in enumerate(trainings, 1):
            with console.status(f"training {number} of {len(trainings)}"):  # Not while a row is written: it takes stdout.
                outcome = next(outcomes)
            yield training, outcome
