"""Fork choice: which chain is the run's, and from which member to take its state. Pure.

A peer that holds a chain follows another one for its certificates alone, and only if it continues mine, each certificate
with a quorum of the electorate that the one before determines. A certified round is final: two quorums of one electorate
share an honest voter, so two certificates of one round prove that voters with more than a third of the votes have signed
twice. None of them is better; who meets both stops, and says so (`Relation.TWICE`). Member records, counts of heads and
claimed tokens decide nothing: keys are free.

A newcomer reads its chain from the certificate that its link or its bootstraps name, or else from the founders' first round
on. A stated head is a claim. It counts once it is on the chain that was read (`state.run_chain`).
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from ...dht.members.body import MemberState
from ...dht.members.table import Member
from ...dht.run.layout import NO_LAYOUT
from ...peer.base.errors import UsageError
from ...peer.base.transport import PeerId
from .certificate import value_of
from .chain import NOTHING, ChainPosition, Head, HeldChain

MAX_NAMED = 3
"""Peers that an error names."""


class Relation(Enum):
    """How another chain relates to mine."""

    EXTENDS = "it continues my chain"
    TWICE = "it parts from my chain: voters with more than a third of the votes have signed both, so neither counts"
    APART = "it shares no certificate with my chain that I hold"
    OLDER = "it ends before the first certificate that I know"


@dataclass(frozen=True, slots=True)
class OwnChain:
    """The position of this peer's state, and the chain that it holds, which may lead further."""

    place: ChainPosition
    """The position of the state."""
    chain: HeldChain

    def has_applied(self, head: Head) -> bool:
        """Return True if this is, or was, the head of the state."""
        if head.round > self.place.round:
            return False
        # Rounds before the first known one cannot be compared: nothing that ends there can be followed.
        return head in (NOTHING, self.place.head) or head.round < self.chain.first or self.chain.at(head.round) == head

    def holds(self, head: Head) -> bool:
        """Return True if a head is on the chain, as far as that can be known."""
        return self.has_applied(head) or self.chain.at(head.round) == head


def head_of(member: Member) -> Head:
    """Return the head that a member states."""
    return Head(member.body.round, member.body.head, member.body.chain_tokens)


def position_in_body(place: ChainPosition) -> dict[str, Any]:
    """Return the fields of `MemberBody` that state a position."""
    return {"round": place.round, "head": place.head.hash, "chain_tokens": place.tokens}


def training(members: Sequence[Member]) -> list[Member]:
    """Return the members that hold a state and are expected in rounds."""
    return [member for member in members if member.body.state == MemberState.TRAINING]


def is_keeper(member: Member) -> bool:
    """Return True for a member without a model: it holds the run's state, and trains nothing."""
    return member.body.layout == NO_LAYOUT


def alike(members: Sequence[Member], me: PeerId) -> list[Member]:
    """Return the members that train my model: same parameter names and shapes, same frozen parameters; and all keepers.

    A keeper, which has no model, cannot tell models apart: to it all members are alike, and of another layout than the
    manifest pins there are none (`Charter.why_not_train`).
    """
    mine = next((member for member in members if member.peer == me), None)
    if mine is None or is_keeper(mine):
        return list(members)
    model = mine.body.layout, mine.body.frozen
    return [member for member in members if is_keeper(member) or (member.body.layout, member.body.frozen) == model]


class Expected:
    """The members that I expect in my rounds, found anew only after a member has changed: each message asks for them."""

    def __init__(self, active: Callable[[], tuple[Member, ...]], me: PeerId) -> None:
        """`active` returns the active members, and the same tuple until one of them changes."""
        self._active = active
        self._me = me
        self._found: tuple[tuple[Member, ...], frozenset[PeerId]] = (), frozenset()

    def __call__(self) -> frozenset[PeerId]:
        """Return the active members that hold a state of my model."""
        members = self._active()
        if members is not self._found[0]:
            self._found = members, frozenset(member.peer for member in training(alike(members, self._me)))
        return self._found[1]


