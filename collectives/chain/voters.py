"""Who votes on a round: a function of the certificate before it, so that nobody counts differently. Pure.

The voters of a round are those that judged the last certified round, may vote and do not leave, with one vote each, and
the voters that have missed no more than the last `MAX_MISSED` of them: so a proposer that closes early costs nobody its
vote, and liars do not become a third because honest voters were away for a moment. The founders, which the manifest names,
vote on the first round, and after a roster in which nobody may vote. Where too few voters are here, the run waits.
"""

from collections.abc import Collection

from ...dht.run.admission import Charter
from ...peer import wire
from ...peer.base.transport import PeerId
from ..agreement.electorate import NOBODY, Electorate
from ..vector.partition import num_parts


def electorate_after(value: wire.Value | None, charter: Charter) -> Electorate:
    """Return the electorate of the round after this value (None: of the first round).

    No liar chooses when the founders decide: each member shows itself whether it may vote, and a roster holds a quorum of
    the electorate before. It takes votes that the owner has withdrawn from all of them.
    """
    founders = dict.fromkeys(sorted(charter.founders)[: wire.MAX_PARTS], 1)  # More would have no place each.
    first = Electorate(founders) if founders else NOBODY
    if value is None:
        return first
    count = num_parts(value.members)
    seats = zip(value.members[:count], value.seats[:count], strict=True)
    leaving = {peer: seat.is_leaving for peer, seat in seats if charter.may_vote(peer, seat.invite, seat.voucher)}
    # Where all leave, they decide once some of them are back: nobody else could.
    staying = {peer for peer, leaves in leaving.items() if not leaves} or leaving.keys()
    kept = sorted(value.absent, key=lambda it: (it.missed, it.voter))[: wire.MAX_PARTS - len(staying)]
    missed = {it.voter: it.missed for it in kept if it.voter not in staying}
    if not staying and not missed:
        return first
    electorate = Electorate(dict.fromkeys((*staying, *missed), 1), missed)
    # Who leaves in order, while others are away, is not to leave a run behind that waits for these.
    return electorate if not staying or electorate.is_quorum(staying) else Electorate(dict.fromkeys(staying, 1))


def absent_after(electorate: Electorate, members: Collection[PeerId]) -> tuple[wire.Absence, ...]:
    """Return the voters of a round that its roster lacks, and that vote in the next one all the same."""
    missed = {voter: electorate.missed.get(voter, 0) + 1 for voter in electorate.voters if voter not in members}
    return tuple(wire.Absence(voter, rosters) for voter, rosters in missed.items() if rosters <= wire.MAX_MISSED)


def why_no_quorum(electorate: Electorate, charter: Charter, here: Collection[PeerId]) -> str:
    """Return why these peers cannot decide with this electorate; empty if they can."""
    if electorate == NOBODY or electorate.is_quorum(here):
        return ""
    return electorate.awaits(here, charter.owner)


def is_needed(me: PeerId, members: Collection[PeerId], electorate: Electorate, charter: Charter) -> bool:
    """Return True if the members that are here may not decide a round without my vote, if one more of them is lost.

    Where no other voter is here I am needed if I can decide alone, and give members that may vote a vote by it: without
    me nobody would have one.
    """
    votes, here = electorate.votes, set(members) - {me}
    others = sorted((votes[peer] for peer in here if peer in votes), reverse=True)
    if me not in votes:
        return False
    if others:
        return sum(others[1:]) < electorate.quorum
    next_voters = here if charter.keepers is None else here & charter.keepers
    return bool(next_voters) and electorate.is_quorum({me})
