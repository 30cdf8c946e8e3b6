"""How peers keep to the rules of a run, and I myself: what I promised, what others said, who is banned."""

from collections.abc import Callable, Iterable
from pathlib import Path

from ...dht.run.admission import Charter
from ...peer import wire
from ...peer.errors import RemoteError
from ...peer.node.node import Node
from ...peer.transport import PeerId
from ..chain.certificate import certificate_hash, heard, result_of, signed_in
from .bans import Bans
from .evidence import Terms, Witness
from .promises import Promises
from .trust import WINDOW, Standing, Trust


class Conduct:
    """What a peer keeps of conduct; over its restarts too where there is a `folder`."""

    def __init__(
        self,
        node: Node,
        terms: Terms,
        charter: Charter,
        folder: Path | None = None,
        history: Callable[[int], wire.Certificate | None] = lambda round_: None,
    ) -> None:
        self.promises = Promises(node.telemetry, folder / "spoken" if folder is not None else None)
        self.bans = Bans(node, terms, folder / "evidence" if folder is not None else None)
        self._witness = Witness()
        self._round = 0
        self._charter = charter
        self._history = history
        self._trust = Trust(charter.earned)
        self._lied: dict[PeerId, int] = {}

    def advance(self, round_: int, certificate: wire.Certificate | None) -> None:
        """The round that I am in, since I hold the state that `certificate` proves (None: the run's start)."""
        self._round = round_
        self._witness.advance(round_)
        if certificate is None:
            self._trust = Trust(self._charter.earned)
        elif certificate_hash(certificate) != self._trust.head:
            if result_of(certificate).previous != self._trust.head:
                self._trust = self._traced(certificate)
            self._trust.take(certificate)

    def standing(self, peer: PeerId) -> Standing | None:
        """What a peer has earned; None where the certificates that I hold do not tell."""
        return self._trust.of(peer)

    def distrust(self, liars: Iterable[PeerId]) -> None:
        """What these made of a part was not the sum of the contributions: no proof to others, but I saw it."""
        self._lied |= dict.fromkeys(liars, self._round)

    def may_own(self, peer: PeerId) -> bool:
        """Whether I would give a peer a part: not who has lied about one within the last `WINDOW` rounds."""
        return peer not in self._lied or self._round - self._lied[peer] >= WINDOW

    def _traced(self, certificate: wire.Certificate) -> Trust:
        """Trust from the certificates before this one, as far as I hold them and as they count."""
        found: list[wire.Certificate] = []
        while len(found) < WINDOW:
            before = self._history(certificate.slot.round - 1)
            if before is None or certificate_hash(before) != result_of(certificate).previous:
                break
            found.append(before)
            certificate = before
        trust = Trust(self._charter.earned)
        for earlier in reversed(found):
            trust.take(earlier)
        return trust

    def hear(self, signed: wire.Signed, message: wire.RoundMessage) -> None:
        """Somebody's word, its signature checked: one that contradicts an earlier one convicts its author."""
        self._see(signed, message)
        if isinstance(message, wire.Void):  # What others said comes with it.
            self._look_into(message.acks)

    def examine(self, certificate: wire.Certificate) -> None:
        """A certificate, checked before: two of one slot hold statements of the same peers."""
        self._look_into((certificate.roster, certificate.cut, *certificate.acks))

    def _look_into(self, packed: tuple[bytes, ...]) -> None:
        for data in packed:
            try:
                signed = signed_in(data)
                self._see(signed, heard(signed))
            except RemoteError:
                continue  # Who passes on what nobody signed proves nothing about anybody.

    def _see(self, signed: wire.Signed, message: wire.RoundMessage) -> None:
        earlier = self._witness.see(signed, message, self._round)
        if earlier is not None:
            self.bans.accuse((earlier, signed))
