"""Commands as real processes, forked from a warm one: none pays three seconds of CPU time for its imports again.

`multiprocessing`'s fork server imports once what the commands need; it has no other thread and runs nothing. A process that
it forks does what `python -m flockstep` does, with pipes, signals and a process id of its own. `python -m flockstep` itself
is started by `test_swarm` (`join`), `test_page_live` (`page`), `test_watch` (`status`) and `tests/protocol/test_simulate.py`.
The network processes of trainers are forked, too (`fork_network_processes`), unless a test needs them where they are for a
user: among the children and in the session of their trainer. It needs `os.fork`.
"""

import os
import runpy
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver, get_context, process, reduction, spawn
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any, Self, TextIO

from flockstep.dht.members import owner_log
from flockstep.peer.process import bridge

PRELOADED = (
    __name__,
    "typer._adapters",  # The first parameter of a command imports it, for a fifth of a second.
    *(f"flockstep.optim.{name}" for name in ("train.trainer", "member.participant", "packing.pack")),
    *(f"flockstep.scripts.{name}" for name in ("cli.main", "page.page", "runs.run", "checkpoints.evaluate")),
    *(f"flockstep.scripts.peers.{name}" for name in ("bootstrap", "join", "keep")),
    *(f"flockstep.scripts.lab.{name}" for name in ("attacks.gradients", "attacks.protocol", "simulate.harm")),
)

STEP_SECONDS = 0.2
"""How long a step of a `join` takes. That of a tiny model costs nothing: peers that train on while a test waits would
make several rounds a second, on all cores."""
OWNER_PERIOD = 2.0
"""How often a process looks for what the run's owner states: a test would wait for half a minute, and train meanwhile."""
FOLLOW_PERIOD = 1.0
"""How often members publish the newest certificate, and a bootstrap follows it and makes its list of runs: tests that wait
for that ask without a pause."""

# One thread each, those that start from nothing, too: several threads of each of several processes on a few cores wait for
# each other in busy loops, and a step of a millisecond takes ten seconds.
for _library in ("OMP", "OPENBLAS"):
    os.environ.setdefault(f"{_library}_NUM_THREADS", "1")


def _use_fork_server() -> None:
    """Let this process fork others from the server that has forked it, which begin without its main module."""
    prepared = spawn.get_preparation_data

    def without_main(name: str) -> dict[str, Any]:
        return {key: value for key, value in prepared(name).items() if not key.startswith("init_main")}

    vars(spawn)["get_preparation_data"] = without_main
    vars(forkserver)["_forkserver"].ensure_running = lambda: None  # Who started it keeps it.


SHARED = "FLOCKSTEP_TESTS_FORK_SERVER"
"""The variable with the address of the fork server that pytest has started for all its workers."""


def _fork_server() -> Any:
    context = get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    if address := os.environ.get(SHARED):
        server = vars(forkserver)["_forkserver"]
        # What it is kept alive by is pytest's: from a worker it takes any file in that place.
        server._forkserver_address, server._forkserver_alive_fd = address, os.open(os.devnull, os.O_RDONLY)
        _use_fork_server()
    return context


