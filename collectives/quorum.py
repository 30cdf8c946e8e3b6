"""Who decides: quorums, the order of a roster, the weights of a cut, and what makes a certificate valid.

Pure functions that every peer computes alike from the same signed messages.
"""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from ..peer import wire
from ..peer.digest import keyed
from ..peer.errors import BadSignature, MalformedMessage, ProtocolViolation
from ..peer.schema import decode
from ..peer.transport import PeerId

MAX_TOKENS_OF_MEDIAN = 1.5
"""DESIGN §6: nobody weighs more than one and a half times the median, however many tokens are claimed."""

Verify = Callable[[wire.Signed], bool]
Settled = tuple[tuple[wire.Signed, ...], wire.ResultAck] | None
M = TypeVar("M", wire.Roster, wire.Cut, wire.ResultAck)


def quorum(members: int) -> int:
    """How many of `members` must agree: more than two thirds, so that any two quorums share an honest peer."""
    return 2 * members // 3 + 1


def ranked(slot: wire.Slot, peers: Iterable[PeerId]) -> tuple[PeerId, ...]:
    """Peers in the order of one attempt: by a hash that nobody chooses, so that the convener (the first) rotates."""
    place = f"{slot.run} {slot.round} {slot.attempt}".encode()
    return tuple(sorted(peers, key=lambda peer: keyed("rank of a peer in a round", place, peer.encode())))


def token_weights(tokens: Sequence[int]) -> tuple[float, ...]:
    """The weights of a cut, summing to 1: tokens capped at 1.5 × their median. All zero where nobody has any."""
    cap = MAX_TOKENS_OF_MEDIAN * statistics.median(tokens)
    capped = [min(float(count), cap) for count in tokens]
    total = sum(capped)
    return tuple(share / total for share in capped) if total else tuple(capped)


def commits_hash(commits: Iterable[wire.Signed]) -> bytes:
    """What a `Cut` binds: the contributors' commits, in the order of the cut."""
    return keyed("commits of a cut", *(commit.hash for commit in commits))


def check_certificate(certificate: wire.Certificate, verify: Verify) -> tuple[wire.Roster, wire.Cut, wire.ResultAck]:
    """The roster, the cut and the acknowledged result that a certificate proves.

    Raises `BadSignature` or `ProtocolViolation` where it does not prove them: every signature is checked, all messages
    must be of its slot and refer to each other, and a quorum of the roster must have acknowledged the same result.
    """
    roster_signed = _signed(certificate.roster, verify)
    roster = _of(wire.Roster, roster_signed, certificate.slot)
    cut_signed = _signed(certificate.cut, verify)
    cut = _of(wire.Cut, cut_signed, certificate.slot)
    if roster_signed.sender != roster.members[0] or cut_signed.sender not in roster.members:
        raise ProtocolViolation("a certificate whose roster or cut is not a convener's")
    if cut.roster != roster_signed.hash:
        raise ProtocolViolation("a certificate whose cut belongs to another roster")
    acks = [_signed(ack, verify) for ack in certificate.acks]
    senders = {ack.sender for ack in acks} & set(roster.members)
    if len(senders) < quorum(len(roster.members)) or len(senders) != len(acks):
        raise ProtocolViolation(f"a certificate with {len(senders)} of {quorum(len(roster.members))} signatures")
    if len({ack.payload for ack in acks}) != 1:
        raise ProtocolViolation("a certificate whose acknowledgements differ")
    result = _of(wire.ResultAck, acks[0], certificate.slot)
    if result.cut != cut_signed.hash:
        raise ProtocolViolation("a certificate whose result belongs to another cut")
    return roster, cut, result


def genesis(run: str) -> bytes:
    """What the certificate of a run's first round names as the one before it."""
    return keyed("genesis of a run", run.encode())


def certificate_hash(certificate: wire.Certificate) -> bytes:
    """The name of a certificate: what its quorum agreed on, whichever members of the quorum signed this copy of it."""
    return decode(wire.Signed, certificate.acks[0], max_bytes=wire.MAX_SIGNED_BYTES).hash


def result_of(certificate: wire.Certificate) -> wire.ResultAck:
    """What a certificate, checked before, certifies."""
    signed = decode(wire.Signed, certificate.acks[0], max_bytes=wire.MAX_SIGNED_BYTES)
    message = wire.opened(signed)
    assert isinstance(message, wire.ResultAck)
    return message


def _signed(data: bytes, verify: Verify) -> wire.Signed:
    signed = decode(wire.Signed, data, max_bytes=wire.MAX_SIGNED_BYTES)
    if not verify(signed):
        raise BadSignature(f"a certificate with a wrong signature of {signed.sender}")
    return signed


def _of(cls: type[M], signed: wire.Signed, slot: wire.Slot) -> M:
    message = wire.opened(signed)
    if not isinstance(message, cls) or message.slot != slot:
        raise ProtocolViolation(f"a certificate with another message where its {cls.__name__} should be")
    return message


def settled(voids: Mapping[PeerId, wire.Void], slot: wire.Slot, members: Sequence[PeerId], verify: Verify) -> Settled:
    """The quorum of equal acknowledgements that Voids carry between them, with what it acknowledges; or None.

    What a Void carries besides signed acknowledgements of its slot does not count.
    """
    acks: dict[bytes, dict[PeerId, wire.Signed]] = {}
    for data in (data for void in voids.values() for data in void.acks):
        try:
            signed = decode(wire.Signed, data, max_bytes=wire.MAX_SIGNED_BYTES)
            message = wire.opened(signed)
        except MalformedMessage:
            continue
        if signed.sender in members and isinstance(message, wire.ResultAck) and message.slot == slot and verify(signed):
            acks.setdefault(signed.payload, {})[signed.sender] = signed
    for signatures in acks.values():
        if len(signatures) >= quorum(len(members)):
            agreed = tuple(signatures.values())
            result = wire.opened(agreed[0])
            assert isinstance(result, wire.ResultAck)
            return agreed, result
    return None
