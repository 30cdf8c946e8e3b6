"""The ledger: the chain of a run's certificates, persisted on this peer's disk.

Theory of operation. Memory holds the `Chain`: 48 bytes a round, and the file offset of each certificate. Each record of
the file (see `peer.log.file`) is one change: a run of consecutive certificates. Recovery replays the records in order:
each one cuts the chain back to its predecessor and extends it, or begins a chain anew. So an extension, a
reorganization to another branch and the checkpoint of a taken state are one kind of record. A branch counts whole or
not at all, and what it replaced stays in the file. Only a branch too long for one record can be truncated by a crash,
between records.

There are two writes. `extend` takes the next certificates, which a reader has verified. `follow` takes the chain of the state
that this peer holds, whatever it knew before, and validates every signature: if nobody provides the state of a later round,
training goes on from what there is, and an event says so.

If the disk fails, certificates wait in memory, an event gives the reason, and the next change retries: a run does not
end because a ledger cannot be written. All methods may be called from any thread; they wait for the disk.
"""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from ...dht.run.admission import OPEN, Charter
from ...peer import wire
from ...peer.base.errors import LocalError, ProtocolViolation, RemoteError
from ...peer.log.file import MAX_LOG_PAYLOAD_BYTES, LogFile, LogRecord, read_records
from ...peer.log.telemetry import Telemetry
from ...peer.wire.signed import Verify
from .certificate import certificate_hash
from .chain import NOTHING, Chain, ChainLink, Head
from .packed import checked, pack_certificate, unpack_certificate

MAX_WAITING = 256
"""Certificates kept in memory while the disk fails: a few MB. Older ones are dropped."""
WAITING = 2**64 - 1
"""The offset of a certificate that is not in the file."""
LENGTH_BYTES = 4


