"""A run of real processes is looked at: by status, as JSON, and in the terminal."""

import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
from collections.abc import Callable
from fcntl import ioctl
from pathlib import Path
from termios import TIOCSWINSZ
from time import monotonic

from flockstep.peer.identity import Identity
from integration.test_keep import HERE, event_of, join, line_with, processes
from support.bootstraps import TINY_RUN, publish_run
from support.commands import Command, flockstep

ROUND = re.compile(r"round (\d+) of")
UNKNOWN = "flockstep://" + "a" * 52


def wait_until_shown(terminal: int, is_there: Callable[[str], bool], seconds: float = 120.0) -> None:
    """Read what a program writes to its terminal until all of it together is as wanted."""
    seen, end = "", monotonic() + seconds
    while not is_there(seen):
        assert monotonic() < end, seen[-2000:]
        if select.select([terminal], [], [], 1.0)[0]:
            seen += os.read(terminal, 65536).decode(errors="replace")


def test_a_run_is_shown_by_status_as_json_and_in_the_terminal(bootstrap_address: str, tmp_path: Path) -> None:
    toml = tmp_path / "run.toml"
    toml.write_text(TINY_RUN)
    stranger = ("--home", str(tmp_path / "stranger"))
    with processes() as started:
        owner = Command("run", "create", str(toml), "--via", bootstrap_address, "--home", str(tmp_path / "owner"), *HERE)
        started.append(owner)
        link = line_with(owner, "flockstep://").split("'")[1]
        started.append(join(link, tmp_path / "anna", "--name", "Anna [red]"))
        event_of(started[-1], "round.done", 3)
        anna = Identity.load_or_create(tmp_path / "anna" / "identity.key").peer_id

        status = flockstep("status", link, *stranger)
        assert status.returncode == 0, status.stderr
        assert "tiny: gpt" in status.stdout
        assert anna[-8:] in status.stdout
        assert "1 of 1 votes are here, 1 needed" in status.stdout
        assert "verified: every certificate from" in status.stdout

        made = flockstep("status", link, "--json", *stranger)
        assert made.returncode == 0, made.stderr
        figures = json.loads(made.stdout)
        rounds = figures["rounds"]["round"]
        assert rounds == list(range(1, rounds[-1] + 1))
        assert rounds[-1] >= 3
        assert {member["peer"] for member in figures["members"]} >= {anna}

        credit = json.loads(flockstep("run", "credit", link, "--json", *stranger, check=True).stdout)
        (row,) = credit["credit"]
        assert (row["peer"], row["name"], credit["first_round"]) == (anna, "Anna [red]", 1)
        assert row["rounds"] == credit["round"] >= 3
        assert row["tokens"] >= 3 * 5 * 16  # Three rounds of five steps of a sequence of 16.

        started.append(Command("status", link, "--follow", "--json", *stranger))
        first, second = (json.loads(next(started[-1].stdout)) for _ in range(2))
        assert (first["run"], first["taken_at"] < second["taken_at"]) == (figures["run"], True)

        control, terminal = pty.openpty()
        ioctl(terminal, TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        viewer = subprocess.Popen(
            [sys.executable, "-m", "flockstep", "status", link, "--follow", *stranger],
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
        )
        try:
            wait_until_shown(control, lambda seen: anna[-8:] in seen and len({*ROUND.findall(seen)}) > 1)
            viewer.send_signal(signal.SIGINT)
            wait_until_shown(control, lambda seen: "\x1b[?25h" in seen)  # It gives the cursor back.
            assert viewer.wait(120) == 130
        finally:
            viewer.kill()
            viewer.wait()
            os.close(control)
            os.close(terminal)


def test_a_run_with_nobody_in_it_and_a_link_to_none_are_one_line_each(bootstrap_address: str, tmp_path: Path) -> None:
    home = ("--home", str(tmp_path / "stranger"))
    link = publish_run(TINY_RUN, (bootstrap_address,), tmp_path / "owner")
    empty = flockstep("status", link, *home)
    assert (empty.returncode, empty.stdout.splitlines()[0]) == (0, "Nobody is in this run at the moment.")
    assert json.loads(flockstep("status", link, *home, "--json").stdout)["progress"]["state"] == "nobody here"
    unknown = flockstep("status", f"{UNKNOWN}?{link.partition('?')[2]}", *home)
    assert (unknown.returncode, unknown.stderr.count("\n")) == (1, 1)
