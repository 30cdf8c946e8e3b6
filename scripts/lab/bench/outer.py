"""`flockstep bench outer`: the loss of each mode, codec, delay and outer setting, beside data parallel.

Every case is a training of its own (`training.outer`), as is the baseline of each seed and number of peers: data parallel
with the same inner optimizer on the same batches, so at equal tokens.
"""

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from rich.console import Console
from rich.table import Table

from ....collectives.codec import CELL, codec_named
from ....optim.outer import OuterSettings
from ....peer.errors import UsageError
from ..training.learner import TrainingSize
from ..training.outer import OUTER_MODES, OUTER_SIZES, OuterResult, OuterTraining, train_outer
from ..training.pool import each_trained
from .allreduce import listed
from .robust import seeds_of

OFFERED = OUTER_MODES[:2]
"""The modes to choose from; the third is the baseline."""
OPTIMIZERS = ("muon", "adamw")


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterOptions:
    """The options of the command line, lists as they were typed."""

    modes: Sequence[str] = ("blocking,streaming",)
    codecs: Sequence[str] = ("fp32,int4,lloyd2",)
    """Contribution/result, or one for both."""
    feedbacks: Sequence[str] = ("contributions",)
    delays: Sequence[str] = ("1",)
    """Of the streaming mode, in inner steps."""
    fragments: int = 4
    """Of the streaming mode."""
    outer: Sequence[str] = ("0.9/0.8/10",)
    """Learning rate/momentum, and /rounds over which the momentum rises."""
    peers: Sequence[str] = ("8",)
    seeds: Sequence[str] = ("0",)
    size: str = "small"
    optimizer: str = ""
    """Empty: the size's own, as with the next two."""
    steps: int | None = None
    rounds: int | None = None
    momentum: float | None = None
    """Of inner Muon, in the baseline, too."""
    baseline: bool = True
    device: str = "cpu"
    jobs: int | None = None
    as_json: bool = False

    def trainings(self) -> list[OuterTraining]:
        """Return all cases without duplicates, after each other's baselines. Raises `UsageError`."""
        cases = [case for peers in _whole(self.peers, "peers") for case in self._cases(peers)]
        if not cases:
            raise UsageError("there is nothing to train", remedy="give each option at least one value")
        baselines = map(baseline_of, cases) if self.baseline else ()
        return list(dict.fromkeys([*baselines, *cases]))

    def _cases(self, peers: int) -> list[OuterTraining]:
        size, cases = self.training_size(), []
        choices = product(*map(listed, (self.outer, self.modes, self.codecs, self.feedbacks)))
        for seed, (outer, mode, codec, feedback) in product(seeds_of(self.seeds), choices):
            if mode not in OFFERED:
                raise UsageError(f"there is no mode {mode!r}", remedy=f"choose one of {', '.join(OFFERED)}")
            contribution, _, result = codec.partition("/")
            for delay in _whole(self.delays, "delays") if mode == "streaming" else (0,):
                case = OuterTraining(
                    size=size,
                    mode=mode,
                    contribution=contribution,
                    result=result or contribution,
                    feedback="none" if codec == "fp32" else feedback,  # There is no rest to feed back.
                    fragments=self.fragments if mode == "streaming" else 1,
                    delay=delay,
                    outer=_settings(outer),
                    peers=peers,
                    seed=seed,
                    device=self.device,
                )
                cases.append(case)
        return cases

    def training_size(self) -> TrainingSize:
        """Return the size, with the options that override its own. Raises `UsageError`."""
        if self.size not in OUTER_SIZES:
            raise UsageError(f"there is no size {self.size!r}", remedy=f"choose one of {', '.join(OUTER_SIZES)}")
        size = OUTER_SIZES[self.size]
        if self.optimizer not in ("", *OPTIMIZERS):
            raise UsageError(f"there is no optimizer {self.optimizer!r}", remedy=f"choose one of {', '.join(OPTIMIZERS)}")
        return replace(
            size,
            optimizer=self.optimizer or size.optimizer,
            steps=size.steps if self.steps is None else self.steps,
            rounds=size.rounds if self.rounds is None else self.rounds,
            momentum=size.momentum if self.momentum is None else self.momentum,
        )


def baseline_of(training: OuterTraining) -> OuterTraining:
    """Return data parallel on the same batches."""
    return OuterTraining(
        size=training.size, mode="parallel", peers=training.peers, seed=training.seed, device=training.device
    )


def run_outer(options: OuterOptions, write_line: Callable[[str], None]) -> None:
    """Train all cases; write a JSON object as each ends, or a table at the end."""
    results: dict[OuterTraining, OuterResult] = {}
    jobs = options.jobs or (os.cpu_count() or 1 if options.device == "cpu" else 1)
    for training, result in each_trained(train_outer, options.trainings(), jobs):
        results[training] = result
        if options.as_json and training.mode != "parallel":
            write_line(json.dumps(outer_object(training, result, results.get(baseline_of(training)))))
    if not options.as_json:
        Console().print(outer_table(results))


