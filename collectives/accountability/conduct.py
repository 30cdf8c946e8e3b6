"""The conduct of peers in a run: signing guard, witness of equivocation, bans, trust."""

from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from ...dht.run.admission import Charter
from ...peer import wire
from ...peer.errors import RemoteError
from ...peer.node.node import Node
from ...peer.transport import PeerId
from ...peer.wire.signed import open_signed
from ..chain.certificate import certificate_hash, result_of, signed_in
from ..spec import Terms
from .bans import Bans
from .evidence import Witness
from .signing import SigningGuard
from .trust import TRUST_WINDOW, Trust, TrustRecord


class Conduct:
    """One peer's record of conduct; it survives restarts if there is a `folder`.

    `is_known`: earlier processes took part in this run.
    """

    def __init__(
        self,
        node: Node,
        terms: Terms,
        charter: Charter,
        folder: Path | None = None,
        history: Callable[[int], wire.Certificate | None] = lambda round_: None,
        *,
        is_known: bool = False,
    ) -> None:
        path = folder / "spoken" if folder is not None else None
        self.guard = SigningGuard(node.identity, node.telemetry, path, is_known=is_known)
        self.bans = Bans(node, terms, folder / "evidence" if folder is not None else None)
        self._node = node
        self._witness = Witness()
        self._slot = wire.Slot(terms.run, 0, 0)
        self._charter = charter
        self._history = history
        self._trust = Trust(charter.earned)
        self._lied: dict[PeerId, int] = {}

    def advance(self, round_: int, certificate: wire.Certificate | None) -> None:
        """Enter a round with the state that `certificate` proves (None: the run's start), and update trust by it."""
        self._slot = wire.Slot(self._slot.run, round_, 0)
        self._witness.advance(round_)
        if certificate is None:
            self._trust = Trust(self._charter.earned)
        elif certificate_hash(certificate) != self._trust.head:
            if result_of(certificate).previous != self._trust.head:
                self._trust = self._traced(certificate)
            self._trust.take(certificate)
            self.guard.certified(certificate.slot.round, {signed_in(ack).sender for ack in certificate.acks})
            if self._node.peer_id in self._trust.all():
                self.guard.named()

    def begin(self, round_: int, attempt: int) -> wire.Slot:
        """Begin an attempt, this one or a later one in which I have certainly signed nothing; return its slot."""
        slot = wire.Slot(self._slot.run, round_, max(attempt, self.guard.begin(round_)))
        if round_ == self._slot.round:
            self._slot = slot
        return slot

    def trust_of(self, peer: PeerId) -> TrustRecord | None:
        """Return a peer's trust record; None if the certificates that I hold do not show it."""
        return self._trust.of(peer)

    def distrust(self, owners: Iterable[PeerId]) -> None:
        """Remember owners whose output of a part was not the sum of the contributions: it is no evidence for others."""
        self._lied |= dict.fromkeys(owners, self._slot.round)

    def may_own(self, peer: PeerId) -> bool:
        """Return True if I would give a peer a part: it has not lied about one within the last `TRUST_WINDOW` rounds."""
        return peer not in self._lied or self._slot.round - self._lied[peer] >= TRUST_WINDOW

    def _traced(self, certificate: wire.Certificate) -> Trust:
        """Replay trust from the certificates before this one, as far back as I hold them and they count."""
        found: list[wire.Certificate] = []
        while len(found) < TRUST_WINDOW:
            before = self._history(certificate.slot.round - 1)
            if before is None or certificate_hash(before) != result_of(certificate).previous:
                break
            found.append(before)
            certificate = before
        trust = Trust(self._charter.earned)
        for earlier in reversed(found):
            trust.take(earlier)
        return trust

    def receive(self, signed: wire.Signed, message: wire.RoundMessage) -> None:
        """Witness a member's message whose signature is checked; if it contradicts an earlier one, its author is accused."""
        self._witness_message(signed, message)
        if isinstance(message, wire.Void):
            self._look_into(message.acks)

    def examine(self, certificate: wire.Certificate) -> None:
        """Witness the messages of a validated certificate: two certificates of one slot hold statements of the same peers."""
        self._look_into((certificate.roster, certificate.cut, *certificate.acks))

    def _look_into(self, packed: tuple[bytes, ...]) -> None:
        for data in packed:
            try:
                signed = signed_in(data)
                if not self._node.knows(signed.sender):
                    continue  # Anybody can make keys that contradict themselves; nobody is helped by their ban.
                self._witness_message(signed, open_signed(signed))
            except RemoteError:
                continue  # Without a valid signature it proves nothing about anybody.

    def _witness_message(self, signed: wire.Signed, message: wire.RoundMessage) -> None:
        if not self._node.knows(signed.sender):
            return  # Keys are free: what one says that is in nobody's table matters to nobody.
        earlier = self._witness.see(signed, message, self._slot)
        if earlier is not None:
            self.bans.accuse((earlier, signed))


def open_void(signed: wire.Signed) -> wire.RoundMessage:
    """Verify and decode a signed Void, and verify what it carries: those who read that later find the result cached.

    Raises `BadSignature` or `MalformedMessage` for the Void itself.
    """
    message = open_signed(signed)
    for data in message.acks if isinstance(message, wire.Void) else ():
        with suppress(RemoteError):
            open_signed(signed_in(data))
    return message
