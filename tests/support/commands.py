"""Commands as real processes, forked from a warm one: none pays three seconds of CPU time for its imports again.

`multiprocessing`'s fork server imports once what the commands need; it has no other thread and runs nothing. A process that
it forks does what `python -m flockstep` does, with pipes, signals and a process id of its own; what it starts itself (the
network process of a trainer) starts from nothing, as ever. `python -m flockstep` itself is started by `test_swarm` (`join`),
`test_page_live` (`page`), `test_watch` (`top`) and `tests/protocol/test_simulate.py`. It needs `os.fork`.
"""

import os
import runpy
import subprocess
import sys
import threading
from collections.abc import Mapping
from multiprocessing import get_context, reduction
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

PRELOADED = (
    __name__,
    *(f"flockstep.optim.{name}" for name in ("trainer", "member.participant", "data.streams")),
    *(f"flockstep.scripts.{name}" for name in ("bootstrap", "cli.main", "evaluate", "join", "keep", "page.runs", "runs.run")),
)


# One thread each, those that start from nothing, too: several threads of each of several processes on a few cores wait for
# each other in busy loops, and a step of a millisecond takes ten seconds.
for _library in ("OMP", "OPENBLAS"):
    os.environ.setdefault(f"{_library}_NUM_THREADS", "1")


def _fork_server() -> Any:
    context = get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    return context


_context = _fork_server() if os.name == "posix" else None


class _Passed:
    """Open files on their way to the process that is started."""

    def __init__(self, *numbers: int) -> None:
        self._numbers = numbers

    def __reduce__(self) -> Any:
        return _arrived, tuple(reduction.DupFd(number) for number in self._numbers)


def _arrived(*passed: Any) -> tuple[int, ...]:
    return tuple(each.detach() for each in passed)


def _run(
    script: Path | None, arguments: tuple[str, ...], environment: dict[str, str], files: tuple[int, ...], new_session: bool
) -> None:
    """What the forked process does."""
    if new_session:
        os.setsid()
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
    sys.argv = [str(script or "flockstep"), *arguments]
    if script is not None:
        sys.path.insert(0, str(script.parent))
        runpy.run_path(str(script), run_name="__main__")
    else:
        from flockstep.scripts.cli.main import main

        main()


class Command:
    """`flockstep` with these arguments, or a Python `script`: as much of `subprocess.Popen` as tests use; its output is text.

    `stdin`, `stdout` and `stderr` are as there; no pipe leads to `stdin`.
    """

    def __init__(
        self,
        *arguments: str,
        script: Path | None = None,
        stdin: int = subprocess.DEVNULL,
        stdout: int | None = subprocess.PIPE,
        stderr: int | None = None,
        env: Mapping[str, str] | None = None,
        start_new_session: bool = False,
    ) -> None:
        input_ = os.open(os.devnull, os.O_RDONLY) if stdin == subprocess.DEVNULL else os.dup(stdin)
        self.stdout: TextIO
        self.stderr: TextIO
        """Without a pipe None, as there."""
        self.stdout, out = _pipe(stdout, 1)
        self.stderr, err = _pipe(out if stderr == subprocess.STDOUT else stderr, 2)
        assert _context is not None
        run = (script, arguments, dict(env or os.environ), _Passed(input_, out, err), start_new_session)
        self._process = _context.Process(target=_run, args=run)
        self._process.start()
        for file in (input_, out, err):
            os.close(file)
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit code; None while it runs. Negative: the signal that has ended it."""
        code: int | None = self._process.exitcode
        return code

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end. Raises `subprocess.TimeoutExpired`."""
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("flockstep", timeout or 0.0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Read what is left of its outputs, close them, and wait for its end. Raises `subprocess.TimeoutExpired`."""
        found = {}

        def read(name: str, pipe: TextIO | None) -> None:
            found[name] = pipe.read() if pipe is not None and not pipe.closed else ""

        pipes = ("out", self.stdout), ("err", self.stderr)
        readers = [threading.Thread(target=read, args=each, daemon=True) for each in pipes]
        for reader in readers:
            reader.start()
        self.wait(timeout)
        for reader in readers:
            reader.join()
        self._close()
        return found["out"], found["err"]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.kill()  # Else a test that fails would wait for it.
        self.wait()
        self._close()

    def _close(self) -> None:
        for pipe in (self.stdout, self.stderr):
            if pipe is not None:
                pipe.close()


def _pipe(wanted: int | None, number: int) -> tuple[Any, int]:
    """Our end of an output, if it is a pipe, and the process's."""
    if wanted is None:
        return None, os.dup(number)
    if wanted == subprocess.PIPE:
        ours, theirs = os.pipe()
        return os.fdopen(ours), theirs
    return None, os.open(os.devnull, os.O_WRONLY) if wanted == subprocess.DEVNULL else os.dup(wanted)


def flockstep(*arguments: str, timeout: float = 120.0, check: bool = False) -> "subprocess.CompletedProcess[str]":
    """Run a command to its end, at most `timeout` seconds. Raises `subprocess.CalledProcessError` where `check` is set."""
    with Command(*arguments, stderr=subprocess.PIPE) as command:
        try:
            out, err = command.communicate(timeout)
        finally:
            command.kill()
        done = subprocess.CompletedProcess(["flockstep", *arguments], command.wait(), out, err)
    if check:
        done.check_returncode()
    return done