def bits_of(training: OuterTraining) -> float:
    """Return the bits that a peer sends for each parameter and round, as sender and as owner, less 1 / peers of them."""
    codecs = codec_named(training.contribution), codec_named(training.result)
    return sum(codec.cell_bytes * 8 / CELL for codec in codecs)


def outer_object(training: OuterTraining, result: OuterResult, baseline: OuterResult | None) -> dict[str, object]:
    """Return one object of `--json`; a loss that is not finite is null."""
    return {
        "mode": training.mode,
        "codec": f"{training.contribution}/{training.result}",
        "feedback": training.feedback,
        "bits": bits_of(training),
        "fragments": training.fragments,
        "delay": training.delay,
        "steps": training.size.steps,
        "rounds": training.size.rounds,
        "lr": training.outer.lr,
        "momentum": training.outer.momentum,
        "momentum_warmup": training.outer.warmup,
        "inner_momentum": training.size.momentum,
        "peers": training.peers,
        "params": result.params,
        "seed": training.seed,
        "tokens": training.tokens,
        "loss": _finite(result.loss),
        "baseline": None if baseline is None else f"parallel {training.size.optimizer}",
        "baseline_loss": None if baseline is None else _finite(baseline.loss),
    }


def outer_table(results: Mapping[OuterTraining, OuterResult]) -> Table:
    """Return a table: the mean of the seeds, and by how much it is above blocking fp32 and above data parallel."""
    size = next(iter(results)).size
    params = next(iter(results.values())).params
    title = f"Held-out loss, {params / 1e6:.2g}M parameters, {size.optimizer}, {size.rounds} rounds of {size.steps} steps"
    table = Table("peers", "case", "outer", "bits", "loss", "blocking", "parallel", title=title, box=None)
    groups: dict[OuterTraining, list[OuterTraining]] = {}
    for training in results:
        if training.mode != "parallel":
            groups.setdefault(replace(training, seed=0), []).append(training)
    for case, group in groups.items():
        loss = _mean([results[one].loss for one in group])
        blocking = [results[one].loss for one in map(_blocking_of, group) if one in results and one not in group]
        parallel = [results[one].loss for one in map(baseline_of, group) if one in results]
        table.add_row(
            str(case.peers),
            _named(case),
            f"{case.outer.lr:g}/{case.outer.momentum:g}" + (f"/{case.outer.warmup}" if case.outer.warmup else ""),
            f"{bits_of(case):.4g}",
            f"{loss:.4f}" if math.isfinite(loss) else "diverged",
            _above(loss, blocking),
            _above(loss, parallel),
        )
    table.caption = "Streaming: fragments, delay in steps. Last: above blocking fp32, above data parallel."
    return table


def _named(case: OuterTraining) -> str:
    """Return the mode and the codecs in short: `streaming 4 1, int4`."""
    mode = f"streaming {case.fragments} {case.delay}" if case.mode == "streaming" else case.mode
    codec = case.contribution if case.contribution == case.result else f"{case.contribution}/{case.result}"
    fed = {"contributions": "", "both": " both", "none": " none" * (codec != "fp32")}
    return f"{mode}, {codec}{fed[case.feedback]}"


def _blocking_of(training: OuterTraining) -> OuterTraining:
    """Return blocking rounds in fp32 with the same outer settings."""
    return replace(
        training, mode="blocking", contribution="fp32", result="fp32", feedback="none", fragments=1, delay=0
    )


def _above(loss: float, others: Sequence[float]) -> str:
    if not others or not math.isfinite(loss) or not math.isfinite(_mean(others)):
        return ""
    return f"{100 * (loss / _mean(others) - 1):+.2f} %"


def _mean(losses: Sequence[float]) -> float:
    return sum(losses) / len(losses)


def _finite(loss: float) -> float | None:
    return loss if math.isfinite(loss) else None


def _whole(words: Sequence[str], what: str) -> list[int]:
    """Parse whole numbers. Raises `UsageError`."""
    try:
        return [int(word) for word in listed(words)]
    except ValueError:
        raise UsageError(f"cannot read the {what} {' '.join(words)!r}", remedy="write whole numbers: 1,2") from None


def _settings(word: str) -> OuterSettings:
    """Parse `0.9/0.8` or `0.9/0.8/10`. Raises `UsageError`."""
    lr, _, rest = word.partition("/")
    momentum, _, warmup = rest.partition("/")
    try:
        return OuterSettings(lr=float(lr), momentum=float(momentum), warmup=int(warmup or 0))
    except ValueError:
        remedy = "write lr/momentum, and /rounds of its warm-up: 0.9/0.8/10"
        raise UsageError(f"cannot read {word!r} as outer settings", remedy=remedy) from None
