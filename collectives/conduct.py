"""How peers keep to the rules of a run, and I myself: what I promised, what others said, who is banned."""

from pathlib import Path

from ..peer import wire
from ..peer.errors import RemoteError
from ..peer.node import Node
from .bans import Bans
from .evidence import Terms, Witness
from .promises import Promises
from .quorum import heard, signed_in


class Conduct:
    """What a peer keeps of conduct; over its restarts too where there is a `folder`."""

    def __init__(self, node: Node, terms: Terms, folder: Path | None = None) -> None:
        self.promises = Promises(node.telemetry, folder / "spoken" if folder is not None else None)
        self.bans = Bans(node, terms, folder / "evidence" if folder is not None else None)
        self._witness = Witness()
        self._round = 0

    def advance(self, round_: int) -> None:
        """The round that I am in."""
        self._round = round_
        self._witness.advance(round_)

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
