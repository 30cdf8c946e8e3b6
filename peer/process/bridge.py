"""Connects the training process and the network process: typed commands, answers and notices over a pipe.

Theory of operation. The trainer spawns (never forks) `python -m flockstep.peer.process.bridge package.module:main` and
exchanges messages with it over its standard input and output. A message is a frozen dataclass and crosses as one line of
JSON: number, class name, fields (`typed_json`). A `Command` that is *called* has a number and gets one answer, of the type
that its class names; one that is *posted* has the number 0 and gets none. The child sends a `Notice` in the same way.
Vectors do not cross here: they lie in `SharedVectors`, a mapped file that both processes see.

No orphans: the child's input ends when the trainer dies, however it dies, and the child exits within two seconds.
If the child dies, every open call and every later one raises `NetworkDied`.
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
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import IO, Any, ClassVar, Generic, Self, TypeAlias, TypeVar, get_args

import trio

from ..base import errors
from ..base.errors import FlockstepError, LocalError, sole_error
from ..base.loading import uncollected
from .typed_json import from_json, to_json

EXIT_SECONDS = 1.5
"""How long the child may take for an orderly exit once its trainer is gone."""
ONE_ARENA = {"MALLOC_ARENA_MAX": "1"}
"""glibc keeps what each thread has freed in an arena of its own (mallopt(3)). In one for all, a network process that takes
part in a round of 25M has 6 MB less at its peak, at the same CPU time. The user's own setting goes before it."""
Cancel: TypeAlias = Callable[[], bool]

_A = TypeVar("_A")
_Answer: TypeAlias = tuple[float, str, Any]
"""When an answer arrived, its class name, empty unless it is a `_Failure`, and its JSON."""


class NetworkDied(LocalError):
    """The network process has died, and with it what its peer has trained since the last round."""

    def __init__(self) -> None:
        remedy = "start this peer again: it goes on from its newest checkpoint, and one phase is lost"
        super().__init__("the network process has died, as when the system kills it for its memory", remedy=remedy)


class Cancelled(LocalError):
    """The caller of a command no longer waits for its answer."""


class Command(Generic[_A]):
    """A message from the trainer to the child, a frozen dataclass; `_A` is the type of its answer."""

    __slots__ = ()
    answer: ClassVar[Any]
    """The type of its answer."""

    def __init_subclass__(cls) -> None:
        (base,) = cls.__dict__["__orig_bases__"]
        (cls.answer,) = get_args(base)

    @classmethod
    def handled_by(cls, run: Callable[[Self], Awaitable[_A]]) -> "Handler":
        """A handler that carries out commands of this class."""
        return Handler(cls, run)


