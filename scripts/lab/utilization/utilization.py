"""`flockstep bench utilization`: measure all cases, and write table or JSON.

Theory of operation. Every case runs in processes of its own, one case after the other: a bootstrap and the peers, each in
a network namespace. A peer's loop counts the seconds that it spends in inner steps, and notes when it has the result of a
round (`peer`). Utilization is their share between the first and the last such moment; the round before the first one is
the founding of the run, and is not measured.
"""

import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ..namespaces import check_compiler, check_namespaces
from ..table import table_lines, written
from .cases import UtilizationCase
from .measure import UtilizationRow, measure_utilization

HEADINGS = ("mode and codec", "Mbit/s", "trains", "planned", "worst", "steps", "idle s", "rounds", "void", "reason")


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
    check_namespaces(("ip", "tc"))
    check_compiler()
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
    what = f"{one['peers']} peers × {one['params'] / 1e6:g}M parameters, H = {one['steps']}, steps of {one['step_s']:g} s"
    yield from table_lines(f"{what}; round trip {one['round_trip_ms']:g} ms", HEADINGS, [[*_cells(row)] for row in rows])
    yield "trains: share of time in inner steps, the mean of the peers and the worst one. planned: that of `flockstep plan`."
    yield "steps: inner ones between two averages of the same parameters. idle: seconds a round without training."


def _cells(row: UtilizationRow) -> Iterator[str]:
    yield f"{row['mode']} {row['codec']}"
    yield f"{row['rate_mbit']:g}"
    yield written(row["utilization"], ".1%")
    yield written(row["planned_utilization"], ".1%")
    yield written(min(row["utilization_of_peers"], default=None), ".1%")
    yield written(row["steps_taken"], ".0f")
    yield written(row["idle_s_per_round"], ".2f")
    yield f"{row['rounds_certified'] or 0} of {row['rounds']}"
    yield f"{row['rounds_void'] or 0}"
    yield row["reason"]
