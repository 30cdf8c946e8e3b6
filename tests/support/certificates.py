"""Certificates for tests: valid ones of any roster, place and content, without a round."""

from collections.abc import Sequence
from typing import Any

from flockstep.collectives.chain.certificate import genesis, ranked
from flockstep.collectives.chain.chain import Link
from flockstep.collectives.round.actions import EMPTY
from flockstep.peer import wire
from flockstep.peer.identity import Identity
from flockstep.peer.wire.schema import encode

RUN = "a" * 52
LONE = Identity.from_seed(bytes([1]) * 32)


def signed(identity: Identity, message: wire.RoundMessage) -> wire.Signed:
    code, payload = wire.code_of(message), encode(message)
    return wire.Signed(identity.peer_id, code, payload, identity.sign(wire.signed_bytes(code, payload)))


def seats(count: int, **fields: Any) -> tuple[wire.Seat, ...]:
    """The seats of so many members who have earned nothing yet, or what `fields` says."""
    return (wire.Seat(**{"trust": 1.0, "rounds": 0, **fields}),) * count


def _seats(order: Sequence[str], **told: Any) -> tuple[wire.Seat, ...]:
    if "standing" in told:
        return tuple(wire.Seat(told["standing"](peer).trust, told["standing"](peer).rounds) for peer in order)
    return told.get("seats", seats(len(order)))  # type: ignore[no-any-return]  # A test's own.


def certify(
    before: wire.Certificate | None,
    tokens: int,
    *,
    roster: Sequence[Identity] = (LONE,),
    signers: Sequence[Identity] | None = None,
    run: str = RUN,
    mark: bytes = b"",
    **told: Any,
) -> wire.Certificate:
    """The certificate of the round after `before`, with so many tokens of its own; another `mark` makes another one.

    `told` may have the `seats` of its roster, or the `standing` of each peer from which they follow, and who is `flagged`.
    """
    at = Link.of(before).head if before is not None else None
    slot = wire.Slot(run, at.round + 1 if at else 1, 0)
    by_peer = {identity.peer_id: identity for identity in roster}
    order = ranked(slot, by_peer)
    convener = by_peer[order[0]]
    opening = signed(convener, wire.Roster(slot, bytes(32), order, tuple(range(len(order) + 1)), _seats(order, **told)))
    cut = signed(convener, wire.Cut(slot, opening.hash, 0, tuple(range(len(order))), bytes(32), ()))
    ack = wire.ResultAck(
        slot,
        cut.hash,
        (EMPTY,) * len(order),
        mark.ljust(32, b"\0"),
        at.hash if at else genesis(run),
        (at.tokens if at else 0) + tokens,
        told.get("flagged", ()),
    )
    acks = tuple(encode(signed(identity, ack)) for identity in (roster if signers is None else signers))
    return wire.Certificate(slot, encode(opening), encode(cut), acks)


def grow(before: wire.Certificate | None, rounds: int, *, tokens: int = 100, mark: bytes = b"") -> list[wire.Certificate]:
    """The certificates of so many rounds after `before`."""
    chain: list[wire.Certificate] = []
    for _ in range(rounds):
        chain.append(certify(chain[-1] if chain else before, tokens, mark=mark))
    return chain
