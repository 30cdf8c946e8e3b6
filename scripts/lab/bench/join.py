"""`flockstep bench join`: a newcomer's time to its first inner step.

Theory of operation. A bootstrap, some members and one newcomer after the other are real processes that train. The newcomer
starts right after a round, so that none falls into its coming. The time to load the interpreter and torch
is measured separately and subtracted, since it does not depend on the swarm.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from ....peer.base.disk import write_whole
from ....peer.base.errors import LocalError
from ....peer.log.telemetry import log_path, read_events
from ...demo.local_run import HERE, open_run
from ...demo.processes import PROCESS_POLL, Process, Processes
from ..table import table_lines

BENCH_RUN_TOML = """\
name = "bench-join"

[model]
name = "gpt"
size = "{size}"

[data]
source = "text:{{stdlib}}"
sequence_length = 32
batch_size = 1

[inner]
optimizer = "adamw"
steps = {steps}

[outer]
rounds = 100000
"""
JOIN_PATIENCE = 600.0
"""Timeout in seconds for each awaited event."""


TrainerEvent: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinOptions:
    """The options of the command line."""

    members: int
    size: str
    steps: int
    repeat: int
    as_json: bool


@dataclass(frozen=True, slots=True)
class Coming:
    """One newcomer; times in seconds."""

    seconds: float
    """From its start to its first inner step."""
    sync_seconds: float
    state_bytes: int
    """Bytes fetched to take the run's state."""


class Trainer:
    """A `flockstep join` process and the events of its log."""

    def __init__(self, process: Process, home: Path) -> None:
        self.process = process
        self.home = home
        self.events: list[TrainerEvent] = []
        self._offset = 0

    def all(self, name: str) -> list[TrainerEvent]:
        """Return all events of that name so far. Raises `LocalError` if the process has ended."""
        code = self.process.code
        for offset, event in read_events(log_path(self.home), offset=self._offset):
            self._offset = offset
            self.events.append(event)
        if code is not None:
            raise self.process.died()
        return [event for event in self.events if event["event"] == name]

    def first(self, name: str, *, after: float = 0.0) -> TrainerEvent:
        """Wait for the first event of that name after a point in time. Raises `LocalError` after the timeout."""
        deadline = time.monotonic() + JOIN_PATIENCE
        while time.monotonic() < deadline:
            for event in self.all(name):
                if event["time"] > after:
                    return event
            time.sleep(PROCESS_POLL)
        raise LocalError(
            f"{self.process.name} had no {name} after {JOIN_PATIENCE:.0f} s", remedy=f"its log is {log_path(self.home)}"
        )


def run_join(options: JoinOptions, write_line: Callable[[str], None], report: Callable[[str], None]) -> None:
    """Measure, and write the figures; `report` gets a line of progress after each step. Raises `LocalError`."""
    began = time.monotonic()

    def progress(line: str) -> None:
        report(f"{time.monotonic() - began:5.0f} s  {line}")

    with tempfile.TemporaryDirectory(prefix="flockstep-bench-") as folder, Processes() as processes:
        toml = Path(folder) / "run.toml"
        write_whole(toml, BENCH_RUN_TOML.format(size=options.size, steps=options.steps).encode())
        _, link = open_run(processes, toml)
        progress(f"a bootstrap and a run of gpt {options.size} are there, {options.members} members start")
        names = [f"member-{number + 1}" for number in range(options.members)]
        members = [start(processes, name, link, Path(folder)) for name in names]
        round_over(members, time.time())  # All are there, and their own start is over.
        loading = statistics.median(loading_seconds() for _ in range(3))  # Beside the members' training, as newcomers load.
        comings = []
        for number in range(options.repeat):
            come = partial(start, processes, f"newcomer-{number + 1}", link, Path(folder))
            comings.append(measure_join(members, come, progress))
    figures = join_summary(options, comings, loading)
    table = table_lines("", list(figures), [list(figures.values())])
    for line in (json.dumps(figures),) if options.as_json else table:
        write_line(line)


def measure_join(members: Sequence[Trainer], come: Callable[[], Trainer], progress: Callable[[str], None]) -> Coming:
    """Start one newcomer right after a round of the members, measure it, and stop it."""
    settled = round_over(members, time.time())
    began, newcomer = time.time(), come()
    progress(f"{newcomer.process.name} starts")
    first: float = newcomer.first("step")["time"]
    progress(f"{newcomer.process.name} has made its first inner step after {first - began:.1f} s")
    newcomer.process.interrupt()
    newcomer.process.stop(JOIN_PATIENCE)
    (synced,) = (event for event in newcomer.events if event["event"] == "state.synced")
    if any(settled < event["time"] < first for member in members for event in member.all("round.done")):
        raise LocalError(
            f"a round fell into the {first - began:.0f} s in which the newcomer came",
            remedy="give --steps a greater number, so that an inner phase is longer",
        )
    return Coming(first - began, synced["seconds"], synced["bytes"])


def round_over(members: Sequence[Trainer], after: float) -> float:
    """Wait until each member has ended a round after a point in time, and return when the last one did."""
    return max(float(member.first("round.done", after=after)["time"]) for member in members)


def start(processes: Processes, name: str, link: str, folder: Path) -> Trainer:
    """Start a `flockstep join`."""
    home = folder / name
    listen = ["--home", str(home), *HERE, "--device", "cpu", "--yes", "--threads", "1"]
    return Trainer(processes.start(name, ["join", link, *listen], home / "log.txt"), home)


def loading_seconds() -> float:
    """Measure the seconds to load an interpreter with torch, from a warm file cache as for a newcomer."""
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return time.monotonic() - began


def join_summary(options: JoinOptions, comings: Sequence[Coming], loading: float) -> dict[str, Any]:
    """Return the figures: medians over the newcomers, and the values of each."""
    beyond = [round(coming.seconds - loading, 2) for coming in comings]
    return {
        "members": options.members,
        "size": options.size,
        "first_inner_step_s": statistics.median(beyond),
        "loading_s": round(loading, 2),
        "sync_s": statistics.median(coming.sync_seconds for coming in comings),
        "state_bytes": int(statistics.median(coming.state_bytes for coming in comings)),
        "all_first_inner_step_s": beyond,
    }
