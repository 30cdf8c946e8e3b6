"""Who decides: quorums, the order of a roster, the weights of a cut, and what makes a certificate valid.

Pure functions that every peer computes alike from the same signed messages.
"""

import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import repeat
from typing import TypeVar

from ...dht.run.admission import OPEN, Charter
from ...peer import identity, wire
from ...peer.claim import Claim
from ...peer.digest import keyed
from ...peer.errors import BadSignature, MalformedMessage, ProtocolViolation
from ...peer.transport import PeerId
from ...peer.wire.schema import decode, encode

MAX_TOKENS_OF_MEDIAN = 1.5
"""DESIGN §6: nobody weighs more than one and a half times the median, however many tokens are claimed."""

Verify = Callable[[wire.Signed], bool]
Settled = tuple[tuple[wire.Signed, ...], wire.ResultAck] | None
M = TypeVar("M", wire.Roster, wire.Cut, wire.ResultAck)


@lru_cache(maxsize=2048)  # What I have heard comes again inside certificates and Voids; 0.1 ms to check.
def verify(signed: wire.Signed) -> bool:
    """Whether a signed message is what its sender signed."""
    return identity.verify(signed.sender, wire.signed_bytes(signed.code, signed.payload), signed.signature)


def sign(me: identity.Identity, message: wire.RoundMessage | Claim) -> wire.Signed:
    """My signature under a message of a round, or under a claim."""
    code, payload = wire.code_of(message), encode(message)
    return wire.Signed(me.peer_id, code, payload, me.sign(wire.signed_bytes(code, payload)))


@lru_cache(maxsize=2048)  # As above; each word of a round is heard by everybody, in a simulation within one process.
def heard(signed: wire.Signed) -> wire.RoundMessage:
    """The message that somebody has signed. Raises `BadSignature`, or `MalformedMessage`."""
    message = wire.opened(signed)
    if not verify(signed):
        raise BadSignature(f"{type(message).__name__} with a wrong signature")
    return message


def quorum(members: int) -> int:
    """How many of `members` must agree: more than two thirds, so that any two quorums share an honest peer."""
    return 2 * members // 3 + 1


def suffices(signers: Collection[PeerId], members: Sequence[PeerId], owner: PeerId | None = None) -> bool:
    """Whether what these have signed counts for a roster: a quorum of it, with the run's owner where `owner` is given.

    With an owner there are no two chains: it signs one certificate a round, and no part of a swarm goes on without it.
    """
    agreed = set(signers) & set(members)
    return len(agreed) >= quorum(len(members)) and (owner is None or owner in agreed)


def ranked(slot: wire.Slot, peers: Iterable[PeerId]) -> tuple[PeerId, ...]:
    """Peers in the order of one attempt: by a hash that nobody chooses, so that the convener (the first) rotates."""
    place = f"{slot.run} {slot.round} {slot.attempt}"
    return tuple(sorted(peers, key=lambda peer: _rank(place, peer)))


@lru_cache(maxsize=8192)  # Who is next is asked several times a round, of all members.
def _rank(place: str, peer: PeerId) -> bytes:
    return keyed("rank of a peer in a round", place.encode(), peer.encode())


def drawn_for(slot: wire.Slot, members: Iterable[PeerId], owner: PeerId | None = None) -> frozenset[PeerId]:
    """Who takes part in a round: everybody, and beyond 64 members the first 64 by rank; the others follow.

    An owner whose signature the run demands is always among them.

    The draw is of the round, whichever its attempt, so that nobody needs to know how many attempts there were.
    """
    order = ranked(wire.Slot(slot.run, slot.round, 0), members)
    return frozenset(sorted(order, key=lambda peer: peer != owner)[: wire.MAX_ROSTER])


def token_weights(tokens: Sequence[int], ramps: Sequence[float] | None = None) -> tuple[float, ...]:
    """The weights of a cut, summing to 1: tokens capped at 1.5 × their median, times the ramps of newcomers.

    All zero where nobody has any.
    """
    cap = MAX_TOKENS_OF_MEDIAN * statistics.median(tokens)
    capped = [ramp * min(float(count), cap) for count, ramp in zip(tokens, ramps or repeat(1.0, len(tokens)), strict=True)]
    total = sum(capped)
    return tuple(share / total for share in capped) if total else tuple(capped)


