"""Where my state stands among those of the members: whose to take, and who goes first where a run begins. Pure.

Members state how far the chain of certificates has come from which their state comes (DESIGN §8). Of two chains the one
with more tokens is the run's, whatever its rounds are: after a partition both sides may have the same number of them.
What a member states is a claim; its state and its certificates prove it when they are taken (`catch_up`).
"""

from collections.abc import Collection, Sequence
from typing import Any

from ..collectives.chain import Head, better, rank
from ..collectives.place import Place
from ..dht.members import Member, MemberState
from ..peer.errors import UsageError
from ..peer.transport import PeerId


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


def outrun(members: Sequence[Member], place: Place) -> bool:
    """Whether a member states that its chain is better than mine: further, or the one that is the run's."""
    mine = place.head
    return any(better(head_of(member), mine) for member in training(members))


def lagging(members: Sequence[Member], place: Place) -> int:
    """How many members have yet to come to my state."""
    mine = place.head
    return sum(better(mine, head_of(member)) for member in training(members))


def choose_giver(
    members: Sequence[Member], me: PeerId, place: Place, *, tired: Collection[PeerId] = ()
) -> Member | None:
    """Who holds the state that I should have; None if mine is the run's.

    That is the state of the best chain, which its last certificate pins. At the start of a run there is no certificate,
    and the state that most hold is the run's (at a tie the smaller root). Newcomers that come together are spread over
    its holders by their ids, so that they do not all draw on the same one; of the `tired`, who did not give when they
    were asked, only where nobody else has it.
    """
    others = [member for member in training(members) if member.peer != me]
    best = min((head_of(member) for member in others), key=rank, default=None)
    if best is None or better(place.head, best):
        return None
    newest = [member for member in others if rank(head_of(member)) == rank(best)]
    same = not better(best, place.head)
    if same and place.certified is not None:
        elected = place.certified
    else:
        roots = [member.body.root for member in newest]
        elected = min(roots, key=lambda root: (-roots.count(root), root))
    holders = [member for member in newest if member.body.root == elected]
    if (same and elected == place.root) or not holders:
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
