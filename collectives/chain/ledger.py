"""The ledger: the chain of a run's certificates, on this peer's disk.

Theory of operation. In memory stands the `Chain`: 48 bytes a round, and where each certificate lies in the file. In the
file (see `ledger_file`) every record is one change: certificates that follow each other. Read back in order, each is
put where it joins the chain, which is cut back to there first, or begins a chain anew; so an extension, another branch
and the checkpoint of a state that was taken are one kind of record, a branch counts whole or not at all, and what it
replaced stays in the file. Only a branch too long for one record can be cut off by a crash, between two of them.

Two ways in. `append` takes the next certificate. `follow` takes the chain of the state that I hold, whatever I knew:
where no one has the state of the better chain, training goes on from what there is, and an event says so. Each checks
every signature.

Where the disk fails, certificates wait in memory, an event tells why, and the next change tries again: a run does not
end because a ledger cannot be written. All methods may be called from any thread; they wait for the disk.
"""

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from ...dht.run.admission import OPEN, Charter
from ...peer import wire
from ...peer.errors import ProtocolViolation, RemoteError
from ...peer.telemetry import Telemetry
from ..ledger_file import MAX_PAYLOAD_BYTES, LedgerFile, read_at, read_records
from .certificate import Verify
from .chain import NOTHING, Chain, Head, Link
from .packed import checked, pack, unpack

MAX_WAITING = 256
"""Certificates that wait in memory for a disk that takes none: a few MB. Older ones are then gone from this peer."""
WAITING = 2**64 - 1
"""The place of a certificate that is not in the file."""
LENGTH_BYTES = 4


