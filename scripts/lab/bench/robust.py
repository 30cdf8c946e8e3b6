"""`flockstep bench robust`: the loss under each attack and rule, beside that of the honest alone.

Every case (attack, rule, seed) is a training of its own, as is the oracle of each seed and number of honest peers. They
run in as many processes as there are cores. `training.attacked` is one training, `attacks.gradients` lists the attacks.
"""

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from rich.console import Console
from rich.table import Table

from ....peer.base.errors import UsageError
from ..attacks.gradients import Attackers
from ..baselines.rules import rule_named
from ..training.attacked import SIZES, Training, train_under_attack
from ..training.pool import each_trained
from .allreduce import listed

ALL = "all"
NAMED = (
    *(
        "none",
        "sign_flip:4",
        "sign_flip:4:10",
        "scaled:4:10",
        "noise:4",
        "ipm:4:0.1",
        "ipm:4:1.5",
        "zero:4",
        "huge:4",
        "nan:4",
        "mimic:4",
    ),
    *(
        "min_max:4",
        "min_sum:4",
        "alie:4",
        "alie:4:1.5",
        "label_flip:4",
        "one_part:4",
        "stale:4",
        "stale:4:5",
        "hidden:4",
    ),
    *(
        "groups2_against:4:1",
        "groups1_against:4:2",
        "groups1_hidden:4:0.75",
        "groups2_hidden:4:0.25",
        "groups2_constant:4:1",
        "parts2_against:4:0.5",
        "freeload:4:0.6",
    ),
    *("sign_flip:2", "noise:2", "ipm:2:1.5", "mimic:2", "min_max:2", "alie:2", "label_flip:2", "one_part:2", "stale:2"),
    "groups1_hidden:2:0.75",
)
"""The attacks of `all`: each by name, with 4 and with 2 attackers."""
DEFAULT_ATTACKS = (
    *("none", "sign_flip:4", "alie:4", "min_max:4", "stale:4", "one_part:4", "label_flip:4", "groups2_against:4:1"),
)
NO_ATTACKERS = Attackers("zero", 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RobustOptions:
    """The options of the command line. Raises `UsageError`."""

    rules: tuple[str, ...]
    attacks: tuple[str, ...]
    seeds: tuple[int, ...]
    peers: int
    size: str
    device: str
    jobs: int
    as_json: bool

    def __post_init__(self) -> None:
        for rule in self.rules:
            rule_named(rule)
        if self.size not in SIZES:
            raise UsageError(f"there is no size {self.size!r}", remedy=f"choose one of {', '.join(SIZES)}")
        if not 2 <= self.peers <= 64:
            raise UsageError(f"a training cannot have {self.peers} peers", remedy="choose 2 to 64")
        for attackers in self.attackers():
            if attackers.count >= self.peers:
                raise UsageError(
                    f"{attackers}: none of {self.peers} peers is honest", remedy="lower the count, or raise --peers"
                )

    def attackers(self) -> list[Attackers]:
        """Parse the attacks; `none` has no attackers."""
        names = [name for text in self.attacks for name in (NAMED if text == ALL else (text,))]
        return [NO_ATTACKERS if name == "none" else Attackers.parse(name) for name in names]

    def trainings(self) -> list[Training]:
        """Return all cases without duplicates, oracles first."""
        cases = [
            Training(size=self.size, rule=rule, attackers=attackers, peers=self.peers, seed=seed, device=self.device)
            for attackers in self.attackers()
            for rule in self.rules
            for seed in self.seeds
        ]
        return list(dict.fromkeys([*map(oracle_of, cases), *cases]))


def oracle_of(training: Training) -> Training:
    """Return the same training without the attackers and without a defence."""
    return replace(training, rule="mean", attackers=Attackers(NO_ATTACKERS.name, training.attackers.count), oracle=True)


def robust_options(
    *,
    rules: Sequence[str],
    attacks: Sequence[str],
    seeds: Sequence[str],
    peers: int,
    size: str,
    device: str,
    jobs: int | None,
    as_json: bool,
) -> RobustOptions:
    """Parse the options of the command line. Raises `UsageError`."""
    return RobustOptions(
        rules=tuple(listed(rules)),
        attacks=tuple(listed(attacks)),
        seeds=seeds_of(seeds),
        peers=peers,
        size=size,
        device=device,
        jobs=jobs or (os.cpu_count() or 1 if device == "cpu" else 1),
        as_json=as_json,
    )


def seeds_of(words: Sequence[str]) -> tuple[int, ...]:
    """Parse the seeds. Raises `UsageError`."""
    try:
        numbers = tuple(int(text) for text in listed(words))
    except ValueError:
        raise UsageError(f"cannot read the seeds {' '.join(words)!r}", remedy="write them as --seeds 0,1,2") from None
    if not numbers or min(numbers) < 0:
        raise UsageError("seeds are whole numbers from 0 on", remedy="write them as --seeds 0,1,2")
    return numbers


def run_robust(options: RobustOptions, write_line: Callable[[str], None]) -> None:
    """Train all cases; write a JSON object as each ends, or a table at the end."""
    losses: dict[Training, float] = {}
    for training, loss in each_trained(train_under_attack, options.trainings(), options.jobs):
        losses[training] = loss
        if options.as_json and not training.oracle:
            write_line(json.dumps(as_object(training, loss, losses[oracle_of(training)])))
    if not options.as_json:
        Console().print(robust_table(options, losses))


def as_object(training: Training, loss: float, oracle_loss: float) -> dict[str, object]:
    """Return one object of `--json`; a loss that is not finite is null."""
    return {
        "rule": training.rule,
        "attack": training.attackers.attack,
        "attackers": training.attackers.count,
        "peers": training.peers,
        "seed": training.seed,
        "loss": loss if math.isfinite(loss) else None,
        "oracle_loss": oracle_loss if math.isfinite(oracle_loss) else None,
    }


def robust_table(options: RobustOptions, losses: Mapping[Training, float]) -> Table:
    """Return a table, attacks by rules: per cent above the oracle's loss, mean and worst of the seeds."""
    result = Table("attack", "oracle", *options.rules, title=f"Loss above the oracle's, {options.peers} peers")
    for attackers in options.attackers():
        cells, oracles = [], {}
        for rule in options.rules:
            above = []
            for training in (
                one for one in losses if (one.attackers, one.rule, one.oracle) == (attackers, rule, False)
            ):
                oracles[training.seed] = losses[oracle_of(training)]
                above.append(100 * (losses[training] / oracles[training.seed] - 1))
            mean = sum(above) / len(above)
            worst = f" ({max(above):+.1f})" if len(above) > 1 else ""
            cells.append(f"{mean:+.1f} %{worst}" if math.isfinite(mean) else "diverged")
        name = str(attackers) if attackers.count else "none"
        result.add_row(name, f"{sum(oracles.values()) / len(oracles):.3f}", *cells)
    return result
