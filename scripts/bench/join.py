"""`flockstep bench join`: how long a newcomer takes to its first inner step, and what that costs the members.

Theory of operation. A bootstrap, some members and one newcomer after the other, all real processes that train. Members
and newcomer get cores of their own where the system allows it: so what the members lose is what giving costs them, not
what sharing a core with somebody else's training costs. The newcomer comes right after a round, and the members' rate
until its first step is compared with that of the same seconds after the round before. What the interpreter and torch
take to load is measured beside it and subtracted: no swarm can be blamed for that.
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
from pathlib import Path
from typing import Any, TypeAlias

from ...peer.errors import LocalError
from ...peer.telemetry import log_path, read_events
from ..local_run import ADDRESS, LINK, START_SECONDS
from ..processes import POLL, Process, Processes

RUN_TOML = """\
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
FOUNDING_ROUNDS = 2
"""Before the first newcomer: the members have their own beginnings behind them."""
PATIENCE = 600.0
"""Seconds for anything that must happen; beyond that something hangs."""


Event: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinOptions:
    """What the command line asks for."""

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
    """What it fetched to hold the run's state."""
    rate_before: float
    rate: float

    @property
    def slowdown(self) -> float:
        """The share of their rate that the members lost; below 0 where they were faster by chance."""
        return 1 - self.rate / self.rate_before


