"""Bans from the run: claims are judged, flooded to the members, and persisted on the disk.

Theory of operation. A peer that witnesses an equivocation signs a claim and sends it to all members. A peer that
receives a claim judges it (`evidence.judge_claim`), bans the guilty one, and forwards the claim once (flooding). It
also sends its newest claims to a newcomer. If bytes decide, they are fetched by hash from the peer that brought
the claim, one exhibit of each carrier at a time and until a deadline; if they are not available, the claim has no effect.
What is well-formed in a round follows from the certificate before it: a claim about a round that I have not reached waits
until I have. Judged by the settings before a revision, it would convict its honest accuser.
A ban holds for the run: each one is a record of a log (see `peer.log.file`), written at once, and read back when the next
process starts.

Anybody can make keys that prove themselves guilty. A ban of a key that is in no member table would keep out nobody, so it
is neither kept nor passed on; the last few such claims wait in memory, in case the key becomes a member. The claims take
a bounded room, on the disk and in memory: beyond it a ban is kept without its proof.

The run's owner bans and pardons too (`dht.run.statements`). Its bans need no evidence, and pass the same door. Its pardon
lifts both kinds, on the disk too, and voids the evidence of rounds up to the one that it names. Peers hold different
statements for a while: whoever knows of a ban refuses the peer, and accuses nobody who does not know of it yet.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, TypeVar

import trio

from ...dht.run.statements import OwnerStatements
from ...peer import wire
from ...peer.base.digest import digest
from ...peer.base.disk import write_whole
from ...peer.base.errors import (
    BadSignature,
    LocalError,
    MalformedMessage,
    NetworkError,
    ProtocolViolation,
    RemoteError,
)
from ...peer.base.transport import PeerId
from ...peer.log.file import LogFile, LogRecord
from ...peer.node.bulk import Blob
from ...peer.node.file_blob import FileBlob
from ...peer.node.node import Node
from ...peer.wire import MAX_CLAIM_BYTES, MAX_CLAIMS, Accusations, Claim, Peer, Reason
from ...peer.wire.schema import Size, decode, encode
from ...peer.wire.signed import sign, verify_signed
from ..spec import Terms
from .evidence import Conviction, Pending, claim_of, judge_claim, look_at, round_of, slot_of
from .waiting import EarlyClaims, Exhibits

MAX_BANS = 4096
"""As many as the members that a member table holds. A ban without its proof takes 0.4 kB: 5 MB at most, reasons included."""
MAX_PROOF_BYTES = 16 << 20
"""The limit of all claims that are kept, on the disk and in memory. One takes 1 kB as a rule, 80 kB with two rosters."""
MAX_STRANGERS = 64
"""Claims against keys in no member table that wait in memory: 26 MB at most."""
MAX_GREETING_BYTES = 1 << 19
GREETING_PERIOD = 60.0
"""The limit of the claims that a newcomer is sent in a period, the newest first: the longest, or some 400."""
MAX_EXHIBITS, MAX_EXHIBITS_BYTES = 16, 1 << 28
"""Exhibits kept on the disk, so that newcomers can verify the bans, and their bytes together."""
SIGNATURES_PER_CLAIM = 3
"""The accuser's, and those of two statements."""
EXHIBITS = "exhibits"
"""The folder of exhibits beside the file of bans, one file each, named by its hash."""
EXHIBIT_PATIENCE = 20.0
"""The timeout of an exhibit's fetch without progress, in seconds."""
EXHIBIT_RATE = 1 << 18
"""Bytes/s below which a fetch ends although it progresses; `EXHIBIT_PATIENCE` is added."""


_K = TypeVar("_K")
_V = TypeVar("_V")


@dataclass(frozen=True, slots=True)
class Kept:
    """One ban, as a record of the file."""

    guilty: Peer
    reason: Reason
    claim: Annotated[bytes, Size(MAX_CLAIM_BYTES)]
    """The signed claim that proves it; empty if there was no room left."""


