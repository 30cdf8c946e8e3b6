"""Typed events to JSONL, and the last values of counters: what status, the live table, reports and bench all read.

Nothing is silent: every retry, drop, ban, void round, fallback and slow path leaves one event. An event is one JSON
object a line: `time` (Unix seconds), `event` (a dotted name such as `round.void`), and where they apply `peer` (the
other peer's id), `step` (what was being done) and `reason` (why), then figures of its own.
In the event `step` itself the field of that name is the number of the inner step.

A full log becomes the old one by one rename, which replaces the log before it; a new one begins with the number of
bytes before it (`log.continued`). So an offset means the same byte, whichever file holds it by now, and a
reader that follows the log misses nothing as long as it reads again before another file is full.
"""

import contextlib
import errno
import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, ClassVar, TypeAlias

from ..base.disk import private_folder
from ..base.errors import LocalError
from ..base.plain import plain_text
from .events import why_not_event

MAX_LOG_BYTES = 32 << 20
"""The size of each of the two files: a peer that records one inner step a second fills one in about two days."""

CONTINUED = "log.continued"

EventValue: TypeAlias = str | int | float | bool | list[str] | list[int] | list[float] | None
Event: TypeAlias = dict[str, EventValue]
Listener: TypeAlias = Callable[[Event], None]


class Telemetry:
    """One peer's event log. `clock` gives the time of an event (virtual in simulations)."""

    strict: ClassVar[bool] = False
    """True if an event outside of the table is an error. Tests set it; a running peer records such an event as it is."""

    def __init__(self, path: Path | None = None, *, clock: Callable[[], float] = time.time) -> None:
        self._lock = threading.Lock()
        self._clock = clock
        self._log = _Log(path) if path else None
        self._listeners: list[Listener] = []
        self.counts: Counter[str] = Counter()

    def emit(self, event: str, *, peer: str = "", step: str | int = "", reason: str = "", **figures: EventValue) -> None:
        """Record one event; empty fields are left out."""
        record: Event = {"time": round(self._clock(), 6), "event": event}
        record.update({name: text for name, text in (("peer", peer), ("step", step), ("reason", reason)) if text})
        record.update(figures)
        self.take(record)

    def take(self, record: Event) -> None:
        """Record an event that was made elsewhere, such as in the network process; its texts become plain."""
        record = {name: _plain(value) for name, value in record.items()}
        if self.strict and (flaw := why_not_event(record)):
            raise AssertionError(flaw)
        self.counts[str(record["event"])] += 1
        with self._lock:
            self._write(record)
        for listener in self._listeners:
            listener(record)

    def subscribe(self, listener: Listener) -> None:
        """Call `listener` with every event from now on."""
        self._listeners.append(listener)

    def close(self) -> None:
        """Close the log; later events still reach listeners and counters."""
        if self._log is not None:
            self._log.file.close()
            self._log = None

    def _write(self, record: Event) -> None:
        if self._log is None:
            return
        try:
            self._log.write(record)
        except OSError as error:  # A full disk must not stop the training (invariant 5): report it once.
            self.close()
            print(f"flockstep: the event log is lost: {error}", file=sys.stderr)  # noqa: T201


def _plain(value: EventValue) -> EventValue:
    """A value whose texts, which others may have written, do nothing to a terminal."""
    if isinstance(value, list):
        texts = [plain_text(item) for item in value if isinstance(item, str)]
        return texts if len(texts) == len(value) else value
    return plain_text(value) if isinstance(value, str) else value


class _Log:
    """The file that events are appended to. Several processes may share it: `run create` beside a peer, for one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._start: Event = {}
        """The `peer.start` event, whose fields the first event of a new log repeats."""
        try:
            private_folder(path.parent)
            self.file = self._open()
        except OSError as error:
            raise LocalError(
                f"cannot write the event log {path}: {error.strerror}", remedy="choose a writable folder with --home"
            ) from error

    def write(self, record: Event) -> None:
        if record["event"] == "peer.start":
            self._start = record
        line = _line(record)
        if not self._is_current():  # Another process has begun a new one, or the file was removed.
            self.file.close()
            self.file = self._open()
        size = os.fstat(self.file.fileno()).st_size
        if size and size + len(line) > MAX_LOG_BYTES:
            self._begin_anew(record["time"])
        self._append(record)

    def _begin_anew(self, now: EventValue) -> None:
        before = _end_of(self._path)
        self.file.close()  # Before the rename: Windows renames no open file, and another process may hold it.
        with contextlib.suppress(PermissionError):
            os.replace(self._path, old_log_path(self._path))
        self.file = self._open()
        if not os.fstat(self.file.fileno()).st_size:
            self._append({**self._start, "time": now, "event": CONTINUED, "before": before})

    def _is_current(self) -> bool:
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(self.file.fileno()))
        except FileNotFoundError:
            return False

    def _open(self) -> IO[bytes]:
        file = self._path.open("a+b", buffering=0)  # One line is one write, so no two lines are interleaved.
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":  # A crash or a full disk has torn a line: the next one must not be lost with it.
                with contextlib.suppress(OSError):  # Of a disk that is still full the first event tells.
                    file.write(b"\n")
        return file

    def _append(self, record: Event) -> None:
        line = _line(record)
        if self.file.write(line) != len(line):  # How a disk that fills up answers first.
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _line(record: Event) -> bytes:
    return (json.dumps(record, ensure_ascii=False, separators=(",", ":")) + "\n").encode(errors="replace")


def read_events(path: Path, *, offset: int = 0) -> Iterator[tuple[int, Event]]:
    """Yield the events of a log from byte `offset` on, each with the offset behind it; skips a half-written last line."""
    with contextlib.ExitStack() as stack:
        # The newer one is opened first: if it is renamed meanwhile it is also the old one, and nothing is missed.
        newer, older = (_opened(one, stack) for one in (path, old_log_path(path)))
        if newer and older and os.path.sameopenfile(newer.fileno(), older.fileno()):
            newer = None
        end = 0
        for file in filter(None, (older, newer)):
            begin = _before(file, end)
            yield from _read(file, begin, offset)
            end = begin + os.fstat(file.fileno()).st_size


def _opened(path: Path, stack: contextlib.ExitStack) -> IO[bytes] | None:
    try:
        return stack.enter_context(path.open("rb"))
    except FileNotFoundError:
        return None


def _read(file: IO[bytes], begin: int, offset: int) -> Iterator[tuple[int, Event]]:
    position = max(0, offset - begin)
    file.seek(position)
    for line in file:
        if not line.endswith(b"\n"):
            return
        position += len(line)
        try:
            event = json.loads(line)
        except ValueError:
            continue  # A line that a crash has torn.
        if isinstance(event, dict):
            yield begin + position, event


def _before(file: IO[bytes], otherwise: int) -> int:
    """Return the number of bytes of the log before a file; `otherwise` if it holds none, as after a crash in between."""
    first = next(_read(file, 0, 0), None)
    before = first[1].get("before") if first and first[1].get("event") == CONTINUED else None
    return before if isinstance(before, int) else otherwise


def _end_of(path: Path) -> int:
    """Return the offset of the end of the log."""
    end = 0
    with contextlib.ExitStack() as stack:
        for file in filter(None, [_opened(one, stack) for one in (old_log_path(path), path)]):
            end = _before(file, end) + os.fstat(file.fileno()).st_size
    return end


def log_path(home: Path) -> Path:
    """Return the path of the event log of a peer with this home folder."""
    return Path(os.fspath(home)) / "events.jsonl"


def old_log_path(path: Path) -> Path:
    """Return the path of a full log."""
    return path.with_suffix(".old.jsonl")
