"""Six peers in six homes train the demo's model: every round certified, everybody in every cut, equal state roots."""

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from flockstep.peer.telemetry import Event, log_path, read_events
from natlab.lab import Home, Lab, environment
from natlab.people import start_bootstrap

HOMES = (
    Home("cone", delay=0.005, up=20, down=100),
    Home("cone", delay=0.010, up=40, down=100),
    Home("symmetric", delay=0.015, up=20, down=50),
    Home("symmetric", delay=0.020, up=50, down=100),
    Home("shift", delay=0.0125, up=20, down=20),
    Home("open", delay=0.025, up=100, down=100),
)
"""Lines of 20 to 100 Mbit/s, 20 to 100 ms round trip from home to home."""

ROUNDS = 10
PATIENCE = 420.0
"""Seconds: a safety net against a hang, six trainers on two cores take about half of it."""

RUN_TOML = f"""
name = "homes"
[model]
name = "gpt"
size = "1m"
[data]
source = "text:{{stdlib}}"
sequence_length = 128
batch_size = 2
[inner]
steps = 5
[outer]
rounds = {ROUNDS}
[admission]
min_peers = {len(HOMES)}
"""


def command(*words: str) -> list[str]:
    return [sys.executable, "-u", "-m", "flockstep", *words]


def publish(lab: Lab, doors: list[str], folder: Path) -> str:
    """The join link of the run, published from the computer of the first bootstrap."""
    (folder / "run.toml").write_text(RUN_TOML, encoding="utf-8")
    via = [word for door in doors for word in ("--via", door)]
    create = command("run", "create", str(folder / "run.toml"), *via, "--home", str(folder / "owner"))
    process = lab.start("boot0", create, stdout=subprocess.PIPE, text=True, env=environment())
    output = str(process.communicate(timeout=60)[0])
    return next(word.strip("'") for word in output.split() if word.strip("'").startswith("flockstep://"))


def join(lab: Lab, number: int, link: str, home: Path) -> subprocess.Popen[Any]:
    words = command("join", link, "--home", str(home), "--threads", "1")
    with (home.parent / f"{home.name}.txt").open("w", encoding="utf-8") as log:
        return lab.start(f"home{number}", words, stdout=log, stderr=subprocess.STDOUT, env=environment())


def events(home: Path, name: str) -> list[Event]:
    return [event for _, event in read_events(log_path(home)) if event["event"] == name]


def test_six_homes_train_together(tmp_path: Path) -> None:
    with Lab(HOMES, bootstraps=2, folder=tmp_path) as lab:
        doors = [start_bootstrap(lab, number, tmp_path / f"boot{number}") for number in range(2)]
        link = publish(lab, doors, tmp_path)
        homes = [tmp_path / f"peer{number}" for number in range(len(HOMES))]
        peers = [join(lab, number, link, home) for number, home in enumerate(homes)]
        deadline = time.monotonic() + PATIENCE
        for peer in peers:
            assert peer.wait(deadline - time.monotonic()) == 0
    done = [events(home, "round.done") for home in homes]
    assert [len(rounds) for rounds in done] == [ROUNDS] * len(HOMES)
    for rounds in zip(*done, strict=True):
        assert len({event["root"] for event in rounds}) == 1
        assert {len(cut) for event in rounds if isinstance(cut := event["cut"], list)} == {len(HOMES)}
    voids = [event for home in homes for event in events(home, "round.void")]
    assert all("the run asks for" in str(event["reason"]) for event in voids)  # Until the last one is in.
