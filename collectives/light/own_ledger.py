"""The certificates that this computer's own peer holds, read from its disk while it may be writing them.

A closed run gives its certificates to members only, and a reader under a key of the moment is no member. Its user may be:
what the peer of the same home folder has on the disk is the user's own, and needs no answer of anybody.
"""

import os
from pathlib import Path

from ...dht.run.admission import Charter
from ...peer import wire
from ...peer.base.disk import disk_errors
from ...peer.log.telemetry import Telemetry
from ...peer.wire.signed import verify_signed
from ..chain.chain import Head
from ..chain.ledger import Ledger
from ..chain.losses import Losses
from ..chain.replay import PAGE_BYTES
from ..state.archive import LEDGER_FILE, LOSSES_FILE


class OwnLedger:
    """The ledger in a run's folder, as it is now. Get one with `of`; a reader of it checks what it shows as any other."""

    def __init__(self, path: Path, charter: Charter, telemetry: Telemetry) -> None:
        self._path, self._charter, self._telemetry = path, charter, telemetry
        self._size = -1
        self._ledger = Ledger(path, charter.run, verify_signed, telemetry, charter)

    @classmethod
    def of(cls, folder: Path, charter: Charter, telemetry: Telemetry) -> "OwnLedger | None":
        """Return the ledger in a run's folder; None if no peer has written one there."""
        path = folder / LEDGER_FILE
        return cls(path, charter, telemetry) if path.exists() else None

    def page(self, round_: int, limit: int) -> wire.LedgerPage:
        """Return up to `limit` certificates from a round on, and losses that my peer has seen. Raises `LocalError`."""
        self._read_again()
        page = self._ledger.since(round_, limit, max_bytes=PAGE_BYTES)
        losses = Losses(self._path.with_name(LOSSES_FILE), self._telemetry)
        return wire.LedgerPage(page, losses.since(round_, len(page)))

    def head(self) -> Head:
        """Return the head of the chain; `NOTHING` before the first certificate. Raises as `page`."""
        self._read_again()
        return self._ledger.head

    def holds(self, head: Head) -> bool:
        """Return True if this head is on my peer's chain, as far as that is here. Raises as `page`."""
        self._read_again()
        return self._ledger.at(head.round) == head or not self._ledger.first <= head.round <= self._ledger.head.round

    def _read_again(self) -> None:
        with disk_errors(f"read {self._path}"):
            if (size := os.stat(self._path).st_size) != self._size:
                self._size = size
                self._ledger = Ledger.beside(self._path, self._charter, verify_signed, self._telemetry)
