"""A storm: trainers that are killed and stopped all the time, and how many of those that live contribute.

cd tests && python -m chaos.storm --seconds 200

Real `flockstep join` processes on loopback and the keeper of `run create`. On average every 30 s one is killed with
SIGKILL and started again with its home; every 60 s one is stopped for 10 to 20 s. A minute of calm follows, so that who is
back late is in the figures, too. It prints the rounds, void attempts and unequal roots; the contributors beside the
processes that were alive, and beside those of them that held the run's state; and of those that were killed how long until
each was in a cut again, where that time went, and how many CPU seconds it cost until the state: on few cores a process
waits longest for these.
"""

import argparse
import contextlib
import json
import math
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from flockstep.peer.identity import Identity, identity_path
from flockstep.peer.log.telemetry import Event, log_path, read_events
from flockstep.scripts.demo.local_run import HERE, open_run
from flockstep.scripts.demo.processes import Process, Processes, descendants

KILL_EVERY, STOP_EVERY = 30.0, 60.0
"""Seconds: a mean, and a period."""
STOPPED = 10.0, 20.0
START_SECONDS = 180.0
"""For all to be in one cut, before the storm."""
MOST_SECONDS = 480.0
CALM_SECONDS = 60.0
STEPS = (("process", "peer.start"), ("state", "state.synced"), ("phase", "phase.end"), ("round", "round.done"))
"""The steps of a return, each with the event that ends it."""
RUN_TOML = """\
name = "storm"
seed = 3
[model]
name = "gpt"
size = "0.2m"
[data]
source = "text:{stdlib}"
sequence_length = 64
batch_size = 4
[inner]
steps = 20
[outer]
rounds = 100000
"""


def cpu_seconds(pids: Iterable[int]) -> float:
    """The CPU seconds so far of those of these processes that are there."""
    taken = 0.0
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            times = psutil.Process(pid).cpu_times()
            taken += times.user + times.system
    return taken


def send(number: int, pids: Iterable[int]) -> None:
    """Send a signal to those of these processes that are there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def within(spans: Iterable[tuple[float, float]], at: float) -> bool:
    """Whether a moment lies in one of these spans."""
    return any(low <= at <= high for low, high in spans)


@dataclass
class Trainer:
    """One trainer: its home, its process of the moment, and what its log has told."""

    home: Path
    process: Process
    offset: int = 0
    away: list[tuple[float, float]] = field(default_factory=list)
    """When it was stopped, or dead."""
    killed: float | None = None
    """When it was killed, until it is in a cut again."""
    ended: dict[str, float] = field(default_factory=dict)
    """Since then: when each step ended, for the first time."""
    cpu: float = 0.0
    """What its processes took until they held the run's state."""
    starting: list[tuple[float, float]] = field(default_factory=list)
    """When it was alive and did not hold the run's state yet."""

    @property
    def peer(self) -> str:
        return Identity.load_or_create(identity_path(self.home)).peer_id

    def news(self) -> list[Event]:
        found = list(read_events(log_path(self.home), offset=self.offset))
        self.offset = found[-1][0] if found else self.offset
        return [event for _, event in found]


