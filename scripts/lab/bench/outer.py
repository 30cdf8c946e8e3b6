"""`flockstep bench outer`: the loss of each mode, codec, delay and outer setting, beside data parallel.

Every case is a training of its own (`training.outer`), as is the baseline of each seed and number of peers: data parallel
with the same inner optimizer on the same batches, so at equal tokens. With several inner rates each side is trained with
each, and the best of its own, by the mean of the seeds, is what the table compares.
"""

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import Any, TypeAlias

from rich.console import Console
from rich.table import Table

from ....collectives.vector.codec import CELL, codec_named
from ....optim.step.outer import OuterSettings
from ....peer.base.errors import LocalError, UsageError
from ..training.learner import TrainingSize
from ..training.outer import OUTER_MODES, OUTER_SIZES, OuterResult, OuterTraining, train_outer
from ..training.pool import each_trained
from .allreduce import listed
from .gap_picture import Gap, gap_picture
from .robust import seeds_of

OFFERED = OUTER_MODES[:2]
"""The modes to choose from; the third is the baseline."""
OPTIMIZERS = ("muon", "adamw")
COMPACT: dict[str, Any] = {"box": None, "pad_edge": False, "collapse_padding": True}
"""The style of the tables: within 80 columns."""
MAX_RATE = 64
"""Of the default rates: nothing learns there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterOptions:
    """The options of the command line, lists as they were typed."""

    modes: Sequence[str] = ("blocking,streaming",)
    codecs: Sequence[str] = ("fp32,int4,lloyd2",)
    """Contribution/result, or one for both."""
    delays: Sequence[str] = ("1",)
    """Of the streaming mode, in inner steps."""
    fragments: int = 4
    """Of the streaming mode."""
    outer: Sequence[str] = ("0.9/0.8/10",)
    """Learning rate/momentum, and /rounds over which the momentum rises."""
    ramps: Sequence[str] = ("1",)
    """The most batches of one optimizer step, in the baseline, too."""
    peers: Sequence[str] = ("8",)
    seeds: Sequence[str] = ("0",)
    size: str = "small"
    optimizer: str = ""
    """Empty: the size's own, as with the next two."""
    steps: int | None = None
    rounds: int | None = None
    momentum: float | None = None
    """Of inner Muon, in the baseline, too."""
    rates: Sequence[str] = ("1",)
    """The inner learning rates, as multiples of a run's defaults, in the baseline, too."""
    baseline: bool = True
    device: str = "cpu"
    jobs: int | None = None
    results: Path | None = None
    """A file with a line for each training that has ended: one that is in it is not made again."""
    picture: Path | None = None
    """A file for a picture of the gap to data parallel over rounds."""
    as_json: bool = False

    def trainings(self) -> list[OuterTraining]:
        """Return all cases without duplicates, after each other's baselines. Raises `UsageError`."""
        cases = [case for peers in _whole(self.peers, "peers") for case in self._cases(peers)]
        if not cases:
            raise UsageError("there is nothing to train", remedy="give each option at least one value")
        baselines = map(baseline_of, cases) if self.baseline else ()
        return list(dict.fromkeys([*baselines, *cases]))

    def _cases(self, peers: int) -> list[OuterTraining]:
        usual, cases = self.training_size(), []
        sizes = [replace(usual, rate=rate) for rate in _rates(self.rates)]
        choices = product(*map(listed, (self.outer, self.modes, self.codecs)))
        for size, seed, ramp, (outer, mode, codec) in product(
            sizes, seeds_of(self.seeds), _whole(self.ramps, "ramps"), choices
        ):
            if mode not in OFFERED:
                raise UsageError(f"there is no mode {mode!r}", remedy=f"choose one of {', '.join(OFFERED)}")
            contribution, _, result = codec.partition("/")
            for delay in _whole(self.delays, "delays") if mode == "streaming" else (0,):
                case = OuterTraining(
                    size=size,
                    mode=mode,
                    contribution=contribution,
                    result=result or contribution,
                    fragments=self.fragments if mode == "streaming" else 1,
                    delay=delay,
                    outer=_settings(outer),
                    ramp=ramp,
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
        size=training.size,
        mode="parallel",
        ramp=training.ramp,
        peers=training.peers,
        seed=training.seed,
        device=training.device,
    )


