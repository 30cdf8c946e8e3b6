"""GATHER: the roster that the proposer makes of the Readys, and the reasons to refuse one. Pure."""

import math
from collections import Counter
from collections.abc import Collection
from functools import lru_cache

from ...peer import wire
from ...peer.errors import MalformedMessage, ProtocolViolation
from ...peer.transport import PeerId
from ...peer.wire.schema import encode
from ..accountability.trust import are_most, misstated, newcomer_record, seat_of
from ..agreement.electorate import Electorate
from ..chain.certificate import signed_in, why_not_seats
from ..chain.quorum import ranked
from ..lines import StatedLines
from ..partition import check_bounds
from .actions import Setup
from .roster import readies_of
from .vote import Vote

SignedReady = tuple[wire.Signed, wire.Ready]
TERM_SECONDS = 15.0
"""Without a decision; after them a round goes on in a later term, with the voters that are here."""
LATE_TRAINING = 2.0
"""Inner phases of mine after which voters that are here and not ready do not hold up a stall any more."""

ROSTER_BYTES, SEAT_BYTES = 2_000, 160
"""Bytes of a roster, and of each member's id, bound and seat in it, at most, beside its Ready, invitation and voucher."""


def willing(setup: Setup, vote: Vote) -> dict[PeerId, SignedReady]:
    """Return the Readys of those that may be in a roster of my slot, at most 64: the voters, who was drawn, and then others.

    Honest members that were not drawn are not Ready: without the draw, keys that are Ready all the same would take the seats.
    """
    fit = {
        peer: (signed, ready)
        for peer, (signed, ready) in vote.ready.items()
        if ready.slot == vote.slot
        and not ready.lock
        and ready.base_root == setup.ready.base_root
        and setup.charter.admits(peer, ready.invite)
        and not (ready.voucher and peer in setup.charter.revoked)
        and not setup.is_banned(peer)
    }
    voters, drawn = vote.electorate.votes, setup.active
    order = sorted(ranked(vote.slot, fit), key=lambda peer: (peer != vote.me, peer not in voters, peer not in drawn))
    taken: dict[PeerId, SignedReady] = {}
    room = wire.MAX_STATEMENT_BYTES - ROSTER_BYTES
    for peer in order[: wire.MAX_ROSTER]:
        signed, ready = fit[peer]
        size = len(encode(signed)) + len(ready.invite) + len(ready.voucher) + SEAT_BYTES
        if size <= room and not setup.charter.overbooked([it.invite for _, it in (*taken.values(), fit[peer])]):
            taken[peer], room = fit[peer], room - size
    return taken


def proposal(setup: Setup, vote: Vote) -> wire.Roster | str:
    """Return the roster of a proposer, or why there is none."""
    readies = willing(setup, vote)
    voters = [peer for peer in readies if peer in vote.electorate.votes]
    if vote.me not in readies or not vote.electorate.is_quorum(voters):
        return f"{len(voters)} voters start from this state, which is no quorum"
    if len(readies) < setup.min_peers:
        return f"{len(readies)} members start from this state, the run asks for {setup.min_peers}"
    lines = StatedLines({peer: ready for peer, (_, ready) in readies.items()}, setup.last, vote.electorate.frontier)
    able = lines.able(setup.cells)
    bounds = lines.proposal(setup.cells, setup.may_own, lambda without: bool(_why_not_left_out(vote, able, without)))
    fresh = newcomer_record(setup.charter.earned)
    seats = tuple(seat_of(ready, setup.trust_of(peer) or fresh) for peer, (_, ready) in readies.items())
    packed = tuple(encode(signed) for signed, _ in readies.values())
    revision = setup.newest_revision or setup.revision
    if setup.why_not_revise(revision, setup.revision):  # An older one that I hold, or one beyond the limits.
        revision = setup.revision
    return wire.Roster(vote.slot, setup.ready.base_root, tuple(readies), bounds, seats, packed, revision)


def closed_early(setup: Setup, vote: Vote, roster: wire.Roster, here: Collection[PeerId]) -> str | None:
    """Return why a roster is refused that leaves out a voter which is ready and here, before all had time to become ready.

    Empty if such a voter is here and may still become ready, None if nobody is left out. Without this rule a proposer could
    choose the voters of the next round, by closing as soon as the ones that it likes are a quorum. A voter that could not
    be in my roster either, such as one that starts from another state, is not left out.
    """
    left_out = {peer for peer in here if peer in vote.electorate.votes} - set(roster.members)
    if not left_out:
        return None
    slots = {peer: vote.ready[peer][1].slot.ballot if peer in vote.ready else (-1, -1) for peer in left_out}
    fit = willing(setup, vote)
    if ready := sorted(peer for peer, ballot in slots.items() if ballot == vote.slot.ballot and peer in fit):
        return f"it leaves out {', '.join(ready)}, which became ready in time"
    return "" if any(ballot < vote.slot.ballot for ballot in slots.values()) else None


