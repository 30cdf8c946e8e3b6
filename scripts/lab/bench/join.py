"""`flockstep bench join`: a newcomer's time to its first inner step, and the members' cost.

Theory of operation. A bootstrap, some members and one newcomer after the other are real processes that train. Members
and newcomer get cores of their own where the system allows it. So the members' loss is the cost of providing the state,
not of sharing a core with another trainer. The newcomer starts right after a round, and the members' rate until its
first step is compared with that of the same seconds after the round before. The time to load the interpreter and torch
is measured separately and subtracted, since it does not depend on the swarm.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from ....peer.base.disk import write_whole
from ....peer.base.errors import LocalError
from ....peer.log.telemetry import log_path, read_events
from ...demo.local_run import HERE, open_run
from ...demo.processes import PROCESS_POLL, Process, Processes

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
FOUNDING_ROUNDS = 1
"""Rounds before the first newcomer, in which the members finish their own start."""
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
    """One newcomer; times in seconds, rates in inner steps a second of all members together."""

    seconds: float
    """From its start to its first inner step."""
    sync_seconds: float
    state_bytes: int
    """Bytes fetched to take the run's state."""
    rate_before: float
    rate: float

    @property
    def slowdown(self) -> float:
        """The share of their rate that the members lost; below 0 where they were faster by chance."""
        return 1 - self.rate / self.rate_before


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

    def steps_between(self, start: float, end: float) -> float:
        """Return the inner steps between two points in time, interpolated between its reports."""
        self.first("step", after=end)
        times, steps = zip(*((event["time"], event["step"]) for event in self.all("step")), strict=True)
        at_start, at_end = np.interp((start, end), times, steps)
        return float(at_end - at_start)


