"""The store of a directory server on disk: an append-only log (`peer.log.file`) that is compacted.

Theory of operation. Each entry that is stored is appended; a later one replaces an earlier one with the same key and peer.
Once the file is more than `SLACK` times as large as the store it is rewritten (log compaction), whole or not at all, so
that its size is bounded by the store's. Entries are not validated again: clients validate the values that they get.
Nothing is synced: a killed process loses nothing, and after a power failure members republish within half a minute.
"""

from pathlib import Path

from ...peer.address import MAX_ADDRESS_BYTES
from ...peer.base.errors import LocalError
from ...peer.log.file import LogFile
from ...peer.log.telemetry import Telemetry
from ...peer.wire.schema import decode, encode
from ..records import MAX_RECORD_BYTES
from .store import ENTRY_BYTES, MAX_STORED_ADDRESSES, Entry, Store

MAX_ENTRY_BYTES = MAX_RECORD_BYTES + MAX_STORED_ADDRESSES * MAX_ADDRESS_BYTES + ENTRY_BYTES

SLACK = 2
SLACK_BYTES = 1 << 20
"""The file is rewritten once it has so many times the store's bytes, and so much more."""


class StoreFile:
    """One server's log. Nothing here raises: a failed read or write is an event."""

    def __init__(self, path: Path, telemetry: Telemetry) -> None:
        self._file = LogFile(path, telemetry, sync=False, max_payload=MAX_ENTRY_BYTES)
        self._telemetry = telemetry
        self._num_bytes = 0
        self._is_failing = False

    def load(self, store: Store, now: float) -> None:
        """Fill a store with the unexpired entries."""

        def take(payload: bytes) -> None:
            entry = decode(Entry, payload, max_bytes=MAX_ENTRY_BYTES)
            if entry.is_alive(now):
                store.put(entry.at(now))

        self._file.load(lambda record: take(record.payload))
        self.rewrite(store)

    def append(self, entry: Entry, store: Store) -> None:
        """Append an entry that the store has taken."""
        payload = encode(entry)
        if self._num_bytes + len(payload) > SLACK * store.num_bytes + SLACK_BYTES or self._is_failing:
            self.rewrite(store)
            return
        try:
            self._num_bytes = self._file.append(payload) + len(payload)
        except LocalError as error:
            self._fail(error)

    def rewrite(self, store: Store) -> None:
        """Rewrite the file with the entries of the store only (log compaction)."""
        try:
            self._num_bytes = self._file.rewrite(map(encode, store))
            self._is_failing = False
        except LocalError as error:
            self._fail(error)

    def _fail(self, error: LocalError) -> None:
        if not self._is_failing:  # Once: otherwise each entry would emit it while the disk is full.
            self._telemetry.emit("store.not_kept", step="write", reason=str(error))
        self._is_failing = True
