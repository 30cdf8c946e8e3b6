"""`flockstep bench utilization` in real namespaces: its figures, and that nothing of it is left whatever happens."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from flockstep.scripts.lab.namespaces import run_program
from natlab.lab import environment

SMALL = ["--peers", "2", "--params", "200k", "--rate", "20", "--delay", "20", "--step-s", "0.05", "--steps", "20"]
ENDLESS = ["--rounds", "1000"]
JOINED = "all have joined and train"


@contextmanager
def bench(folder: Path, *arguments: str) -> Iterator["subprocess.Popen[str]"]:
    """The command, with its temporary files in `folder`."""
    command = [sys.executable, "-m", "flockstep", "bench", "utilization", *SMALL, "--modes", "blocking", *arguments, "--json"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment({"TMPDIR": str(folder)}), **pipes) as process:  # type: ignore[call-overload]
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def wait_until_they_train(process: "subprocess.Popen[str]") -> None:
    assert process.stderr is not None
    assert any(JOINED in line for line in process.stderr)


def left_of(process: "subprocess.Popen[str]", folder: Path) -> list[str]:
    """Namespaces, processes and files of a bench."""
    prefix = f"fs{process.pid}-"
    spaces = [line for line in run_program("ip", "netns", "list").splitlines() if line.startswith(prefix)]
    lines = (Path("/proc") / pid / "cmdline" for pid in os.listdir("/proc") if pid.isdigit())
    running = [text for line in lines if (text := text_of(line)) and (str(folder) in text or prefix in text)]
    return [*spaces, *running, *map(str, folder.glob("flockstep*"))]  # Others are caches of libraries.


def text_of(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # A process that has just ended.
        return ""


def test_two_peers_are_measured(tmp_path: Path) -> None:
    with bench(tmp_path, "--rounds", "2") as process:
        out, told = process.communicate()
    assert process.returncode == 0, told
    (row,) = map(json.loads, out.splitlines())
    assert (row["reason"], row["rounds_certified"], row["mode"]) == ("", 2, "blocking")
    assert 0 < row["utilization"] < 1
    assert len(row["utilization_of_peers"]) == 2
    assert left_of(process, tmp_path) == []


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_nothing_is_left_of_a_bench_that_was_stopped(tmp_path: Path, ending: signal.Signals) -> None:
    with bench(tmp_path, *ENDLESS) as process:
        wait_until_they_train(process)
        process.send_signal(ending)
        process.communicate()
    assert process.returncode not in (0, None)
    assert left_of(process, tmp_path) == []


def test_a_killed_peer_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    with bench(tmp_path, *ENDLESS) as process:
        wait_until_they_train(process)
        inside = run_program("ip", "netns", "pids", f"fs{process.pid}-peer1").split()
        trainer = next(pid for pid in inside if "utilization.peer" in text_of(Path("/proc") / pid / "cmdline"))
        os.kill(int(trainer), signal.SIGKILL)
        out, _ = process.communicate()
    assert process.returncode == 1
    assert "peer-1 ended" in json.loads(out)["reason"]
    assert left_of(process, tmp_path) == []
