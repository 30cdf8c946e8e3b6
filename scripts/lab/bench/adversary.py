"""`flockstep bench adversary`: the worst that a few members can put into a round.

Theory of operation. A lie is some numbers (`attacks.values`), and its harm is that to one round of the tiny GPT's training
(`training.lying`): the share of that round's progress that is lost, and the length of the outer step. For each rule, number
of liars and pair of codecs a search draws lies at random, a third of its tries, and then climbs from the best, which it also
takes along to the next pair. At the end the worst lies are told in every round of a whole training: the
loss above that of the honest alone, and the longest outer step beside theirs.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from ....collectives.robust.rules import RULES, rule_named
from ....collectives.vector.codec import codec_named
from ....dht.run.manifest import CODEC_NAMES
from ....peer.base.errors import UsageError
from ..attacks.values import Lie
from ..training.attacked import SIZES
from ..training.lying import Case, Harm, LyingSwarm, Moment
from .allreduce import listed

JUDGED = tuple(name for name, rule in RULES.items() if not rule.blind)
MIXED = "int4 lloyd2 int8"
"""Contributions of which each sender chooses the codec."""
PAIRS = tuple(f"{one}/{other}" for one, other in product((*CODEC_NAMES, MIXED), CODEC_NAMES))
ROUND = 6
"""The round of which lies are tried: the common direction is weaker than in the first ones."""
RANDOM = 3
"""One in so many tries is drawn at random, before the search climbs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdversaryOptions:
    """The options of the command line. Raises `UsageError`."""

    rules: Sequence[str] = JUDGED
    pairs: Sequence[str] = PAIRS
    liars: Sequence[int] = (1, 4)
    peers: int = 10
    tries: int = 24
    trained: int = 2
    size: str = "tiny"
    seed: int = 0
    keep: Path | None = None
    as_json: bool = False

    def __post_init__(self) -> None:
        for rule in self.rules:
            if rule_named(rule).blind:
                raise UsageError(f"the rule {rule} trusts what is contributed", remedy=f"choose of {', '.join(JUDGED)}")
        if self.size not in SIZES:
            raise UsageError(f"there is no size {self.size!r}", remedy=f"choose one of {', '.join(SIZES)}")
        if not self.liars or not 0 < min(self.liars) <= max(self.liars) < self.peers:
            raise UsageError(
                f"{self.peers} peers cannot have {self.liars} liars", remedy="choose 1 to --peers less one"
            )
        for pair in self.pairs:
            for name in pair.replace("/", " ").split():
                codec_named(name)

    def cases(self) -> list[Case]:
        """Return what is searched."""
        pairs = [pair.partition("/") for pair in self.pairs]
        return [
            Case(rule=rule, contributions=one, result=other or one, liars=liars)
            for rule, liars, (one, _, other) in product(self.rules, self.liars, pairs)
        ]


@dataclass(frozen=True, slots=True)
class Found:
    """A lie and its harm."""

    case: Case
    lie: Lie
    harm: Harm

    @classmethod
    def read(cls, line: str) -> "Found":
        """Read what `written` has made."""
        fields = json.loads(line)
        harm = Harm(**{**fields["harm"], "blamed": tuple(fields["harm"]["blamed"])})
        return cls(Case(**fields["case"]), Lie(**fields["lie"]), harm)

    def written(self) -> str:
        """Return one line of JSON."""
        return json.dumps({"case": asdict(self.case), "lie": self.lie.told(), "harm": asdict(self.harm)})


def searched(options: AdversaryOptions) -> Iterator[Found]:
    """Yield the worst lie of each case, after those of all cases before: each search begins with the best of the last one."""
    moment = Moment(options.peers, options.size, options.seed, ROUND)
    draw, best = np.random.default_rng(options.seed), dict[tuple[str, int], Lie]()
    for case in options.cases():
        key = case.rule, case.liars
        worst = Found(case, lie := best.get(key, Lie()), moment.harm(case, lie))
        for number in range(options.tries):
            lie = Lie.drawn(draw) if RANDOM * number < options.tries else worst.lie.moved(draw)
            harm = moment.harm(case, lie)
            if harm.score > worst.harm.score:
                worst = Found(case, lie, harm)
        best[key] = worst.lie
        yield worst


