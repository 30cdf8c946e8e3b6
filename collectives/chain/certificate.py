"""Certificates of rounds: validation, hashes, and the value that they decide. Pure.

Every peer computes the same answers from the same bytes. A certificate has two parts that are checked apart: what it says
and who signed it (`check_certificate`), and whether the signers may decide (`check_votes`), which takes the electorate that
the certificate before it determines (`voters`).
"""

from collections.abc import Sequence
from functools import lru_cache

from ...dht.run.admission import OPEN, Charter
from ...dht.run.manifest import Manifest, SignedManifest
from ...dht.run.revision import revised_by, why_not_revision
from ...peer import wire
from ...peer.base.digest import keyed
from ...peer.base.errors import BadSignature, NoRightToVote, ProtocolViolation
from ...peer.base.transport import PeerId
from ...peer.wire.schema import decode, encode
from ...peer.wire.signed import Verify
from ..agreement.electorate import Electorate
from ..vector.partition import num_parts


def genesis(run: str) -> bytes:
    """Return the hash that the certificate of a run's first round names as its predecessor."""
    return keyed("genesis of a run", run.encode())


@lru_cache(maxsize=512)  # All statements and certificates of a round name the same few values.
def value_hash(value: bytes) -> bytes:
    """Return the hash of an encoded `wire.Value`: what voters accept and confirm."""
    return keyed("value of a round", value)


@lru_cache(maxsize=512)
def open_value(value: bytes) -> wire.Value:
    """Decode a value, its contents unchecked. Raises `MalformedMessage`."""
    return decode(wire.Value, value, max_bytes=wire.MAX_VALUE_BYTES)


def certificate_hash(certificate: wire.Certificate) -> bytes:
    """Return the hash that identifies a certificate: of its value, whoever signed this copy."""
    return value_hash(certificate.value)


def value_of(certificate: wire.Certificate | wire.Proof) -> wire.Value:
    """Return the value of a certificate or a proof. Raises `MalformedMessage`."""
    return open_value(certificate.value)


def settings_after(certificate: wire.Certificate | None, signed: SignedManifest) -> Manifest:
    """Return the settings of the round after a certificate, which was checked; None: of the first round.

    Raises `UsageError` if the owner has revised what this version does not know.
    """
    return revised_by(signed, b"" if certificate is None else value_of(certificate).revision)


def check_certificate(certificate: wire.Certificate, verify: Verify, *, charter: Charter = OPEN) -> wire.Value:
    """Validate all of a certificate but its voters' right to vote (`check_votes`); returns its value.

    Raises `BadSignature` or `ProtocolViolation`. Every signature is checked. The run's `charter` must have admitted all
    members.
    """
    return _check_signed_by(certificate, wire.Precommit, verify, charter)


def check_proof(proof: wire.Proof, verify: Verify, *, charter: Charter = OPEN) -> wire.Value:
    """Validate a proof as `check_certificate` does a certificate."""
    return _check_signed_by(proof, wire.Prevote, verify, charter)


def check_votes(quorum: wire.Certificate | wire.Proof, electorate: Electorate) -> None:
    """Raise `ProtocolViolation` unless a validated certificate or proof has a quorum of its round's electorate."""
    kind = type(quorum).__name__.lower()
    strangers = sorted(set(quorum.voters) - electorate.votes.keys())
    if strangers:
        raise ProtocolViolation(f"a {kind} signed by {strangers[0]}, which has no vote in its round")
    if not electorate.is_quorum(quorum.voters):
        raise ProtocolViolation(f"a {kind} with {electorate.votes_of(quorum.voters)} of {electorate.quorum} votes")


def check_right_to_vote(certificate: wire.Certificate, charter: Charter) -> None:
    """Raise `NoRightToVote` unless most voters of a certificate show that they may vote.

    For who does not hold the certificate before it. Where every member votes, and anybody is admitted, that shows nothing.
    """
    value = value_of(certificate)
    seats = zip(value.members, value.seats, strict=True)
    may_vote = {peer for peer, seat in seats if charter.may_vote(peer, seat.invite, seat.voucher)}
    may_vote |= charter.keepers or frozenset()
    if 2 * len(may_vote.intersection(certificate.voters)) <= len(certificate.voters):
        raise NoRightToVote("a certificate whose voters show no right to vote")


def why_not_seats(members: Sequence[PeerId], seats: Sequence[wire.Seat], charter: Charter) -> str | None:
    """Return why the seats of a roster do not fit a run; None if they do."""
    if len(seats) != len(members):
        return f"{len(seats)} seats for {len(members)} members"
    if len(set(members)) != len(members):
        return "a member has two seats"
    if len(members) < charter.min_peers:
        return f"{len(members)} members, where the run asks for {charter.min_peers}"
    for peer, seat in zip(members, seats, strict=True):
        if why_not := charter.why_not_admit(peer, seat.invite):
            return f"it includes {peer}: {why_not}"
    return charter.overbooked(seat.invite for seat in seats) or None


@lru_cache(maxsize=512)  # Rosters hold the Readys that have also arrived by themselves.
def signed_in(data: bytes) -> wire.Signed:
    """Decode a signed message inside another message, its signature unchecked. Raises `MalformedMessage`."""
    return decode(wire.Signed, data, max_bytes=wire.MAX_SIGNED_BYTES)


def _check_signed_by(
    quorum: wire.Certificate | wire.Proof, kind: type[wire.Precommit] | type[wire.Prevote], verify: Verify, charter: Charter
) -> wire.Value:
    value, slot = value_of(quorum), quorum.slot
    if (value.run, value.round, value.previous) != slot.decision:
        raise ProtocolViolation("a certificate whose value is of another round")
    if why_not := _why_not_value(value, charter):
        raise ProtocolViolation(f"a certificate of a wrong value: {why_not}")
    if list(quorum.voters) != sorted(set(quorum.voters)) or len(quorum.signatures) != len(quorum.voters):
        raise ProtocolViolation("a certificate that does not list its voters once each, with their signatures")
    payload, code = encode(kind(slot, value_hash(quorum.value))), wire.code_of_kind(kind)
    for voter, signature in zip(quorum.voters, quorum.signatures, strict=True):
        if not verify(wire.Signed(voter, code, payload, signature)):
            raise BadSignature(f"a certificate with a wrong signature of {voter}")
    return value


def _why_not_value(value: wire.Value, charter: Charter) -> str:
    members = len(value.members)
    if flaw := why_not_seats(value.members, value.seats, charter):
        return flaw
    parts = num_parts(value.members)
    if len(value.bounds) != parts + 1 or len(value.outputs) != parts:
        return f"{len(value.bounds) - 1} parts and {len(value.outputs)} outputs for {members} members"
    if list(value.contributors) != sorted(set(value.contributors)) or value.contributors[-1] >= members:
        return "its contributors are not members in order"
    if not set(value.flagged) <= set(value.contributors):
        return "it flags a member that did not contribute"
    if len(value.credit) != len(value.contributors):
        return f"credit for {len(value.credit)} of {len(value.contributors)} contributors"
    if any(tokens for tokens, index in zip(value.credit, value.contributors, strict=True) if index in value.flagged):
        return "credit for a contribution that it flags"
    return why_not_revision(value.revision, b"", value.run, charter.owner, charter.manifest)


def why_not_revised(before: wire.Value | None, value: wire.Value, charter: Charter) -> str:
    """Return why a validated value cannot name its revision after the value before; empty if it can."""
    known = b"" if before is None else before.revision
    return why_not_revision(value.revision, known, value.run, charter.owner, charter.manifest)
