"""The one crossing between the training process and the network process.

Theory of operation. The trainer spawns (never forks) `python -m flockstep.peer.process.bridge package.module:main` and speaks
with it through its standard input and output: one JSON object a line. A *call* has a number and gets one answer, a
*post* has none; the child posts events in the same way. Vectors do not cross here: they lie in `SharedVectors`, a
mapped file that both see.

No orphans: the child's input ends when the trainer dies, however it dies, and the child is gone within two seconds.
If the child dies, every open call raises `NetworkDied` and the trainer may spawn another one.
"""

import importlib
import json
import math
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import IO, Any, TypeAlias

import trio

from .. import errors
from ..errors import FlockstepError, LocalError, sole_error

LAST_SECONDS = 1.5
"""What the child has for an orderly end once its trainer is gone."""
Payload: TypeAlias = dict[str, Any]
Cancel: TypeAlias = Callable[[], bool]
Handler: TypeAlias = Callable[[Payload], Awaitable[Payload | None]]


class NetworkDied(LocalError):
    """The network process has ended; its trainer may start another one."""


class Cancelled(LocalError):
    """The caller of a command has lost interest in its answer."""


class NetworkProcess:
    """The trainer's end: spawns the child, calls it, and collects what it posts."""

    def __init__(self, entry: str) -> None:
        self.events: queue.SimpleQueue[tuple[str, Payload]] = queue.SimpleQueue()
        self._answers: dict[int, queue.SimpleQueue[Payload]] = {}
        self._lock = threading.Lock()
        self._next = 0
        self.died = False
        # -P keeps the caller's folder off the child's path: a `random.py` there must not become our `random`.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__, entry], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._reader = threading.Thread(target=self._read, name="flockstep network", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._process.pid

    def call(
        self, name: str, payload: Payload | None = None, *, timeout: float = math.inf, cancel: Cancel = lambda: False
    ) -> Payload:
        """The child's answer to a command; `cancel` is asked twenty times a second whether to wait on.

        Raises the `FlockstepError` that it raised there, `NetworkDied`, `Cancelled`, or `DeadlineExceeded` after
        `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        answers: queue.SimpleQueue[Payload] = queue.SimpleQueue()
        with self._lock:
            self._next = number = self._next + 1
            self._answers[number] = answers
        try:
            self._write({"call": number, "name": name, "with": payload or {}})
            while (answer := _get(answers)) is None:
                if cancel():
                    raise Cancelled(f"gave up waiting for {name}")
                if time.monotonic() > deadline:
                    raise errors.DeadlineExceeded(f"the network process did not answer {name} within {timeout:g} s")
        finally:
            with self._lock:
                self._answers.pop(number, None)
        if "error" in answer:
            kind = getattr(errors, answer["error"], FlockstepError)
            error = NetworkDied(answer["what"]) if kind is FlockstepError else FlockstepError.__new__(kind)
            FlockstepError.__init__(error, answer["what"], remedy=answer["remedy"])
            raise error
        return answer

    def post(self, name: str, payload: Payload) -> None:
        """A command without an answer; lost if the child has died."""
        try:
            self._write({"name": name, "with": payload})
        except NetworkDied:
            return  # Whoever calls next, or reads `died`, learns of it.

    def stop(self, timeout: float) -> int:
        """Close the child's input and wait for its end, by force after `timeout` seconds. Returns its exit code."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
        except OSError:
            self.died = True  # Its end of the pipe is gone already.
        try:
            code = self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        self._reader.join(1.0)
        assert self._process.stdout is not None
        self._process.stdout.close()
        return code

    def _write(self, message: Payload) -> None:
        assert self._process.stdin is not None
        line = json.dumps(message, separators=(",", ":")).encode() + b"\n"
        try:
            with self._lock:
                self._process.stdin.write(line)
                self._process.stdin.flush()
        except (OSError, ValueError) as error:
            raise NetworkDied(f"the network process has ended: {error}") from error
        if self.died:
            raise NetworkDied("the network process has ended")

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            message = json.loads(line)
            if "answer" in message:
                with self._lock:
                    answers = self._answers.get(message["answer"])
                if answers is not None:
                    answers.put(message["with"])
            else:
                self.events.put((message["name"], message["with"]))
        self.died = True
        with self._lock:
            waiting = list(self._answers.values())
        for answers in waiting:
            answers.put({"error": "FlockstepError", "what": "the network process has ended", "remedy": ""})


def _get(answers: "queue.SimpleQueue[Payload]") -> Payload | None:
    """An answer, None if there is none for a twentieth of a second."""
    try:
        return answers.get(timeout=0.05)
    except queue.Empty:
        return None


@dataclass(slots=True)
class Channel:
    """The child's end: commands in, answers and events out."""

    _commands: trio.MemoryReceiveChannel[Payload]
    _out: IO[bytes]

    async def serve(self, handlers: Mapping[str, Handler]) -> None:
        """Carry out commands, each in a task of its own, until the trainer closes the pipe."""
        async with trio.open_nursery() as nursery:
            async for command in self._commands:
                nursery.start_soon(self._carry_out, handlers[command["name"]], command)
            nursery.cancel_scope.cancel()

    def post(self, name: str, payload: Payload) -> None:
        """Tell the trainer something."""
        self._write({"name": name, "with": payload})

    async def _carry_out(self, handler: Handler, command: Payload) -> None:
        try:
            answer = await handler(command["with"]) or {}
        except (FlockstepError, BaseExceptionGroup) as raised:
            error = sole_error(raised)
            if not isinstance(error, FlockstepError):
                raise
            kind = next(cls.__name__ for cls in type(error).__mro__ if hasattr(errors, cls.__name__))
            answer = {"error": kind, "what": str(error), "remedy": error.remedy}
        if "call" in command:
            self._write({"answer": command["call"], "with": answer})

    def _write(self, message: Payload) -> None:
        try:
            self._out.write(json.dumps(message, separators=(",", ":")).encode() + b"\n")
            self._out.flush()
        except OSError:
            return  # The trainer is gone: the end of the input says so, and ends us.


async def _child(entry: str, out: IO[bytes]) -> None:
    """Run `entry` (an async function of a `Channel`) with a thread that turns lines of input into commands."""
    module, _, function = entry.partition(":")
    main = getattr(importlib.import_module(module), function)
    send, receive = trio.open_memory_channel[Payload](1024)
    token = trio.lowlevel.current_trio_token()

    def read() -> None:
        for line in sys.stdin.buffer:
            token.run_sync_soon(send.send_nowait, json.loads(line))
        token.run_sync_soon(send.close)
        threading.Timer(LAST_SECONDS, os._exit, (0,)).start()

    threading.Thread(target=read, name="commands", daemon=True).start()
    await main(Channel(receive, out))


def main() -> None:
    """The child's entry point."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the trainer leads the way out.
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # Whatever a library prints must not stand between our lines.
    trio.run(_child, sys.argv[1], out)
    os._exit(0)  # Threads of libraries must not keep the process alive.


if __name__ == "__main__":
    main()
