"""Where a state stands in its run, and what proves that it does. Pure."""

from dataclasses import dataclass
from typing import TypeAlias

from ..dht.run.admission import OPEN, Charter
from ..peer import wire
from ..peer.errors import ProtocolViolation
from .chain.certificate import certificate_hash, check_certificate, result_of, verify
from .chain.chain import NOTHING, Head


@dataclass(frozen=True, slots=True)
class Place:
    """Where a state stands in its run: `round` rounds were applied, the last one as `certificate` proves."""

    round: int
    root: bytes
    tokens: int
    certificate: wire.Certificate | None

    @property
    def head(self) -> Head:
        """The end of the chain of certificates that leads to this state."""
        if self.certificate is None:
            return NOTHING
        return Head(self.round, certificate_hash(self.certificate), self.tokens)

    @property
    def certified(self) -> bytes | None:
        """The root that this state must have; None at the start of a run, where no round says so."""
        return None if self.certificate is None else result_of(self.certificate).next_root


Stated: TypeAlias = tuple[int, bytes, bytes]
"""A place as it is offered (`wire.StateOffer`): round, root, packed certificate."""


def start_of_run(root: bytes) -> Place:
    """The place of a state that no round has made."""
    return Place(0, root, 0, None)


def place_after(certificate: wire.Certificate, run: str, charter: Charter = OPEN) -> Place:
    """The place that a certificate of this run proves. Raises `RemoteError`; for `charter` see `check_certificate`."""
    _, _, result = check_certificate(certificate, verify, charter=charter)
    if certificate.slot.run != run:
        raise ProtocolViolation("a certificate of another run")
    return Place(certificate.slot.round, result.next_root, result.tokens, certificate)
