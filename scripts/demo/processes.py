"""Child processes of the demo: logged to a file each, watched, killed, never left behind."""

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

import psutil

from ...peer.base.errors import LocalError

PROCESS_POLL = 0.1
"""Seconds between two polls of a process or a file."""
LEAVE_SECONDS = 5.0
"""Seconds to leave in order: a peer needs at most 3 after Ctrl-C; the rest is for a busy machine."""


@dataclass(frozen=True, slots=True)
class Killed:
    """The fate of the child processes of a killed process."""

    children: int
    left: int
    """The number that still ran `seconds` later."""
    seconds: float

    def __str__(self) -> str:
        if not self.children:
            return ""
        if self.left:
            return f"{self.left} of its {self.children} child processes still ran {self.seconds:.1f} s later."
        were = "child process was" if self.children == 1 else f"{self.children} child processes were"
        return f"Its {were} gone {self.seconds:.1f} s later."


class Process:
    """One `python -m flockstep …` with a log file; messages use its `name`, and `inside` is the start of its command."""

    def __init__(self, name: str, arguments: Sequence[str], log: Path, inside: Sequence[str] = ()) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self.name, self.log = name, log
        with log.open("wb") as output:
            self._popen = subprocess.Popen(
                [*inside, sys.executable, "-m", "flockstep", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # Ctrl-C in the terminal signals the demo alone, which then ends its processes in order.
                start_new_session=True,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._popen.pid

    @property
    def code(self) -> int | None:
        """The exit code; None while it runs."""
        return self._popen.poll()

    def died(self) -> LocalError:
        """Return the error of an unexpected end: its last line, and its log file."""
        with self.log.open(encoding="utf-8", errors="replace") as file:
            last = next(iter(deque((line.strip() for line in file if line.strip()), maxlen=1)), "no output")
        return LocalError(f"{self.name} ended with exit code {self.code}: {last}", remedy=f"its log is {self.log}")

    def await_line(self, pattern: str, seconds: float) -> str:
        """Wait for `pattern` in its log and return the first match. Raises `LocalError` if it ends, or after the timeout."""
        deadline = time.monotonic() + seconds
        while True:
            code = self.code  # Read before the log, so that the log of an ended process is complete.
            if match := re.search(pattern, self.log.read_text(encoding="utf-8", errors="replace")):
                return match.group()
            if code is not None:
                raise self.died()
            if time.monotonic() > deadline:
                raise LocalError(f"{self.name} was not ready after {seconds:.0f} s", remedy=f"its log is {self.log}")
            time.sleep(PROCESS_POLL)

    def kill(self, seconds: float = 2.0) -> Killed:
        """Send SIGKILL, and wait up to `seconds` for the end of its children, which detect it themselves."""
        children = descendants(self._popen.pid)
        self._popen.kill()
        self._popen.wait()
        start = time.monotonic()
        while (left := children & running()) and time.monotonic() - start < seconds:
            time.sleep(PROCESS_POLL / 5)
        return Killed(len(children), len(left), time.monotonic() - start)

    def interrupt(self) -> None:
        """Send SIGINT, as Ctrl-C does."""
        if self.code is None:
            self._popen.send_signal(signal.SIGTERM if sys.platform == "win32" else signal.SIGINT)

    def stop(self, seconds: float) -> None:
        """Wait up to `seconds` for its end, then kill it."""
        try:
            self._popen.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            self.kill()


class Processes:
    """All processes of a demo; leaving the context, also by SIGTERM, ends them all."""

    def __init__(self) -> None:
        self._all: list[Process] = []
        self._on_sigterm: Any = None

    def start(self, name: str, arguments: Sequence[str], log: Path, inside: Sequence[str] = ()) -> Process:
        """Start one more process."""
        process = Process(name, arguments, log, inside)
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
    """Return the ids of all descendants of a process."""
    try:
        return {child.pid for child in psutil.Process(ancestor).children(recursive=True)}
    except psutil.NoSuchProcess:
        return set()


def running() -> set[int]:
    """Return the ids of running processes, without zombies."""
    found = psutil.process_iter(["status"])
    return {process.pid for process in found if process.info["status"] != psutil.STATUS_ZOMBIE}
