"""The demo's real processes: started with a log file each, watched, killed, and never left behind."""

import os
import re
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from ..peer.errors import LocalError

POLL = 0.1
"""Seconds between two looks at a process or a file."""
LEAVE_SECONDS = 5.0
"""For leaving in order: a peer promises 3 s after Ctrl-C; the rest is for a machine that is busy."""


@dataclass(frozen=True, slots=True)
class Killed:
    """What became of the child processes of one that was killed."""

    children: int
    left: int
    """Those that still ran `seconds` later."""
    seconds: float

    def __str__(self) -> str:
        if not self.children:
            return ""
        if self.left:
            return f"{self.left} of its {self.children} child processes still ran {self.seconds:.1f} s later."
        were = "child process was" if self.children == 1 else f"{self.children} child processes were"
        return f"Its {were} gone {self.seconds:.1f} s later."


class Process:
    """One `python -m flockstep …` with a log file; `name` is what messages call it."""

    def __init__(self, name: str, arguments: Sequence[str], log: Path) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self.name, self.log = name, log
        with log.open("wb") as output:
            self._popen = subprocess.Popen(
                [sys.executable, "-m", "flockstep", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # Ctrl-C in the terminal reaches the demo alone, which then ends its processes in order.
                start_new_session=True,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )

    @property
    def code(self) -> int | None:
        """The exit code; None while it runs."""
        return self._popen.poll()

    def died(self) -> LocalError:
        """The error to raise when it ended before its time: its last line, and where the rest stands."""
        with self.log.open(encoding="utf-8", errors="replace") as file:
            last = next(iter(deque((line.strip() for line in file if line.strip()), maxlen=1)), "it wrote nothing")
        return LocalError(f"{self.name} ended with exit code {self.code}: {last}", remedy=f"its log is {self.log}")

    def await_line(self, pattern: str, seconds: float) -> str:
        """The first match of `pattern` in its log. Raises `LocalError` if it ends before, or is silent for too long."""
        deadline = time.monotonic() + seconds
        while True:
            code = self.code  # Before the log is read: what it wrote last is in there.
            if match := re.search(pattern, self.log.read_text(encoding="utf-8", errors="replace")):
                return match.group()
            if code is not None:
                raise self.died()
            if time.monotonic() > deadline:
                raise LocalError(f"{self.name} was not ready after {seconds:.0f} s", remedy=f"its log is {self.log}")
            time.sleep(POLL)

    def kill(self, seconds: float = 2.0) -> Killed:
        """End it with SIGKILL and wait up to `seconds` for the end of its children, who should notice by themselves."""
        children = descendants(self._popen.pid)
        self._popen.kill()
        self._popen.wait()
        start = time.monotonic()
        while (left := children & running()) and time.monotonic() - start < seconds:
            time.sleep(POLL / 5)
        return Killed(len(children), len(left), time.monotonic() - start)

    def interrupt(self) -> None:
        """Ask it to leave, as Ctrl-C would."""
        if self.code is None:
            self._popen.send_signal(signal.SIGTERM if sys.platform == "win32" else signal.SIGINT)

    def stop(self, seconds: float) -> None:
        """Wait up to `seconds` for its end, then kill it."""
        try:
            self._popen.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            self.kill()


class Processes:
    """All processes of a demo, as a context: on leaving, for whatever reason, SIGTERM included, none is left."""

    def __init__(self) -> None:
        self._all: list[Process] = []
        self._on_sigterm: Any = None

    def start(self, name: str, arguments: Sequence[str], log: Path) -> Process:
        """Start one more."""
        process = Process(name, arguments, log)
        self._all.append(process)
        return process

    def __enter__(self) -> "Processes":
        self._on_sigterm = signal.signal(signal.SIGTERM, signal.default_int_handler)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._all:
            process.interrupt()
        deadline = time.monotonic() + LEAVE_SECONDS
        for process in self._all:
            process.stop(deadline - time.monotonic())
        signal.signal(signal.SIGTERM, self._on_sigterm)


def descendants(ancestor: int) -> set[int]:
    """The process ids of all that a process started, directly or not; none where the system does not tell."""
    parents = {pid: parent for pid, parent, _ in _table()}
    found: set[int] = set()
    while more := {pid for pid, parent in parents.items() if parent in found | {ancestor}} - found:
        found |= more
    return found


def running() -> set[int]:
    """The process ids that still run: a zombie, whose end nobody has asked for yet, does not."""
    return {pid for pid, _, state in _table() if not state.startswith("Z")}


def _table() -> list[tuple[int, int, str]]:
    """(process, parent, state) of every process: from /proc, else from `ps` (macOS), else (Windows) nothing."""
    if Path("/proc/self/stat").exists():
        rows = []
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit():
                try:
                    # The second field is the name in parentheses, which may hold anything: proc(5).
                    state, parent = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
                except (OSError, ValueError):
                    continue  # It ended while we looked.
                rows.append((int(folder.name), int(parent), state))
        return rows
    try:
        listing = subprocess.run(["ps", "-A", "-o", "pid=,ppid=,stat="], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return []
    fields = [line.split(maxsplit=2) for line in listing.stdout.splitlines()]
    return [(int(pid), int(parent), state) for pid, parent, state in fields]
