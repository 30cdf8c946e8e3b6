"""A child process with limits on memory and processor time, in which a parser reads strangers' files.

Theory of operation. A library that parses a file of some kilobytes may take any memory, or any time, and some abort their
process. So a file that comes from elsewhere is opened by a function of ours in a child, which answers requests of bytes with
bytes; nothing that it sends is unpickled, and each answer has the limit of its request. The child imports the module of
that function and no more, ends with its parent's end of the pipe, and dies by its limits: that is one error, which names the
file. Where the system has no such limits (Windows; macOS has none on memory), the limit of answers and the death of a child
alone hold.
"""

import contextlib
import importlib
import os
import re
import struct
import sys
import threading
import weakref
from collections.abc import Callable
from signal import Signals
from subprocess import DEVNULL, PIPE, Popen
from typing import IO, TypeAlias, cast

from ..base.errors import LocalError, UsageError

MEMORY, MEMORY_PER_BYTE, MOST_MEMORY = 1 << 30, 512, 12 << 30
"""Bytes of addresses that a child may take: besides a base, so many for each byte of its largest request, and never more.

A tokenizer takes 240 for a byte of a text, and more where it says at which character each token begins.
"""
CPU_SECONDS, CPU_SECONDS_PER_MIB = 30, 30
"""Processor time of one request: the slowest models take 2 s for 1 MiB."""
MAX_REASON_BYTES = 2_000
_SECRET = re.compile(r"(?:TOKEN|SECRET|PASSW(?:OR)?D|CREDENTIAL|AUTH|(?:\A|_)KEY)(?:S|_\w*)?\Z", re.IGNORECASE)
_HEAD = struct.Struct(">BQ")
"""Whether the function has raised, and the length of what follows."""

Handler: TypeAlias = Callable[[bytes], bytes]


class Confined:
    """A file opened in a child by `opener`, a function of a module: what it returns answers `ask`.

    `what` names the file in errors, which a `ValueError` of the function goes on with. Raises `UsageError` where the function
    raises, or the child dies.
    """

    def __init__(self, opener: Callable[[bytes], Handler], data: bytes, what: str) -> None:
        self._what, self._lock = what, threading.Lock()
        command = [sys.executable, "-P", "-m", __name__, opener.__module__, opener.__name__]
        env = {"MALLOC_ARENA_MAX": "4"} | {name: value for name, value in os.environ.items() if not is_secret(name)}
        # Its standard error is of a library that panics; signals of the terminal are for its parent.
        self._process = Popen(command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, env=env, start_new_session=True)
        weakref.finalize(self, _end, self._process)
        self._asked(data, 0)

    def ask(self, request: bytes, most: int) -> bytes:
        """Return the answer, of at most so many bytes. Raises `UsageError`, and `LocalError` once the child has ended."""
        with self._lock:
            return self._asked(request, most)

    def _asked(self, request: bytes, most: int) -> bytes:
        stdin, stdout = cast("tuple[IO[bytes], IO[bytes]]", (self._process.stdin, self._process.stdout))
        with contextlib.suppress(OSError, ValueError, struct.error):
            _write(stdin, 0, request)
            failed, size = _HEAD.unpack(stdout.read(_HEAD.size))
            if size <= (MAX_REASON_BYTES if failed else most) and len(answer := stdout.read(size)) == size:
                if failed:
                    raise UsageError(f"{self._what} {answer.decode(errors='replace')}", remedy="take another one")
                return answer
        _end(self._process)
        code = self._process.returncode
        how = Signals(-code).name if code < 0 else f"exit code {code}"
        what = f"{self._what} ends the process that reads it ({how}), which has limits on memory, processor time and answers"
        raise LocalError(what, remedy="take another one")


def is_secret(name: str) -> bool:
    """Return True for the name of a variable of the environment that holds a token, a key or a password."""
    return _SECRET.search(name) is not None


def _end(process: "Popen[bytes]") -> None:
    with process:  # Closes its pipes, and waits.
        process.kill()


def _write(file: IO[bytes], failed: int, content: bytes) -> None:
    file.write(_HEAD.pack(failed, len(content)))
    file.write(content)
    file.flush()


def _limit(size: int, largest: int) -> None:
    """Allow the time of a request beyond what is used, and the memory of the largest one: not all of that is given back."""
    with contextlib.suppress(ImportError, ValueError, OSError):  # Where the system has none.
        import resource

        used = resource.getrusage(resource.RUSAGE_SELF)
        seconds = int(used.ru_utime + used.ru_stime) + CPU_SECONDS + CPU_SECONDS_PER_MIB * (size >> 20)
        memory = min(MEMORY + MEMORY_PER_BYTE * largest, MOST_MEMORY)
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.getrlimit(resource.RLIMIT_CPU)[1]))
        resource.setrlimit(resource.RLIMIT_AS, (memory, resource.getrlimit(resource.RLIMIT_AS)[1]))
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # No files, and none of its memory when it aborts.


def _serve(opener: Callable[[bytes], Handler]) -> None:
    """Answer requests until the pipe ends: the first opens the file, and what `opener` returns answers the others."""
    stdin, stdout, handler, largest = sys.stdin.buffer, os.fdopen(os.dup(1), "wb"), None, 0
    os.dup2(2, 1)  # What a library prints is no answer.
    while len(head := stdin.read(_HEAD.size)) == _HEAD.size:
        request = stdin.read(_HEAD.unpack(head)[1])
        largest = max(largest, len(request))
        _limit(len(request), largest)
        try:
            answer = handler(request) if handler else b""
            handler = handler or opener(request)
        except BaseException as error:  # noqa: BLE001 # Libraries in Rust panic with bare exceptions.
            reason = " ".join(str(error).split()) or type(error).__name__
            reason = reason if type(error) is ValueError else f"cannot be read: {reason}"
            _write(stdout, 1, reason.encode(errors="replace")[:MAX_REASON_BYTES])
        else:
            _write(stdout, 0, answer)


if __name__ == "__main__":
    _serve(getattr(importlib.import_module(sys.argv[1]), sys.argv[2]))
