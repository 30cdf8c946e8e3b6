"""`flockstep join` on a computer that its user needs, too: pause, resume, a restart, and its limits, as real processes."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.bootstraps import TINY_RUN

HERE = ["--host", "127.0.0.1", "--port", "0"]


def flockstep(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "flockstep", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


class Joined:
    """A `flockstep join --json` process."""

    def __init__(self, link: str, home: Path, *options: str) -> None:
        command = [sys.executable, "-u", "-m", "flockstep", "join", link, "--home", str(home), *HERE, "--yes", "--json"]
        self.process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True)

    def until(self, name: str) -> dict[str, object]:
        """Return the next event of this name."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            event: dict[str, object] = json.loads(line)
            if event["event"] == name:
                return event
        raise AssertionError(f"the peer ended before {name}")


@contextmanager
def joined(link: str, home: Path, *options: str) -> Iterator[Joined]:
    peer = Joined(link, home, *options)
    try:
        yield peer
    finally:
        peer.process.terminate()
        assert peer.process.stdout is not None
        peer.process.stdout.read()
        peer.process.stdout.close()
        peer.process.wait(60)


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


@pytest.mark.parametrize("options", [["--hours", "7-25"], ["--max-up", "0.01"]])
def test_limits_that_make_no_sense_are_one_line(options: list[str], tmp_path: Path) -> None:
    wrong = flockstep("join", "flockstep://nothing", "--home", str(tmp_path), *options)
    assert wrong.returncode == 2
    assert wrong.stderr.count("\n") == 1
    assert options[0] in wrong.stderr
    assert " — " in wrong.stderr