def run_join(options: JoinOptions, write_line: Callable[[str], None], report: Callable[[str], None]) -> None:
    """Measure, and write the figures; `report` gets a line of progress after each step. Raises `LocalError`."""
    began = time.monotonic()

    def progress(line: str) -> None:
        report(f"{time.monotonic() - began:5.0f} s  {line}")

    theirs, newcomers = split_cores()
    with tempfile.TemporaryDirectory(prefix="flockstep-bench-") as folder, Processes() as processes:
        with on_cores(newcomers):
            toml = Path(folder) / "run.toml"
            write_whole(toml, BENCH_RUN_TOML.format(size=options.size, steps=options.steps).encode())
            _, link = open_run(processes, toml)
        progress(f"a bootstrap and a run of gpt {options.size} are there, {options.members} members start")
        members = []
        with on_cores(theirs):
            for number in range(options.members):
                threads = max(1, len(theirs) // options.members)
                members.append(start(processes, f"member-{number + 1}", link, Path(folder), threads))
        earlier = quiet_round(members, time.time(), progress)
        with on_cores(newcomers):  # Beside the members' training, as newcomers load.
            loading = statistics.median(loading_seconds() for _ in range(3))
        comings = []
        for number in range(options.repeat):
            name = f"newcomer-{number + 1}"
            earlier = earlier if number == 0 else quiet_round(members, time.time(), progress)
            come = partial(start_newcomer, processes, name, link, Path(folder), newcomers)
            comings.append(measure_join(members, earlier, come, progress))
    figures = join_summary(options, comings, loading, apart=not set(theirs) & set(newcomers))
    for line in (json.dumps(figures),) if options.as_json else written(figures):
        write_line(line)


def measure_join(
    members: Sequence[Trainer], earlier: float, come: Callable[[], Trainer], progress: Callable[[str], None]
) -> Coming:
    """Start one newcomer right after the round that follows the quiet one at `earlier`, measure it, and stop it."""
    settled = quiet_round(members, earlier, progress)
    began = time.time()
    newcomer = come()
    progress(f"{newcomer.process.name} starts")
    first: float = newcomer.first("step")["time"]
    seconds, offset = first - began, began - settled
    progress(f"{newcomer.process.name} has made its first inner step after {seconds:.1f} s")
    newcomer.process.interrupt()
    newcomer.process.stop(JOIN_PATIENCE)
    (synced,) = (event for event in newcomer.events if event["event"] == "state.synced")
    if any(settled < event["time"] < first for member in members for event in member.all("round.done")):
        raise LocalError(
            f"a round fell into the {seconds:.0f} s in which the newcomer came",
            remedy="give --steps a greater number, so that an inner phase is longer",
        )
    rate = sum(member.steps_between(began, first) for member in members) / seconds
    before = sum(member.steps_between(earlier + offset, earlier + offset + seconds) for member in members) / seconds
    return Coming(seconds, synced["seconds"], synced["bytes"], before, rate)


def quiet_round(members: Sequence[Trainer], after: float, progress: Callable[[str], None]) -> float:
    """Wait for a round after `after` in which exactly the members took part, and return its end."""
    since, last = after, 0
    while True:
        done = [member.first("round.done", after=since) for member in members]
        since = min(event["time"] for event in done)
        number, here = done[0]["round"], len(done[0]["cut"])
        if number > last:
            progress(f"round {number} is over, {here} took part")
        last = number
        whole = {(event["round"], len(event["cut"])) for event in done} == {(number, len(members))}
        if whole and number > FOUNDING_ROUNDS:
            over: float = max(event["time"] for event in done)
            return over


def start(processes: Processes, name: str, link: str, folder: Path, threads: int) -> Trainer:
    """Start a `flockstep join` on the cores of this process."""
    home = folder / name
    listen = ["--home", str(home), *HERE, "--device", "cpu", "--yes", "--threads", str(threads)]
    return Trainer(processes.start(name, ["join", link, *listen], home / "log.txt"), home)


def start_newcomer(processes: Processes, name: str, link: str, folder: Path, cores: Sequence[int]) -> Trainer:
    """Start a `flockstep join` on these cores."""
    with on_cores(cores):
        return start(processes, name, link, folder, max(1, len(cores)))


def loading_seconds() -> float:
    """Measure the seconds to load an interpreter with torch, from a warm file cache as for a newcomer."""
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return time.monotonic() - began


def split_cores() -> tuple[list[int], list[int]]:
    """Return the cores of members and of newcomers: halves of mine, or all for both where affinity is not supported."""
    cores = sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else list(range(os.cpu_count() or 1))
    if sys.platform != "linux" or len(cores) < 2:
        return cores, cores
    return cores[: len(cores) // 2], cores[len(cores) // 2 :]


@contextmanager
def on_cores(cores: Sequence[int]) -> Iterator[None]:
    """Start the processes of this block on these cores, where the system supports it."""
    if sys.platform != "linux":
        yield
        return
    mine = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, mine)


def join_summary(options: JoinOptions, comings: Sequence[Coming], loading: float, *, apart: bool) -> dict[str, Any]:
    """Return the figures: medians over the newcomers, and the values of each."""
    beyond = [round(coming.seconds - loading, 2) for coming in comings]
    slowdowns = [round(coming.slowdown, 4) for coming in comings]
    return {
        "members": options.members,
        "size": options.size,
        "first_inner_step_s": statistics.median(beyond),
        "members_slowdown": statistics.median(slowdowns),
        "loading_s": round(loading, 2),
        "sync_s": statistics.median(coming.sync_seconds for coming in comings),
        "state_bytes": int(statistics.median(coming.state_bytes for coming in comings)),
        "cores_apart": apart,
        "all_first_inner_step_s": beyond,
        "all_members_slowdown": slowdowns,
    }


def written(figures: dict[str, Any]) -> Iterator[str]:
    """Yield the figures as lines of text."""
    apart = "on cores of their own" if figures["cores_apart"] else "on the same cores as the newcomer"
    yield f"gpt {figures['size']}, {figures['members']} members {apart}; medians, and each newcomer"
    yield f"to the first inner step  {figures['first_inner_step_s']:.2f} s  {figures['all_first_inner_step_s']}"
    yield f"  of that for the state  {figures['sync_s']:.2f} s  for {figures['state_bytes'] / 1e6:.0f} MB"
    yield f"  loading torch first    {figures['loading_s']:.2f} s, which comes on top"
    yield f"members were slower by   {figures['members_slowdown']:.1%}  {figures['all_members_slowdown']}"
