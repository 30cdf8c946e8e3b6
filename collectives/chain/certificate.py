"""Certificates of rounds: validation, hashes, and the result that they certify. Pure.

Every peer computes the same answers from the same signed messages.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import TypeVar

from ...dht.run.admission import OPEN, Charter
from ...peer import wire
from ...peer.digest import keyed
from ...peer.errors import BadSignature, MalformedMessage, ProtocolViolation
from ...peer.transport import PeerId
from ...peer.wire.schema import decode
from ...peer.wire.signed import Verify
from .quorum import quorum, suffices

SettledResult = tuple[tuple[wire.Signed, ...], wire.ResultAck] | None
_M = TypeVar("_M", wire.Roster, wire.Cut, wire.ResultAck)


def commits_hash(commits: Iterable[wire.Signed]) -> bytes:
    """Return the hash that a `Cut` binds: of the contributors' signed commits, in the order of the cut."""
    return keyed("commits of a cut", *(commit.hash for commit in commits))


def check_certificate(
    certificate: wire.Certificate, verify: Verify, *, charter: Charter = OPEN
) -> tuple[wire.Roster, wire.Cut, wire.ResultAck]:
    """Validate a certificate; returns the roster, the cut and the acknowledged result that it proves.

    Raises `BadSignature` or `ProtocolViolation` if it does not prove them. Every signature is checked. All messages
    must be of its slot and refer to each other. The run's `charter` must have admitted all members of the roster. A
    quorum of them must have acknowledged the same result; if the charter names an authority, the quorum must include
    it.
    """
    roster_signed = _signed(certificate.roster, verify)
    roster = _of(wire.Roster, roster_signed, certificate.slot)
    cut_signed = _signed(certificate.cut, verify)
    cut = _of(wire.Cut, cut_signed, certificate.slot)
    if roster_signed.sender != roster.members[0] or cut_signed.sender not in roster.members:
        raise ProtocolViolation("a certificate whose roster or cut no convener signed")
    if cut.roster != roster_signed.hash:
        raise ProtocolViolation("a certificate whose cut belongs to another roster")
    if (flaw := why_not_seats(roster, charter)) is not None:
        raise ProtocolViolation(f"a certificate whose roster is wrong: {flaw}")
    acks = [_signed(ack, verify) for ack in certificate.acks]
    senders = {ack.sender for ack in acks} & set(roster.members)
    if len(senders) < quorum(len(roster.members)) or len(senders) != len(acks):
        raise ProtocolViolation(f"a certificate with {len(senders)} of {quorum(len(roster.members))} signatures")
    if not suffices(senders, roster.members, charter.authority):
        raise ProtocolViolation("a certificate without the signature of the run's owner")
    if len({ack.payload for ack in acks}) != 1:
        raise ProtocolViolation("a certificate whose acknowledgements differ")
    result = _of(wire.ResultAck, acks[0], certificate.slot)
    if result.cut != cut_signed.hash:
        raise ProtocolViolation("a certificate whose result belongs to another cut")
    if not set(result.flagged) <= set(cut.contributors):
        raise ProtocolViolation("a certificate that flags a member that did not contribute")
    return roster, cut, result


def why_not_seats(roster: wire.Roster, charter: Charter) -> str | None:
    """Return why the seats of a roster do not fit a run; None if they do."""
    if len(roster.seats) != len(roster.members):
        return f"{len(roster.seats)} seats for {len(roster.members)} members"
    if len(roster.members) < charter.min_peers:
        return f"{len(roster.members)} members, where the run asks for {charter.min_peers}"
    for peer, seat in zip(roster.members, roster.seats, strict=True):
        if why_not := charter.why_not_admit(peer, seat.invite):
            return f"it includes {peer}: {why_not}"
    return charter.overbooked(seat.invite for seat in roster.seats) or None


def genesis(run: str) -> bytes:
    """Return the hash that the certificate of a run's first round names as its predecessor."""
    return keyed("genesis of a run", run.encode())


def certificate_hash(certificate: wire.Certificate) -> bytes:
    """Return the hash that identifies a certificate: of the agreed result, whichever quorum signed this copy."""
    return signed_in(certificate.acks[0]).hash


def result_of(certificate: wire.Certificate) -> wire.ResultAck:
    """Return the result of a certificate that `check_certificate` has validated. Raises `RemoteError` if it holds none."""
    signed = signed_in(certificate.acks[0])
    return _of(wire.ResultAck, signed, certificate.slot)


@lru_cache(maxsize=512)  # Certificates of one round hold the same acknowledgements, and each is decoded several times.
def signed_in(data: bytes) -> wire.Signed:
    """Decode a signed message inside another message, its signature unchecked. Raises `MalformedMessage`."""
    return decode(wire.Signed, data, max_bytes=wire.MAX_SIGNED_BYTES)


def _signed(data: bytes, verify: Verify) -> wire.Signed:
    signed = signed_in(data)
    if not verify(signed):
        raise BadSignature(f"a certificate with a wrong signature of {signed.sender}")
    return signed


def _of(cls: type[_M], signed: wire.Signed, slot: wire.Slot) -> _M:
    message = wire.opened(signed)
    if not isinstance(message, cls) or message.slot != slot:
        raise ProtocolViolation(f"a certificate with another message in place of its {cls.__name__}")
    return message


def settled_result(
    voids: Mapping[PeerId, wire.Void],
    slot: wire.Slot,
    members: Sequence[PeerId],
    verify: Verify,
    *,
    owner: PeerId | None = None,
) -> SettledResult:
    """Return the quorum of equal acknowledgements that Voids carry together, and the result; None if there is no quorum.

    Only signed acknowledgements of this slot count.
    """
    acks: dict[bytes, dict[PeerId, wire.Signed]] = {}
    for data in (data for void in voids.values() for data in void.acks):
        try:
            signed = signed_in(data)
            message = wire.opened(signed)
        except MalformedMessage:
            continue
        if signed.sender in members and isinstance(message, wire.ResultAck) and message.slot == slot and verify(signed):
            acks.setdefault(signed.payload, {})[signed.sender] = signed
    for signatures in acks.values():
        if suffices(signatures, members, owner):
            agreed = tuple(signatures.values())
            result = wire.opened(agreed[0])
            assert isinstance(result, wire.ResultAck)
            return agreed, result
    return None
