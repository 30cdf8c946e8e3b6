"""`flockstep bench outer`: the loss of each mode, codec, delay and outer setting, beside data parallel.

Every case is a training of its own (`training.swarm`), as is the baseline of each seed and number of peers: data parallel
with the same inner optimizer on the same batches, so at equal tokens. With several inner rates each side is trained with
each, and the best of its own, by the mean of the seeds, is what the table compares.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import TypeAlias

from ....collectives.vector.codec import CELL, codec_named
from ....optim.step.outer import OuterSettings
from ....peer.base.errors import UsageError
from ..table import table_lines
from ..training.batches import SIZES
from ..training.pool import each_trained
from ..training.swarm import MODES, Training, TrainingResult, train
from ..words import listed, numbers

OFFERED = MODES[:2]
"""The modes to choose from; the third is the baseline."""
OPTIMIZERS = ("muon", "adamw")
MAX_RATE = 64
"""Of the default rates: nothing learns there."""


def outer_trainings(
    *,
    modes: Sequence[str],
    codecs: Sequence[str],
    delays: Sequence[str],
    fragments: int,
    outer: Sequence[str],
    ramps: Sequence[str],
    peers: Sequence[str],
    seeds: Sequence[str],
    rates: Sequence[str],
    size: str,
    optimizer: str,
    steps: int | None,
    rounds: int | None,
    baseline: bool,
    device: str,
) -> list[Training]:
    """Return all cases without duplicates, after their baselines; lists are as they were typed. Raises `UsageError`."""
    for word, known, what in ((size, SIZES, "size"), (optimizer or OPTIMIZERS[0], OPTIMIZERS, "optimizer")):
        if word not in known:
            raise UsageError(f"there is no {what} {word!r}", remedy=f"choose one of {', '.join(known)}")
    usual = SIZES[size]
    usual = replace(
        usual,
        optimizer=optimizer or usual.optimizer,
        steps=usual.steps if steps is None else steps,
        rounds=usual.rounds if rounds is None else rounds,
    )
    sides = [
        Training(
            size=replace(usual, rate=rate), mode="parallel", ramp=ramp, peers=number, seed=seed, device=device
        )
        for number, rate, seed, ramp in product(
            numbers(peers, "--peers", int, 1, 64),
            numbers(rates, "--rate", float, 1e-3, MAX_RATE),
            numbers(seeds, "--seeds", int, 0),
            numbers(ramps, "--ramp", int, 1),
        )
    ]
    cases = []
    for side, word, mode, codec in product(sides, listed(outer), listed(modes), listed(codecs)):
        if mode not in OFFERED:
            raise UsageError(f"there is no mode {mode!r}", remedy=f"choose one of {', '.join(OFFERED)}")
        contribution, _, result = codec.partition("/")
        case = replace(side, mode=mode, contribution=contribution, result=result or contribution, outer=_settings(word))
        streams = mode == "streaming"
        cases += [
            replace(case, fragments=fragments if streams else 1, delay=delay)
            for delay in (numbers(delays, "--delay", int, 0) if streams else (0,))
        ]
    if not cases:
        raise UsageError("there is nothing to train", remedy="give each option at least one value")
    return list(dict.fromkeys([*(sides if baseline else ()), *cases]))


def baseline_of(training: Training) -> Training:
    """Return data parallel on the same batches."""
    usual = Training(size=training.size, mode="parallel", peers=training.peers, seed=training.seed)
    return replace(usual, ramp=training.ramp, device=training.device)


def run_outer(
    trainings: Sequence[Training], jobs: int | None, write_line: Callable[[str], None], *, as_json: bool
) -> None:
    """Train all cases; write a JSON object as each ends, or tables at the end."""
    results: dict[Training, TrainingResult] = {}
    for training, result in each_trained(train, trainings, jobs):
        results[training] = result
        if as_json and training.mode != "parallel":
            write_line(json.dumps(outer_object(training, result, results.get(baseline_of(training)))))
    for line in () if as_json else outer_tables(results):
        write_line(line)


def bits_of(training: Training) -> float:
    """Return the bits that a peer sends for each parameter and round, as sender and as owner, less 1 / peers of them."""
    codecs = codec_named(training.contribution), codec_named(training.result)
    return sum(codec.cell_bytes * 8 / CELL for codec in codecs)


def outer_object(training: Training, result: TrainingResult, baseline: TrainingResult | None) -> dict[str, object]:
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
        "inner_momentum": training.size.inner().momentum,
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


Group: TypeAlias = list[Training]
"""The trainings of one case, which differ by their seeds."""


def outer_tables(results: Mapping[Training, TrainingResult]) -> Iterator[str]:
    """Yield the mean losses beside blocking fp32 and data parallel, then the gap to the latter over the rounds."""
    first = next(iter(results))
    size, params, rounds = first.size, results[first].params, [round_ for round_, _ in results[first].curve]
    rows: list[list[str]] = []
    gaps: list[list[str]] = []
    best = _best(results)
    for case, group in best.items():
        loss = _mean(results, group)
        is_baseline = case.mode == "parallel"
        blocking = group if is_baseline else best.get(_blocking_of(case), group)
        parallel = best.get(baseline_of(case), group)
        outer = f"{case.outer.lr:g}/{case.outer.momentum:g}" + (f"/{case.outer.warmup}" if case.outer.warmup else "")
        names = [_named(case), "" if is_baseline else outer]
        rows.append(
            [
                *(str(case.peers), *names, f"{group[0].size.rate:g}", "" if is_baseline else f"{bits_of(case):.4g}"),
                f"{loss:.4f}" if math.isfinite(loss) else "diverged",
                "" if blocking is group else _above(loss, _mean(results, blocking)),
                "" if parallel is group else _above(loss, _mean(results, parallel)),
            ]
        )
        if parallel is not group:
            gap = [_above(_mean(results, group, at), _mean(results, parallel, at)) for at in range(len(rounds))]
            gaps.append([str(case.peers), *names, *gap])
    title = f"Held-out loss, {params / 1e6:.2g}M parameters, {size.optimizer}, {size.rounds} rounds of {size.steps} steps"
    yield from table_lines(title, ("peers", "case", "outer", "rate", "bits", "loss", "blocking", "parallel"), rows)
    yield "Streaming: fragments, delay in steps. Rate: the best multiple of the inner rates, for each row of its own."
    yield "Last: above blocking fp32, above data parallel."
    if gaps:
        yield from table_lines(
            "\nAbove data parallel after so many rounds", ("peers", "case", "outer", *map(str, rounds)), gaps
        )


def _best(results: Mapping[Training, TrainingResult]) -> dict[Training, Group]:
    """Return each case, with seed 0 and rate 1, and its trainings at the rate with the least mean loss at the end."""
    groups: dict[Training, dict[float, Group]] = {}
    for training in results:
        rates = groups.setdefault(replace(training, seed=0, size=replace(training.size, rate=1.0)), {})
        rates.setdefault(training.size.rate, []).append(training)
    return {case: min(rates.values(), key=partial(_mean, results)) for case, rates in groups.items()}


def _mean(results: Mapping[Training, TrainingResult], group: Group, point: int = -1) -> float:
    return sum(results[one].curve[point][1] for one in group) / len(group)


def _named(case: Training) -> str:
    """Return the mode and the codecs in short: `streaming 4 1, int4`."""
    ramp = f", ramp {case.ramp}" if case.ramp > 1 else ""
    if case.mode == "parallel":
        return f"data parallel{ramp}"
    mode = f"streaming {case.fragments} {case.delay}" if case.mode == "streaming" else case.mode
    codec = case.contribution if case.contribution == case.result else f"{case.contribution}/{case.result}"
    return f"{mode}, {codec}{ramp}"


def _blocking_of(training: Training) -> Training:
    """Return blocking rounds in fp32 with the same outer settings."""
    return replace(training, mode="blocking", contribution="fp32", result="fp32", fragments=1, delay=0)


def _above(loss: float, other: float) -> str:
    return f"{100 * (loss / other - 1):+.2f} %" if math.isfinite(loss) and math.isfinite(other) else ""


def _finite(loss: float) -> float | None:
    return loss if math.isfinite(loss) else None


def _settings(word: str) -> OuterSettings:
    """Parse `0.9/0.8` or `0.9/0.8/10`. Raises `UsageError`."""
    lr, _, rest = word.partition("/")
    momentum, _, warmup = rest.partition("/")
    try:
        return OuterSettings(lr=float(lr), momentum=float(momentum), warmup=int(warmup or 0))
    except ValueError:
        remedy = "write lr/momentum, and /rounds of its warm-up: 0.9/0.8/10"
        raise UsageError(f"cannot read {word!r} as outer settings", remedy=remedy) from None
