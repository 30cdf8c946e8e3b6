"""Certificates in few bytes, for the ledger, its pages and the directory; and a trail of them, checked.

A certificate repeats what its quorum agreed on once for every signature. At 64 members that is 107 kB of which 15 kB are
left by zlib; the directory takes 64 kB, and a ledger keeps one for every round. What is unpacked is checked like any
other message, so that nothing depends on how it was packed.
"""

import zlib
from collections.abc import Sequence

from ...dht.run.admission import OPEN, Charter
from ...peer import wire
from ...peer.errors import MalformedMessage, ProtocolViolation
from ...peer.wire.schema import decode, encode
from .certificate import Verify, check_certificate
from .chain import Link, check_trail

MAX_PLAIN_BYTES = 256_000
"""Of one certificate, unpacked: enough for 64 signatures of 64 members."""


def pack(certificate: wire.Certificate) -> bytes:
    """The bytes that `unpack` takes."""
    return zlib.compress(encode(certificate))


def unpack(data: bytes) -> wire.Certificate:
    """A certificate, unchecked, from anybody's bytes, in at most `MAX_PLAIN_BYTES`. Raises `MalformedMessage`."""
    inflater = zlib.decompressobj()
    try:
        plain = inflater.decompress(data, MAX_PLAIN_BYTES)
    except zlib.error as error:
        raise MalformedMessage(f"not a packed certificate: {error}") from error
    if not inflater.eof or inflater.unused_data:
        raise MalformedMessage("a packed certificate that is too long, cut off, or followed by something else")
    return decode(wire.Certificate, plain, max_bytes=MAX_PLAIN_BYTES)


def checked(
    certificates: Sequence[wire.Certificate], run: str, verify: Verify, charter: Charter = OPEN
) -> list[Link]:
    """The links of certificates that follow each other. Raises `RemoteError` where one is not valid or not of this run."""
    for certificate in certificates:
        check_certificate(certificate, verify, charter=charter)
        if certificate.slot.run != run:
            raise ProtocolViolation("a certificate of another run")
    links = [Link.of(certificate) for certificate in certificates]
    check_trail(links)
    return links