def run_outer(options: OuterOptions, write_line: Callable[[str], None]) -> None:
    """Train all cases; write a JSON object as each ends, or a table at the end."""
    trainings = options.trainings()
    if options.picture is not None and not options.baseline:
        raise UsageError("without a baseline there is no gap to draw", remedy="leave out --no-baseline")
    results = {} if options.results is None else _ended(options.results, trainings)
    jobs = options.jobs or (os.cpu_count() or 1 if options.device == "cpu" else 1)
    left = [training for training in trainings if training not in results]
    for training, result in chain(results.copy().items(), each_trained(train_outer, left, jobs)):
        if training not in results and options.results is not None:
            with options.results.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"training": asdict(training), "result": asdict(result)}) + "\n")
        results[training] = result
        if options.as_json and training.mode != "parallel":
            write_line(json.dumps(outer_object(training, result, results.get(baseline_of(training)))))
    if not options.as_json:
        console = Console()
        console.print(outer_table(results))
        if options.baseline:
            console.print(gap_table(results))
    if options.picture is not None:
        try:
            drawn = gap_picture("Held-out loss above data parallel", gaps_of(results))
            options.picture.write_text(drawn, encoding="utf-8")
        except OSError as error:
            raise LocalError(f"cannot write {options.picture}: {error.strerror}", remedy="name another file") from error


