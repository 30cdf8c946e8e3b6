"""The head of a run that a bootstrap follows: what it takes to move it. Pure.

A bootstrap that follows a run holds its newest certificate and the marks of its chain. It takes the next certificate if
that continues this chain and has a quorum of the electorate which the one before determines, by the rules of the signed
manifest. It never goes back, never changes to another chain, and needs no tensor for that.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from ...dht.run.admission import Charter
from ...dht.run.manifest import SignedManifest
from ...peer import wire
from ...peer.base.errors import ProtocolViolation, RemoteError
from ...peer.base.transport import PeerId
from ...peer.wire.schema import Size, decode, encode
from ...peer.wire.signed import Verify
from ..chain.certificate import certificate_hash, genesis, value_of
from ..chain.packed import checked, pack_certificate, unpack_certificate
from ..chain.voters import electorate_after
from ..spec import charter_of
from .marks import MAX_MARKS_BYTES, Mark, Marks, thinned

MAX_FOLLOWED_BYTES = wire.MAX_PACKED_BYTES + MAX_MARKS_BYTES + 256
"""A file; with six keepers it has 10 kB."""


@dataclass(frozen=True, slots=True)
class FollowedRun:
    """A run that is followed, as it is kept on disk."""

    network: Annotated[str, Size(64)]
    """From where its head was published last; that network's runs give way to each other."""
    certificate: Annotated[bytes, Size(wire.MAX_PACKED_BYTES)]
    """The packed certificate of the head; empty before the first round."""
    chain: Marks

    @property
    def head(self) -> Mark:
        """The newest mark."""
        return self.chain.head

    def newest(self) -> wire.Certificate | None:
        """Return the certificate of the head; None before the first round."""
        return unpack_certificate(self.certificate) if self.certificate else None

    def voters(self, charter: Charter) -> tuple[PeerId, ...]:
        """Return the peers that decide the next round, then the other members of the last roster."""
        newest = self.newest()
        value = None if newest is None else value_of(newest)
        return *electorate_after(value, charter).voters, *(() if value is None else value.members)


def charter_followed(signed: SignedManifest) -> Charter | None:
    """Return the rules of a run that a bootstrap can follow; None for one that shows its certificates to members only."""
    charter = charter_of(signed)
    return charter if charter.earned else None


def before_first_round(run: str, network: str) -> FollowedRun:
    """Return the state of a run without a certified round."""
    return FollowedRun(network, b"", Marks(run, (Mark(0, genesis(run)),)))


def started_at(certificate: wire.Certificate, at: Mark, network: str, verify: Verify, charter: Charter) -> FollowedRun:
    """Return the state of a run from a certificate on that my operator names by its hash. Raises `RemoteError`."""
    run = charter.run
    checked([certificate], run, verify, charter)
    if _mark_of(certificate) != at:
        raise ProtocolViolation(f"the certificate of round {certificate.slot.round} is not the one that is to be followed")
    return FollowedRun(network, pack_certificate(certificate), Marks(run, (at,)))


def followed_on(
    followed: FollowedRun, page: Sequence[wire.Certificate], network: str, verify: Verify, charter: Charter
) -> tuple[FollowedRun, RemoteError | None]:
    """Follow a run along the valid certificates of a page; returns the new state, and why the next one is not taken."""
    before, error = followed.newest(), None
    marks = followed.chain.marks
    for certificate in page:
        try:
            _check_next(certificate, marks[-1], before, verify, charter)
        except RemoteError as raised:
            error = raised
            break
        before, marks = certificate, thinned((*marks, _mark_of(certificate)), certificate.slot.round)
    if before is None or marks is followed.chain.marks:
        return followed, error
    return FollowedRun(network, pack_certificate(before), Marks(followed.chain.run, marks)), error


def _check_next(
    certificate: wire.Certificate, head: Mark, before: wire.Certificate | None, verify: Verify, charter: Charter
) -> None:
    if (certificate.slot.round, certificate.slot.previous) != (head.round + 1, head.hash):
        raise ProtocolViolation(f"the certificate of round {certificate.slot.round} does not continue the chain at {head}")
    checked([certificate], charter.run, verify, charter, before=before)


def num_signatures(certificate: wire.Certificate) -> int:
    """Return how many signatures a certificate takes to check: of its voters and seats."""
    seats = value_of(certificate).seats
    return len(certificate.voters) + sum(bool(seat.voucher) + bool(seat.invite) for seat in seats)


def encode_followed(followed: FollowedRun) -> bytes:
    """Encode a followed run for the disk."""
    return encode(followed)


def decode_followed(data: bytes, run: str) -> FollowedRun:
    """Decode what the disk has of a run. Raises `RemoteError` if it is damaged."""
    followed = decode(FollowedRun, data, max_bytes=MAX_FOLLOWED_BYTES)
    newest = followed.newest()
    head = Mark(0, genesis(run)) if newest is None else _mark_of(newest)
    if followed.chain.run != run or followed.head != head or (newest is not None and newest.slot.run != run):
        raise ProtocolViolation("the marks are not those of its certificate")
    return followed


def _mark_of(certificate: wire.Certificate) -> Mark:
    return Mark(certificate.slot.round, certificate_hash(certificate))