def why_unshared(setup: Setup, vote: Vote, roster: wire.Roster, here: Collection[PeerId]) -> str:
    """Return why a roster is refused that leaves out most of those that train, by weight, are ready and here; empty if not.

    Where those that train have no vote, a proposer could else decide on the contribution of a key of its own alone.
    """
    record = newcomer_record(setup.charter.earned)
    ready = {
        peer: (ready.tokens, seat_of(ready, setup.trust_of(peer) or record))
        for peer, (_, ready) in willing(setup, vote).items()
        if ready.tokens and peer in here
    }
    is_shared = are_most(roster.members, ready, earned=setup.charter.earned)
    return "" if is_shared else "it leaves out most of the contributors that are ready"


def unfit(setup: Setup, vote: Vote) -> set[PeerId]:
    """Return the voters whose Ready in my slot, without a lock, could not be in my roster either: another state, say."""
    fit = willing(setup, vote)
    ready = {peer for peer, (_, it) in vote.ready.items() if it.slot == vote.slot and not it.lock}
    return (ready & vote.electorate.votes.keys()) - fit.keys()


def unready(setup: Setup, vote: Vote, here: Collection[PeerId]) -> list[PeerId]:
    """Return the voters that are here and not ready, and would be a quorum with those that are; none if I cannot know.

    Who is in a later term will not be ready in mine.
    """
    if vote.term_began is None or setup.phase_seconds == math.inf:
        return []
    in_term = [peer for peer in here if peer not in vote.ready or vote.ready[peer][1].slot.term <= vote.slot.term]
    missing = [peer for peer in in_term if peer in vote.electorate.votes and peer not in vote.reached]
    return missing if vote.electorate.is_quorum(in_term) else []


def is_training(setup: Setup, vote: Vote, here: Collection[PeerId]) -> bool:
    """Return True if I train, or a member that is here and was Ready for the round does."""
    return bool(setup.ready.tokens) or any(ready.tokens and peer in here for peer, (_, ready) in vote.ready.items())


def stalls_at(setup: Setup, vote: Vote, missing: Collection[PeerId]) -> float:
    """Return when a term stalls in which these voters still train.

    They have two of my inner phases or the ceiling, whichever is longer; without this rule the first to be ready would
    decide alone wherever the others train for some seconds longer. Voters that were silent lately have the time that a
    roster gives slow members: else one that is Ready in every second round would cost as much in each of the others.
    They shorten nobody else's time. After a stop of my process all have their time anew: I have to meet them again.
    """
    began = -math.inf if vote.term_began is None else max(vote.term_began, setup.woke())
    if any(map(setup.is_prompt, missing)):
        return began + max(LATE_TRAINING * setup.phase_seconds, setup.timing.patience)
    return began + (min(setup.timing.gather, TERM_SECONDS) if missing else TERM_SECONDS)


def away_until(setup: Setup, vote: Vote, here: Collection[PeerId], usual: float) -> float:
    """Return when a term stalls, where those decide that are present, because of voters that nobody here has heard.

    All voters that are here must be ready; else the term stalls at the `usual` time. Of the others I wait for the return:
    `TERM_SECONDS` from their loss and not from my Ready, so that a partition that makes two chains is no shorter. Losses
    long after my Ready delay it by as much again at most: a voter can be lost as often as it likes. A few seconds are
    enough if more than half of the votes are ready, since those that are away cannot be more. Who has no vote appoints
    nobody, and follows those that have one.
    """
    electorate = vote.electorate
    present = {peer for peer in here if peer in electorate.votes}
    ready = present & vote.reached
    away = max(map(setup.lost_at, electorate.votes.keys() - present), default=math.inf)
    if setup.charter.stall != "present" or ready < present or not ready or away == math.inf:
        return usual
    if vote.slot.term and vote.term_began is not None:
        away = max(away, vote.term_began)  # Else I would appoint term after term at once.
    if 2 * electorate.votes_of(ready) > electorate.total or vote.me not in electorate.votes:
        return min(usual, away + min(setup.timing.gather, TERM_SECONDS))
    return min(usual, away) + TERM_SECONDS


def starts_elsewhere(setup: Setup, vote: Vote) -> bool:
    """Return True if most votes that are ready for the first round start from another state than I; at a tie the smaller
    root's. Keys without a vote count nothing.

    Later ones begin with the state that the certificate before names.
    """
    electorate, roots = vote.electorate, Counter[bytes]()
    if vote.slot.round > 1 or len(vote.ready) < electorate.fewest:
        return False
    for peer in vote.reached:
        roots[vote.ready[peer][1].base_root] += electorate.votes_of([peer])
    best = min(roots, key=lambda root: (-roots[root], root), default=setup.ready.base_root)
    return roots.total() >= electorate.quorum and best != setup.ready.base_root


def why_not_ready(setup: Setup, vote: Vote, here: Collection[PeerId]) -> str:
    """Return why there is no roster at the timeout, in one line for a person: who was ready and is lost is missing, too."""
    if setup.charter.authority is not None and setup.charter.authority not in here:
        return "the run's owner, whose vote it requires, was not ready in time"
    ready, electorate = [peer for peer in vote.reached if peer in here], vote.electorate
    missing = [peer for peer in electorate.voters if peer and peer not in ready]
    if missing:
        return f"{electorate.votes_of(ready)} of {electorate.quorum} votes are ready and here; missing: {', '.join(missing)}"
    return f"{len(ready)} members are ready and here, {max(setup.min_peers, 1)} are needed"


