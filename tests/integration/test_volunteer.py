"""`flockstep join` on a computer that its user needs, too: pause, resume, a restart, and its limits, as real processes."""

import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

import pytest
from flockstep.peer.log.telemetry import log_path, read_events
from support.bootstraps import TINY_RUN
from support.commands import Command, flockstep

HERE = ["--host", "127.0.0.1", "--port", "0"]


class Joined:
    """A `flockstep join --json` process, or one that keeps."""

    def __init__(self, link: str, home: Path, *options: str, verb: str = "join") -> None:
        self.process = Command(verb, link, "--home", str(home), *HERE, "--yes", "--json", *options)

    def until(self, name: str) -> dict[str, object]:
        """Return the next event of this name."""
        for line in self.process.stdout:
            event: dict[str, object] = json.loads(line)
            if event["event"] == name:
                return event
        raise AssertionError(f"the peer ended before {name}")


@contextmanager
def joined(link: str, home: Path, *options: str, verb: str = "join") -> Iterator[Joined]:
    peer = Joined(link, home, *options, verb=verb)
    try:
        yield peer
    finally:
        peer.process.send_signal(signal.SIGTERM)
        peer.process.stdout.read()
        peer.process.stdout.close()
        peer.process.wait(120)


def test_a_paused_peer_leaves_stays_away_after_a_restart_and_comes_back(
    publish: Callable[..., str], tmp_path: Path
) -> None:
    home = tmp_path / "owner"
    link = publish(TINY_RUN, "owner")
    with joined(link, home) as peer:
        done = peer.until("round.done")
        assert "leaves its run in order" in flockstep("pause", "--home", str(home)).stdout
        assert peer.until("peer.leave")["reason"] == "paused"
        assert "its user has paused it" in str(peer.until("peer.paused")["reason"])
    with joined(link, home) as peer:
        assert "its user has paused it" in str(peer.until("peer.paused")["reason"])
        assert "The peer goes on" in flockstep("resume", "--home", str(home)).stdout
        peer.until("peer.resumed")
        restored = peer.until("state.restored")
        assert int(str(restored["round"])) >= int(str(done["round"])) - 2  # The last checkpoint.
        peer.until("round.done")
        flockstep("pause", "--home", str(home))
        peer.until("peer.paused")
        flockstep("resume", "--home", str(home))
        peer.until("round.done")
    nobody = flockstep("pause", "--home", str(home))
    assert nobody.returncode == 1
    assert nobody.stderr.count("\n") == 1
    assert "no peer that trains" in nobody.stderr


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGHUP")
def test_a_peer_whose_terminal_is_closed_leaves_in_order(publish: Callable[..., str], tmp_path: Path) -> None:
    """Its lines have nowhere to go from then on, and that ends nothing."""
    link, home = publish(TINY_RUN, "owner"), tmp_path / "owner"
    terminal, its_end = os.openpty()
    with Command("join", link, "--home", str(home), *HERE, "--yes", stdout=its_end) as peer:
        os.close(its_end)
        shown = ""
        while "state root" not in shown:
            shown += os.read(terminal, 4096).decode(errors="replace")
        os.close(terminal)
        peer.send_signal(signal.SIGHUP)
        assert peer.wait(120) == 130
    leaving = [event for _, event in read_events(log_path(home)) if event["event"] == "peer.leave"]
    assert [event["reason"] for event in leaving] == ["left"]


def test_whoever_trains_a_run_to_its_end_is_thanked_and_reads_how_to_take_the_model(
    publish: Callable[..., str], tmp_path: Path
) -> None:
    link, home = publish(TINY_RUN.replace("rounds = 100000", "rounds = 2"), "owner"), tmp_path / "owner"
    ended = flockstep("join", link, "--home", str(home), *HERE, "--yes", check=True)
    *_, last = ended.stdout.splitlines()
    command = last.partition("flockstep ")[2].split()
    assert last.startswith("Thank you")
    assert "yours counts with" in ended.stdout
    flockstep(command[0], command[1], str(tmp_path / command[2]), check=True)
    assert (tmp_path / "my-model" / "model.safetensors").exists()


def test_a_peer_shows_its_metrics(publish: Callable[..., str], tmp_path: Path) -> None:
    home, link = tmp_path / "owner", publish(TINY_RUN, "owner")
    with joined(link, home, "--metrics", "127.0.0.1:0", "--max-up", "20") as peer:
        port = peer.until("metrics.ready")["port"]
        done = peer.until("round.done")
        peer.until("step")
        with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=120) as page:
            figures = dict(line.rsplit(" ", 1) for line in page.read().decode().splitlines() if line[0] != "#")
        taken = flockstep("join", link, "--home", str(tmp_path / "other"), *HERE, "--yes", "--metrics", str(port))
    assert float(figures["flockstep_round"]) >= float(str(done["round"]))
    assert float(figures['flockstep_rounds_total{outcome="done"}']) >= 1
    assert float(figures["flockstep_training"]) == 1
    assert float(figures["flockstep_loss"]) > 0
    assert taken.returncode == 1
    assert taken.stderr.count("\n") == 1
    assert f"cannot listen at {port} for --metrics" in taken.stderr


def test_a_keeper_shows_its_metrics(publish: Callable[..., str], tmp_path: Path) -> None:
    with joined(publish(TINY_RUN, "owner"), tmp_path / "owner", "--metrics", "0", verb="keep") as peer:
        port = peer.until("metrics.ready")["port"]
        with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=120) as page:
            text = page.read().decode()
    assert 'flockstep_bytes_total{direction="sent"}' in text
    assert 'flockstep_events_total{event="metrics.ready"}' in text