class Ledger:
    """One run's chain of certificates. Get one with `open`."""

    def __init__(self, path: Path, run: str, verify: Verify, telemetry: Telemetry, charter: Charter) -> None:
        self._path = path
        self._run = run
        self._verify = verify
        self._telemetry = telemetry
        self._charter = charter
        self._lock = threading.RLock()
        self._chain = Chain(run)
        self._waiting: dict[int, bytes] = {}
        self._file: LedgerFile | None = None

    @classmethod
    def open(
        cls, path: Path, run: str, *, verify: Verify, telemetry: Telemetry, charter: Charter = OPEN
    ) -> "Ledger":
        """The ledger kept at `path`, made if it is missing. Raises nothing: a file that cannot be used is an event.

        `charter`: whose certificates count.
        """
        ledger = cls(path, run, verify, telemetry, charter)
        try:
            file = LedgerFile(path)
            torn = file.cut(ledger._read())
            ledger._file = file
            if torn:
                telemetry.emit("ledger.torn", step="open", reason="cut off what a crash left half written", bytes=torn)
        except OSError as error:
            telemetry.emit("ledger.unavailable", step="open", reason=f"{path}: {error}")
        telemetry.emit("ledger.opened", round=ledger.head.round, first=ledger.first, tokens=ledger.head.tokens)
        return ledger

    @property
    def head(self) -> Head:
        """The last certificate's place; `chain.NOTHING` where there is none."""
        with self._lock:
            return self._chain.head

    @property
    def first(self) -> int:
        """The first round whose certificate is here: 1, or that of the state with which this peer began."""
        with self._lock:
            return self._chain.first

    def at(self, round_: int) -> Head | None:
        """The place of a round's certificate; None where it is not here."""
        with self._lock:
            return self._chain.at(round_)

    def joins(self, certificate: wire.Certificate) -> bool:
        """Whether what a certificate, checked before, follows is here."""
        with self._lock:
            return self._chain.joins(Link.of(certificate))

    def certificate(self, round_: int) -> wire.Certificate | None:
        """The certificate of a round; None where it is not here or cannot be read any more."""
        data = self._packed(round_)
        return None if data is None else unpack(data)

    def since(self, round_: int, limit: int, *, max_bytes: int) -> tuple[bytes, ...]:
        """Up to `limit` certificates from a round on, packed, of `max_bytes` together."""
        page: list[bytes] = []
        for number in range(round_, min(round_ + limit, self.head.round + 1)):
            data = self._packed(number)
            max_bytes -= len(data or b"")
            if data is None or max_bytes < 0:
                break
            page.append(data)
        return tuple(page)

    def append(self, certificate: wire.Certificate) -> None:
        """Make the chain one longer. Raises `RemoteError` where the certificate is not its valid next one."""
        (link,) = self._check([certificate])
        with self._lock:
            if link.head.round != self.head.round + 1 or not self._chain.joins(link):
                raise ProtocolViolation(f"the certificate of round {link.head.round} is not the ledger's next one")
            self._put([link], [certificate])

    def follow(self, certificates: Sequence[wire.Certificate]) -> None:
        """Make the last of these the head, since I hold its state; none of them: the run begins here.

        What they replace need not be worse, nor must they join it. Raises `RemoteError` if they are not valid.
        """
        links = self._check(certificates)
        with self._lock:
            head, before = links[-1].head if links else NOTHING, self.head
            if head == before:
                return
            new = [index for index, link in enumerate(links) if self._chain.at(link.head.round) != link.head]
            joins = bool(new) and self._chain.joins(links[new[0]])
            if joins and (replaced := before.round + 1 - links[new[0]].head.round):
                reason = f"{replaced} rounds of mine gave way to the run's chain"
                self._telemetry.emit("ledger.replaced", step="follow", reason=reason, round=head.round)
            if not joins and before != NOTHING:
                reason = f"my state is of round {head.round}: what is known beyond or beside it is left behind"
                self._telemetry.emit("ledger.left_behind", step="follow", reason=reason, round=before.round)
            if joins:
                self._put(links[new[0] :], certificates[new[0] :])
            elif new:
                self._put(links, certificates)
            else:
                self._cut(head.round)

    def close(self) -> None:
        """Write no more."""
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None

    def _check(self, certificates: Sequence[wire.Certificate]) -> list[Link]:
        return checked(certificates, self._run, self._verify, self._charter)

    def _cut(self, round_: int) -> None:
        self._chain.cut(round_)
        self._waiting = {number: data for number, data in self._waiting.items() if number <= round_}

    def _put(self, links: Sequence[Link], certificates: Sequence[wire.Certificate]) -> None:
        if self._chain.joins(links[0]):
            self._cut(links[0].head.round - 1)
        else:
            self._waiting.clear()
        for link, certificate in zip(links, certificates, strict=True):
            self._chain.put(link, WAITING)
            self._waiting[link.head.round] = pack(certificate)
        self._save()

    def _save(self) -> None:
        """Write what waits; what cannot be written goes on waiting."""
        try:
            if self._file is None:
                self._file = LedgerFile(self._path)
            for rounds in list(_batches(self._waiting)):
                items = [self._waiting[number] for number in rounds]
                place = self._file.append(b"".join(len(item).to_bytes(LENGTH_BYTES, "big") + item for item in items))
                for number in rounds:
                    self._chain.move(number, place)
                    place += LENGTH_BYTES + len(self._waiting.pop(number))
        except OSError as error:
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
            length = int.from_bytes(read_at(self._path, place, LENGTH_BYTES), "big")
            data = read_at(self._path, place + LENGTH_BYTES, min(length, MAX_PAYLOAD_BYTES))
            if Link.of(unpack(data)).head == link:
                return data
            reason = "another certificate stands in its place"
        except (OSError, RemoteError) as error:
            reason = str(error)
        self._telemetry.emit("ledger.unreadable", step="read", reason=reason, round=round_)
        return None

    def _read(self) -> int:
        """Build the chain from the file; returns where its last whole record ends."""
        end, damaged = 0, False
        for record in read_records(self._path):
            if record.skipped:
                damaged = True
                reason = "passed over bytes that are no whole record"
                self._telemetry.emit("ledger.damaged", step="open", reason=reason, bytes=record.skipped)
            end = record.start + len(record.payload)
            try:
                items = list(_items(record.payload))
                certificates = [unpack(data) for _, data in items]
                # I checked them before I wrote them; behind damage the mark may be one that a certificate contains.
                links = self._check(certificates) if damaged else [Link.of(item) for item in certificates]
                if any(item.slot.run != self._run for item in certificates):
                    raise ProtocolViolation("certificates of another run")
            except RemoteError as error:
                self._telemetry.emit("ledger.damaged", step="open", reason=str(error), bytes=len(record.payload))
                continue
            for link, (place, _) in zip(links, items, strict=True):
                self._chain.put(link, record.start + place)
        return end


def _items(payload: bytes) -> Iterator[tuple[int, bytes]]:
    """The packed certificates of a record, each with where its length stands."""
    position = 0
    while position < len(payload):
        start = position + LENGTH_BYTES
        stop = start + int.from_bytes(payload[position:start], "big")
        yield position, payload[start:stop]
        position = stop


def _batches(waiting: dict[int, bytes]) -> Iterator[list[int]]:
    """The rounds that wait, in order, in runs that fit into one record each."""
    batch: list[int] = []
    size = 0
    for number in sorted(waiting):
        grown = size + LENGTH_BYTES + len(waiting[number])
        if batch and grown > MAX_PAYLOAD_BYTES:
            yield batch
            batch, grown = [], grown - size
        batch.append(number)
        size = grown
    if batch:
        yield batch
