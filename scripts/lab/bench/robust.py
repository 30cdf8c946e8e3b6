"""`flockstep bench robust`: the loss under each attack and rule, beside that of the honest alone.

Every case (attack, rule, seed) is a training of its own, as is the oracle of each seed and number of honest peers.
`training.swarm` is one training, `attacks.gradients` lists the attacks.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

from ....optim.step.outer import OuterSettings
from ....peer.base.errors import UsageError
from ..attacks.gradients import ATTACKS, Attackers
from ..table import table_lines
from ..training.batches import SIZES
from ..training.rows import Results
from ..training.swarm import NOBODY, Training
from ..words import listed, numbers

DEFAULT_ATTACKS = ("none", "sign_flip:4", "alie:4", "min_max:4", "stale:4", "one_part:4", "label_flip:4", "pairs:4")
ALL_ATTACKS = ("none", *(f"{name}:{count}" for count in (4, 2) for name in ATTACKS))
OUTER = OuterSettings(lr=0.8, momentum=0.5)
"""Of short trainings without a warm-up, as all figures of the log."""


def robust_trainings(
    *, rules: Sequence[str], attacks: Sequence[str], seeds: Sequence[str], peers: int, size: str, device: str
) -> list[Training]:
    """Return all cases without duplicates, oracles first. Raises `UsageError`."""
    if size not in SIZES:
        raise UsageError(f"there is no size {size!r}", remedy=f"choose one of {', '.join(SIZES)}")
    names = [name for text in listed(attacks) for name in (ALL_ATTACKS if text == "all" else (text,))]
    attackers = [NOBODY if name == "none" else Attackers.parse(name, ATTACKS) for name in names]
    cases = [
        Training(
            size=SIZES[size],
            contribution="int4",
            result="int4",
            outer=OUTER,
            rule=rule,
            attackers=each,
            peers=peers,
            seed=seed,
            device=device,
        )
        for each, rule, seed in product(attackers, listed(rules), numbers(seeds, "--seeds", int, 0))
    ]
    return list(dict.fromkeys([*map(oracle_of, cases), *cases]))


def oracle_of(training: Training) -> Training:
    """Return the same training without the attackers and without a defence."""
    return replace(training, rule="mean", attackers=replace(NOBODY, count=training.attackers.count), oracle=True)


def _named(attackers: Attackers) -> str:
    return str(attackers) if attackers.count else "none"


def robust_table(results: Results) -> Iterator[str]:
    """Yield a table, attacks by rules: per cent above the oracle's loss, mean and worst of the seeds."""
    cases = [training for training in results if not training.oracle]
    rules = list(dict.fromkeys(case.rule for case in cases))
    rows = []
    for attackers in dict.fromkeys(case.attackers for case in cases):
        those = [case for case in cases if case.attackers == attackers]
        oracle = [results[oracle_of(case)].loss for case in those]
        row = [_named(attackers), f"{sum(oracle) / len(oracle):.3f}"]
        for rule in rules:
            above = [100 * (results[case].loss / results[oracle_of(case)].loss - 1) for case in those if case.rule == rule]
            mean, worst = sum(above) / len(above), f" ({max(above):+.1f})" if len(above) > 1 else ""
            row.append(f"{mean:+.1f} %{worst}" if math.isfinite(mean) else "diverged")
        rows.append(row)
    yield from table_lines(f"Loss above the oracle's, {cases[0].peers} peers", ("attack", "oracle", *rules), rows)