class Ledger:
    """One run's chain of certificates. Get one with `open`."""

    def __init__(self, path: Path, run: str, verify: Verify, telemetry: Telemetry, charter: Charter) -> None:
        self._file = LogFile(path, telemetry)
        self._run = run
        self._verify = verify
        self._telemetry = telemetry
        self._charter = charter
        self._lock = threading.RLock()
        self._chain = Chain(run)
        self._waiting: dict[int, bytes] = {}
        self._is_damaged = False

    @classmethod
    def open(
        cls, path: Path, run: str, *, verify: Verify, telemetry: Telemetry, charter: Charter = OPEN
    ) -> "Ledger":
        """Open the ledger at `path`, or create it. Raises nothing: a file that cannot be used is an event.

        `charter`: the admission rules that certificates are validated against.
        """
        ledger = cls(path, run, verify, telemetry, charter)
        ledger._file.load(ledger._take)
        telemetry.emit("ledger.opened", round=ledger.head.round, first=ledger.first, tokens=ledger.head.tokens)
        return ledger

    @classmethod
    def beside(cls, path: Path, charter: Charter, verify: Verify, telemetry: Telemetry) -> "Ledger":
        """Read a ledger that another process may be writing, and change nothing; only to look at. Raises `OSError`."""
        ledger = cls(path, charter.run, verify, telemetry, charter)
        for record in read_records(path):
            with contextlib.suppress(RemoteError):  # As in the process that opens it: what follows may be whole.
                ledger._take(record)
        return ledger

    @property
    def head(self) -> Head:
        """The head of the chain; `chain.NOTHING` if it is empty."""
        with self._lock:
            return self._chain.head

    @property
    def first(self) -> int:
        """The first round whose certificate is here: 1, or that of the state that this peer began with."""
        with self._lock:
            return self._chain.first

    def at(self, round_: int) -> Head | None:
        """Return the head after a round; None if its certificate is not here."""
        with self._lock:
            return self._chain.at(round_)

    def certificate(self, round_: int) -> wire.Certificate | None:
        """Return the certificate of a round; None if it is not here or cannot be read any more."""
        data = self._packed(round_)
        return None if data is None else unpack_certificate(data)

    def since(self, round_: int, limit: int, *, max_bytes: int) -> tuple[bytes, ...]:
        """Return up to `limit` packed certificates from a round on, of at most `max_bytes` together."""
        page: list[bytes] = []
        for number in range(round_, min(round_ + limit, self.head.round + 1)):
            data = self._packed(number)
            max_bytes -= len(data or b"")
            if data is None or max_bytes < 0:
                break
            page.append(data)
        return tuple(page)

    def extend(self, certificates: Sequence[wire.Certificate]) -> bool:
        """Append consecutive verified certificates, those here already left out; returns False if they do not follow."""
        with self._lock:
            new = [it for it in certificates if it.slot.round > self.head.round]
            links = [ChainLink.of(certificate) for certificate in new]
            if new and (links[0].head.round != self.head.round + 1 or not self._chain.joins(links[0])):
                return False
            if new:
                self._put(links, new)
            return True

    def follow(self, certificates: Sequence[wire.Certificate]) -> None:
        """Make the last of these the head, since I hold its state; an empty list resets to the start of the run.

        They may replace a better chain and need not join mine. Raises `RemoteError` if they are not valid.
        """
        links = self._check(certificates)
        with self._lock:
            head, before = links[-1].head if links else NOTHING, self.head
            if head == before and (not links or self._chain.at(links[0].head.round) == links[0].head):
                return
            new = [index for index, link in enumerate(links) if self._chain.at(link.head.round) != link.head]
            joins = bool(new) and self._chain.joins(links[new[0]])
            if joins and (replaced := before.round + 1 - links[new[0]].head.round):
                reason = f"{replaced} rounds of mine gave way to the run's chain"
                self._telemetry.emit("ledger.replaced", step="follow", reason=reason, round=head.round)
            if not joins and before not in (head, NOTHING):
                reason = f"my state is of round {head.round}: what is known beyond or beside it is left behind"
                self._telemetry.emit("ledger.left_behind", step="follow", reason=reason, round=before.round)
            if joins:
                self._put(links[new[0] :], certificates[new[0] :])
            elif new:
                self._put(links, certificates)
            else:
                self._cut(head.round)

    def _check(self, certificates: Sequence[wire.Certificate]) -> list[ChainLink]:
        first = certificates[0].slot.round if certificates else 0
        before = self.certificate(first - 1) if first > 1 else None
        if before is not None and certificates[0].slot.previous != certificate_hash(before):
            before = None
        return checked(certificates, self._run, self._verify, self._charter, before=before)

    def _cut(self, round_: int) -> None:
        self._chain.cut(round_)
        self._waiting = {number: data for number, data in self._waiting.items() if number <= round_}

    def _put(self, links: Sequence[ChainLink], certificates: Sequence[wire.Certificate]) -> None:
        if self._chain.joins(links[0]):
            self._cut(links[0].head.round - 1)
        else:
            self._waiting.clear()
        for link, certificate in zip(links, certificates, strict=True):
            self._chain.put(link, WAITING)
            self._waiting[link.head.round] = pack_certificate(certificate)
        self._save()

    def _save(self) -> None:
        """Write the waiting certificates; those that cannot be written stay in memory."""
        try:
            for rounds in list(_batches(self._waiting)):
                items = [self._waiting[number] for number in rounds]
                place = self._file.append(b"".join(len(item).to_bytes(LENGTH_BYTES, "big") + item for item in items))
                for number in rounds:
                    self._chain.move(number, place)
                    place += LENGTH_BYTES + len(self._waiting.pop(number))
        except LocalError as error:
            reason = f"{len(self._waiting)} certificates wait in memory: {error}"
            self._telemetry.emit("ledger.unwritten", step="save", reason=reason, round=self.head.round)
            for number in sorted(self._waiting)[:-MAX_WAITING]:
                del self._waiting[number]

    def _packed(self, round_: int) -> bytes | None:
        with self._lock:
            link = self._chain.at(round_)
            if link is None:
                return None
            place = self._chain.place(round_)
            if place == WAITING:
                return self._waiting.get(round_)
        try:
            length = int.from_bytes(self._file.read(place, LENGTH_BYTES), "big")
            data = self._file.read(place + LENGTH_BYTES, min(length, MAX_LOG_PAYLOAD_BYTES))
            if ChainLink.of(unpack_certificate(data)).head == link:
                return data
            reason = "another certificate stands in its place"
        except (LocalError, RemoteError) as error:
            reason = str(error)
        self._telemetry.emit("ledger.unreadable", step="read", reason=reason, round=round_)
        return None

    def _take(self, record: LogRecord) -> None:
        """Replay a record: put its certificates into the chain. Raises `RemoteError` if they are not of this run."""
        self._is_damaged = self._is_damaged or record.skipped > 0
        items = list(_items(record.payload))
        certificates = [unpack_certificate(data) for _, data in items]
        # They were validated before the write; but after damage, the mark found may be part of a certificate.
        links = self._check(certificates) if self._is_damaged else [ChainLink.of(item) for item in certificates]
        if any(item.slot.run != self._run for item in certificates):
            raise ProtocolViolation("certificates of another run")
        for link, (place, _) in zip(links, items, strict=True):
            self._chain.put(link, record.start + place)


def _items(payload: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the packed certificates of a record, each with the offset of its length."""
    position = 0
    while position < len(payload):
        start = position + LENGTH_BYTES
        stop = start + int.from_bytes(payload[position:start], "big")
        yield position, payload[start:stop]
        position = stop


def _batches(waiting: dict[int, bytes]) -> Iterator[list[int]]:
    """Yield the waiting rounds in order, in batches that fit into one record each."""
    batch: list[int] = []
    size = 0
    for number in sorted(waiting):
        grown = size + LENGTH_BYTES + len(waiting[number])
        if batch and grown > MAX_LOG_PAYLOAD_BYTES:
            yield batch
            batch, grown = [], grown - size
        batch.append(number)
        size = grown
    if batch:
        yield batch