def trained(options: AdversaryOptions, found: Sequence[Found]) -> Iterator[tuple[Found, float, float]]:
    """Train with the worst lies of each rule and number of liars: each with its loss above the honest, and longest step."""
    honest: dict[Case, float] = {}
    for rule, liars in product(options.rules, options.liars):
        here = [it for it in found if (it.case.rule, it.case.liars) == (rule, liars)]
        worst = {
            it.case.result: it for it in sorted(here, key=lambda it: it.harm.score)
        }  # The worst of each result's codec.
        for it in sorted(worst.values(), key=lambda it: -it.harm.score)[: options.trained]:
            if it.case not in honest:
                honest[it.case] = _swarm(options, it.case, None).run(lambda number, weighting: None)
            swarm = _swarm(options, it.case, it.lie)
            loss = swarm.run(lambda number, weighting: None)
            yield it, loss / honest[it.case] - 1, swarm.longest


def run_adversary(options: AdversaryOptions, write_line: Callable[[str], None]) -> None:
    """Search, then train; write a JSON object of each lie, or two tables."""
    torch.set_num_threads(1)
    found: list[Found] = []
    console = Console(stderr=True)
    cases = options.cases()
    with console.status("searching") as status:
        for it in searched(options):
            found.append(it)
            status.update(f"searching {len(found)} of {len(cases)}")
            if options.as_json:
                write_line(it.written())
    if options.keep is not None:
        kept = {(it.case.rule, it.case.liars, it.case.result): it for it in sorted(found, key=lambda it: it.harm.score)}
        options.keep.write_text("".join(f"{it.written()}\n" for it in kept.values()))
    table = Table("rule", "liars", "codecs", "loss", "longest step", "lie", title="After whole trainings")
    for it, above, longest in trained(options, found):
        if options.as_json:
            write_line(json.dumps({**json.loads(it.written()), "above": above, "longest": longest}))
        pair = f"{it.case.contributions}/{it.case.result}"
        table.add_row(it.case.rule, str(it.case.liars), pair, f"{100 * above:+.2f} %", f"{longest:.2f}", told(it.lie))
    if not options.as_json:
        Console().print(searched_table(found))
        Console().print(table)


def searched_table(found: Sequence[Found]) -> Table:
    """Return a table of the worst of each rule, number of liars and codec of results."""
    result = Table("rule", "liars", "result", "progress lost", "step", "honest owners blamed", title="In one round")
    worst = {(it.case.rule, it.case.liars, it.case.result): it for it in sorted(found, key=lambda it: it.harm.score)}
    for (rule, liars, codec), it in sorted(worst.items()):
        harm = it.harm
        result.add_row(rule, str(liars), codec, f"{100 * harm.lost:.1f} %", f"{harm.longer:.2f}", str(len(harm.blamed)))
    return result


def told(lie: Lie) -> str:
    """Return a lie's numbers in one line."""
    return " ".join(f"{name}={value:g}" for name, value in lie.told().items())


def _swarm(options: AdversaryOptions, case: Case, lie: Lie | None) -> LyingSwarm:
    return LyingSwarm(case, lie, options.peers, options.size, options.seed)


def adversary_options(
    *, rules: Sequence[str] | None, codecs: Sequence[str] | None, liars: Sequence[str] | None, options: AdversaryOptions
) -> AdversaryOptions:
    """Parse the options of the command line that are lists. Raises `UsageError`."""
    try:
        counts = [int(text) for text in listed(liars or ())]
    except ValueError:
        raise UsageError(f"cannot read the numbers of liars {liars}", remedy="write them as --liars 1,4") from None
    return replace(
        options,
        rules=tuple(listed(rules or ())) or options.rules,
        pairs=tuple(listed(codecs or ())) or options.pairs,
        liars=tuple(counts) or options.liars,
    )