class Storm:
    """The trainers of a run, what is done to them, and what comes of it."""

    def __init__(self, folder: Path, processes: Processes, trainers: int, seed: int) -> None:
        self.chance, self.processes, self.faults = random.Random(seed), processes, 0
        toml = folder / "run.toml"
        toml.write_text(RUN_TOML)
        _, self.link = open_run(processes, toml)
        homes = [folder / f"trainer-{number}" for number in range(trainers)]
        self.trainers = [Trainer(home, self.start(home)) for home in homes]
        self.cuts: dict[int, tuple[float, set[str]]] = {}
        """By round, when it ended and who contributed."""
        self.roots: dict[int, set[str]] = defaultdict(set)
        self.voids = 0
        self.returns: list[dict[str, float]] = []
        """Of each that was killed and is back: the seconds of each step, and the CPU seconds of its processes."""

    def start(self, home: Path) -> Process:
        command = ["join", self.link, "--yes", "--home", str(home), *HERE, "--threads", "1"]
        return self.processes.start(home.name, command, home / "log.txt")

    def look(self) -> None:
        """Read what the trainers have told since the last look."""
        for trainer in self.trainers:
            for event in trainer.news():
                name, at = str(event["event"]), float(str(event["time"]))
                self.voids += name == "round.void"
                if trainer.killed is not None and at > trainer.killed:
                    trainer.ended.setdefault(name, at)
                    if name == "state.synced" and trainer.ended[name] == at:
                        trainer.starting[-1] = trainer.killed, at
                        trainer.cpu = cpu_seconds({trainer.process.pid, *descendants(trainer.process.pid)})
                if name == "round.done":
                    number, cut = int(str(event["round"])), {*map(str, event["cut"])}  # type: ignore[arg-type]  # a list
                    self.cuts.setdefault(number, (at, cut))
                    self.roots[number].add(str(event["root"]))
                    if trainer.killed is not None and trainer.peer in cut and at > trainer.killed:
                        self.back(trainer, at)

    def back(self, trainer: Trainer, at: float) -> None:
        """Take note of one that was killed and is in a cut again."""
        assert trainer.killed is not None
        trainer.ended["round.done"] = at
        times = [trainer.killed, *(trainer.ended[event] for _, event in STEPS)]
        found = {step: after - before for (step, _), before, after in zip(STEPS, times, times[1:], strict=False)}
        self.returns.append({"all": at - trainer.killed, **found, "cpu": trainer.cpu})
        trainer.killed = None

    def here(self) -> list[Trainer]:
        now = time.time()
        return [it for it in self.trainers if it.killed is None and not within(it.away, now)]

    def rage(self, seconds: float) -> None:
        """Kill and stop for so long."""
        began = time.time()
        end, kill, stop = began + seconds, began + self.chance.expovariate(1 / KILL_EVERY), began + STOP_EVERY / 2
        waking: list[tuple[float, set[int]]] = []
        while (now := time.time()) < end:
            if now >= kill and (victims := self.here()):
                kill = now + self.chance.expovariate(1 / KILL_EVERY)
                self.kill(self.chance.choice(victims))
            if now >= stop and (victims := self.here()):
                stop = now + STOP_EVERY
                victim, length = self.chance.choice(victims), self.chance.uniform(*STOPPED)
                pids = {victim.process.pid, *descendants(victim.process.pid)}
                send(signal.SIGSTOP, pids)
                victim.away.append((now, now + length))
                waking.append((now + length, pids))
                self.faults += 1
            for at, pids in [it for it in waking if it[0] <= now]:
                waking.remove((at, pids))
                send(signal.SIGCONT, pids)
            self.look()
            time.sleep(0.1)
        for _, pids in waking:
            send(signal.SIGCONT, pids)
        calm = time.time() + CALM_SECONDS
        while time.time() < calm and any(it.killed is not None for it in self.trainers):
            self.look()
            time.sleep(0.1)

    def kill(self, victim: Trainer) -> None:
        began = time.time()
        victim.process.kill()
        victim.process = self.start(victim.home)
        victim.away.append((began, time.time()))
        victim.starting.append((began, math.inf))
        victim.killed, victim.ended = began, {}
        self.faults += 1

    def report(self, since: float, until: float) -> dict[str, object]:
        rounds = [(at, cut) for at, cut in self.cuts.values() if since <= at < until]
        alive = [(at, it) for at, _ in rounds for it in self.trainers if not within(it.away, at)]
        ready = [at for at, it in alive if not within(it.starting, at)]
        contributed = sum(len(cut) for _, cut in rounds)
        return {
            "faults": self.faults,
            "rounds": len(rounds),
            "void_attempts": self.voids,
            "unequal_rounds": [number for number, roots in self.roots.items() if len(roots) > 1],
            "contributors_of_alive": round(contributed / max(1, len(alive)), 3),
            "contributors_of_those_with_the_state": round(contributed / max(1, len(ready)), 3),
            "back_in_a_cut_s": sorted(round(it["all"], 1) for it in self.returns),
            "never_back": sum(it.killed is not None for it in self.trainers),
            "back_median": {
                key: round(statistics.median(it[key] for it in self.returns), 1) for key in (self.returns[:1] or [{}])[0]
            },
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=200.0)
    parser.add_argument("--trainers", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", default="", help="an empty folder for all homes, which stay there with their logs")
    arguments = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = arguments.folder or stack.enter_context(tempfile.TemporaryDirectory(prefix="flockstep-storm-"))
        processes = stack.enter_context(Processes())
        storm = Storm(Path(folder), processes, arguments.trainers, arguments.seed)
        calm = time.time() + START_SECONDS
        while not any(len(cut) == arguments.trainers for _, cut in storm.cuts.values()):
            assert time.time() < calm, f"not all trainers are in a cut: {storm.cuts}"
            storm.look()
            time.sleep(0.1)
        began = time.time()
        seconds = min(arguments.seconds, MOST_SECONDS)
        storm.rage(seconds)
        found = storm.report(began, began + seconds)
    sys.stdout.write(json.dumps(found) + "\n")
    return bool(found["unequal_rounds"])


if __name__ == "__main__":
    sys.exit(main())
