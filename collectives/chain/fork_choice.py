"""Fork choice: which chain is the run's, and from which member to take its state. Pure.

Members state the head of the chain of certificates that their state comes from (DESIGN §8). Of two branches, the one
with more members on it is the run's, and at equal numbers the one with more tokens. So a peer that makes rounds alone
takes nobody along, however many tokens it claims. A chain that extends mine is followed even if fewer members are on
it, provided that the members left behind are no quorum without them. That costs nothing, and is how a peer that missed
a round catches up. So less than a third of the members can neither take the others along nor hold them up. If a run has
more members than a roster has seats, more than half a roster's seats are enough: no roster with fewer is accepted
(`round.gather`).

A stated head is a claim. It counts once its certificate is validated (`state.head_proofs`).
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...dht.members.table import Member, MemberState
from ...peer.errors import UsageError
from ...peer.transport import PeerId
from ...peer.wire import MAX_ROSTER
from .chain import NOTHING, ChainPosition, Head, better, rank
from .quorum import quorum

ENOUGH = MAX_ROSTER // 2 + 1
"""Members on a chain beyond which more of them do not count: more than half a roster."""


@dataclass(frozen=True, slots=True)
class Proof:
    """What the validated certificate of a head proves."""

    place: ChainPosition
    base: bytes
    """The hash of my head at the time of validation."""
    parts: bool
    """True if its chain is known to fork from mine instead of extending it."""


@dataclass(frozen=True, slots=True)
class Chains:
    """This peer's view of the run's chains."""

    place: ChainPosition
    """The position of my state."""
    at: Callable[[int], Head | None]
    """Returns the head of my chain after a round; None if it is not known."""
    first: int
    """The first round whose head is known."""
    proven: Mapping[Head, Proof]
    """The heads of others whose certificates I have validated."""

    def proof(self, head: Head) -> Proof | None:
        """Return the proof of a head; None if there is none, or if my head has changed since its validation."""
        proof = self.proven.get(head)
        return proof if proof is not None and proof.base == self.place.head.hash else None

    def is_mine(self, head: Head) -> bool:
        """Return True if this is, or was, the head of my own chain."""
        if head.round > self.place.round:
            return False
        if head in (NOTHING, self.place.head):
            return True
        # Rounds before my first known one cannot be compared by hash; a prefix of my chain has fewer tokens than it.
        return head.tokens <= self.place.tokens if head.round < self.first else self.at(head.round) == head


def head_of(member: Member) -> Head:
    """Return the head that a member states."""
    return Head(member.body.round, member.body.head, member.body.chain_tokens)


def position_in_body(place: ChainPosition) -> dict[str, Any]:
    """Return the fields of `MemberBody` that state a position."""
    return {"round": place.round, "head": place.head.hash, "chain_tokens": place.tokens}


def training(members: Sequence[Member]) -> list[Member]:
    """Return the members that hold a state and are expected in rounds."""
    return [member for member in members if member.body.state == MemberState.TRAINING]


def alike(members: Sequence[Member], me: PeerId) -> list[Member]:
    """Return the members that train my model: same parameter names and shapes, same frozen parameters."""
    mine = next((_model_of(member) for member in members if member.peer == me), None)
    return [member for member in members if mine is None or _model_of(member) == mine]


def check_model(members: Sequence[Member], me: PeerId) -> None:
    """Raise `UsageError` if most of the other training members have another model than I, so that my state is useless."""
    others = [member for member in training(members) if member.peer != me]
    same = {member.peer for member in alike(members, me)}
    unlike = [member for member in others if member.peer not in same]
    if 2 * len(unlike) <= len(others):
        return
    mine = next(member for member in members if member.peer == me)
    shapes = mine.body.layout != unlike[0].body.layout
    raise UsageError(
        f"this model is not that of the run's members: {'other names or shapes' if shapes else 'other values'} of its "
        f"{'trained' if shapes else 'frozen'} parameters",
        remedy="build it as they do" if shapes else "start from the same base weights as they do",
    )


def elected(members: Sequence[Member], me: PeerId, chains: Chains) -> Head | None:
    """Return the head that fork choice elects; None if it is on my chain."""
    others = [member for member in training(members) if member.peer != me]
    stated = Counter(head_of(member) for member in others)
    foreign = {head: proof for head in stated if not chains.is_mine(head) and (proof := chains.proof(head))}
    if not foreign:
        return None
    with_me = 1 + sum(count for head, count in stated.items() if chains.is_mine(head))

    def order(head: Head, members: int) -> tuple[int, tuple[int, int, bytes]]:
        return -min(members, ENOUGH), rank(head)

    best = min(foreign, key=lambda head: order(head, stated[head]))
    if order(best, stated[best]) < order(chains.place.head, with_me):
        return best
    stuck = min(with_me, MAX_ROSTER) < quorum(min(1 + len(others), MAX_ROSTER))
    return best if stuck and not foreign[best].parts else None


def lagging(members: Sequence[Member], place: ChainPosition) -> int:
    """Return how many training members are on worse chains than mine and have yet to catch up."""
    mine = place.head
    return sum(better(mine, head_of(member)) for member in training(members))


def choose_provider(
    members: Sequence[Member], me: PeerId, chains: Chains, *, backed_off: Collection[PeerId] = ()
) -> Member | None:
    """Choose the provider of the state that I should have; None if mine is the run's.

    The run's state is the one that the last certificate of its chain names. At the start of a run there is no
    certificate, and the state of most members is the run's (at a tie the smaller root). Newcomers are spread over the
    providers by their ids, so that they do not all load the same one. Members in `backed_off` did not provide it when
    asked; they are chosen only if nobody else holds it.
    """
    place, best = chains.place, elected(members, me, chains)
    head = place.head if best is None else best
    newest = [member for member in training(members) if member.peer != me and head_of(member) == head]
    if best is not None:
        root = chains.proven[best].place.root
    elif place.certified is not None:
        root = place.certified
    else:
        roots = [member.body.root for member in newest]
        root = min(roots, key=lambda root: (-roots.count(root), root), default=place.root)
    holders = [member for member in newest if member.body.root == root]
    if (best is None and root == place.root) or not holders:
        return None
    holders = [member for member in holders if member.peer not in backed_off] or holders
    return holders[int.from_bytes(me.encode()[-4:]) % len(holders)]


def goes_first(members: Sequence[Member], me: PeerId, place: ChainPosition) -> bool:
    """Return True if I need not wait for a state: somebody trains already, or I have the smallest id of all newcomers."""
    return any(member.peer != me for member in training(members)) or not any(
        member.peer < me and not better(place.head, head_of(member))
        for member in members
        if member.body.state == MemberState.SYNCING
    )


def _model_of(member: Member) -> tuple[bytes, bytes]:
    return member.body.layout, member.body.frozen
