"""Compression of certificates for ledger and directory; validation of consecutive ones.

A certificate of 64 members has some 13 kB; the directory takes 64 kB, and a ledger keeps one for every round. An unpacked
certificate is validated like any other message, so nothing depends on how it was packed.
"""

import zlib
from collections.abc import Sequence

from ...dht.run.admission import OPEN, Charter
from ...peer import wire
from ...peer.base.errors import MalformedMessage, ProtocolViolation, RemoteError
from ...peer.wire.schema import decode, encode
from ...peer.wire.signed import Verify
from .certificate import check_certificate, check_votes, genesis, value_of, why_not_revised
from .chain import ChainLink, check_consecutive
from .voters import electorate_after

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
    certificates: Sequence[wire.Certificate],
    run: str,
    verify: Verify,
    charter: Charter = OPEN,
    *,
    before: wire.Certificate | None = None,
) -> list[ChainLink]:
    """Validate consecutive certificates; returns their links. Raises `RemoteError` if one is not valid or not of this run.

    Each must have a quorum of the voters that the one before determines, the first one of those after `before`. Without
    that, who may vote on the first one is not known, unless it is the run's first: whoever passes it here trusts it.
    """
    if any(certificate.slot.run != run for certificate in certificates):
        raise ProtocolViolation("a certificate of another run")
    links = [ChainLink.of(certificate) for certificate in certificates]
    check_consecutive(links if before is None else [ChainLink.of(before), *links])
    if links and links[0].head.round == 1 and links[0].previous != genesis(run):
        raise ProtocolViolation("the certificate of a first round that follows another one")
    last = None if before is None else value_of(before)
    electorate = electorate_after(last, charter)
    for place, certificate in enumerate(certificates):
        value = check_certificate(certificate, verify, charter=charter)
        if place or before is not None or value.round == 1:
            check_votes(certificate, electorate)
            if why_not := why_not_revised(last, value, charter):
                raise ProtocolViolation(f"the certificate of round {value.round}: {why_not}")
        last, electorate = value, electorate_after(value, charter)
    return links


def why_not_next(
    certificate: wire.Certificate, decision: tuple[wire.RunId, int, bytes], before: wire.Certificate | None, charter: Charter
) -> str:
    """Return why a validated certificate does not decide this (run, round, previous) after `before`; empty if it does."""
    if certificate.slot.round != decision[1]:
        return f"my round is {decision[1]}"
    if certificate.slot.decision != decision:
        return "it continues another chain than mine"
    last = None if before is None else value_of(before)
    if why_not := why_not_revised(last, value_of(certificate), charter):
        return why_not
    try:
        check_votes(certificate, electorate_after(last, charter))
    except ProtocolViolation as error:
        return str(error)
    return ""


def continued(
    page: Sequence[wire.Certificate], before: wire.Certificate | None, run: str, verify: Verify, charter: Charter
) -> tuple[list[wire.Certificate], RemoteError | None]:
    """Return the certificates of a page that continue the chain of `before`, or begin the run, and why the next does not.

    Each has a quorum of the voters that the one before it determines.
    """
    valid: list[wire.Certificate] = []
    for certificate in page:
        try:
            if before is None and certificate.slot.round != 1:
                raise ProtocolViolation(f"the certificate of round {certificate.slot.round} is not that of the first")
            checked([certificate], run, verify, charter, before=before)
        except RemoteError as error:
            return valid, error
        valid.append(before := certificate)
    return valid, None