def share_fork_server() -> None:
    """Start the fork server, now, for this process and all that it starts: its imports take 6 CPU seconds, uncompiled 17."""
    server = vars(forkserver)["_forkserver"]
    server.ensure_running()
    os.environ[SHARED] = server._forkserver_address


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
    program: str | Path,
    arguments: tuple[str, ...],
    environment: dict[str, str],
    files: tuple[int, ...],
    new_session: bool,
    forks: bool,
) -> None:
    """What the forked process does."""
    # The fork server ignores an ImportError, and each command would import those modules again: 4 CPU seconds for `join`.
    missing = set(PRELOADED) - set(sys.modules)
    assert not missing, f"the fork server could not import {missing}"
    if new_session:
        os.setsid()
    # Preloaded; tests that start no command need not import them.
    from flockstep.collectives.chain import head
    from flockstep.collectives.light import follower, run_list

    vars(owner_log)["OWNER_PERIOD"] = OWNER_PERIOD
    vars(head)["HEAD_PERIOD"] = vars(follower)["TURN_PERIOD"] = vars(run_list)["LIST_PERIOD"] = FOLLOW_PERIOD
    if forks and not new_session:  # A network process that is forked is in the session of the fork server.
        vars(bridge)["subprocess"] = _FORKING
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
    _use_fork_server()
    sys.argv = [str(program), *arguments]
    if isinstance(program, Path):
        sys.path.insert(0, str(program.parent))
        runpy.run_path(str(program), run_name="__main__")
    elif program == "flockstep":
        from flockstep.optim.train.swarm import Swarm
        from flockstep.scripts.cli.main import main

        if arguments[:1] == ("join",):
            Swarm.step = slowed(Swarm.step)  # type: ignore[method-assign]
        main()
    else:
        warnings.filterwarnings("ignore", ".* found in sys.modules", RuntimeWarning)  # It is what forking saves.
        runpy.run_module(program, run_name="__main__", alter_sys=True)


def slowed(step: Callable[..., Any]) -> Callable[..., Any]:
    """Let `Swarm.step` take `STEP_SECONDS`."""

    def slow(*arguments: Any, **named: Any) -> Any:
        time.sleep(STEP_SECONDS)
        return step(*arguments, **named)

    return slow


class Command:
    """`flockstep` with these arguments, or another module or script: as much of `subprocess.Popen` as tests use.

    `stdin`, `stdout`, `stderr` and `text` are as there.
    """

    def __init__(
        self,
        *arguments: str,
        program: str | Path = "flockstep",
        stdin: int = subprocess.DEVNULL,
        stdout: int | None = subprocess.PIPE,
        stderr: int | None = None,
        env: Mapping[str, str] | None = None,
        start_new_session: bool = False,
        text: bool = True,
    ) -> None:
        self.stdin: TextIO
        self.stdout: TextIO
        self.stderr: TextIO
        """Without a pipe None, as there."""
        self.stdin, input_ = _pipe(stdin, 0, text)
        self.stdout, out = _pipe(stdout, 1, text)
        self.stderr, err = _pipe(out if stderr == subprocess.STDOUT else stderr, 2, text)
        assert _context is not None
        run = (program, arguments, dict(env or os.environ), _Passed(input_, out, err), start_new_session, forks())
        self._process = _context.Process(target=_run, args=run)
        self._process.start()
        vars(process)["_children"].discard(self._process)  # Nobody waits for it on leaving, as there.
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
        for pipe in (self.stdin, self.stdout, self.stderr):
            if pipe is not None:
                pipe.close()


def _pipe(wanted: int | None, number: int, text: bool) -> tuple[Any, int]:
    """Our end of an input or output, if it is a pipe, and the process's."""
    if wanted is None:
        return None, os.dup(number)
    if wanted == subprocess.PIPE:
        ends = os.pipe()
        ours, theirs = ends if number else reversed(ends)
        mode = "r" if number else "w"
        return os.fdopen(ours, mode if text else mode + "b"), theirs
    return None, os.open(os.devnull, os.O_RDWR) if wanted == subprocess.DEVNULL else os.dup(wanted)


def _network_process(command: Sequence[str], *, stdin: int, stdout: int, env: Mapping[str, str]) -> Command:
    """Fork what `bridge.NetworkProcess` spawns."""
    *_, module, entry = command
    return Command(entry, program=module, stdin=stdin, stdout=stdout, env=env, text=False)


_FORKING = SimpleNamespace(Popen=_network_process, PIPE=subprocess.PIPE, TimeoutExpired=subprocess.TimeoutExpired)
"""What `bridge` finds in the place of `subprocess`."""


def forks() -> bool:
    """True while network processes are forked."""
    return vars(bridge)["subprocess"] is _FORKING


@contextmanager
def fork_network_processes() -> Iterator[None]:
    """Fork the network processes of trainers, here and in the commands that are started: two CPU seconds less each."""
    vars(bridge)["subprocess"] = _FORKING
    try:
        yield
    finally:
        vars(bridge)["subprocess"] = subprocess


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
