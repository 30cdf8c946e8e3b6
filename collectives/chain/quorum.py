"""Quorum arithmetic, the rank order of members, and the draw of a round's members. Pure."""

from collections.abc import Collection, Iterable
from functools import lru_cache

from ...peer import wire
from ...peer.base.digest import keyed
from ...peer.base.transport import PeerId


def quorum(members: int) -> int:
    """Return the size of a quorum: more than two thirds of `members`, so that any two quorums share an honest peer."""
    return 2 * members // 3 + 1


def ranked(slot: wire.Slot, peers: Iterable[PeerId]) -> tuple[PeerId, ...]:
    """Sort peers by their rank in one attempt: a hash that nobody chooses."""
    place = f"{slot.run} {slot.round} {slot.attempt}"
    return tuple(sorted(peers, key=lambda peer: _rank(place, peer)))


def ranked_in_draw(slot: wire.Slot, peers: Iterable[PeerId]) -> tuple[PeerId, ...]:
    """Sort peers by their rank in all attempts of a round: it depends on the certificate before, which no key can foresee."""
    place = _draw(slot)
    return tuple(sorted(peers, key=lambda peer: _rank(place, peer)))


def _draw(slot: wire.Slot) -> str:
    return f"{slot.run} {slot.round} {slot.previous.hex()}"


@lru_cache(maxsize=8192)  # All members are ranked several times a round.
def _rank(place: str, peer: PeerId) -> bytes:
    return keyed("rank of a peer in a round", place.encode(), peer.encode())


def drawn_for(
    slot: wire.Slot, members: Iterable[PeerId], voters: Collection[PeerId], earlier: Collection[PeerId]
) -> frozenset[PeerId]:
    """Draw the members that take part in a round: all, or the voters and then the first 256 by rank; others follow.

    The rank depends on the certificate before, and who was a member when that was made (`earlier`) goes before who came
    since: else keys could be made to suit the draw, some thousand a second, and would take all seats that are drawn. All
    attempts of a round share one draw, so that no peer needs to know how many attempts there were.
    """
    place, drawn = _draw(slot), frozenset(members)
    is_all, rank = len(drawn) <= wire.MAX_ROSTER, lambda peer: (peer not in voters, peer not in earlier, _rank(place, peer))
    return drawn if is_all else frozenset(sorted(drawn, key=rank)[: wire.MAX_ROSTER])