def refusal(setup: Setup, vote: Vote, sender: PeerId, roster: wire.Roster) -> str | None:
    """Return why I refuse a roster of my slot; None if I accept it, even one without me."""
    if sender != vote.proposer or roster.members[0] != sender:
        return f"its sender is not the proposer of this attempt, but {vote.proposer}"
    if roster.base_root != setup.ready.base_root and vote.me in roster.members:
        return "it starts from another state"
    if (flaw := why_not_seats(roster.members, roster.seats, setup.charter)) is not None:
        return flaw
    if not vote.electorate.is_quorum(roster.members):
        return "it has no quorum of the voters"
    if roster.base_root == setup.ready.base_root and (flaw := _why_not_revision(setup, roster.revision)):
        return flaw
    if len(roster.readys) != len(roster.members):
        return f"{len(roster.readys)} Readys for {len(roster.members)} members"
    for peer, seat, data in zip(roster.members, roster.seats, roster.readys, strict=True):
        record = setup.trust_of(peer)
        if setup.is_banned(peer):
            return f"it includes {peer}, which is banned"
        if seat.voucher and peer in setup.charter.revoked:
            return f"it includes {peer} as a keeper, which the run's owner has revoked"
        if record is not None and misstated(seat, record):
            return f"it states a trust of {seat.trust:.3f} for {peer}, the chain {record.trust:.3f}"
        if (flaw := _why_not_shown(setup, roster, peer, seat, data)) is not None:
            return flaw
    try:
        check_bounds(roster.bounds, len(roster.members), setup.cells)
    except ProtocolViolation as error:
        return str(error)
    able, without, bounds = _owners(roster.members, roster.readys, roster.bounds, setup.last, setup.cells, vote.electorate)
    if bounds != roster.bounds:
        return "its parts do not follow from the lines that its Readys state"
    return _why_not_left_out(vote, able, without)


@lru_cache(maxsize=8)  # In a simulation all members of a roster share one process.
def _owners(
    members: tuple[PeerId, ...],
    readys: tuple[bytes, ...],
    bounds: tuple[int, ...],
    last: tuple[PeerId, ...],
    cells: range,
    electorate: Electorate,
) -> tuple[Collection[PeerId], Collection[PeerId], tuple[int, ...]]:
    """Return who can own a part by the lines that Readys state, who has none in these bounds, and those that follow."""
    lines = StatedLines(readies_of(members, readys), last, electorate.frontier)
    without = lines.without(bounds)
    return lines.able(cells), without, lines.bounds(cells, without)


def _why_not_left_out(vote: Vote, able: Collection[PeerId], without: Collection[PeerId]) -> str | None:
    """Return why a proposer must not leave out all `without` a part, of those that are `able` to own one; None if it may.

    Honest ones leave out owners that lied or were silent; voters with more than a third of the votes are not all such.
    Free keys may be left out as long as voters own parts; where no voter can, half of those that can must own some.
    """
    dropped, votes = set(able) & set(without), vote.electorate.votes_of
    if votes(dropped) >= vote.electorate.third:
        return "it leaves voters with a third of the votes without a part"
    if 2 * votes(dropped) > votes(able) or (not votes(able) and 2 * len(dropped) > len(able)):
        return "it leaves more than half of those that can own without a part"
    return "it gives the whole vector to one member" if len(able) > 2 and len(able) - len(dropped) < 2 else None


def _why_not_revision(setup: Setup, revision: wire.PackedRevision) -> str:
    """Return why a roster that starts from my state cannot name this revision; empty if it can."""
    newest = setup.newest_revision
    if why_not := setup.why_not_revise(revision, setup.revision):
        return why_not
    if revision not in (setup.revision, newest) and not setup.why_not_revise(newest, revision):
        return "it names a revision that the owner has replaced"
    return ""


def _why_not_shown(setup: Setup, roster: wire.Roster, peer: PeerId, seat: wire.Seat, data: bytes) -> str | None:
    """Return why the bytes that a roster shows are not the Ready of one of its members; None if they are."""
    try:
        signed = signed_in(data)
        ready = wire.opened(signed)
    except MalformedMessage as error:
        return f"it shows a Ready of {peer} that does not decode: {error}"
    if not isinstance(ready, wire.Ready) or signed.sender != peer or ready.slot != roster.slot or ready.lock:
        return f"it shows no Ready of {peer} in this slot, without a lock"
    shown = ready.invite, ready.voucher, ready.is_leaving
    if ready.base_root != roster.base_root or shown != (seat.invite, seat.voucher, seat.is_leaving):
        return f"it misquotes the Ready of {peer}"
    return None if setup.verify(signed) else f"it shows a Ready of {peer} that {peer} has not signed"
