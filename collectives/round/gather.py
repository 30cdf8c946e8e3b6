"""Closing a roster: which one a convener proposes, and why a member refuses one."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from ...peer import wire
from ...peer.errors import ProtocolViolation
from ...peer.transport import PeerId
from ..accountability.trust import misstated, newcomer, seat_of
from ..chain.certificate import flaw_of_seats, quorum, ranked
from ..partition import check_bounds, split
from .actions import Action, Forward, Setup
from .roster import Facts, Table

MAX_LEAP = 64
"""How far ahead of the others' attempts one is believed: a restart or a void is one attempt, and a run has some 10^6."""


def within_reach(attempts: Sequence[int]) -> int:
    """The furthest attempt that is believed where members are at these: a third of them may claim whatever they like."""
    return sorted(attempts, reverse=True)[(len(attempts) - 1) // 3] + MAX_LEAP


def election(setup: Setup, readies: Mapping[PeerId, wire.Ready]) -> tuple[wire.Slot, bytes, tuple[PeerId, ...]]:
    """Slot, base root and members of the roster that follows from who is ready; the first one is to propose it.

    Every peer with the same facts computes the same. Members are those who start from the state that most hold (at a
    tie the smaller root, so that all elect the same); beyond 64 the first by rank take part. The attempt is the highest
    that anybody is at, except for who claims to be further than a leap ahead of those who cannot all be liars.
    """
    roots = Counter(ready.base_root for ready in readies.values())
    elected = min(roots, key=lambda root: (-roots[root], root))
    slot = setup.ready.slot
    attempts = [ready.slot.attempt for ready in readies.values()]
    slot = wire.Slot(slot.run, slot.round, max(attempt for attempt in attempts if attempt <= within_reach(attempts)))
    there = (peer for peer, ready in readies.items() if ready.slot.attempt <= slot.attempt)
    order = ranked(slot, (peer for peer in there if readies[peer].base_root == elected))
    members: list[PeerId] = []
    invites: list[bytes] = []
    for peer in order[: wire.MAX_ROSTER]:
        invite = readies[peer].invite
        together = not setup.charter.overbooked([*invites, invite])
        if together and setup.charter.admits(peer, invite) and not setup.is_banned(peer):
            members.append(peer)
            invites.append(invite)
    return slot, elected, tuple(members)


def shortage(setup: Setup, active: Collection[PeerId], members: Collection[PeerId]) -> str:
    """Why no roster of these members would be accepted, so that there is no use in a proposal; empty where it would be."""
    if setup.charter.authority is not None and setup.charter.authority not in members:
        return "the run's owner, whose signature it demands, was not ready in time"
    if len(members) < setup.min_peers:
        return f"{len(members)} members start from this state, the run asks for {setup.min_peers}"
    if leaves_out_half(active, members):
        return f"of {len(active)} members only {len(members)} start from this state"
    return ""


def unripe(setup: Setup, active: Collection[PeerId], readies: Mapping[PeerId, wire.Ready]) -> str:
    """Why there is no roster now that time is up; one line for a person."""
    needed = max(setup.min_peers, quorum(len(active)))
    if len(readies) < needed and setup.charter.authority in (None, *readies):
        return f"{len(readies)} members became ready in time, {needed} are needed"
    return shortage(setup, active, election(setup, readies)[2])


def leaves_out_half(active: Collection[PeerId], members: Collection[PeerId]) -> bool:
    """Whether a roster has no more than half of the members that I know: another one of the same round may then exist."""
    known = set(active)
    return 2 * len(known & set(members)) <= min(len(known), wire.MAX_ROSTER)


def proposal(setup: Setup, readies: Mapping[PeerId, wire.Ready]) -> wire.Roster:
    """The roster that the convener proposes."""
    slot, elected, order = election(setup, readies)
    bounds = split(setup.num_cells, [readies[peer].upload * setup.may_own(peer) for peer in order])
    fresh = newcomer(setup.charter.earned)
    seats = tuple(seat_of(readies[peer], setup.standing(peer) or fresh) for peer in order)
    return wire.Roster(slot, elected, order, bounds, seats)


def misquoted(roster: wire.Roster, facts: Facts) -> list[wire.Signed]:
    """What members have told me of themselves otherwise than a roster quotes them: somebody has lied, and who, that shows."""
    readies = facts.of(wire.Ready)
    quoted = zip(roster.members, roster.seats, strict=False)
    return [
        facts.signed(wire.Ready, peer)
        for peer, seat in quoted
        if peer in readies and (readies[peer].prefix, readies[peer].invite) != (seat.prefix, seat.invite)
    ]


def reminder(me: PeerId, sender: PeerId, message: wire.RoundMessage, facts: Facts) -> list[Action]:
    """For who gave an earlier attempt up and is ready once more: in the new one it has not heard that I still am."""
    readies = facts.of(wire.Ready)
    if not isinstance(message, wire.Ready) or sender == me or not {me, sender} <= readies.keys():
        return []
    return [Forward((sender,), facts.signed(wire.Ready, me))] if message.slot.attempt > readies[sender].slot.attempt else []


def stranger(sender: PeerId, message: wire.RoundMessage, table: Table, active: Collection[PeerId]) -> list[Action]:
    """A word from outside the roster: who became ready too late is shown the roster, and need not wait for one."""
    if isinstance(message, wire.Ready):
        return [Forward((sender,), table.signed)] if table.convener(active) == table.me else []
    if isinstance(message, wire.RosterAck | wire.Commit | wire.Have | wire.Cut) and message.roster == table.hash:
        raise ProtocolViolation(f"{type(message).__name__} for a roster in which its sender has no place")
    return []  # There may be another roster of this attempt, if its convener was lost while it spoke.


def refusal(
    setup: Setup, active: Collection[PeerId], sender: PeerId, roster: wire.Roster, facts: Facts
) -> str | None:
    """Why I do not accept a roster; None if I do, be it one without me."""
    if roster.members != ranked(roster.slot, set(roster.members)) or roster.members[0] != sender:
        return "its members are not in the order of their ranks, its sender first"
    if roster.base_root != setup.ready.base_root and setup.me in roster.members:
        return "it starts from another state"
    readies = facts.of(wire.Ready)
    heard = [readies.get(peer, setup.ready).slot.attempt for peer in {*active, setup.me}]
    if roster.slot.attempt > within_reach(heard):
        return f"its attempt, {roster.slot.attempt}, is far ahead of what I heard"
    if setup.charter.authority is not None and setup.charter.authority not in roster.members:
        return "it leaves out the run's owner, whose signature the run demands"
    if (flaw := flaw_of_seats(roster, setup.charter)) is not None:
        return flaw
    for peer, seat in zip(roster.members, roster.seats, strict=True):
        standing = setup.standing(peer)
        if setup.is_banned(peer):
            return f"it has {peer} in it, who is banned"
        if standing is not None and misstated(seat, standing):
            return f"it says that {peer} has earned a trust of {seat.trust:.3f}, the chain says {standing.trust:.3f}"
    if words := misquoted(roster, facts):
        return f"it quotes {words[0].sender} otherwise than I heard it"
    if leaves_out_half(active, roster.members):
        return "it leaves out half of the members that I know, or more"
    try:
        check_bounds(roster.bounds, len(roster.members), setup.num_cells)
    except ProtocolViolation as error:
        return str(error)
    return None
