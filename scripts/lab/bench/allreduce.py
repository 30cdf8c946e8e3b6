"""`flockstep bench allreduce`: speed, cost and error of an average, beside hivemind.

Theory of operation. Every case (system, peers, parameters, codec) runs in processes of its own, one case after the
other on the same machine in the same minutes, so that ratios hold where absolute times do not. `measure` measures
one case, `group` reads the machine's counters, `peer` is our own worker, and `hivemind` is the baseline.
"""

import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path

from rich.console import Console

from ....collectives.robust.rules import rule_named
from ....collectives.vector.codec import codec_named
from ..table import table_lines, written
from ..words import count, listed, numbers
from .measure import Case, Figures, measure_case

BASELINE = "hivemind"
BASELINE_CODECS = ("fp32", "fp16", "uniform8")
MAX_BENCH_PEERS = 256
"""The size of a full roster."""
FIGURES = {"wall_s": "wall s", "cpu_s": "CPU s", "bytes_per_peer": "sent MB"}
"""The figures for which less is better. CPU is of all processes together; sent is of one peer."""


def allreduce_cases(
    *,
    peers: Sequence[str],
    params: Sequence[str],
    codec: Sequence[str],
    rule: Sequence[str],
    baseline_python: str,
) -> list[Case]:
    """Return all cases, for each size ours first; lists are as they were typed. Raises `UsageError`."""
    codecs, rules = listed(codec), listed(rule)
    for name in (name for pair in codecs for name in pair.split("/", 1)):
        codec_named(name)
    for name in rules:
        rule_named(name)
    cases = []
    for size in product(numbers(peers, "--peers", count, 2, MAX_BENCH_PEERS), numbers(params, "--params", count, 1)):
        cases += [Case("flockstep", sys.executable, one, *size, name) for one, name in product(codecs, rules)]
        if baseline_python:
            cases += [Case(BASELINE, baseline_python, one, *size) for one in BASELINE_CODECS]
    return cases


def run_allreduce(
    cases: Sequence[Case], repeat: int, write_line: Callable[[str], None], *, as_json: bool
) -> None:
    """Measure all cases and write their rows: each at once as JSON, or all as a table at the end."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="flockstep-bench-") as folder, Console(stderr=True).status("") as status:
        for number, case in enumerate(cases):
            status.update(f"{case.system} {case.codec}, {case.peers} peers × {case.params / 1e6:g}M")
            rows.append(measure_case(case, repeat, Path(folder) / str(number)))
            if as_json:
                write_line(json.dumps(rows[-1]))
    for line in () if as_json else tables(rows):
        write_line(line)


def tables(rows: Sequence[Figures]) -> Iterator[str]:
    """Yield a table of medians over the rounds for each size of the task."""
    for size in dict.fromkeys((row["peers"], row["params"]) for row in rows):
        those = [row for row in rows if (row["peers"], row["params"]) == size]
        title = f"{size[0]} peers × {size[1] / 1e6:g}M parameters"
        headings = ("system and codec", *FIGURES.values(), "error", "same", "exact", "reason")
        yield from table_lines(title, headings, [[*_cells(row)] for row in those])
    yield "Medians. same: all hold the same bits; exact: these are the bits of the encoded mean."


def _cells(row: Figures) -> Iterator[str]:
    yield f"{row['system']} {row['codec']}" + ("" if row["rule"] == "mean" else f" {row['rule']}")
    for name in FIGURES:
        is_time, value = name.endswith("_s"), row[name]
        yield written(value if value is None or is_time else value / 1e6, ".2f" if is_time else ".1f")
    yield written(row["rel_l2"], ".0e")
    yield "yes" if row["bit_identical"] else "no"
    yield {True: "yes", False: "no", None: ""}[row["exact"]]
    yield row["reason"]
