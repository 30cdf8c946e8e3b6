"""The head of a run that a bootstrap follows: what it takes to move it. Pure.

A bootstrap that follows a run holds its newest certificate and the marks of its chain. It takes the certificates that a
reader has verified (`chain.reader`). It never goes back, never changes to another chain, and needs no tensor for that.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from ...dht.run.admission import Charter
from ...dht.run.manifest import SignedManifest
from ...peer import wire
from ...peer.base.errors import ProtocolViolation
from ...peer.base.transport import PeerId
from ...peer.wire.schema import Size, decode, encode
from ..chain.certificate import certificate_hash, genesis, value_of
from ..chain.chain import Head, HeldChain
from ..chain.packed import pack_certificate, unpack_certificate
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

    def held(self) -> HeldChain:
        """Return the chain as a `ChainReader` continues it."""
        newest, head = self.newest(), Head(self.head.round, self.head.hash, tokens=0)
        return HeldChain.of([] if newest is None else [newest], head)

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


def named_by_operator(run: str, at: Mark, network: str) -> FollowedRun:
    """Return the state of a run that is followed from a certificate on which this bootstrap's operator names by its hash."""
    return FollowedRun(network, b"", Marks(run, (at,)))


def followed_on(followed: FollowedRun, page: Sequence[wire.Certificate], network: str) -> FollowedRun:
    """Return the state of a run after certificates that a reader has verified (`chain.reader`)."""
    marks = followed.chain.marks
    for certificate in page:
        marks = thinned((*marks, _mark_of(certificate)), certificate.slot.round)
    return FollowedRun(network, pack_certificate(page[-1]), Marks(followed.chain.run, marks))


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
