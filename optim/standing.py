"""Where my state stands among those of the members: whose to take, and who goes first where a run begins. Pure."""

from collections.abc import Sequence

from ..collectives.transfer import Place
from ..dht.members import Member, MemberState
from ..peer.transport import PeerId


def training(members: Sequence[Member]) -> list[Member]:
    """Those who hold a state and are waited for."""
    return [member for member in members if member.body.state == MemberState.TRAINING]


def outrun(members: Sequence[Member], place: Place) -> bool:
    """Whether a member states that it has applied a round that I have not."""
    return any(member.body.round > place.round for member in training(members))


def lagging(members: Sequence[Member], place: Place) -> int:
    """How many members have yet to apply a round that I have."""
    return sum(member.body.round < place.round for member in training(members))


def choose_giver(members: Sequence[Member], me: PeerId, place: Place) -> Member | None:
    """Who holds a state that is further than mine, or another one of the same round; None if mine is the run's.

    Of several states of the newest round the one that most hold is the run's (at a tie the smaller root). Newcomers
    that come together are spread over its holders by their ids, so that they do not all draw on the same one.
    """
    others = [member for member in training(members) if member.peer != me]
    best = max((member.body.round for member in others), default=-1)
    newest = [member for member in others if member.body.round == best]
    if best < place.round or not newest:
        return None
    roots = [member.body.root for member in newest]
    elected = min(roots, key=lambda root: (-roots.count(root), root))
    if best == place.round and elected == place.root:
        return None
    holders = [member for member in newest if member.body.root == elected]
    return holders[int.from_bytes(me.encode()[-4:]) % len(holders)]


def goes_first(members: Sequence[Member], me: PeerId, place: Place) -> bool:
    """Whether I need not wait for anybody's state: somebody trains already, or of all newcomers my id is the smallest."""
    if any(member.peer != me for member in training(members)):
        return True
    return not any(
        member.peer < me and member.body.round >= place.round
        for member in members
        if member.body.state == MemberState.SYNCING
    )
