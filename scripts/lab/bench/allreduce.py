"""`flockstep bench allreduce`: speed, cost and error of an average, beside other systems.

Theory of operation. Every case (system, peers, parameters, codec) runs in processes of its own, one case after the
other on the same machine in the same minutes, so that ratios hold where absolute times do not. `measure` measures
one case, `group` reads the machine's counters, `peer` is our own worker, and `hivemind` and `gloo` are the others.
"""

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ....collectives.vector.codec import codec_named
from ....peer.base.errors import UsageError
from ....peer.base.install import WHERE, install_command
from ..baselines.rules import rule_named
from .group import enter_own_network, interface_bytes, is_alone, raise_loopback
from .measure import Case, Disturbance, Row, measure_case

BASELINE_CODECS = {"hivemind": ("fp32", "fp16", "uniform8", "blockwise8"), "gloo": ("fp32",)}
INSTALL = {
    "hivemind": f"{install_command('hivemind')} 'numpy<2.4'{WHERE}, or name an interpreter that has it: --baseline-python",
    "gloo": "pip install torch, or name an interpreter that has it: --baseline-python",
}
NEEDS = {"hivemind": "hivemind", "gloo": "torch"}
"""The package that a baseline imports."""
MAX_BENCH_PEERS = 256
"""The size of a full roster."""
FIGURES = {"wall_s": "wall s", "cpu_s": "CPU s", "bytes_per_peer": "sent MB", "peak_memory_bytes": "peak MB"}
"""The figures for which less is better. CPU is of all processes together; sent and peak are of one peer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllreduceOptions:
    """The options of the command line. Raises `UsageError`."""

    peers: tuple[int, ...]
    params: tuple[int, ...]
    codecs: tuple[str, ...]
    """Contribution/result, or one name for both."""
    rules: tuple[str, ...]
    repeat: int
    baselines: tuple[str, ...]
    """Names of baselines, each with all of its codecs, or `name/codec`."""
    baseline_python: str
    disturbance: Disturbance | None
    as_json: bool

    def __post_init__(self) -> None:
        for codec in self.codecs:
            for name in codec.split("/", 1):
                codec_named(name)
        for rule in self.rules:
            rule_named(rule)
        for baseline in self.baselines:
            name, _, codec = baseline.partition("/")
            if name not in BASELINE_CODECS or (codec and codec not in BASELINE_CODECS[name]):
                known = ", ".join(f"{name}/{one}" for name, codecs in BASELINE_CODECS.items() for one in codecs)
                raise UsageError(f"there is no baseline {baseline!r}", remedy=f"choose from hivemind, gloo, {known}")
        if not all(2 <= number <= MAX_BENCH_PEERS for number in self.peers):
            raise UsageError(f"an average needs 2 to {MAX_BENCH_PEERS} peers", remedy="such as --peers 4,8")

    def cases(self) -> Iterator[Case]:
        """Yield all cases, ours first."""
        for peers in self.peers:
            for params in self.params:
                for codec in self.codecs:
                    for rule in self.rules:
                        yield Case("flockstep", "peer", sys.executable, codec, peers, params, rule)
                for baseline in self.baselines:
                    name, _, chosen = baseline.partition("/")
                    for codec in (chosen,) if chosen else BASELINE_CODECS[name]:
                        yield Case(name, name, self.baseline_python, codec, peers, params)


def allreduce_options(
    *,
    peers: Sequence[str],
    params: Sequence[str],
    codec: Sequence[str],
    rule: Sequence[str],
    repeat: int,
    baseline: Sequence[str],
    baseline_python: str,
    kill_after: float | None,
    stop_after: float | None,
    as_json: bool,
) -> AllreduceOptions:
    """Parse the options of the command line. Raises `UsageError`."""
    if kill_after is not None and stop_after is not None:
        raise UsageError("--kill-after and --stop-after exclude each other", remedy="run the bench twice")
    disturbance = None
    if kill_after is not None:
        disturbance = Disturbance(signal.SIGKILL, kill_after)
    elif stop_after is not None:
        disturbance = Disturbance(signal.SIGSTOP, stop_after)
    return AllreduceOptions(
        peers=tuple(count(text) for text in listed(peers)),
        params=tuple(count(text) for text in listed(params)),
        codecs=tuple(listed(codec)),
        rules=tuple(listed(rule)),
        repeat=repeat,
        baselines=tuple(listed(baseline)),
        baseline_python=baseline_python or sys.executable,
        disturbance=disturbance,
        as_json=as_json,
    )


def listed(values: Sequence[str]) -> list[str]:
    """Split `["4,8", "2"]` into `["4", "8", "2"]`: an option may be repeated, or be a list."""
    return [part.strip() for value in values for part in value.split(",") if part.strip()]


def count(text: str) -> int:
    """Parse a whole number: `25M`, `1e6`, `4`. Raises `UsageError`."""
    factors = {"k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9}
    factor = factors.get(text[-1:].lower(), 1)
    try:
        number = float(text[:-1] if factor != 1 else text) * factor
        if number < 1 or number != int(number):
            raise ValueError(text)
    except (ValueError, OverflowError):
        raise UsageError(f"{text!r} is not a count", remedy="write it as 25M, 1e6 or 4") from None
    return int(number)


def run_allreduce(options: AllreduceOptions, write_line: Callable[[str], None]) -> None:
    """Measure all cases and write their rows: each at once as JSON, or all as a table at the end."""
    for name in dict.fromkeys(baseline.partition("/")[0] for baseline in options.baselines):
        _require(name, options.baseline_python)
    enter_own_network()
    if is_alone():
        raise_loopback()
    progress = Console(stderr=True)
    rows = []
    with tempfile.TemporaryDirectory(prefix="flockstep-bench-") as folder, progress.status("") as status:
        for number, case in enumerate(options.cases()):
            status.update(f"{case.system} {case.codec}, {case.peers} peers × {case.params / 1e6:g}M")
            row = measure_case(case, options.repeat, options.disturbance, Path(folder) / str(number))
            rows.append(row)
            if options.as_json:
                write_line(json.dumps(row.as_json(options.disturbance)))
    if not options.as_json:
        console = Console()
        for grid in tables(rows, options.disturbance):
            console.print(grid)
        write_line("Medians. same: all survivors hold the same bits; exact: these are the bits of the encoded mean.")
        for line in comparisons(rows):
            write_line(line)


def _require(baseline: str, python: str) -> None:
    """Raise `UsageError` if the interpreter lacks the package that a baseline imports."""
    look = f"import importlib.util as u, sys; sys.exit(u.find_spec({NEEDS[baseline]!r}) is None)"
    try:
        missing = subprocess.run([python, "-c", look], capture_output=True, check=False).returncode != 0
    except OSError as error:
        raise UsageError(f"cannot run {python}: {error.strerror}", remedy="see --baseline-python") from None
    if missing:
        raise UsageError(f"{NEEDS[baseline]} is not installed for {python}", remedy=INSTALL[baseline])


def tables(rows: Sequence[Row], disturbance: Disturbance | None) -> Iterator[Table]:
    """Yield a table of medians over the rounds for each size of the task."""
    source = "on the interface" if interface_bytes() is not None else "by our own transport"
    for peers, params in dict.fromkeys((row.case.peers, row.case.params) for row in rows):
        title = f"{peers} peers × {params / 1e6:g}M parameters; bytes counted {source}"
        what = f"; {disturbance}" if disturbance else ""
        grid = Table(title=title + what, title_justify="left", title_style="bold", box=None, pad_edge=False)
        grid.add_column("system and codec", no_wrap=True)
        for heading in (*FIGURES.values(), "error"):
            grid.add_column(heading, justify="right", no_wrap=True)
        for heading in ("same", "exact", "outcome"):
            grid.add_column(heading)
        for row in rows:
            if (row.case.peers, row.case.params) == (peers, params):
                grid.add_row(*_cells(row, disturbance))
        yield grid


def _cells(row: Row, disturbance: Disturbance | None) -> Iterator[str]:
    figures = row.as_json(disturbance)
    rule = "" if row.case.rule == "mean" else f" {row.case.rule}"
    yield f"{row.case.system} {row.case.codec}{rule}"
    yield from (_written(name, row.figure(name)) for name in (*FIGURES, "rel_l2"))
    yield "yes" if figures["bit_identical"] else "no"
    yield {True: "yes", False: "no", None: ""}[figures["exact"]]
    outcome: str = figures["outcome"]
    if figures["reason"]:
        outcome += f": {figures['reason']}"
    elif disturbance and figures["contributors"]:
        outcome += f", {figures['contributors']} of {row.case.peers}"
    yield outcome


def _written(name: str, value: float | None) -> str:
    if value is None:
        return ""
    if name.endswith("_s"):
        return f"{value:.2f}"
    if name == "peak_memory_bytes":
        return f"{value / 1e6:.0f}"
    return f"{value / 1e6:.1f}" if name == "bytes_per_peer" else f"{value:.0e}"


def comparisons(rows: Sequence[Row]) -> Iterator[str]:
    """Compare each of our rows with the best of each baseline's codecs, figure by figure."""
    for ours in rows:
        if ours.case.system != "flockstep" or not ours.rounds:
            continue
        size = (ours.case.peers, ours.case.params)
        for name in BASELINE_CODECS:
            theirs = [row for row in rows if row.case.system == name and (row.case.peers, row.case.params) == size]
            ratios = []
            for figure, heading in FIGURES.items():
                best = min((value for row in theirs if (value := row.figure(figure))), default=None)
                mine = ours.figure(figure)
                if best is not None and mine is not None:
                    ratios.append(f"{heading} {mine / best:.2f}×")
            if ratios:
                yield f"flockstep {ours.case.codec} against {name}'s best codec in each: {', '.join(ratios)}"
