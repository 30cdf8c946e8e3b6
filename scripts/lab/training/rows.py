"""The trainings of a bench: one after the other, as JSON or as tables."""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TypeAlias

from rich.console import Console

from .swarm import Training, TrainingResult, train

Results: TypeAlias = Mapping[Training, TrainingResult]


def run_trainings(
    trainings: Sequence[Training],
    baseline_of: Callable[[Training], Training],
    tables: Callable[[Results], Iterator[str]],
    write_line: Callable[[str], None],
    *,
    as_json: bool,
) -> None:
    """Train all cases, baselines first; write a JSON object for each other one as it ends, or tables at the end.

    A terminal shows which one is trained.
    """
    console, results = Console(stderr=True), dict[Training, TrainingResult]()
    for number, training in enumerate(trainings, 1):
        with console.status(f"training {number} of {len(trainings)}"):  # Not while a row is written: it takes stdout.
            results[training] = train(training)
        if as_json and training != baseline_of(training):
            write_line(json.dumps(object_of(training, results[training], results[baseline_of(training)])))
    for line in () if as_json else tables(results):
        write_line(line)


def object_of(training: Training, result: TrainingResult, baseline: TrainingResult) -> dict[str, object]:
    """Return one object of `--json`: the training, its curve, and that of its baseline; a loss that is not finite is null."""
    curves = [[(round_, loss if math.isfinite(loss) else None) for round_, loss in one.curve] for one in (result, baseline)]
    return {
        **asdict(training),
        "params": result.params,
        "tokens": training.tokens,
        "loss": curves[0][-1][1],
        "baseline_loss": curves[1][-1][1],
        "curve": curves[0],
        "baseline_curve": curves[1],
    }