class Trainer:
    """A `flockstep join` and what its log says."""

    def __init__(self, process: Process, home: Path) -> None:
        self.process = process
        self.home = home
        self.events: list[Event] = []
        self._offset = 0

    def all(self, name: str) -> list[Event]:
        """Every event of that name so far. Raises `LocalError` where the process has ended."""
        code = self.process.code
        for offset, event in read_events(log_path(self.home), offset=self._offset):
            self._offset = offset
            self.events.append(event)
        if code is not None:
            raise self.process.died()
        return [event for event in self.events if event["event"] == name]

    def first(self, name: str, *, after: float = 0.0) -> Event:
        """The first event of that name after a point in time; waits for it."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            for event in self.all(name):
                if event["time"] > after:
                    return event
            time.sleep(POLL)
        raise LocalError(
            f"{self.process.name} had no {name} after {PATIENCE:.0f} s", remedy=f"its log is {log_path(self.home)}"
        )

    def steps_between(self, start: float, end: float) -> float:
        """Inner steps between two points in time, interpolated between its reports."""
        self.first("step", after=end)
        reports = [(event["time"], event["step"]) for event in self.all("step")]
        return _at(reports, end) - _at(reports, start)


def run_join(options: JoinOptions, say: Callable[[str], None]) -> None:
    """Measure and say it. Raises `LocalError`."""
    theirs, newcomers = split_cores()
    with tempfile.TemporaryDirectory(prefix="flockstep-bench-") as folder, Processes() as processes:
        with on_cores(newcomers):
            link = open_run(options, processes, Path(folder))
            loading = statistics.median(loading_seconds() for _ in range(3))
        members = []
        with on_cores(theirs):
            for number in range(options.members):
                threads = max(1, len(theirs) // options.members)
                members.append(start(processes, f"member-{number + 1}", link, Path(folder), threads))
        comings = []
        for number in range(options.repeat):
            name = f"newcomer-{number + 1}"
            comings.append(
                measure(members, lambda name=name: newcomer(processes, name, link, Path(folder), newcomers))  # type: ignore[misc]
            )
    figures = summary(options, comings, loading, apart=not set(theirs) & set(newcomers))
    for line in (json.dumps(figures),) if options.as_json else written(figures):
        say(line)


def measure(members: Sequence[Trainer], come: Callable[[], Trainer]) -> Coming:
    """Let one come right after a round, and leave again."""
    earlier = quiet_round(members)
    settled = quiet_round(members, after=earlier)
    began = time.time()
    newcomer = come()
    first: float = newcomer.first("step")["time"]
    newcomer.process.interrupt()
    newcomer.process.stop(PATIENCE)
    (synced,) = (event for event in newcomer.events if event["event"] == "state.synced")
    seconds, offset = first - began, began - settled
    if any(settled < event["time"] < first for member in members for event in member.all("round.done")):
        raise LocalError(
            f"a round fell into the {seconds:.0f} s in which the newcomer came",
            remedy="give --steps a greater number, so that an inner phase is longer",
        )
    rate = sum(member.steps_between(began, first) for member in members) / seconds
    before = sum(member.steps_between(earlier + offset, earlier + offset + seconds) for member in members) / seconds
    return Coming(seconds, synced["seconds"], synced["bytes"], before, rate)


def quiet_round(members: Sequence[Trainer], *, after: float | None = None) -> float:
    """When the next round was over that all members, and nobody else, took part in."""
    since: float = time.time() if after is None else after
    while True:
        done = [member.first("round.done", after=since) for member in members]
        since = min(event["time"] for event in done)
        whole = {(event["round"], len(event["cut"])) for event in done} == {(done[0]["round"], len(members))}
        if whole and done[0]["round"] > FOUNDING_ROUNDS:
            over: float = max(event["time"] for event in done)
            return over


def open_run(options: JoinOptions, processes: Processes, folder: Path) -> str:
    """Start a bootstrap and publish a run through it; its link."""
    toml = folder / "run.toml"
    toml.write_text(RUN_TOML.format(size=options.size, steps=options.steps), encoding="utf-8")
    home = folder / "bootstrap"
    door = processes.start(
        "the bootstrap", ["bootstrap", "--home", str(home), "--host", "127.0.0.1", "--port", "0"], home / "log.txt"
    )
    address = door.await_line(ADDRESS, START_SECONDS)
    create = ["run", "create", str(toml), "--via", address, "--home", str(folder / "owner")]
    return processes.start("flockstep run create", create, folder / "owner" / "log.txt").await_line(LINK, START_SECONDS)


def start(processes: Processes, name: str, link: str, folder: Path, threads: int) -> Trainer:
    """One more `flockstep join`, on the cores of whoever starts it."""
    home = folder / name
    listen = ["--home", str(home), "--host", "127.0.0.1", "--port", "0", "--device", "cpu", "--threads", str(threads)]
    return Trainer(processes.start(name, ["join", link, *listen], home / "log.txt"), home)


def newcomer(processes: Processes, name: str, link: str, folder: Path, cores: Sequence[int]) -> Trainer:
    """One more `flockstep join`, on these cores."""
    with on_cores(cores):
        return start(processes, name, link, folder, max(1, len(cores)))


def loading_seconds() -> float:
    """What an interpreter with torch takes to load, with everything in the file cache as for a newcomer."""
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return time.monotonic() - began


def split_cores() -> tuple[list[int], list[int]]:
    """The cores of the members and those of newcomers: halves of mine, or all for both where they cannot be told."""
    cores = sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else list(range(os.cpu_count() or 1))
    if sys.platform != "linux" or len(cores) < 2:
        return cores, cores
    return cores[: len(cores) // 2], cores[len(cores) // 2 :]


@contextmanager
def on_cores(cores: Sequence[int]) -> Iterator[None]:
    """Whatever is started within runs on these cores, where the system allows it."""
    if sys.platform != "linux":
        yield
        return
    mine = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, mine)


def summary(options: JoinOptions, comings: Sequence[Coming], loading: float, *, apart: bool) -> dict[str, Any]:
    """The figures: medians over the newcomers, and those of each."""
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
    """For people."""
    apart = "on cores of their own" if figures["cores_apart"] else "on the same cores as the newcomer"
    yield f"gpt {figures['size']}, {figures['members']} members {apart}; medians, and each newcomer"
    yield f"to the first inner step  {figures['first_inner_step_s']:.2f} s  {figures['all_first_inner_step_s']}"
    yield f"  of that for the state  {figures['sync_s']:.2f} s  for {figures['state_bytes'] / 1e6:.0f} MB"
    yield f"  beyond loading torch   {figures['loading_s']:.2f} s"
    yield f"members were slower by   {figures['members_slowdown']:.1%}  {figures['all_members_slowdown']}"


def _at(reports: Sequence[tuple[float, int]], moment: float) -> float:
    """How many steps were done at a moment, from (time, steps) in order."""
    before, after = reports[0], reports[-1]
    for report in reports:
        if report[0] <= moment:
            before = report
        else:
            after = report
            break
    if after[0] <= before[0]:
        return before[1]
    return before[1] + (after[1] - before[1]) * (moment - before[0]) / (after[0] - before[0])
