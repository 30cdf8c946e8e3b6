"""Valid certificates of any roster, position and content, without a round."""

from collections.abc import Sequence
from typing import Any

from flockstep.collectives.chain.certificate import genesis
from flockstep.collectives.chain.chain import ChainLink
from flockstep.collectives.chain.quorum import ranked
from flockstep.collectives.codec import EMPTY
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
        return tuple(wire.Seat(fields["trust_of"](peer).trust, fields["trust_of"](peer).rounds) for peer in order)
    if "invite_of" in fields:
        return tuple(wire.Seat(1.0, 0, invite=fields["invite_of"](peer)) for peer in order)
    return fields.get("seats", seats(len(order)))  # type: ignore[no-any-return]  # given by a test


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

    `fields` may hold the `seats` of its roster, or `trust_of` or `invite_of` each peer, from which they follow, and the
    `flagged`.
    """
    at = ChainLink.of(before).head if before is not None else None
    slot = wire.Slot(run, at.round + 1 if at else 1, 0)
    by_peer = {identity.peer_id: identity for identity in roster}
    order = ranked(slot, by_peer)
    convener = by_peer[order[0]]
    opening = signed(convener, wire.Roster(slot, bytes(32), order, tuple(range(len(order) + 1)), _seats(order, **fields)))
    cut = signed(convener, wire.Cut(slot, opening.hash, 0, tuple(range(len(order))), bytes(32), ()))
    ack = wire.ResultAck(
        slot,
        cut.hash,
        (EMPTY,) * len(order),
        mark.ljust(32, b"\0"),
        at.hash if at else genesis(run),
        (at.tokens if at else 0) + tokens,
        fields.get("flagged", ()),
    )
    acks = tuple(encode(signed(identity, ack)) for identity in (roster if signers is None else signers))
    return wire.Certificate(slot, encode(opening), encode(cut), acks)


def grow(before: wire.Certificate | None, rounds: int, *, tokens: int = 100, mark: bytes = b"") -> list[wire.Certificate]:
    """Return the certificates of `rounds` rounds after `before`."""
    chain: list[wire.Certificate] = []
    for _ in range(rounds):
        chain.append(certify(chain[-1] if chain else before, tokens, mark=mark))
    return chain