def commits_hash(commits: Iterable[wire.Signed]) -> bytes:
    """What a `Cut` binds: the contributors' commits, in the order of the cut."""
    return keyed("commits of a cut", *(commit.hash for commit in commits))


def check_certificate(
    certificate: wire.Certificate, verify: Verify, *, charter: Charter = OPEN
) -> tuple[wire.Roster, wire.Cut, wire.ResultAck]:
    """The roster, the cut and the acknowledged result that a certificate proves.

    Raises `BadSignature` or `ProtocolViolation` where it does not prove them: every signature is checked, all messages
    must be of its slot and refer to each other, all members of the roster must have been admitted by the run's `charter`,
    and a quorum of them must have acknowledged the same result, among it the one to whom the charter gives the authority.
    """
    roster_signed = _signed(certificate.roster, verify)
    roster = _of(wire.Roster, roster_signed, certificate.slot)
    cut_signed = _signed(certificate.cut, verify)
    cut = _of(wire.Cut, cut_signed, certificate.slot)
    if roster_signed.sender != roster.members[0] or cut_signed.sender not in roster.members:
        raise ProtocolViolation("a certificate whose roster or cut is not a convener's")
    if cut.roster != roster_signed.hash:
        raise ProtocolViolation("a certificate whose cut belongs to another roster")
    if (flaw := flaw_of_seats(roster, charter)) is not None:
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
        raise ProtocolViolation("a certificate that flags who did not contribute")
    return roster, cut, result


def flaw_of_seats(roster: wire.Roster, charter: Charter) -> str | None:
    """Why the seats of a roster do not fit a run; None if they do."""
    if len(roster.seats) != len(roster.members):
        return f"{len(roster.seats)} seats for {len(roster.members)} members"
    if len(roster.members) < charter.min_peers:
        return f"{len(roster.members)} members, where the run asks for {charter.min_peers}"
    for peer, seat in zip(roster.members, roster.seats, strict=True):
        if barred := charter.bars(peer, seat.invite):
            return f"it has {peer} in it, and {barred}"
    return charter.overbooked(seat.invite for seat in roster.seats) or None


def genesis(run: str) -> bytes:
    """What the certificate of a run's first round names as the one before it."""
    return keyed("genesis of a run", run.encode())


def certificate_hash(certificate: wire.Certificate) -> bytes:
    """The name of a certificate: what its quorum agreed on, whichever members of the quorum signed this copy of it."""
    return signed_in(certificate.acks[0]).hash


def result_of(certificate: wire.Certificate) -> wire.ResultAck:
    """What a certificate certifies, if `check_certificate` finds it valid. Raises `RemoteError` where it says nothing."""
    signed = signed_in(certificate.acks[0])
    return _of(wire.ResultAck, signed, certificate.slot)


@lru_cache(maxsize=512)  # Certificates of one round hold the same acknowledgements, and each is looked into several times.
def signed_in(data: bytes) -> wire.Signed:
    """A signed message inside another message, its signature unchecked. Raises `MalformedMessage`."""
    return decode(wire.Signed, data, max_bytes=wire.MAX_SIGNED_BYTES)


def _signed(data: bytes, verify: Verify) -> wire.Signed:
    signed = signed_in(data)
    if not verify(signed):
        raise BadSignature(f"a certificate with a wrong signature of {signed.sender}")
    return signed


def _of(cls: type[M], signed: wire.Signed, slot: wire.Slot) -> M:
    message = wire.opened(signed)
    if not isinstance(message, cls) or message.slot != slot:
        raise ProtocolViolation(f"a certificate with another message where its {cls.__name__} should be")
    return message


def settled(
    voids: Mapping[PeerId, wire.Void],
    slot: wire.Slot,
    members: Sequence[PeerId],
    verify: Verify,
    *,
    owner: PeerId | None = None,
) -> Settled:
    """The quorum of equal acknowledgements that Voids carry between them, with what it acknowledges; or None.

    What a Void carries besides signed acknowledgements of its slot does not count.
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
