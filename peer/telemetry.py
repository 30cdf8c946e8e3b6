"""Typed events to JSONL, and the last values of counters: what status, the live table, reports and bench all read.

Nothing is silent: every retry, drop, ban, void round, fallback and slow path leaves one event. An event is one JSON
object a line: `time` (Unix seconds), `event` (a dotted name such as `round.void`), and where they apply `peer` (the
other peer's id), `step` (what was being done) and `reason` (why), then figures of its own.
In the event `step` itself the field of that name is the number of the inner step.
"""

import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TypeAlias

from .errors import LocalError

Value: TypeAlias = str | int | float | bool | list[str] | list[int] | list[float] | None
Event: TypeAlias = dict[str, Value]
Listener: TypeAlias = Callable[[Event], None]


class Telemetry:
    """One peer's event log. `clock` gives the time of an event (virtual in simulations)."""

    def __init__(self, path: Path | None = None, *, clock: Callable[[], float] = time.time) -> None:
        self._lock = threading.Lock()
        self._clock = clock
        self._file: IO[bytes] | None = _open_log(path) if path else None
        self._listeners: list[Listener] = []
        self.counts: Counter[str] = Counter()

    def emit(self, event: str, *, peer: str = "", step: str | int = "", reason: str = "", **figures: Value) -> None:
        """Record one event; empty fields are left out."""
        record: Event = {"time": round(self._clock(), 6), "event": event}
        record.update({name: text for name, text in (("peer", peer), ("step", step), ("reason", reason)) if text})
        record.update(figures)
        self.take(record)

    def take(self, record: Event) -> None:
        """Record an event that was made elsewhere, such as in the network process."""
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
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, record: Event) -> None:
        if self._file is None:
            return
        try:
            line = json.dumps(record, ensure_ascii=False, separators=(",", ":")) + "\n"
            self._file.write(line.encode(errors="replace"))
        except (
            OSError
        ) as error:  # A full disk must not stop the training (invariant 5): say it once, then go on without.
            self.close()
            print(f"flockstep: the event log is lost: {error}", file=sys.stderr)  # noqa: T201


def _open_log(path: Path) -> IO[bytes]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("ab", buffering=0)  # One line is one write: nothing is torn between two of them.
    except OSError as error:
        raise LocalError(
            f"cannot write the event log {path}: {error.strerror}", remedy="choose a writable folder with --home"
        ) from error


def read_events(path: Path, *, offset: int = 0) -> Iterator[tuple[int, Event]]:
    """The events of a log from byte `offset` on, each with the offset behind it; a half-written last line is left alone."""
    if not path.exists():
        return
    with path.open("rb") as file:
        file.seek(offset)
        for line in file:
            if not line.endswith(b"\n"):
                return
            offset += len(line)
            try:
                event = json.loads(line)
            except ValueError:
                continue  # A crash in mid-write can leave a torn line before the next start's first event.
            if isinstance(event, dict):
                yield offset, event


def log_path(home: Path) -> Path:
    """Where a peer with this home folder writes its events."""
    return Path(os.fspath(home)) / "events.jsonl"
