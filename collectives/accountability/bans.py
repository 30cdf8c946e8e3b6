"""Who is banned from the run: claims are judged, spread among the members, and kept on the disk.

Theory of operation. Whoever sees a peer contradict itself signs a claim and tells it to everybody. Whoever hears a claim
judges it (`evidence.judge`), bans the guilty one, and tells it on, once; who meets a newcomer shows it what it keeps. If
bytes decide, they are fetched by their hash from whoever brought the claim, one exhibit at a time; where they cannot be
had nothing follows. A ban holds for the run: each is one record of an append-only file (see `ledger_file`), written
before anything else can be lost, and read when the next life begins.

Anybody can make keys that prove themselves guilty, so bans of peers that nobody has met are kept only up to a limit.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import trio

from ...dht.run.manifest import write_whole
from ...peer import wire
from ...peer.claim import MAX_CLAIMS, Accusations, Claim
from ...peer.digest import digest
from ...peer.errors import BadSignature, NetworkError, ProtocolViolation, RemoteError
from ...peer.node.bulk import Blob
from ...peer.node.file_blob import FileBlob
from ...peer.node.node import Node
from ...peer.transport import PeerId
from ...peer.wire.fields import Peer, Reason
from ...peer.wire.schema import Size, decode, encode
from ..chain.certificate import sign, verify
from ..ledger_file import LedgerFile, read_records
from .evidence import Pending, Terms, Verdict, claim_of, judge, look_at

MAX_BANS = 4096
"""As many as members that a table holds."""
MAX_UNKNOWN = 1024
"""Bans beyond which only peers that I have met are banned: about 10 MB on the disk, and no more of what costs nothing."""
MAX_CLAIM_BYTES = 4 * 32_000
MAX_EXHIBITS = 16
"""Exhibits kept on the disk, so that newcomers can see for themselves."""
EXHIBIT_PATIENCE = 20.0
"""Seconds in which something of an exhibit must come."""


@dataclass(frozen=True, slots=True)
class Kept:
    """One ban as the file keeps it."""

    guilty: Peer
    reason: Reason
    claim: Annotated[bytes, Size(MAX_CLAIM_BYTES)]


class Bans:
    """One run's bans, as far as this peer knows; on the disk too where there is a `folder`."""

    def __init__(self, node: Node, terms: Terms, folder: Path | None = None) -> None:
        self.mine = ""
        """Why the others have nothing to do with me; empty while they have."""
        self._node = node
        self._terms = terms
        self._folder = folder
        self._file: LedgerFile | None = None
        self._kept: dict[PeerId, Kept] = {}
        self._heard: dict[bytes, None] = {}
        self._bench = trio.CapacityLimiter(1)
        self._writing = trio.Lock()
        node.on_tell(Accusations, self._hear)

    async def load(self) -> None:
        """Ban whoever was banned in an earlier life. Raises nothing: a file that cannot be used is an event."""
        for kept in await self._node.compute(self._read):
            self._ban(kept, "from the disk")

    def __contains__(self, peer: PeerId) -> bool:
        return peer in self._kept

    def accuse(self, statements: Sequence[wire.Signed], part: int = 0, data: Blob | None = None) -> None:
        """Tell everybody what `statements` (see `peer.claim`) prove, with the bytes of the exhibit if there is one."""
        if statements[0].sender in self._kept:
            return
        claim = claim_of(self._terms.run, tuple(statements), part)
        signed = sign(self._node.identity, claim)
        found = judge(signed.sender, claim, self._terms, verify)
        if isinstance(found, Pending):
            assert data is not None, "an accusation of bytes comes with them"
            found = look_at(signed.sender, found, data)
        if found.guilty == statements[0].sender:  # Else I would accuse myself of a false accusation.
            self._convict(found, signed, data)

    def greet(self, peer: PeerId) -> None:
        """Tell a newcomer whom it should have nothing to do with, and why; in a crowd only those I share a round with."""
        claims = [kept.claim for kept in self._kept.values()] if peer in self._node.watched else []
        for start in range(0, len(claims), MAX_CLAIMS):
            self._node.tell(peer, Accusations(tuple(claims[start : start + MAX_CLAIMS])))

    def _hear(self, carrier: PeerId, message: Accusations) -> None:
        for data in message.claims:
            signed = decode(wire.Signed, data, max_bytes=MAX_CLAIM_BYTES)
            if signed.signature in self._heard:
                continue
            if wire.CODES.get(signed.code) is not Claim:
                raise ProtocolViolation("an accusation that makes no claim")
            claim = decode(Claim, signed.payload, max_bytes=MAX_CLAIM_BYTES)
            if claim.run != self._terms.run:
                raise ProtocolViolation("an accusation in another run")
            if not verify(signed):
                raise BadSignature("an accusation with a wrong signature")
            self._remember(signed)
            found = judge(signed.sender, claim, self._terms, verify)
            if isinstance(found, Verdict):
                self._convict(found, signed)
            elif found.author not in self._kept:
                self._node.nursery.start_soon(self._examine, carrier, signed, found)

    def _remember(self, signed: wire.Signed) -> None:
        self._heard[signed.signature] = None
        while len(self._heard) > MAX_BANS:
            del self._heard[next(iter(self._heard))]

    async def _examine(self, carrier: PeerId, signed: wire.Signed, pending: Pending) -> None:
        """Fetch what a claim is about and look at it."""
        exhibit = pending.exhibit
        try:
            async with self._bench:
                data = await self._node.fetch(carrier, exhibit.hash, exhibit.num_bytes, patience=EXHIBIT_PATIENCE)
                found = await self._node.compute(look_at, signed.sender, pending, data)
            self._convict(found, signed, data)
        except NetworkError as error:
            self._heard.pop(signed.signature, None)  # Somebody else may bring it, and the bytes.
            self._node.telemetry.emit("evidence.missing", peer=carrier, step="fetch an exhibit", reason=str(error))
        except RemoteError as error:
            self._node.charge(carrier, "fetch an exhibit", error)

    def _convict(self, found: Verdict, signed: wire.Signed, data: Blob | None = None) -> None:
        node, guilty = self._node, found.guilty
        if guilty == node.peer_id:
            self.mine = found.reason
            node.telemetry.emit("peer.banned", peer=guilty, step="this peer itself", reason=found.reason)
        elif guilty not in self._kept:
            if len(self._kept) >= (MAX_BANS if node.knows(guilty) else MAX_UNKNOWN):
                node.telemetry.emit("evidence.dropped", peer=guilty, step="ban", reason="too many bans are kept")
                return
            kept = Kept(guilty, found.reason[: wire.MAX_REASON], encode(signed))
            self._ban(kept, f"accused by {signed.sender}")
            self._remember(signed)
            if data is not None:
                node.blobs.put(digest(data), data)
            node.tell(sorted(node.watched), Accusations((kept.claim,)))
            node.nursery.start_soon(self._write, kept, data)

    def _ban(self, kept: Kept, step: str) -> None:
        self._kept[kept.guilty] = kept
        self._node.telemetry.emit("peer.banned", peer=kept.guilty, step=step, reason=kept.reason)
        self._node.ban(kept.guilty, kept.reason)

    def _read(self) -> list[Kept]:
        """The bans of earlier lives; opens the file for those to come."""
        if self._folder is None:
            return []
        telemetry, found = self._node.telemetry, list[Kept]()
        path = self._folder / "bans"
        try:
            self._file, end = LedgerFile(path), 0
            for record in read_records(path):
                end = record.start + len(record.payload)
                try:
                    found.append(decode(Kept, record.payload, max_bytes=2 * MAX_CLAIM_BYTES))
                except RemoteError as error:
                    telemetry.emit("evidence.damaged", step="open", reason=str(error))
            if torn := self._file.cut(end):
                telemetry.emit("evidence.torn", step="open", reason="cut off what a crash left half written", bytes=torn)
            for exhibit in sorted((self._folder / "exhibits").glob("*"))[:MAX_EXHIBITS]:
                self._node.blobs.put(bytes.fromhex(exhibit.name), FileBlob(exhibit, 0, exhibit.stat().st_size))
        except (OSError, ValueError) as error:  # ValueError: a file there that is none of mine.
            telemetry.emit("evidence.unavailable", step="open", reason=f"{path}: {error}")
        return found

    async def _write(self, kept: Kept, data: Blob | None) -> None:
        if self._folder is not None:
            async with self._writing:
                await self._node.compute(self._append, self._folder, kept, data)

    def _append(self, folder: Path, kept: Kept, data: Blob | None) -> None:
        try:
            self._file = self._file or LedgerFile(folder / "bans")
            exhibits = folder / "exhibits"
            exhibits.mkdir(exist_ok=True)
            if data is not None and len(list(exhibits.iterdir())) < MAX_EXHIBITS:
                write_whole(exhibits / digest(data).hex(), bytes(data))
            self._file.append(encode(kept))  # Last: a ban that a restart finds can be proven to others.
        except OSError as error:
            reason = f"the ban of {kept.guilty} will not outlive this process: {error}"
            self._node.telemetry.emit("evidence.unwritten", peer=kept.guilty, step="save", reason=reason)
