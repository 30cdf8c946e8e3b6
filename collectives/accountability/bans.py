"""Bans from the run: claims are judged, flooded to the members, and persisted on the disk.

Theory of operation. A peer that witnesses an equivocation signs a claim and sends it to all members. A peer that
receives a claim judges it (`evidence.judge_claim`), bans the guilty one, and forwards the claim once (flooding). It
also sends its claims to every newcomer. If bytes decide, they are fetched by hash from the peer that brought the claim,
one exhibit at a time; if they are not available, the claim has no effect. A ban holds for the run: each one is a record
of a log (see `peer.log_file`), written at once, and read back when the next process starts.

Anybody can make keys that prove themselves guilty, so bans of peers that I have never met are kept only up to a limit.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import trio

from ...peer import wire
from ...peer.digest import digest
from ...peer.disk import write_whole
from ...peer.errors import BadSignature, LocalError, NetworkError, ProtocolViolation, RemoteError
from ...peer.log_file import LogFile, LogRecord
from ...peer.node.bulk import Blob
from ...peer.node.file_blob import FileBlob
from ...peer.node.node import Node
from ...peer.transport import PeerId
from ...peer.wire import MAX_CLAIMS, Accusations, Claim, Peer, Reason
from ...peer.wire.schema import Size, decode, encode
from ...peer.wire.signed import sign, verify_signed
from ..spec import Terms
from .evidence import Conviction, Pending, claim_of, judge_claim, look_at

MAX_BANS = 4096
"""As many as the members that a member table holds."""
MAX_UNKNOWN = 1024
"""Bans beyond which only peers that I have met are banned: about 10 MB on the disk, since fresh keys cost nothing."""
MAX_CLAIM_BYTES = 4 * 32_000
MAX_EXHIBITS = 16
"""Exhibits kept on the disk, so that newcomers can verify the bans."""
MAX_EXAMINATIONS = 16
"""Claims that wait for their exhibit at a time, of all carriers; `EXAMINATIONS_PER_PEER` of them from one."""
EXAMINATIONS_PER_PEER = 2
SIGNATURES_PER_CLAIM = 3
"""The accuser's, and those of two statements."""
EXHIBITS = "exhibits"
"""The folder of exhibits beside the file of bans, one file each, named by its hash."""
EXHIBIT_PATIENCE = 20.0
"""The timeout of an exhibit's fetch without progress, in seconds."""


@dataclass(frozen=True, slots=True)
class Kept:
    """One ban, as a record of the file."""

    guilty: Peer
    reason: Reason
    claim: Annotated[bytes, Size(MAX_CLAIM_BYTES)]


