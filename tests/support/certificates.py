"""Valid certificates of any roster, position and content, without a round."""

from collections.abc import Sequence
from typing import Any

from flockstep.collectives.chain.certificate import genesis, value_hash, value_of
from flockstep.collectives.chain.chain import ChainLink
from flockstep.collectives.vector.codec import EMPTY
from flockstep.collectives.vector.partition import num_parts
from flockstep.peer import wire
from flockstep.peer.identity import Identity
from flockstep.peer.wire.schema import encode

RUN = "a" * 52
LONE = Identity.from_seed(bytes([1]) * 32)


def signed(identity: Identity, message: wire.RoundMessage) -> wire.Signed:
    code, payload = wire.code_of(message), encode(message)
    return wire.Signed(identity.peer_id, code, payload, identity.sign(wire.signed_bytes(code, payload)))


def seats(count: int, **fields: Any) -> tuple[wire.Seat, ...]:
    """Return `count` seats of new members, with `fields` replaced."""
    return (wire.Seat(**{"trust": 1.0, "rounds": 0, **fields}),) * count


def _seats(order: Sequence[str], **fields: Any) -> tuple[wire.Seat, ...]:
    if "trust_of" in fields:
        records = map(fields["trust_of"], order)
        return tuple(wire.Seat(record.trust, record.rounds) for record in records)
    if "invite_of" in fields:
        return tuple(wire.Seat(1.0, 0, invite=fields["invite_of"](peer)) for peer in order)
    return fields.get("seats", seats(len(order)))  # type: ignore[no-any-return]  # given by a test


def _credit(count: int, flagged: Sequence[int], tokens: int) -> tuple[int, ...]:
    """Share `tokens` among so many contributors, none to those that are flagged."""
    given = [place for place in range(count) if place not in flagged]
    shares = {place: max(0, tokens) // len(given) for place in given}
    if given:
        shares[given[0]] += max(0, tokens) % len(given)
    return tuple(shares.get(place, 0) for place in range(count))


def certify(
    before: wire.Certificate | None,
    tokens: int,
    *,
    roster: Sequence[Identity] = (LONE,),
    signers: Sequence[Identity] | None = None,
    run: str = RUN,
    mark: bytes = b"",
    **fields: Any,
) -> wire.Certificate:
    """Return a certificate of the round after `before` with `tokens` of its own; `mark` makes it distinct.

    Those of the roster vote that were in the one before, or all if none was: in the first round they are the founders.
    `fields` may hold the `seats` of its roster, or
    `trust_of` or `invite_of` each peer, from which they follow, the `flagged`, the `revision`, the `credit`,
    the `cut`.
    """
    at = ChainLink.of(before).head if before is not None else None
    slot = wire.Slot(run, at.round + 1 if at else 1, at.hash if at else genesis(run))
    order = tuple(sorted(identity.peer_id for identity in roster))
    value = wire.Value(
        *slot.decision,
        bytes(32),
        order,
        tuple(range(num_parts(order) + 1)),
        _seats(order, **fields),
        fields.get("cut", bytes(32)),
        tuple(range(len(order))),
        (EMPTY,) * num_parts(order),
        mark.ljust(32, b"\0"),
        (at.tokens if at else 0) + tokens,
        fields.get("flagged", ()),
        fields.get("revision", b""),
        fields.get("credit", _credit(len(order), fields.get("flagged", ()), tokens)),
    )
    members = value_of(before).members if before is not None else order
    electorate = set(members[: num_parts(members)])
    entitled = [identity for identity in roster if identity.peer_id in electorate] or roster
    return decided(value, slot, entitled if signers is None else signers)


def decided(value: wire.Value, slot: wire.Slot, voters: Sequence[Identity]) -> wire.Certificate:
    """Return a certificate of a value by these voters."""
    return wire.Certificate(slot, *_signed_by(wire.Precommit, value, slot, voters))


def proven(value: wire.Value, slot: wire.Slot, voters: Sequence[Identity]) -> wire.Proof:
    """Return a proof of a value, as `decided` returns a certificate."""
    return wire.Proof(slot, *_signed_by(wire.Prevote, value, slot, voters))


def _signed_by(
    kind: type[wire.Prevote] | type[wire.Precommit],
    value: wire.Value,
    slot: wire.Slot,
    voters: Sequence[Identity],
) -> tuple[bytes, tuple[str, ...], tuple[bytes, ...]]:
    packed = encode(value)
    ordered = sorted(voters, key=lambda identity: identity.peer_id)
    signatures = tuple(signed(identity, kind(slot, value_hash(packed))).signature for identity in ordered)
    return packed, tuple(identity.peer_id for identity in ordered), signatures


def grow(before: wire.Certificate | None, rounds: int, *, tokens: int = 100, mark: bytes = b"") -> list[wire.Certificate]:
    """Return the certificates of `rounds` rounds after `before`."""
    chain: list[wire.Certificate] = []
    for _ in range(rounds):
        chain.append(certify(chain[-1] if chain else before, tokens, mark=mark))
    return chain