def check_model(members: Sequence[Member], me: PeerId) -> None:
    """Raise `UsageError` if most of the other members with a model have another one than I, so that my state is useless.

    For a newcomer, and with the members that count: records alone say nothing. The error names those that differ. Keepers
    have no say: they hold no model, so that any number of them would hide another base.
    """
    others = [member for member in training(members) if member.peer != me and not is_keeper(member)]
    same = {member.peer for member in alike(members, me)}
    unlike = [member for member in others if member.peer not in same]
    if 2 * len(unlike) <= len(others):
        return
    mine = next(member for member in members if member.peer == me)
    shapes = mine.body.layout != unlike[0].body.layout
    named = ", ".join(member.peer for member in unlike[:MAX_NAMED])
    raise UsageError(
        f"this model is not that of the run's members: {'other names or shapes' if shapes else 'other values'} of its "
        f"{'trained' if shapes else 'frozen'} parameters than {len(unlike)} of {len(others)} members have: {named}"
        + (", …" if len(unlike) > MAX_NAMED else ""),
        remedy="build it as they do" if shapes else "start from the same base weights as they do",
    )


def elected(members: Sequence[Member], me: PeerId, mine: OwnChain) -> Head | None:
    """Return the furthest head that others state and that my chain leads to beyond my state; None if there is none."""
    stated = {head_of(member) for member in training(members) if member.peer != me}
    ahead = [head for head in stated if head.round > mine.place.round and mine.holds(head)]
    return max(ahead, key=lambda head: head.round, default=None)


def lagging(members: Sequence[Member], place: ChainPosition) -> int:
    """Return how many training members are at an earlier round than I and have yet to catch up."""
    return sum(member.body.round < place.round for member in training(members))


def choose_provider(
    members: Sequence[Member],
    me: PeerId,
    mine: OwnChain,
    *,
    start: bytes = b"",
    founders: Collection[PeerId] = (),
    backed_off: Collection[PeerId] = (),
) -> Member | None:
    """Choose the provider of the state that I should have; None if mine is the run's.

    The run's state is the one that the last certificate of its chain names. At the start of a run there is no
    certificate: it is `start`, where the manifest names a root, else that of most founders (`start_root`). Newcomers are
    spread over the providers by their ids, so that they do not all load the same one. Members in `backed_off` did not
    provide it when asked; they are chosen only if nobody else holds it. Once one has failed, those that decided on the
    state come first: any number of free keys may say that they hold it.
    """
    place, best = mine.place, elected(members, me, mine)
    head = place.head if best is None else best
    newest = [member for member in training(members) if member.peer != me and head_of(member) == head]
    certificate = place.certificate if best is None else mine.chain.certificate(best.round)
    if certificate is not None:
        root = value_of(certificate).next_root
    else:
        root = start or start_root(members, me, place, founders, backed_off)
    holders = [member for member in newest if member.body.root == root]
    if (best is None and (root == place.root or mine.chain.head.round > place.round)) or not holders:
        return None
    left = [member for member in holders if member.peer not in backed_off] or holders
    if len(left) < len(holders) and certificate is not None:
        left = [member for member in left if member.peer in certificate.voters] or left
    return left[int.from_bytes(me.encode()[-4:]) % len(left)]


def start_root(
    members: Sequence[Member],
    me: PeerId,
    place: ChainPosition,
    founders: Collection[PeerId],
    backed_off: Collection[PeerId] = (),
) -> bytes:
    """Return the root of the start state: that of most founders which hold one, at a tie the smallest.

    Only where no founder holds one, that of most members: keys are free, and the founders decide on the first round. A
    founder with a model has a state of its own: it goes on without those in `backed_off`, who only state one.
    """
    has_own = me in founders and not any(member.peer == me and is_keeper(member) for member in members)
    roots = {member.peer: member.body.root for member in training(members) if head_of(member) == place.head}
    roots |= {me: place.root} if me in roots else {}
    if has_own:
        roots = {peer: root for peer, root in roots.items() if peer not in backed_off}
    voices = [root for peer, root in roots.items() if peer in founders]
    if has_own and not voices:
        return place.root
    voices = voices or [*roots.values()]
    return min(voices, key=lambda root: (-voices.count(root), root), default=place.root)


def goes_first(members: Sequence[Member], me: PeerId, place: ChainPosition) -> bool:
    """Return True if I need not wait for a state: somebody trains already, or I have the smallest id of all newcomers.

    Keepers do not count among the newcomers: they cannot make the start state.
    """
    return any(member.peer != me for member in training(members)) or not any(
        member.peer < me and member.body.round >= place.round
        for member in members
        if member.body.state == MemberState.SYNCING and not is_keeper(member)
    )