class Bans:
    """One run's bans, as far as this peer knows; persisted if there is a `folder`."""

    def __init__(self, node: Node, terms: Terms, folder: Path | None = None) -> None:
        self.mine = ""
        """Why I am banned myself; empty while I am not."""
        self._node = node
        self._terms = terms
        self._file = LogFile(folder / "bans", node.telemetry) if folder is not None else None
        self._kept: dict[PeerId, Kept] = {}
        self._seen: dict[bytes, None] = {}
        self._examined: Counter[PeerId] = Counter()
        self._bench = trio.CapacityLimiter(1)
        self._writing = trio.Lock()
        node.on_message(Accusations, self._receive)

    async def load(self) -> None:
        """Restore the bans of earlier processes. Raises nothing: a file that cannot be used is an event."""
        for kept in await self._node.compute(self._read):
            self._ban(kept, "from the disk")

    def __contains__(self, peer: PeerId) -> bool:
        return peer in self._kept

    def accuse(self, statements: Sequence[wire.Signed], part: int = 0, data: Blob | None = None) -> None:
        """Sign and send the claim that `statements` (see `peer.wire.direct`) prove; `data`: the bytes of its exhibit."""
        if statements[0].sender in self._kept:
            return
        claim = claim_of(self._terms.run, tuple(statements), part)
        signed = sign(self._node.identity, claim)
        found = judge_claim(signed.sender, claim, self._terms, verify_signed)
        if isinstance(found, Pending):
            assert data is not None, "an accusation of bytes comes with them"
            found = look_at(signed.sender, found, data)
        if found.guilty == statements[0].sender:  # Otherwise the accusation would be false, and convict me.
            self._convict(found, signed, data)

    def send_claims(self, peer: PeerId) -> None:
        """Send my claims to a newcomer, if it is among the peers that I watch (in a crowd: those that share a round)."""
        claims = [kept.claim for kept in self._kept.values()] if peer in self._node.watched else []
        for start in range(0, len(claims), MAX_CLAIMS):
            self._node.send(peer, Accusations(tuple(claims[start : start + MAX_CLAIMS])))

    def _receive(self, carrier: PeerId, message: Accusations) -> None:
        num_signatures = SIGNATURES_PER_CLAIM * len(message.claims)
        work, then = partial(self._judge, message), partial(self._take, carrier)
        self._node.verify(carrier, "accusation", num_signatures, work, then)

    def _judge(self, message: Accusations) -> list[tuple[wire.Signed, Conviction | Pending]]:
        """Judge the claims of a message that are new to me. Raises `RemoteError` for what is no claim."""
        judged: list[tuple[wire.Signed, Conviction | Pending]] = []
        for data in message.claims:
            signed = decode(wire.Signed, data, max_bytes=MAX_CLAIM_BYTES)
            if signed.signature in self._seen:
                continue
            if wire.CODES.get(signed.code) is not Claim:
                raise ProtocolViolation("an accusation that makes no claim")
            claim = decode(Claim, signed.payload, max_bytes=MAX_CLAIM_BYTES)
            if claim.run != self._terms.run:
                raise ProtocolViolation("an accusation in another run")
            if not verify_signed(signed):
                raise BadSignature("an accusation with a wrong signature")
            judged.append((signed, judge_claim(signed.sender, claim, self._terms, verify_signed)))
        return judged

    def _take(self, carrier: PeerId, judged: Sequence[tuple[wire.Signed, Conviction | Pending]]) -> None:
        for signed, found in judged:
            if signed.signature in self._seen:
                continue
            if isinstance(found, Conviction):
                self._remember(signed)
                self._convict(found, signed)
            elif found.author in self._kept:
                self._remember(signed)
            elif self._examined[carrier] >= EXAMINATIONS_PER_PEER or self._examined.total() >= MAX_EXAMINATIONS:
                reason = "too many claims wait for their exhibits"
                self._node.telemetry.emit("evidence.dropped", peer=found.author, step="fetch an exhibit", reason=reason)
            else:
                self._remember(signed)
                self._examined[carrier] += 1
                self._node.nursery.start_soon(self._examine, carrier, signed, found)

    def _remember(self, signed: wire.Signed) -> None:
        self._seen[signed.signature] = None
        while len(self._seen) > MAX_BANS:
            del self._seen[next(iter(self._seen))]

    async def _examine(self, carrier: PeerId, signed: wire.Signed, pending: Pending) -> None:
        """Fetch the exhibit of a claim and judge it."""
        exhibit = pending.exhibit
        try:
            async with self._bench:
                data = await self._node.fetch(carrier, exhibit.hash, exhibit.num_bytes, patience=EXHIBIT_PATIENCE)
                found = await self._node.compute(look_at, signed.sender, pending, data)
            self._convict(found, signed, data)
        except NetworkError as error:
            self._seen.pop(signed.signature, None)  # Another peer may bring the claim again, with its bytes.
            self._node.telemetry.emit("evidence.missing", peer=carrier, step="fetch an exhibit", reason=str(error))
        except RemoteError as error:
            self._node.charge(carrier, "fetch an exhibit", error)
        finally:
            self._examined[carrier] -= 1
            self._examined += Counter()  # Drops zero counts.

    def _convict(self, found: Conviction, signed: wire.Signed, data: Blob | None = None) -> None:
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
            node.send(sorted(node.watched), Accusations((kept.claim,)))
            node.nursery.start_soon(self._write, kept, data)

    def _ban(self, kept: Kept, step: str) -> None:
        self._kept[kept.guilty] = kept
        self._node.telemetry.emit("peer.banned", peer=kept.guilty, step=step, reason=kept.reason)
        self._node.ban(kept.guilty, kept.reason)

    def _read(self) -> list[Kept]:
        """Read the bans of earlier processes, and serve their exhibits again."""
        found: list[Kept] = []

        def take(record: LogRecord) -> None:
            found.append(decode(Kept, record.payload, max_bytes=2 * MAX_CLAIM_BYTES))

        if self._file is not None:
            self._file.load(take)
            try:
                for exhibit in _exhibits(self._file)[:MAX_EXHIBITS]:
                    self._node.blobs.put(bytes.fromhex(exhibit.name), FileBlob(exhibit, 0, exhibit.stat().st_size))
            except (OSError, ValueError) as error:  # ValueError: a foreign file in the folder.
                self._node.telemetry.emit("evidence.unavailable", step="open", reason=str(error))
        return found

    async def _write(self, kept: Kept, data: Blob | None) -> None:
        if self._file is not None:
            async with self._writing:
                await self._node.compute(self._append, self._file, kept, data)

    def _append(self, file: LogFile, kept: Kept, data: Blob | None) -> None:
        try:
            if data is not None and len(_exhibits(file)) < MAX_EXHIBITS:
                write_whole(file.path.with_name(EXHIBITS) / digest(data).hex(), bytes(data))
            file.append(encode(kept))  # Last, so that a restored ban can be proven to others.
        except (OSError, LocalError) as error:
            reason = f"the ban of {kept.guilty} will not outlive this process: {error}"
            self._node.telemetry.emit("evidence.unwritten", peer=kept.guilty, step="save", reason=reason)


def _exhibits(file: LogFile) -> list[Path]:
    return sorted(file.path.with_name(EXHIBITS).glob("[!.]*"))  # A draft has a dot before its name.
