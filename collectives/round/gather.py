"""GATHER: election of a convener, proposal of a roster, reasons to refuse one. Pure."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from ...peer import wire
from ...peer.errors import ProtocolViolation
from ...peer.transport import PeerId
from ..accountability.trust import misstated, newcomer_record, seat_of
from ..chain.certificate import why_not_seats
from ..chain.quorum import quorum, ranked
from ..partition import check_bounds, split
from .actions import Action, Forward, Setup
from .facts import MessageLog
from .roster import RosterView

MAX_LEAP = 64
"""How far ahead of the others' attempts a claimed one may be: a restart or a void is one attempt, a run has some 10^6."""


def within_reach(attempts: Sequence[int]) -> int:
    """Return the highest credible attempt when members claim these: a third of them may lie."""
    return sorted(attempts, reverse=True)[(len(attempts) - 1) // 3] + MAX_LEAP


def election(setup: Setup, readies: Mapping[PeerId, wire.Ready]) -> tuple[wire.Slot, bytes, tuple[PeerId, ...]]:
    """Elect slot, base root and members of a roster from the ready peers; the first member is the convener.

    Every peer with the same messages computes the same. Members are the peers that start from the state that most hold
    (at a tie the smaller root); beyond 64 the first by rank take part. The attempt is the highest claimed one that is
    `within_reach`.
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


def why_not_enough(setup: Setup, active: Collection[PeerId], members: Collection[PeerId]) -> str:
    """Return why no roster of these members would be accepted; empty if one would be."""
    if setup.charter.authority is not None and setup.charter.authority not in members:
        return "the run's owner, whose signature it requires, was not ready in time"
    if len(members) < setup.min_peers:
        return f"{len(members)} members start from this state, the run asks for {setup.min_peers}"
    if leaves_out_half(active, members):
        return f"of {len(active)} members only {len(members)} start from this state"
    return ""


def why_not_ready(setup: Setup, active: Collection[PeerId], readies: Mapping[PeerId, wire.Ready]) -> str:
    """Return why there is no roster at the timeout, in one line for a person."""
    needed = max(setup.min_peers, quorum(len(active)))
    if len(readies) < needed and setup.charter.authority in (None, *readies):
        return f"{len(readies)} members became ready in time, {needed} are needed"
    return why_not_enough(setup, active, election(setup, readies)[2])


def leaves_out_half(active: Collection[PeerId], members: Collection[PeerId]) -> bool:
    """Return True if a roster has at most half of the members that I know: another one of the same round may then exist."""
    known = set(active)
    return 2 * len(known & set(members)) <= min(len(known), wire.MAX_ROSTER)


def proposal(setup: Setup, readies: Mapping[PeerId, wire.Ready]) -> wire.Roster:
    """Return the roster that the convener proposes."""
    slot, elected, order = election(setup, readies)
    bounds = split(setup.num_cells, [readies[peer].upload * setup.may_own(peer) for peer in order])
    fresh = newcomer_record(setup.charter.earned)
    seats = tuple(seat_of(readies[peer], setup.trust_of(peer) or fresh) for peer in order)
    return wire.Roster(slot, elected, order, bounds, seats)


def misquoted(roster: wire.Roster, facts: MessageLog) -> list[wire.Signed]:
    """Return the Readies that a roster misquotes; sent to its convener, they expose a member that equivocated."""
    readies = facts.of(wire.Ready)
    quoted = zip(roster.members, roster.seats, strict=False)
    return [
        facts.signed(wire.Ready, peer)
        for peer, seat in quoted
        if peer in readies and (readies[peer].prefix, readies[peer].invite) != (seat.prefix, seat.invite)
    ]


def reminder(me: PeerId, sender: PeerId, message: wire.RoundMessage, facts: MessageLog) -> list[Action]:
    """Repeat my Ready to a member that is ready in a later attempt: there it has not received mine yet."""
    readies = facts.of(wire.Ready)
    if not isinstance(message, wire.Ready) or sender == me or not {me, sender} <= readies.keys():
        return []
    return [Forward((sender,), facts.signed(wire.Ready, me))] if message.slot.attempt > readies[sender].slot.attempt else []


def stranger(sender: PeerId, message: wire.RoundMessage, table: RosterView, active: Collection[PeerId]) -> list[Action]:
    """React to a message from outside the roster: a peer that became ready too late is sent the roster, and stops waiting."""
    if isinstance(message, wire.Ready):
        return [Forward((sender,), table.signed)] if table.convener(active) == table.me else []
    if isinstance(message, wire.RosterAck | wire.Commit | wire.Have | wire.Cut) and message.roster == table.hash:
        raise ProtocolViolation(f"{type(message).__name__} for a roster that does not include its sender")
    return []  # There may be another roster of this attempt, if its convener was lost while it sent it.


def refusal(
    setup: Setup, active: Collection[PeerId], sender: PeerId, roster: wire.Roster, facts: MessageLog
) -> str | None:
    """Return why I refuse a roster; None if I accept it, even one without me."""
    if roster.members != ranked(roster.slot, set(roster.members)) or roster.members[0] != sender:
        return "its members are not in the order of their ranks, its sender first"
    if roster.base_root != setup.ready.base_root and setup.me in roster.members:
        return "it starts from another state"
    readies = facts.of(wire.Ready)
    attempts = [readies.get(peer, setup.ready).slot.attempt for peer in {*active, setup.me}]
    if roster.slot.attempt > within_reach(attempts):
        return f"its attempt, {roster.slot.attempt}, is far ahead of those that I received"
    if setup.charter.authority is not None and setup.charter.authority not in roster.members:
        return "it leaves out the run's owner, whose signature the run requires"
    if (flaw := why_not_seats(roster, setup.charter)) is not None:
        return flaw
    for peer, seat in zip(roster.members, roster.seats, strict=True):
        record = setup.trust_of(peer)
        if setup.is_banned(peer):
            return f"it includes {peer}, which is banned"
        if record is not None and misstated(seat, record):
            return f"it states a trust of {seat.trust:.3f} for {peer}, the chain {record.trust:.3f}"
    if quoted := misquoted(roster, facts):
        return f"it misquotes the Ready that I have from {quoted[0].sender}"
    if leaves_out_half(active, roster.members):
        return "it leaves out half of the members that I know, or more"
    try:
        check_bounds(roster.bounds, len(roster.members), setup.num_cells)
    except ProtocolViolation as error:
        return str(error)
    return None
