"""The entries of a directory server on disk: an append-only file that survives `kill -9`, flipped bits and a full disk.

Theory of operation. Each entry that is taken in is appended; a later one takes the place of an earlier one with the same
key and peer. As soon as the file is more than `SLACK` times what the store holds it is written anew, whole or not at all,
so that its size is bounded by the store's. A record is

    "FSD1"   length: 4 bytes, big-endian   BLAKE3 of the payload: 32 bytes   payload

Reading goes from record to record; where one is damaged it goes on at the next mark, so that damage costs what it touched.
Entries are not validated again: whoever asks for a value does that. Nothing is synced: a process that dies loses nothing,
and after a power failure members publish anew within half a minute.
"""

import mmap
import os
from collections.abc import Iterator
from pathlib import Path

from ..peer.digest import DIGEST_BYTES, keyed
from ..peer.errors import MalformedMessage
from ..peer.telemetry import Telemetry
from ..peer.wire.schema import decode, encode
from .directory.store import ENTRY_BYTES, MAX_ADDRESS_BYTES, MAX_ADDRESSES, Entry, Store
from .records import MAX_RECORD_BYTES

MARK = b"FSD1"
HEADER_BYTES = len(MARK) + 4 + DIGEST_BYTES
MAX_PAYLOAD_BYTES = MAX_RECORD_BYTES + MAX_ADDRESSES * MAX_ADDRESS_BYTES + ENTRY_BYTES

SLACK = 2
SLACK_BYTES = 1 << 20
"""The file may have so many times what the store holds, and so much more, before it is written anew."""


class StoreFile:
    """One server's file. Nothing here raises `OSError`: what cannot be read or written is told as an event."""

    def __init__(self, path: Path, telemetry: Telemetry) -> None:
        self._path = path
        self._telemetry = telemetry
        self._num_bytes = 0
        self._is_failing = False

    def load(self, store: Store, now: float) -> None:
        """Fill a store with the entries that have not ended."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if self._path.exists() and self._path.stat().st_size:
                with self._path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                    self._take(data, store, now)
        except OSError as error:
            self._telemetry.emit("store.unreadable", step="read", reason=f"{self._path}: {error}")
        self.rewrite(store)

    def append(self, entry: Entry, store: Store) -> None:
        """Write down an entry that the store has taken in."""
        record = _record(entry)
        if self._num_bytes + len(record) > SLACK * store.num_bytes + SLACK_BYTES or self._is_failing:
            self.rewrite(store)
            return
        try:
            with self._path.open("ab", buffering=0) as file:
                file.write(record)
            self._num_bytes += len(record)
        except OSError as error:
            self._fail(error)

    def rewrite(self, store: Store) -> None:
        """Write down what the store holds and nothing else."""
        try:
            draft = self._path.with_name(f".{self._path.name}.draft")
            with draft.open("wb") as file:
                file.writelines(map(_record, store))
                self._num_bytes = file.tell()
            os.replace(draft, self._path)
            self._is_failing = False
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        if not self._is_failing:  # Else each entry of a full disk would tell it again.
            self._telemetry.emit("store.not_kept", step="write", reason=f"{self._path}: {error}")
        self._is_failing = True

    def _take(self, data: mmap.mmap, store: Store, now: float) -> None:
        taken = damaged = 0
        for payload, skipped in _records(data):
            damaged += skipped
            try:
                entry = decode(Entry, payload, max_bytes=MAX_PAYLOAD_BYTES)
            except MalformedMessage:
                damaged += len(payload)
                continue
            if entry.expires > now:
                store.put(entry)
                taken += 1
        if damaged:
            reason = f"{self._path}: {damaged} bytes are damaged and left out"
            self._telemetry.emit("store.damaged", step="read", reason=reason, taken=taken)


def _record(entry: Entry) -> bytes:
    payload = encode(entry)
    return MARK + len(payload).to_bytes(4, "big") + keyed("entry of a store", payload) + payload


def _records(data: mmap.mmap) -> Iterator[tuple[bytes, int]]:
    """Every whole payload, and how many bytes of damage lie before it; at last nothing, and the damage at the end."""
    position = end = 0
    while (position := data.find(MARK, position)) >= 0:
        start = position + HEADER_BYTES
        length = int.from_bytes(data[position + len(MARK) : position + len(MARK) + 4], "big")
        payload = data[start : start + min(length, MAX_PAYLOAD_BYTES)]
        if len(payload) == length and data[start - DIGEST_BYTES : start] == keyed("entry of a store", payload):
            yield payload, position - end
            position = end = start + length
        else:
            position += 1
    if len(data) > end:
        yield b"", len(data) - end
