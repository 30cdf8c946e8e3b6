"""Quorum arithmetic, the rank order of conveners, and the draw of a round's members. Pure."""

from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache

from ...peer import wire
from ...peer.digest import keyed
from ...peer.transport import PeerId


def quorum(members: int) -> int:
    """Return the size of a quorum: more than two thirds of `members`, so that any two quorums share an honest peer."""
    return 2 * members // 3 + 1


def suffices(signers: Collection[PeerId], members: Sequence[PeerId], owner: PeerId | None = None) -> bool:
    """Return True if the signers are a quorum of a roster, including the run's owner if `owner` is given.

    An owner rules out forks: it signs one certificate a round, and no partition of the swarm goes on without it.
    """
    agreed = set(signers) & set(members)
    return len(agreed) >= quorum(len(members)) and (owner is None or owner in agreed)


def ranked(slot: wire.Slot, peers: Iterable[PeerId]) -> tuple[PeerId, ...]:
    """Sort peers by their rank in one attempt: a hash that nobody chooses, so that the convener (the first) rotates."""
    place = f"{slot.run} {slot.round} {slot.attempt}"
    return tuple(sorted(peers, key=lambda peer: _rank(place, peer)))


@lru_cache(maxsize=8192)  # All members are ranked several times a round.
def _rank(place: str, peer: PeerId) -> bytes:
    return keyed("rank of a peer in a round", place.encode(), peer.encode())


def drawn_for(slot: wire.Slot, members: Iterable[PeerId], owner: PeerId | None = None) -> frozenset[PeerId]:
    """Draw the members that take part in a round: all, and beyond 64 the first 64 by rank; the others follow.

    An owner whose signature the run demands is always drawn. All attempts of a round share one draw, so that no peer
    needs to know how many attempts there were.
    """
    order = ranked(wire.Slot(slot.run, slot.round, 0), members)
    return frozenset(sorted(order, key=lambda peer: peer != owner)[: wire.MAX_ROSTER])
