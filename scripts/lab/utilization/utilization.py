"""`flockstep bench utilization`: measure all cases, and write table or JSON.

Theory of operation. Every case runs in processes of its own, one case after the other: a bootstrap and the peers, each in
a network namespace (`lines`). A peer's loop counts the seconds that it spends in inner steps, and notes when it has the
result of a round (`peer`). Utilization is their share between the first and the last such moment; the round before the
first one is the founding of the run, and is not measured. Rates are read from the interface's counters meanwhile.
"""

import json
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ....peer.base.errors import LocalError
from ..bench.allreduce import INSTALL
from .lines import check_lines
from .measure import UtilizationRow, measure_utilization
from .options import UtilizationOptions

HEADINGS = ("mode and codec", "Mbit/s", "trains", "planned", "worst", "steps", "peak", "idle s", "line s", "rounds", "void")


def run_utilization(
    options: UtilizationOptions, write_line: Callable[[str], None], report: Callable[[str], None]
) -> bool:
    """Measure all cases and write their rows: each at once as JSON, or all as a table at the end.

    `report` gets lines of progress. Returns whether all cases were measured. Raises `LocalError` where this machine has
    no shaped lines.
    """
    began = time.monotonic()
    check_lines(options.rates[0], options.round_trip_ms / 1000, options.loss_percent / 100)
    rows = []
    missing = {name: why for name in options.baselines if (why := why_no_baseline(name, options.baseline_python))}
    for why in missing.values():
        report(why)
    with tempfile.TemporaryDirectory(prefix="flockstep-bench-") as folder:
        for number, case in enumerate(options.cases()):
            if case.system in missing:
                continue
            name = f"{case.system} {case.mode} {case.codec}, {case.rate:g} Mbit/s"

            def progress(line: str, name: str = name) -> None:
                report(f"{time.monotonic() - began:5.0f} s  {name}: {line}")

            row = measure_utilization(case, Path(folder) / str(number), progress)
            rows.append(row)
            if options.as_json:
                write_line(json.dumps(row.as_json()))
    if not options.as_json:
        Console().print(utilization_table(rows))
        for line in utilization_notes(rows):
            write_line(line)
    return not any(row.failure for row in rows)


def why_no_baseline(name: str, python: str) -> str:
    """Return why a baseline cannot be measured; empty if it can."""
    look = f"import importlib.util as u, sys; sys.exit(u.find_spec({name!r}) is None)"
    try:
        found = subprocess.run([python, "-c", look], capture_output=True, check=False).returncode == 0
    except OSError as error:
        raise LocalError(f"cannot run {python}: {error.strerror}", remedy="see --baseline-python") from None
    return "" if found else f"{name} is left out, since it is not installed for {python}: {INSTALL[name]}"


def utilization_table(rows: Sequence[UtilizationRow]) -> Table:
    """Return the table of all rows."""
    case = rows[0].case if rows else None
    title = f"{case.peers} peers × {case.params / 1e6:g}M parameters, H = {case.steps}, {_steps(rows)}" if case else ""
    grid = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    grid.add_column(HEADINGS[0], no_wrap=True)
    for heading in HEADINGS[1:]:
        grid.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        grid.add_row(*_cells(row))
    return grid


def _steps(rows: Sequence[UtilizationRow]) -> str:
    case = rows[0].case
    times = sorted(set(case.step_seconds))
    steps = "real steps" if not times else "steps of " + " and ".join(f"{seconds:g} s" for seconds in times)
    lost = f", {case.loss:.2%} lost" if case.loss else ""
    return f"{steps}; round trip {case.round_trip * 1000:g} ms{lost}"


def _cells(row: UtilizationRow) -> Iterator[str]:
    case = row.case
    system = "" if case.system == "flockstep" else f"{case.system} "
    yield f"{system}{case.mode} {case.codec}"
    yield f"{case.rate:g}"
    if row.failure:
        yield "failed"
        yield from [""] * (len(HEADINGS) - 3)
        return
    yield f"{row.utilization:.1%}"
    yield "" if case.planned_share is None else f"{case.planned_share:.1%}"
    yield f"{min(peer.utilization for peer in row.peers):.1%}"
    yield "" if row.steps_taken is None else f"{row.steps_taken:.0f}"
    yield f"{row.peak_rate_share:.0%}"
    yield f"{row.idle_seconds:.2f}"
    yield f"{row.line_seconds:.2f}"
    yield f"{row.certified} of {case.rounds * case.cycle}"
    yield f"{row.void}" if case.system == "flockstep" else ""


def utilization_notes(rows: Sequence[UtilizationRow]) -> Iterator[str]:
    """Yield the lines under the table."""
    yield "trains: share of time in inner steps, the mean of the peers and the worst one. peak: greatest rate over 1 s."
    yield "planned: the share of `flockstep plan`. steps: inner ones between two averages of the same parameters."
    yield "idle, line: seconds a round without training, and what its bytes take at the line's full rate."
    for row in rows:
        if row.round_seconds:
            parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in row.round_seconds.items())
            yield f"{row.case.mode} {row.case.codec}, {row.case.rate:g} Mbit/s, seconds of a round: {parts}"
        if row.failure:
            yield f"{row.case.system} {row.case.mode} {row.case.codec}: {row.failure}"