class Notice:
    """A message from the child to the trainer that no command asked for, a frozen dataclass."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Handler:
    """What carries out the commands of one class; `Command.handled_by` makes it and checks its types."""

    command: type[Command[Any]]
    run: Callable[[Any], Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class _Failure:
    """The error that a command raised, in place of its answer."""

    kind: str
    what: str
    remedy: str

    @classmethod
    def of(cls, error: FlockstepError) -> Self:
        """An error as its nearest class in `peer.base.errors`, which both processes know."""
        kind = next(base.__name__ for base in type(error).__mro__ if hasattr(errors, base.__name__))
        return cls(kind, str(error), error.remedy)

    def error(self) -> FlockstepError:
        """The error, without the attributes of its own that some classes have."""
        kind: type[FlockstepError] = getattr(errors, self.kind)
        error = kind.__new__(kind)
        FlockstepError.__init__(error, self.what, remedy=self.remedy)
        return error


class PendingAnswer(Generic[_A]):
    """The answer of a command that was sent."""

    def __init__(
        self, command: Command[_A], answers: "queue.SimpleQueue[_Answer | None]", forget: Callable[[], None]
    ) -> None:
        self._command = command
        self._answers = answers
        self._forget = forget
        self.arrived = math.inf
        """When the answer arrived, by the monotonic clock; known once it was waited for."""

    @property
    def is_here(self) -> bool:
        """True once the answer, or why there is none, has arrived."""
        return not self._answers.empty()

    def wait(self, *, timeout: float = math.inf, cancel: Cancel = lambda: False) -> _A:
        """Return the answer, once; `cancel` is asked twenty times a second whether to give up.

        Raises the `FlockstepError` that the child raised, `NetworkDied`, `Cancelled`, or `DeadlineExceeded` after
        `timeout` seconds.
        """
        deadline, name = time.monotonic() + timeout, type(self._command).__name__
        try:
            while True:
                try:
                    answer = self._answers.get(timeout=0.05)
                    break
                except queue.Empty:
                    if cancel():
                        raise Cancelled(f"gave up waiting for {name}") from None
                    if time.monotonic() > deadline:
                        what = f"the network process did not answer {name} within {timeout:g} s"
                        raise errors.DeadlineExceeded(what) from None
        finally:
            self._forget()
        if answer is None:
            raise NetworkDied
        self.arrived, kind, raw = answer
        if kind == _Failure.__name__:
            failure: _Failure = from_json(_Failure, raw)
            raise failure.error()
        value: _A = from_json(self._command.answer, raw)
        return value


class NetworkProcess:
    """The trainer's end: spawns the child, sends it commands, and queues its notices."""

    def __init__(self, entry: str, notices: Iterable[type[Notice]]) -> None:
        self.notices: queue.SimpleQueue[tuple[float, Notice]] = queue.SimpleQueue()
        """What the child posted, and when it arrived by the monotonic clock."""
        self._kinds = {kind.__name__: kind for kind in notices}
        self._answers: dict[int, queue.SimpleQueue[_Answer | None]] = {}
        self._lock = threading.Lock()
        self._next = 0
        self.died = False
        # -P keeps the caller's folder off the child's path: a `random.py` there must not become our `random`.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__, entry],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**ONE_ARENA, **os.environ},
        )
        self._reader = threading.Thread(target=self._read, name="flockstep network", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._process.pid

    def call(self, command: Command[_A], *, timeout: float = math.inf, cancel: Cancel = lambda: False) -> _A:
        """Send a command and wait for its answer, as `PendingAnswer.wait` does. Raises the same, or `NetworkDied` at once."""
        return self.start(command).wait(timeout=timeout, cancel=cancel)

    def start(self, command: Command[_A]) -> "PendingAnswer[_A]":
        """Send a command; its answer is waited for later. Raises `NetworkDied`."""
        answers: queue.SimpleQueue[_Answer | None] = queue.SimpleQueue()
        with self._lock:
            self._next = number = self._next + 1
            self._answers[number] = answers
        try:
            self._write(number, command)
        except NetworkDied:
            self._forget(number)
            raise
        return PendingAnswer(command, answers, lambda: self._forget(number))

    def _forget(self, number: int) -> None:
        with self._lock:
            self._answers.pop(number, None)

    def post(self, command: Command[Any]) -> None:
        """Send a command without waiting for an answer; it is lost if the child has died."""
        try:
            self._write(0, command)
        except NetworkDied:
            return  # The next call raises it, and `died` is set.

    def stop(self, timeout: float) -> int:
        """Close the child's input and wait for its exit; kill it after `timeout` seconds. Returns its exit code."""
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

    def _write(self, number: int, command: Command[Any]) -> None:
        assert self._process.stdin is not None
        line = _line(number, type(command).__name__, command)
        try:
            with self._lock:
                self._process.stdin.write(line)
                self._process.stdin.flush()
        except (OSError, ValueError) as error:
            raise NetworkDied from error
        if self.died:
            raise NetworkDied

    def _read(self) -> None:
        assert self._process.stdout is not None
        try:
            for line in self._process.stdout:
                number, name, raw = json.loads(line)
                if number:
                    with self._lock:
                        answers = self._answers.get(number)
                    if answers is not None:
                        answers.put((time.monotonic(), name, raw))
                else:
                    self.notices.put((time.monotonic(), from_json(self._kinds[name], raw)))
        finally:
            self.died = True
            with self._lock:
                waiting = list(self._answers.values())
            for answers in waiting:
                answers.put(None)


class Channel:
    """The child's end: receives commands, sends answers and notices."""

    def __init__(self, commands: trio.MemoryReceiveChannel[Any], out: IO[bytes]) -> None:
        self._commands = commands
        self._out = out
        self._handlers: dict[str, Handler] = {}

    def handle(self, *handlers: Handler) -> None:
        """Carry out the commands of these classes from now on, in place of earlier handlers of the same classes."""
        self._handlers.update({handler.command.__name__: handler for handler in handlers})

    async def serve(self) -> None:
        """Carry out commands, each in a task of its own, until the trainer closes the pipe."""
        async with trio.open_nursery() as nursery:
            async for number, name, raw in self._commands:
                handler = self._handlers[name]
                nursery.start_soon(self._carry_out, number, handler, from_json(handler.command, raw))
            nursery.cancel_scope.cancel()

    def post(self, notice: Notice) -> None:
        """Send the trainer a notice."""
        self._write(0, type(notice).__name__, notice)

    async def _carry_out(self, number: int, handler: Handler, command: Command[Any]) -> None:
        name = ""
        try:
            answer = await handler.run(command)
        except (FlockstepError, BaseExceptionGroup) as raised:
            error = sole_error(raised)
            if not isinstance(error, FlockstepError):
                raise
            name, answer = _Failure.__name__, _Failure.of(error)
        if number:
            self._write(number, name, answer)

    def _write(self, number: int, name: str, message: object) -> None:
        try:
            self._out.write(_line(number, name, message))
            self._out.flush()
        except OSError:
            return  # The trainer is gone: our input ends, too, and with it this process.


def _line(number: int, name: str, message: object) -> bytes:
    """One message on the pipe."""
    return to_json((number, name, message)) + b"\n"


async def _child(entry: str, out: IO[bytes]) -> None:
    """Run `entry` (an async function of a `Channel`) with a thread that turns lines of input into commands."""
    module, _, function = entry.partition(":")
    with uncollected():
        main = getattr(importlib.import_module(module), function)
    send, receive = trio.open_memory_channel[Any](1024)
    token = trio.lowlevel.current_trio_token()

    def read() -> None:
        for line in sys.stdin.buffer:
            token.run_sync_soon(send.send_nowait, json.loads(line))
        token.run_sync_soon(send.close)
        threading.Timer(EXIT_SECONDS, os._exit, (0,)).start()

    threading.Thread(target=read, name="commands", daemon=True).start()
    await main(Channel(receive, out))


def main() -> None:
    """The child's entry point."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the trainer ends the child.
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # What a library prints must not stand between our lines.
    trio.run(_child, sys.argv[1], out)
    os._exit(0)  # Threads of libraries must not keep the process alive.


if __name__ == "__main__":
    main()
