"""`flockstep bench utilization`: measure all cases, and write table or JSON.

Theory of operation. Every case runs in processes of its own, one case after the other: a bootstrap and the peers, each in
a network namespace. A peer's loop counts the seconds that it spends in inner steps, and notes when it has the result of a
round (`peer`). Utilization is their share between the first and the last such moment; the round before the first one is
the founding of the run, and is not measured. Rates are read from the interface's counters meanwhile.
"""

import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ..table import table_lines, written
from .cases import UtilizationCase
from .measure import UtilizationRow, check_lines, measure_utilization

HEADINGS = ("mode and codec", "Mbit/s", "trains", "planned", "worst", "steps", "peak", "idle s", "line s", "rounds", "void")


def run_utilization(
    cases: Sequence[UtilizationCase],
    write_line: Callable[[str], None],
    report: Callable[[str], None],
    *,
    as_json: bool,
) -> bool:
    """Measure all cases and write their rows: each at once as JSON, or all as a table at the end.

    `report` gets lines of progress. Returns whether all cases were measured. Raises `LocalError` where this machine has
    no shaped lines.
    """
    began = time.monotonic()
    check_lines(cases[0])
    rows = []
    with tempfile.TemporaryDirectory(prefix="flockstep-bench-") as folder:
        for number, case in enumerate(cases):

            def progress(line: str, case: UtilizationCase = case) -> None:
                report(f"{time.monotonic() - began:5.0f} s  {case.mode} {case.codec}, {case.rate:g} Mbit/s: {line}")

            rows.append(measure_utilization(case, Path(folder) / str(number), progress))
            if as_json:
                write_line(json.dumps(rows[-1]))
    for line in () if as_json else utilization_table(rows):
        write_line(line)
    return not any(row["reason"] for row in rows)


def utilization_table(rows: Sequence[UtilizationRow]) -> Iterator[str]:
    """Yield the table of all rows, and the lines under it."""
    one = rows[0]
    steps = " and ".join(f"{seconds:g} s" for seconds in sorted(set(one["step_s"])))
    lost = f", {one['loss_percent']:g} % lost" if one["loss_percent"] else ""
    what = f"{one['peers']} peers × {one['params'] / 1e6:g}M parameters, H = {one['steps']}, steps of {steps}"
    title = f"{what}; round trip {one['round_trip_ms']:g} ms{lost}"
    yield from table_lines(title, HEADINGS, [[*_cells(row)] for row in rows])
    yield "trains: share of time in inner steps, the mean of the peers and the worst one. peak: greatest rate over 1 s."
    yield "planned: the share of `flockstep plan`. steps: inner ones between two averages of the same parameters."
    yield "idle, line: seconds a round without training, and what its bytes take at the line's full rate."
    for row in rows:
        name = f"{row['mode']} {row['codec']}, {row['rate_mbit']:g} Mbit/s"
        if row["round_s"]:
            parts = ", ".join(f"{part} {seconds:.2f}" for part, seconds in row["round_s"].items())
            yield f"{name}, seconds of a round: {parts}"
        if row["reason"]:
            yield f"{name}: {row['reason']}"


def _cells(row: UtilizationRow) -> Iterator[str]:
    yield f"{row['mode']} {row['codec']}"
    yield f"{row['rate_mbit']:g}"
    yield "failed" if row["reason"] else written(row["utilization"], ".1%")
    yield written(row["planned_utilization"], ".1%")
    yield written(min(row["utilization_of_peers"], default=None), ".1%")
    for name, form in (("steps_taken", ".0f"), ("peak_rate_share", ".0%"), ("idle_s_per_round", ".2f")):
        yield written(row[name], form)
    yield written(row["line_s_per_round"], ".2f")
    yield f"{row['rounds_certified']} of {row['rounds'] * row['cycle']}"
    yield f"{row['rounds_void']}"
