"""Compression of certificates for ledger and directory; validation of a trail.

A certificate repeats the agreed result with every signature. At 64 members that is 107 kB, which zlib reduces to 15 kB;
the directory takes 64 kB, and a ledger keeps one for every round. An unpacked certificate is validated like any other
message, so nothing depends on how it was packed.
"""

import zlib
from collections.abc import Sequence

from ...dht.run.admission import OPEN, Charter
from ...peer import wire
from ...peer.errors import MalformedMessage, ProtocolViolation
from ...peer.wire.schema import decode, encode
from ...peer.wire.signed import Verify
from .certificate import check_certificate
from .chain import ChainLink, check_trail

MAX_PLAIN_BYTES = 256_000
"""The limit of one certificate, unpacked: enough for 64 signatures of 64 members."""


def pack_certificate(certificate: wire.Certificate) -> bytes:
    """Compress a certificate for `unpack_certificate`."""
    return zlib.compress(encode(certificate))


def unpack_certificate(data: bytes) -> wire.Certificate:
    """Decompress an untrusted certificate, not yet validated, of at most `MAX_PLAIN_BYTES`. Raises `MalformedMessage`."""
    inflater = zlib.decompressobj()
    try:
        plain = inflater.decompress(data, MAX_PLAIN_BYTES)
    except zlib.error as error:
        raise MalformedMessage(f"not a packed certificate: {error}") from error
    if not inflater.eof or inflater.unused_data:
        raise MalformedMessage("a packed certificate that is too long, truncated, or followed by something else")
    return decode(wire.Certificate, plain, max_bytes=MAX_PLAIN_BYTES)


def checked(
    certificates: Sequence[wire.Certificate], run: str, verify: Verify, charter: Charter = OPEN
) -> list[ChainLink]:
    """Validate consecutive certificates; returns their links. Raises `RemoteError` if one is not valid or not of this run."""
    for certificate in certificates:
        check_certificate(certificate, verify, charter=charter)
        if certificate.slot.run != run:
            raise ProtocolViolation("a certificate of another run")
    links = [ChainLink.of(certificate) for certificate in certificates]
    check_trail(links)
    return links
