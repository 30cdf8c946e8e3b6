"""An append-only log of checksummed records that survives a crash in mid-write, a full disk and flipped bits.

Theory of operation. A record is a mark, the length of its payload, a hash over both, and the payload:

    "FSL1"   length: 4 bytes, big-endian   BLAKE3: 32 bytes   payload

One record is one change of its owner's state: it counts whole or not at all. Nothing that was written is written over.
Reading goes from record to record; where one is damaged it resynchronizes at the next mark behind which a whole record
stands, so that damage costs what it touched. What follows the last whole record is a torn write: `load` cuts it off, a
reader beside the writer leaves it alone. A write that fails (a full disk) is truncated back; should that fail too, its
remains are passed over like any damage. An owner whose records outlive their use writes the file anew (`rewrite`).

A log is synced to the disk before `append` returns, unless its owner can do without. A process that dies loses nothing
in any case, since the system holds what was written; the sync is for power failures, and costs some milliseconds.

Why not SQLite: docs/log.md, "One log of our own or SQLite".
"""

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ..base.digest import DIGEST_BYTES, keyed
from ..base.disk import disk_errors, draft_of, sync_folder
from ..base.errors import LocalError, RemoteError
from .telemetry import Telemetry

MARK = b"FSL1"
LOG_HEADER_BYTES = len(MARK) + 4 + DIGEST_BYTES
MAX_LOG_PAYLOAD_BYTES = 4 << 20
"""What a reader may have to hold at once; some hundred certificates of eight peers."""
SEARCH_BYTES = 1 << 20
"""How much is read at a time while looking for the next mark."""

_APPEND = os.O_RDWR | os.O_APPEND | getattr(os, "O_BINARY", 0)
"""O_BINARY: without it Windows turns every 0x0a into two bytes."""


@dataclass(frozen=True, slots=True)
class LogRecord:
    """A whole record: where its payload starts, the payload, and how many bytes of damage lie before it."""

    start: int
    payload: bytes
    skipped: int

    @property
    def end(self) -> int:
        """Where the next record starts."""
        return self.start + len(self.payload)


class LogFile:
    """One writer's log at `path`, which need not exist; without `sync` a power failure may lose its end."""

    def __init__(
        self, path: Path, telemetry: Telemetry, *, sync: bool = True, max_payload: int = MAX_LOG_PAYLOAD_BYTES
    ) -> None:
        self.path = path
        self._telemetry = telemetry
        self._sync = sync
        self._max_payload = max_payload

    def load(self, take: Callable[[LogRecord], None]) -> None:
        """Give every whole record in order to `take`, which raises `RemoteError` where it cannot use one.

        Call it before the first `append`: it cuts off a torn write. Raises nothing: what is lost is an event.
        """
        end = lost = 0
        why = ""
        try:
            with disk_errors(f"read {self.path}"), contextlib.suppress(FileNotFoundError):
                for record in read_records(self.path, self._max_payload):
                    end = record.end
                    if record.skipped:
                        lost += record.skipped
                        why = why or "passed over bytes that are no whole record"
                    try:
                        take(record)
                    except RemoteError as error:
                        lost += len(record.payload)
                        why = why or str(error)
                torn = self.path.stat().st_size - end
                if torn > 0:
                    os.truncate(self.path, end)
                    reason = "cut off what a crash left half written"
                    self._telemetry.emit("file.torn", step="open", reason=reason, name=self.path.name, bytes=torn)
        except LocalError as error:
            self._telemetry.emit("file.unavailable", step="open", reason=str(error), name=self.path.name)
        if lost:
            self._telemetry.emit("file.damaged", step="open", reason=why, name=self.path.name, bytes=lost)

    def append(self, payload: bytes) -> int:
        """Write a record; returns where its payload starts. After a `LocalError` the file is as it was before."""
        with disk_errors(f"write {self.path}"):
            fd, is_new = self._open()
            try:
                start = os.lseek(fd, 0, os.SEEK_END)
                try:
                    rest = memoryview(_record(payload))
                    while rest:
                        rest = rest[os.write(fd, rest) :]
                    if self._sync:
                        os.fsync(fd)
                except OSError:
                    with contextlib.suppress(OSError):  # What cannot be taken back is passed over when it is read.
                        os.ftruncate(fd, start)
                    raise
            finally:
                os.close(fd)
            if self._sync and is_new:
                sync_folder(self.path.parent)
        return start + LOG_HEADER_BYTES

    def rewrite(self, payloads: Iterable[bytes]) -> int:
        """Write the file anew with these records alone; returns its size. Raises `LocalError`."""
        with draft_of(self.path, sync=self._sync) as draft, draft.open("wb") as file:
            file.writelines(map(_record, payloads))
            return file.tell()

    def read(self, start: int, size: int) -> bytes:
        """Up to `size` bytes from `start` on. Raises `LocalError`."""
        with disk_errors(f"read {self.path}"), self.path.open("rb") as file:
            file.seek(start)
            return file.read(size)

    def _open(self) -> tuple[int, bool]:
        """A descriptor to append with, and whether the file is new; opened each time, since the file may be removed."""
        with contextlib.suppress(FileNotFoundError):
            return os.open(self.path, _APPEND), False
        self.path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(self.path, _APPEND | os.O_CREAT, 0o644), True


def read_records(path: Path, max_payload: int = MAX_LOG_PAYLOAD_BYTES) -> Iterator[LogRecord]:
    """Every whole record of a log in order, whoever else may be writing to it. Raises `OSError`.

    `max_payload` bounds what is hashed at each mark: behind damage marks may be a stranger's, as many as fit a payload.
    """
    with path.open("rb") as file:
        position = end = 0
        while True:
            file.seek(position)
            header = file.read(LOG_HEADER_BYTES)
            payload = b""
            if len(header) == LOG_HEADER_BYTES and header.startswith(MARK):
                length = header[len(MARK) :][:4]
                if int.from_bytes(length, "big") <= max_payload:
                    payload = file.read(int.from_bytes(length, "big"))
                if header[len(MARK) + 4 :] == _hash(length, payload):
                    record = LogRecord(position + LOG_HEADER_BYTES, payload, position - end)
                    yield record
                    position = end = record.end
                    continue
            found = _next_mark(file, position + 1)
            if found is None:
                return
            position = found


def _record(payload: bytes) -> bytes:
    length = len(payload).to_bytes(4, "big")
    return MARK + length + _hash(length, payload) + payload


def _hash(length: bytes, payload: bytes) -> bytes:
    return keyed("record of a ledger", length, payload)  # The first log's name; another would change every file.


def _next_mark(file: BinaryIO, position: int) -> int | None:
    """Where the next mark stands at or after `position`."""
    while True:
        file.seek(position)
        piece = file.read(SEARCH_BYTES)
        found = piece.find(MARK)
        if found >= 0:
            return position + found
        if len(piece) < SEARCH_BYTES:
            return None
        position += len(piece) - len(MARK) + 1  # A mark may lie across two pieces.
