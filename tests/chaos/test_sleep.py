"""A peer whose computer sleeps, and one that leaves in mid-round: real `join` processes."""

import json
import os
import queue
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.bootstraps import Bootstrap, publish_run
from support.commands import Command

RUN = """
name = "sleep"
[data]
source = "text:{stdlib}"
sequence_length = 16
batch_size = 2
[model]
size = "0.2m"
context = 16
[inner]
steps = 10
[outer]
rounds = 100000
[timing]
floor = 5.0
"""
PATIENCE = 120.0
"""Seconds without the awaited event after which a test gives up: bounds only how long a broken build hangs."""


class Joined:
    """A `flockstep join` in a process group of its own, trainer and network process."""

    def __init__(self, link: str, home: Path) -> None:
        place = ("--home", str(home), "--host", "127.0.0.1", "--port", "0", "--threads", "1", "--device", "cpu")
        self.process = Command("join", link, *place, "--json", "--yes", start_new_session=True)
        self._events: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self._events.put(json.loads(line))

    def hear(self, *names: str, matches: Callable[[dict[str, Any]], bool] = lambda event: True) -> dict[str, Any]:
        """The next event of one of these names that matches; those before it are gone."""
        while True:
            event = self._events.get(timeout=PATIENCE)
            if event["event"] in names and matches(event):
                return event

    def signal(self, number: int) -> None:
        """Send a signal to all of its processes."""
        os.killpg(self.process.pid, number)

    def end(self) -> None:
        """SIGKILL, if it still runs."""
        if self.process.poll() is None:
            self.signal(signal.SIGKILL)
        self.process.wait()
        self._reader.join()
        self.process.stdout.close()


@pytest.fixture
def peers(tmp_path: Path) -> Iterator[list[Joined]]:
    bootstrap = Bootstrap(tmp_path / "bootstrap")
    link = publish_run(RUN, (bootstrap.address(),), tmp_path / "a")
    joined = [Joined(link, tmp_path / name) for name in "abc"]
    yield joined
    for peer in joined:
        peer.end()
    bootstrap.kill()


def all_three(event: dict[str, Any]) -> bool:
    return len(event["cut"]) == 3


def test_a_peer_that_slept_comes_back_as_itself_and_one_that_leaves_ends_its_round(peers: list[Joined]) -> None:
    stays, leaves, sleeper = peers
    me = sleeper.hear("peer.start")["peer"]
    slept = sleeper.hear("round.done", matches=all_three)["round"]
    sleeper.signal(signal.SIGSTOP)
    stays.hear("peer.lost", matches=lambda event: event["peer"] == me)
    stays.hear("round.done", matches=lambda event: len(event["cut"]) == 2)
    sleeper.signal(signal.SIGCONT)
    awake = sleeper.hear("round.done", matches=all_three)
    assert me in awake["cut"]
    assert awake["round"] > slept + 1
    assert stays.hear("round.done", matches=lambda event: event["round"] == awake["round"])["root"] == awake["root"]

    said = leaves.hear("round.said", matches=lambda event: event["step"] == "Result" and event["round"] > awake["round"])
    leaves.process.send_signal(signal.SIGINT)
    assert leaves.process.wait(timeout=PATIENCE) == 130
    done = stays.hear("round.done", matches=lambda event: event["round"] >= said["round"])
    assert done["round"] == said["round"]
    # On a slow machine the round may take it longer than a leaving peer waits, which it says; `stays` ended it either way.
    ended = leaves.hear("round.done", "peer.left_round", matches=lambda event: event["round"] >= said["round"])
    assert ended["round"] == said["round"]
    assert leaves.hear("peer.leave")["reason"] == "left"
