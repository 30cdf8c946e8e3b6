"""Where my state stands among those of the members: whose to take, and who goes first where a run begins. Pure.

Members state how far the chain of certificates has come from which their state comes (DESIGN §8). Of two chains that
part, the one that more members say they are on is the run's, and of two with as many the one with more tokens: so who
makes rounds alone takes nobody along, however many tokens he claims. A chain that goes on from mine I follow also where
fewer are on it, if those who are left cannot make rounds without the others: that costs nobody anything, and is how all
who missed a round come after. Less than a third can so neither take the others along nor hold them up. Where members
are more than a roster has seats, more than half of these are enough: no roster with fewer of them is accepted (`gather`).

What a member states is a claim; its certificate proves it before it counts (`proofs`).
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...dht.members.table import Member, MemberState
from ...peer.errors import UsageError
from ...peer.transport import PeerId
from ...peer.wire import MAX_ROSTER
from ..place import Place
from .certificate import quorum
from .chain import NOTHING, Head, better, rank

ENOUGH = MAX_ROSTER // 2 + 1
"""Members on a chain from which on more of them say nothing."""


@dataclass(frozen=True, slots=True)
class Proof:
    """What the certificate of a head says."""

    place: Place
    base: bytes
    """The hash of my head when I saw it."""
    parts: bool
    """Whether its chain is known to part from mine, instead of going on from there."""


@dataclass(frozen=True, slots=True)
class Chains:
    """What a peer knows of the run's chains."""

    place: Place
    """Where its state stands."""
    at: Callable[[int], Head | None]
    """The head of its own chain after a round; None where that is not known."""
    first: int
    """The first round whose head is known."""
    proven: Mapping[Head, Proof]
    """The others' heads of which it has seen the certificate."""

    def proof(self, head: Head) -> Proof | None:
        """What is known of a head; None where that is nothing, or was seen from elsewhere than where I stand now."""
        proof = self.proven.get(head)
        return proof if proof is not None and proof.base == self.place.head.hash else None

    def is_mine(self, head: Head) -> bool:
        """Whether that is the head of my chain, or was: nothing that I should go over to."""
        if head.round > self.place.round:
            return False
        if head in (NOTHING, self.place.head):
            return True
        # Before the first round that I know of, the chain that goes on to mine has fewer tokens than it.
        return head.tokens <= self.place.tokens if head.round < self.first else self.at(head.round) == head


def head_of(member: Member) -> Head:
    """How far a member says that its chain has come."""
    return Head(member.body.round, member.body.head, member.body.chain_tokens)


def told_of(place: Place) -> dict[str, Any]:
    """What members are told of where a state stands: fields of `MemberBody`."""
    return {"round": place.round, "head": place.head.hash, "chain_tokens": place.tokens}


def training(members: Sequence[Member]) -> list[Member]:
    """Those who hold a state and are waited for."""
    return [member for member in members if member.body.state == MemberState.TRAINING]


def alike(members: Sequence[Member], me: PeerId) -> list[Member]:
    """Those who train the same model as I: parameters of the same names and shapes, on the same frozen ones."""
    mine = next((_model_of(member) for member in members if member.peer == me), None)
    return [member for member in members if mine is None or _model_of(member) == mine]


def check_model(members: Sequence[Member], me: PeerId) -> None:
    """Raise `UsageError` where most of the others who train have another model than I, and my state is worth nothing."""
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
    """The head of the chain that is the run's; None where that is mine."""
    others = [member for member in training(members) if member.peer != me]
    stated = Counter(head_of(member) for member in others)
    foreign = {head: proof for head in stated if not chains.is_mine(head) and (proof := chains.proof(head))}
    if not foreign:
        return None
    with_me = 1 + sum(count for head, count in stated.items() if chains.is_mine(head))

    def order(head: Head, members: int) -> tuple[int, tuple[int, bytes]]:
        return -min(members, ENOUGH), rank(head)

    best = min(foreign, key=lambda head: order(head, stated[head]))
    if order(best, stated[best]) < order(chains.place.head, with_me):
        return best
    stuck = min(with_me, MAX_ROSTER) < quorum(min(1 + len(others), MAX_ROSTER))
    return best if stuck and not foreign[best].parts else None


def lagging(members: Sequence[Member], place: Place) -> int:
    """How many members have yet to come to my state."""
    mine = place.head
    return sum(better(mine, head_of(member)) for member in training(members))


def choose_giver(
    members: Sequence[Member], me: PeerId, chains: Chains, *, tired: Collection[PeerId] = ()
) -> Member | None:
    """Who holds the state that I should have; None if mine is the run's.

    That is the state to which the run's chain leads, as its last certificate says. At the start of a run there is none,
    and the state that most hold is the run's (at a tie the smaller root). Newcomers that come together are spread over
    its holders by their ids, so that they do not all draw on the same one; of the `tired`, who did not give when they
    were asked, only where nobody else has it.
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
    holders = [member for member in holders if member.peer not in tired] or holders
    return holders[int.from_bytes(me.encode()[-4:]) % len(holders)]


def goes_first(members: Sequence[Member], me: PeerId, place: Place) -> bool:
    """Whether I need not wait for anybody's state: somebody trains already, or of all newcomers my id is the smallest."""
    return any(member.peer != me for member in training(members)) or not any(
        member.peer < me and not better(place.head, head_of(member))
        for member in members
        if member.body.state == MemberState.SYNCING
    )


def _model_of(member: Member) -> tuple[bytes, bytes]:
    return member.body.layout, member.body.frozen
