"""`flockstep bench outer`: the loss of each mode, codec and outer setting, beside data parallel.

Every case is a training of its own (`training.swarm`), as is the baseline of each seed and number of peers: data parallel
with the same inner optimizer on the same batches, so at equal tokens. With several inner rates each side is trained with
each, and the best of its own, by the mean of the seeds, is what the table compares.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import TypeAlias

from ....collectives.vector.codec import CELL, codec_named
from ....optim.step.outer import OuterSettings
from ....peer.base.errors import UsageError
from ..table import table_lines
from ..training.batches import SIZES
from ..training.rows import Results
from ..training.swarm import MODES, Training
from ..words import listed, numbers

OFFERED = MODES[:2]
"""The modes to choose from; the third is the baseline."""
FRAGMENTS = 4
"""Of streaming."""
MAX_RATE = 64
"""Of the default rates: nothing learns there."""


def outer_trainings(
    *,
    modes: Sequence[str],
    codecs: Sequence[str],
    outer: Sequence[str],
    ramps: Sequence[str],
    peers: Sequence[str],
    seeds: Sequence[str],
    rates: Sequence[str],
    size: str,
    steps: int | None,
    rounds: int | None,
    device: str,
) -> list[Training]:
    """Return all cases without duplicates, after their baselines; lists are as they were typed. Raises `UsageError`."""
    if size not in SIZES:
        raise UsageError(f"there is no size {size!r}", remedy=f"choose one of {', '.join(SIZES)}")
    usual = SIZES[size]
    usual = replace(
        usual, steps=usual.steps if steps is None else steps, rounds=usual.rounds if rounds is None else rounds
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
        cases.append(replace(case, fragments=FRAGMENTS if mode == "streaming" else 1))
    if not cases:
        raise UsageError("there is nothing to train", remedy="give each option at least one value")
    return [*sides, *cases]


def baseline_of(training: Training) -> Training:
    """Return data parallel on the same batches."""
    usual = Training(size=training.size, mode="parallel", peers=training.peers, seed=training.seed)
    return replace(usual, ramp=training.ramp, device=training.device)


def bits_of(training: Training) -> float:
    """Return the bits that a peer sends for each parameter and round, as sender and as owner, less 1 / peers of them."""
    codecs = codec_named(training.contribution), codec_named(training.result)
    return sum(codec.cell_bytes * 8 / CELL for codec in codecs)


Group: TypeAlias = list[Training]
"""The trainings of one case, which differ by their seeds."""


def outer_tables(results: Results) -> Iterator[str]:
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
        parallel = best[baseline_of(case)]
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
    yield "Rate: the best multiple of the inner rates, for each row of its own."
    yield "Last: above blocking fp32, above data parallel."
    if gaps:
        yield from table_lines(
            "\nAbove data parallel after so many rounds", ("peers", "case", "outer", *map(str, rounds)), gaps
        )


def _best(results: Results) -> dict[Training, Group]:
    """Return each case, with seed 0 and rate 1, and its trainings at the rate with the least mean loss at the end."""
    groups: dict[Training, dict[float, Group]] = {}
    for training in results:
        rates = groups.setdefault(replace(training, seed=0, size=replace(training.size, rate=1.0)), {})
        rates.setdefault(training.size.rate, []).append(training)
    return {case: min(rates.values(), key=partial(_mean, results)) for case, rates in groups.items()}


def _mean(results: Results, group: Group, point: int = -1) -> float:
    return sum(results[one].curve[point][1] for one in group) / len(group)


def _named(case: Training) -> str:
    """Return the mode and the codecs in short: `streaming, int4`."""
    ramp = f", ramp {case.ramp}" if case.ramp > 1 else ""
    if case.mode == "parallel":
        return f"data parallel{ramp}"
    codec = case.contribution if case.contribution == case.result else f"{case.contribution}/{case.result}"
    return f"{case.mode}, {codec}{ramp}"


def _blocking_of(training: Training) -> Training:
    """Return blocking rounds in fp32 with the same outer settings."""
    return replace(training, mode="blocking", contribution="fp32", result="fp32", fragments=1)


def _above(loss: float, other: float) -> str:
    return f"{100 * (loss / other - 1):+.2f} %" if math.isfinite(loss) and math.isfinite(other) else ""


def _settings(word: str) -> OuterSettings:
    """Parse `0.9/0.8` or `0.9/0.8/10`. Raises `UsageError`."""
    lr, _, rest = word.partition("/")
    momentum, _, warmup = rest.partition("/")
    try:
        return OuterSettings(lr=float(lr), momentum=float(momentum), warmup=int(warmup or 0))
    except ValueError:
        remedy = "write lr/momentum, and /rounds of its warm-up: 0.9/0.8/10"
        raise UsageError(f"cannot read {word!r} as outer settings", remedy=remedy) from None