def _ended(path: Path, trainings: Sequence[OuterTraining]) -> dict[OuterTraining, OuterResult]:
    """Return the results in a file of those trainings that it has. Raises `UsageError`."""
    known = {json.dumps(asdict(training)): training for training in trainings}
    results = {}
    try:
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
            entry = json.loads(line)
            if training := known.get(json.dumps(entry["training"])):
                curve = tuple((int(round_), float(loss)) for round_, loss in entry["result"]["curve"])
                results[training] = OuterResult(curve, int(entry["result"]["params"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"cannot read the results in {path}: {error}", remedy="name another file") from error
    return results


def bits_of(training: OuterTraining) -> float:
    """Return the bits that a peer sends for each parameter and round, as sender and as owner, less 1 / peers of them."""
    codecs = codec_named(training.contribution), codec_named(training.result)
    return sum(codec.cell_bytes * 8 / CELL for codec in codecs)


def outer_object(training: OuterTraining, result: OuterResult, baseline: OuterResult | None) -> dict[str, object]:
    """Return one object of `--json`; a loss that is not finite is null."""
    return {
        "mode": training.mode,
        "codec": f"{training.contribution}/{training.result}",
        "bits": bits_of(training),
        "fragments": training.fragments,
        "delay": training.delay,
        "steps": training.size.steps,
        "rounds": training.size.rounds,
        "lr": training.outer.lr,
        "momentum": training.outer.momentum,
        "momentum_warmup": training.outer.warmup,
        "ramp": training.ramp,
        "inner_momentum": training.size.momentum,
        "rate": training.size.rate,
        "peers": training.peers,
        "params": result.params,
        "seed": training.seed,
        "tokens": training.tokens,
        "loss": _finite(result.loss),
        "baseline": None if baseline is None else f"parallel {training.size.optimizer}",
        "baseline_loss": None if baseline is None else _finite(baseline.loss),
        "curve": [(round_, _finite(loss)) for round_, loss in result.curve],
        "baseline_curve": None if baseline is None else [(round_, _finite(loss)) for round_, loss in baseline.curve],
    }


Group: TypeAlias = list[OuterTraining]
"""The trainings of one case, which differ by their seeds."""


def outer_table(results: Mapping[OuterTraining, OuterResult]) -> Table:
    """Return a table: the mean of the seeds, and by how much it is above blocking fp32 and above data parallel."""
    size = next(iter(results)).size
    params = next(iter(results.values())).params
    title = f"Held-out loss, {params / 1e6:.2g}M parameters, {size.optimizer}, {size.rounds} rounds of {size.steps} steps"
    table = Table("peers", "case", "outer", "rate", "bits", "loss", "blocking", "parallel", title=title, **COMPACT)
    best = _best(results)
    for case, group in best.items():
        loss = _mean(results, group)
        is_baseline = case.mode == "parallel"
        blocking = group if is_baseline else best.get(_blocking_of(case), group)
        parallel = best.get(baseline_of(case), group)
        outer = f"{case.outer.lr:g}/{case.outer.momentum:g}" + (f"/{case.outer.warmup}" if case.outer.warmup else "")
        table.add_row(
            str(case.peers),
            _named(case),
            "" if is_baseline else outer,
            f"{group[0].size.rate:g}",
            "" if is_baseline else f"{bits_of(case):.4g}",
            f"{loss:.4f}" if math.isfinite(loss) else "diverged",
            "" if blocking is group else _above(loss, _mean(results, blocking)),
            "" if parallel is group else _above(loss, _mean(results, parallel)),
        )
    table.caption = (
        "Streaming: fragments, delay in steps. Rate: the best multiple of the inner rates, for each row of its own.\n"
        "Last: above blocking fp32, above data parallel."
    )
    return table


def gap_table(results: Mapping[OuterTraining, OuterResult]) -> Table:
    """Return a table of how far each case is above data parallel after so many rounds, each at its best rate of the end."""
    rounds = [round_ for round_, _ in next(iter(results.values())).curve]
    table = Table("case", *map(str, rounds), title="Above data parallel after so many rounds, %", **COMPACT)
    for name, gap in gaps_of(results).items():
        table.add_row(name, *(f"{percent:+.1f}" for _, percent in gap))
    return table


def gaps_of(results: Mapping[OuterTraining, OuterResult]) -> dict[str, Gap]:
    """Return how far each case is above data parallel in percent, over its rounds, each at its best rate of the end."""
    found: dict[str, Gap] = {}
    best = _best(results)
    are_many = len({case.outer for case in best if case.mode != "parallel"}) > 1
    for case, group in best.items():
        if case.mode != "parallel" and (parallel := best.get(baseline_of(case))):
            rounds = [round_ for round_, _ in results[group[0]].curve]
            above = [_mean(results, group, at) / _mean(results, parallel, at) - 1 for at in range(len(rounds))]
            outer = f", {case.outer.lr:g}/{case.outer.momentum:g}/{case.outer.warmup}" if are_many else ""
            gap = [(at, 100 * it) for at, it in zip(rounds, above, strict=True)]
            found[f"{case.peers} peers, {_named(case)}{outer}"] = gap
    return found


def _best(results: Mapping[OuterTraining, OuterResult]) -> dict[OuterTraining, Group]:
    """Return each case, with seed 0 and rate 1, and its trainings at the rate with the least mean loss at the end."""
    groups: dict[OuterTraining, dict[float, Group]] = {}
    for training in results:
        rates = groups.setdefault(replace(training, seed=0, size=replace(training.size, rate=1.0)), {})
        rates.setdefault(training.size.rate, []).append(training)
    return {case: min(rates.values(), key=partial(_mean, results)) for case, rates in groups.items()}


def _mean(results: Mapping[OuterTraining, OuterResult], group: Group, point: int = -1) -> float:
    return sum(results[one].curve[point][1] for one in group) / len(group)


def _named(case: OuterTraining) -> str:
    """Return the mode and the codecs in short: `streaming 4 1, int4`."""
    ramp = f", ramp {case.ramp}" if case.ramp > 1 else ""
    if case.mode == "parallel":
        return f"data parallel{ramp}"
    mode = f"streaming {case.fragments} {case.delay}" if case.mode == "streaming" else case.mode
    codec = case.contribution if case.contribution == case.result else f"{case.contribution}/{case.result}"
    return f"{mode}, {codec}{ramp}"


def _blocking_of(training: OuterTraining) -> OuterTraining:
    """Return blocking rounds in fp32 with the same outer settings."""
    return replace(training, mode="blocking", contribution="fp32", result="fp32", fragments=1, delay=0)


def _above(loss: float, other: float) -> str:
    return f"{100 * (loss / other - 1):+.2f} %" if math.isfinite(loss) and math.isfinite(other) else ""


def _finite(loss: float) -> float | None:
    return loss if math.isfinite(loss) else None


def _whole(words: Sequence[str], what: str) -> list[int]:
    """Parse whole numbers. Raises `UsageError`."""
    try:
        return [int(word) for word in listed(words)]
    except ValueError:
        raise UsageError(f"cannot read the {what} {' '.join(words)!r}", remedy="write whole numbers: 1,2") from None


def _rates(words: Sequence[str]) -> list[float]:
    """Parse multiples of the inner rates. Raises `UsageError`."""
    try:
        rates = [float(word) for word in listed(words)]
    except ValueError:
        rates = [0.0]
    if not all(0 < rate <= MAX_RATE for rate in rates):
        remedy = f"write multiples of the default rates, up to {MAX_RATE}: 1,2,4"
        raise UsageError(f"cannot read the rates {' '.join(words)!r}", remedy=remedy)
    return rates


def _settings(word: str) -> OuterSettings:
    """Parse `0.9/0.8` or `0.9/0.8/10`. Raises `UsageError`."""
    lr, _, rest = word.partition("/")
    momentum, _, warmup = rest.partition("/")
    try:
        return OuterSettings(lr=float(lr), momentum=float(momentum), warmup=int(warmup or 0))
    except ValueError:
        remedy = "write lr/momentum, and /rounds of its warm-up: 0.9/0.8/10"
        raise UsageError(f"cannot read {word!r} as outer settings", remedy=remedy) from None
