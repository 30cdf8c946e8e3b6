"""The bench's workers as processes: start, command, measure from outside, and always end.

What is measured, and where:

    bytes    the loopback interface's counter, in a network namespace where nothing else runs: headers, acknowledgements
             and everything else included
    CPU      user and system time of the worker and of all its descendants
"""

import contextlib
import json
import os
import queue
import re
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import psutil

from ....peer.base.errors import LocalError
from ....peer.process.bridge import ONE_ARENA
from ...demo.processes import descendants
from .worker import WorkerAnswer

PACKAGE = Path(__file__).parents[3]
LAUNCH = """
import importlib, importlib.util, sys
root = sys.argv[1]
spec = importlib.util.spec_from_file_location("flockstep", root + "/__init__.py", submodule_search_locations=[root])
sys.modules["flockstep"] = package = importlib.util.module_from_spec(spec)
spec.loader.exec_module(package)
importlib.import_module("flockstep.scripts.lab." + sys.argv[2]).main()
"""
"""Loads this very package, also under an interpreter in which it is not installed."""
ASK_POLL = 0.2
"""Seconds to wait for the answer of one peer before it is the next one's turn: the first that fails ends all."""
OURS = "bench.peer"
"""The program that is one of our peers."""


class Worker:
    """One process that answers commands; `pid` and its descendants are one measured peer.

    `module` is its program within `flockstep.scripts.lab`; `inside` is the start of its command, such as
    `ip netns exec NAME`.
    """

    def __init__(self, python: str, module: str, log: Path, inside: Sequence[str] = ()) -> None:
        self.log = log
        # One thread each: several peers on one machine share its cores, and spinning threads slow all of them.
        # Ours has the memory allocator of the network process, others what they would have.
        threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        try:
            with log.open("wb") as errors:
                self._popen = subprocess.Popen(
                    [*inside, python, "-c", LAUNCH, str(PACKAGE), module],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    # Ctrl-C in the terminal reaches the bench alone, which then ends its workers.
                    start_new_session=True,
                    env={**(ONE_ARENA if module == OURS else {}), **os.environ, **threads},
                )
        except OSError as error:
            raise LocalError(f"cannot run {python}: {error.strerror}") from error
        self.pid = self._popen.pid
        self._answers: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def send(self, command: WorkerAnswer) -> None:
        """Send a command. Raises `LocalError` if the worker has ended."""
        assert self._popen.stdin is not None
        try:
            self._popen.stdin.write(json.dumps(command).encode() + b"\n")
            self._popen.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None

    def receive(self, seconds: float) -> WorkerAnswer:
        """Return the answer to the next command.

        Raises `TimeoutError`, after which the answer may still come, or `LocalError` if the worker has ended.
        """
        try:
            line = self._answers.get(timeout=seconds)
        except queue.Empty:
            raise TimeoutError from None
        if not line:
            raise self._ended()
        answer: WorkerAnswer = json.loads(line)
        return answer

    def end(self) -> None:
        """Kill it and all processes that it started."""
        for pid in (self.pid, *descendants(self.pid)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._popen.wait()
        for pipe in (self._popen.stdin, self._popen.stdout):
            with contextlib.suppress(BrokenPipeError):
                assert pipe is not None
                pipe.close()

    def _read(self) -> None:
        assert self._popen.stdout is not None
        with contextlib.suppress(ValueError):  # The bench has closed the pipe.
            for line in self._popen.stdout:
                self._answers.put(line)
        self._answers.put(b"")

    def _ended(self) -> LocalError:
        lines = [line.strip() for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return LocalError(f"{self.log.stem} ended: {lines[-1] if lines else 'it wrote nothing'}")


class Group:
    """The workers of one system, as a context: on leaving all are ended. `places` has the start of each one's command."""

    def __init__(self, python: str, module: str, places: Sequence[Sequence[str]], folder: Path) -> None:
        self.workers: list[Worker] = []
        self._start = (python, module, places, folder)

    def __enter__(self) -> "Group":
        python, module, places, folder = self._start
        name = module.rpartition(".")[2]
        for index, inside in enumerate(places):
            self.workers.append(Worker(python, module, folder / f"{name}-{index}.log", inside))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self.workers:
            worker.end()


def ask(workers: Sequence[Worker], commands: Sequence[WorkerAnswer], seconds: float) -> list[WorkerAnswer]:
    """Return the answers of workers to a command for each. Raises `LocalError` as soon as one fails, or after the timeout."""
    for worker, command in zip(workers, commands, strict=True):
        worker.send(command)
    answers: dict[Worker, WorkerAnswer] = {}
    deadline = time.monotonic() + seconds
    while missing := [worker for worker in workers if worker not in answers]:
        for worker in missing:
            try:
                answer = answers[worker] = worker.receive(ASK_POLL)
            except TimeoutError:
                if time.monotonic() > deadline:
                    step = commands[0]["op"]
                    raise LocalError(f"{worker.log.stem}: no answer to {step} within {seconds:.0f} s") from None
                continue
            if answer.get("outcome") == "failed":
                raise LocalError(f"{worker.log.stem}: {answer['reason']}")
    return [answers[worker] for worker in workers]


def cpu_seconds(workers: Sequence[Worker]) -> float:
    """Return the processor time of all these peers so far."""
    seconds = 0.0
    for pid in (pid for worker in workers for pid in (worker.pid, *descendants(worker.pid))):
        with contextlib.suppress(psutil.NoSuchProcess):  # A child that has just ended.
            times = psutil.Process(pid).cpu_times()
            seconds += times.user + times.system
    return seconds


def interface_bytes(worker: Worker) -> int:
    """Return all bytes that the loopback interface of a worker's network has sent (proc(5))."""
    table = Path(f"/proc/{worker.pid}/net/dev").read_text()
    found = re.search(r"^\s*lo:(?:\s*\d+){8}\s+(\d+)", table, re.MULTILINE)
    assert found is not None
    return int(found[1])