class Bans:
    """One run's bans, as far as this peer knows; persisted if there is a `folder`."""

    def __init__(
        self,
        node: Node,
        terms: Terms,
        folder: Path | None = None,
        terms_in: Callable[[wire.Slot], Terms | None] | None = None,
    ) -> None:
        """`terms_in` returns those of a slot, None where they are not known; without it they are always `terms`."""
        self._node = node
        self._terms = terms
        self._terms_in = terms_in or (lambda slot: terms)
        self._file = LogFile(folder / "bans", node.telemetry) if folder is not None else None
        self._kept: dict[PeerId, Kept] = {}
        self._statements = OwnerStatements(terms.run, "")
        self._withdrawn = ""
        self._convicted: tuple[str, int] | None = None
        """Why I was convicted by evidence myself, and the round of it."""
        self._proof_bytes = 0
        self._seen: dict[bytes, None] = {}
        self._strangers: dict[PeerId, tuple[Conviction, wire.Signed]] = {}
        self._early = EarlyClaims()
        self._greeted: dict[PeerId, tuple[float, int]] = {}
        """Since when a peer has been sent how many bytes of claims: it may have restarted without its memory."""
        self._exhibits = Exhibits()
        self._writing = trio.Lock()
        node.on_message(Accusations, self._receive)

    async def load(self) -> None:
        """Restore the bans of earlier processes. Raises nothing: a file that cannot be used is an event."""
        for kept in await self._node.compute(self._read):
            self._ban(kept, "from the disk")

    def __contains__(self, peer: PeerId) -> bool:
        return peer in self._kept or peer in self._statements.bans

    @property
    def mine(self) -> str:
        """Why I am banned myself; empty while I am not."""
        me = self._node.peer_id
        if me in self._statements.bans:
            return _by_owner(self._statements.bans[me])
        return self._convicted[0] if self._convicted is not None else self._withdrawn

    def follow(self, statements: OwnerStatements, *, withdrawn: str = "") -> None:
        """Carry out the bans and pardons of the run's owner; `withdrawn`: why I am no longer admitted myself, if so."""
        before, self._statements, self._withdrawn = self._statements, statements, withdrawn
        for peer, reason in statements.bans.items():
            if peer not in before.bans:
                self._node.telemetry.emit("peer.banned", peer=peer, step="the run's owner", reason=_by_owner(reason))
                if peer != self._node.peer_id:
                    self._node.ban(peer, _by_owner(reason))
        lifted = [kept for kept in self._kept.values() if self._is_pardoned(kept.guilty, _round_of(kept))]
        for kept in lifted:
            del self._kept[kept.guilty]
            self._proof_bytes -= len(kept.claim)
        if lifted:
            self._node.nursery.start_soon(self._rewrite)
        pardoned = {kept.guilty for kept in lifted} | (before.bans.keys() - statements.bans.keys())
        if self._convicted is not None and self._is_pardoned(self._node.peer_id, self._convicted[1]):
            self._convicted = None
            pardoned.add(self._node.peer_id)
        for peer in sorted(pardoned):
            if peer not in self:
                self._node.pardon(peer)
                self._node.telemetry.emit("peer.pardoned", peer=peer, step="the run's owner")

    def _is_pardoned(self, peer: PeerId, round_: int) -> bool:
        return round_ <= self._statements.pardons.get(peer, -1)

    def advance(self, round_: int) -> None:
        """Enter a round, and judge the claims that have waited for it."""
        for carrier, due in self._early.enter(round_):
            for start in range(0, len(due), MAX_CLAIMS):
                self._receive(carrier, Accusations(tuple(due[start : start + MAX_CLAIMS])))

    def accuse(self, statements: Sequence[wire.Signed], part: int = 0, data: Blob | None = None) -> None:
        """Sign and send the claim that `statements` (see `peer.wire.direct`) prove; `data`: the bytes of its exhibit."""
        if statements[0].sender in self._kept:
            return
        claim = claim_of(self._terms.run, tuple(statements), part)
        signed = sign(self._node.identity, claim)
        try:
            found = self._judged(signed.sender, claim)
        except NetworkError as error:
            self._node.telemetry.emit("evidence.missing", peer=statements[0].sender, step="accuse", reason=str(error))
            return
        if isinstance(found, Pending):
            assert data is not None, "an accusation of bytes comes with them"
            found = look_at(signed.sender, found, data)
        if found.guilty == statements[0].sender:  # Otherwise the accusation would be false, and convict me.
            self._convict(found, signed, data)

    def greet(self, peer: PeerId) -> None:
        """Take in a new member: ban it if a claim has waited for it, else send it my newest claims, once.

        They are sent if it is among the peers that I watch (in a crowd: those that share a round).
        """
        if (waiting := self._strangers.pop(peer, None)) is not None:
            self._convict(*waiting)
        if peer in self._kept or peer not in self._node.watched:
            return
        since, sent = self._greeted.get(peer, (self._node.now(), 0))
        if self._node.now() >= since + GREETING_PERIOD:
            since, sent = self._node.now(), 0
        claims, room = list[bytes](), MAX_GREETING_BYTES - sent
        for kept in reversed(self._kept.values()):
            if kept.claim and len(kept.claim) <= room:  # A long one does not keep back the others.
                room -= len(kept.claim)
                claims.append(kept.claim)
        _bounded(self._greeted, peer, (since, sent + sum(map(len, claims))), MAX_BANS)
        for start in range(0, len(claims), MAX_CLAIMS):
            self._node.send(peer, Accusations(tuple(claims[start : start + MAX_CLAIMS])))

    def _receive(self, carrier: PeerId, message: Accusations) -> None:
        num_signatures = SIGNATURES_PER_CLAIM * len(message.claims)
        work, then = partial(self._judge, message), partial(self._take, carrier)
        self._node.verify(carrier, "accusation", num_signatures, work, then)

    def _judge(self, message: Accusations) -> list[tuple[wire.Signed, Conviction | Pending | None]]:
        """Judge the claims of a message that are new to me; None: too early. Raises `RemoteError` for what is no claim."""
        judged: list[tuple[wire.Signed, Conviction | Pending | None]] = []
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
            try:
                judged.append((signed, self._judged(signed.sender, claim)))
            except NetworkError as error:  # It is not remembered: another peer may bring it again.
                self._node.telemetry.emit("evidence.missing", peer=signed.sender, step="judge a claim", reason=str(error))
                if round_of(claim) > self._early.round:
                    judged.append((signed, None))
        return judged

    def _judged(self, accuser: PeerId, claim: Claim) -> Conviction | Pending:
        slot = slot_of(claim)
        return judge_claim(accuser, claim, self._terms if slot is None else self._terms_in(slot), verify_signed)

    def _take(self, carrier: PeerId, judged: Sequence[tuple[wire.Signed, Conviction | Pending | None]]) -> None:
        for signed, found in judged:
            if signed.signature in self._seen:
                continue
            if found is None:
                self._early.keep(carrier, encode(signed), _about(signed))
            elif isinstance(found, Conviction):
                self._remember(signed)
                self._convict(found, signed)
            elif found.author in self._kept:
                self._remember(signed)
            elif not self._node.knows(found.author):
                self._drop(found.author)
            elif not self._exhibits.expect(carrier):
                self._miss(carrier, signed, "too many exhibits are awaited already")
            else:
                self._remember(signed)
                self._node.nursery.start_soon(self._examine, carrier, signed, found)

    def _remember(self, signed: wire.Signed) -> None:
        _bounded(self._seen, signed.signature, None, MAX_BANS)

    async def _examine(self, carrier: PeerId, signed: wire.Signed, pending: Pending) -> None:
        """Fetch the exhibit of a claim and judge it."""
        exhibit = pending.exhibit
        try:
            async with self._exhibits.turn(carrier):
                with trio.fail_after(EXHIBIT_PATIENCE + exhibit.num_bytes / EXHIBIT_RATE):
                    data = await self._node.fetch(carrier, exhibit.hash, exhibit.num_bytes, patience=EXHIBIT_PATIENCE)
                found = await self._node.compute(look_at, signed.sender, pending, data)
            self._convict(found, signed, data)
        except NetworkError as error:
            self._miss(carrier, signed, str(error))
        except trio.TooSlowError:
            self._miss(carrier, signed, f"{exhibit.num_bytes} bytes did not come in time")
        except RemoteError as error:
            self._node.charge(carrier, "fetch an exhibit", error)

    def _miss(self, carrier: PeerId, signed: wire.Signed, reason: str) -> None:
        """Do without a claim's exhibit; another peer may bring the claim again, with its bytes."""
        self._seen.pop(signed.signature, None)
        self._node.telemetry.emit("evidence.missing", peer=carrier, step="fetch an exhibit", reason=reason)

    def _drop(self, guilty: PeerId) -> None:
        reason = "it is in no member table" if len(self._kept) < MAX_BANS else "too many bans are kept"
        self._node.telemetry.emit("evidence.dropped", peer=guilty, step="ban", reason=reason)

    def _convict(self, found: Conviction, signed: wire.Signed, data: Blob | None = None) -> None:
        node, guilty = self._node, found.guilty
        round_ = _about(signed)
        if self._is_pardoned(guilty, round_):
            reason = f"the run's owner has pardoned what it did up to round {self._statements.pardons[guilty]}"
            node.telemetry.emit("evidence.dropped", peer=guilty, step="ban", reason=reason)
        elif guilty == node.peer_id:
            self._convicted = found.reason, round_
            node.telemetry.emit("peer.banned", peer=guilty, step="this peer itself", reason=found.reason)
        elif guilty not in self._kept:
            if not node.knows(guilty):
                _bounded(self._strangers, guilty, (found, signed), MAX_STRANGERS)
            if not node.knows(guilty) or len(self._kept) >= MAX_BANS:
                self._drop(guilty)
                return
            claim = encode(signed)
            if data is not None:
                node.blobs.put(digest(data), data)
            node.send(sorted(node.watched - {guilty}), Accusations((claim,)))
            if self._proof_bytes + len(claim) > MAX_PROOF_BYTES:
                claim, reason = b"", f"the claims take {self._proof_bytes} bytes already"
                node.telemetry.emit("evidence.unproven", peer=guilty, step="ban", reason=reason)
            kept = Kept(guilty, found.reason[: wire.MAX_REASON], claim)
            self._ban(kept, f"accused by {signed.sender}")
            self._remember(signed)
            node.nursery.start_soon(self._write, kept, data)

    def _ban(self, kept: Kept, step: str) -> None:
        self._kept[kept.guilty] = kept
        self._proof_bytes += len(kept.claim)
        self._node.telemetry.emit("peer.banned", peer=kept.guilty, step=step, reason=kept.reason)
        self._node.ban(kept.guilty, kept.reason)

    async def _rewrite(self) -> None:
        """Write the file anew without the bans that were lifted."""
        if self._file is not None:
            async with self._writing:
                await self._node.compute(self._replace, self._file, list(self._kept.values()))

    def _replace(self, file: LogFile, kept: Sequence[Kept]) -> None:
        try:
            file.rewrite(map(encode, kept))
        except (OSError, LocalError) as error:  # The next process lifts them again: the owner's statements are kept, too.
            self._node.telemetry.emit("evidence.unwritten", step="lift bans", reason=str(error))

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
            if data is not None:
                sizes = [exhibit.stat().st_size for exhibit in _exhibits(file)]
                if len(sizes) < MAX_EXHIBITS and sum(sizes) + len(data) <= MAX_EXHIBITS_BYTES:
                    write_whole(file.path.with_name(EXHIBITS) / digest(data).hex(), bytes(data))
                else:
                    reason = f"{len(sizes)} exhibits take {sum(sizes)} bytes already"
                    self._node.telemetry.emit("evidence.unproven", peer=kept.guilty, step="save", reason=reason)
            file.append(encode(kept))  # Last, so that a restored ban can be proven to others.
        except (OSError, LocalError) as error:
            reason = f"the ban of {kept.guilty} will not outlive this process: {error}"
            self._node.telemetry.emit("evidence.unwritten", peer=kept.guilty, step="save", reason=reason)


def _by_owner(reason: str) -> str:
    return f"by the run's owner: {reason}" if reason else "by the run's owner"


def _about(signed: wire.Signed) -> int:
    """Return the round that a signed claim is about."""
    return round_of(decode(Claim, signed.payload, max_bytes=MAX_CLAIM_BYTES))


def _round_of(kept: Kept) -> int:
    """Return the round of the evidence of a ban; 0 if it was kept without its claim."""
    try:
        return _about(decode(wire.Signed, kept.claim, max_bytes=MAX_CLAIM_BYTES))
    except MalformedMessage:
        return 0


def _bounded(entries: dict[_K, _V], key: _K, value: _V, most: int) -> None:
    """Add an entry, and drop the oldest beyond `most`."""
    entries[key] = value
    while len(entries) > most:
        del entries[next(iter(entries))]


def _exhibits(file: LogFile) -> list[Path]:
    return sorted(file.path.with_name(EXHIBITS).glob("[!.]*"))  # A draft has a dot before its name.
