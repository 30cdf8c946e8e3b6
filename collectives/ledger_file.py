"""An append-only file of checksummed records that survives a crash in mid-write, a full disk and flipped bits.

Theory of operation. A record is a mark, the length of its payload, a hash over both, and the payload:

    "FSL1"   length: 4 bytes, big-endian   BLAKE3: 32 bytes   payload

One record is one change of its owner's state: it counts whole or not at all. Nothing that was written is written over.
Reading goes from record to record; where one is damaged it goes on at the next mark behind which a whole record stands,
so that damage costs what it touched. What follows the last whole record is a torn write: `open` cuts it off, a reader
beside the writer leaves it alone. A write that fails (a full disk) is taken back; should that fail too, its remains are
passed over like any damage.

Each record is synced to the disk before `append` returns. A process that dies loses nothing in any case, since the
system holds what was written; the sync is for power failures, and costs a few milliseconds once in a round of seconds.
"""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ..peer.digest import DIGEST_BYTES, keyed

MARK = b"FSL1"
HEADER_BYTES = len(MARK) + 4 + DIGEST_BYTES
MAX_PAYLOAD_BYTES = 4 << 20
"""What a reader may have to hold at once; some hundred certificates of eight peers."""
SEARCH_BYTES = 1 << 20
"""How much is read at a time while looking for the next mark."""


@dataclass(frozen=True, slots=True)
class Found:
    """A whole record: where its payload starts, the payload, and how many bytes of damage lie before it."""

    start: int
    payload: bytes
    skipped: int


class LedgerFile:
    """One writer's handle. Every method raises `OSError` as the system does."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        # O_BINARY: without it Windows turns every 0x0a into two bytes.
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0), 0o644)

    def cut(self, end: int) -> int:
        """Cut off what follows `end`; returns how much that was."""
        torn = os.lseek(self._fd, 0, os.SEEK_END) - end
        if torn > 0:
            os.ftruncate(self._fd, end)
        return max(0, torn)

    def append(self, payload: bytes) -> int:
        """Write a record; returns where its payload starts. After an `OSError` the file is as it was before."""
        length = len(payload).to_bytes(4, "big")
        record = MARK + length + keyed("record of a ledger", length, payload) + payload
        start = os.lseek(self._fd, 0, os.SEEK_END)
        try:
            rest = memoryview(record)
            while rest:
                rest = rest[os.write(self._fd, rest) :]
            os.fsync(self._fd)
        except OSError:
            with contextlib.suppress(OSError):  # What cannot be taken back is passed over when it is read.
                os.ftruncate(self._fd, start)
            raise
        return start + HEADER_BYTES

    def close(self) -> None:
        """Write no more."""
        os.close(self._fd)


def read_records(path: Path) -> Iterator[Found]:
    """Every whole record of a file in order, whoever else may be writing to it. Raises `OSError`."""
    with path.open("rb") as file:
        position = end = 0
        while True:
            file.seek(position)
            header = file.read(HEADER_BYTES)
            payload = b""
            if len(header) == HEADER_BYTES and header.startswith(MARK):
                length = header[len(MARK) :][:4]
                if int.from_bytes(length, "big") <= MAX_PAYLOAD_BYTES:
                    payload = file.read(int.from_bytes(length, "big"))
                if header[len(MARK) + 4 :] == keyed("record of a ledger", length, payload):
                    yield Found(position + HEADER_BYTES, payload, position - end)
                    position = end = position + HEADER_BYTES + len(payload)
                    continue
            found = _next_mark(file, position + 1)
            if found is None:
                return
            position = found


def read_at(path: Path, start: int, size: int) -> bytes:
    """Up to `size` bytes from `start` on. Raises `OSError`."""
    with path.open("rb") as file:
        file.seek(start)
        return file.read(size)


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
