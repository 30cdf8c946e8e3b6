"""Who votes on a round: the last roster's members that may, or the founders."""

from dataclasses import replace

import pytest
from flockstep.collectives.agreement.electorate import NOBODY, Electorate
from flockstep.collectives.chain.certificate import value_of
from flockstep.collectives.chain.voters import (
    absent_after,
    electorate_after,
    is_needed,
    why_no_quorum,
)
from flockstep.dht.run.admission import OPEN, Charter, Invitation, Ticket
from flockstep.dht.run.statements import OwnerStatement, OwnerStatements
from flockstep.peer import wire
from flockstep.peer.identity import Identity
from support.certificates import RUN, certify, seats

FIVE = sorted((Identity.from_seed(bytes([number]) * 32) for number in range(1, 6)), key=lambda one: one.peer_id)
IDS = tuple(identity.peer_id for identity in FIVE)
OWNER = Identity.from_seed(bytes([8]) * 32)
STRANGER = Identity.from_seed(bytes([9]) * 32)
SLOT = wire.Slot(RUN, 3, b"p" * 32, 2)
VALUE = wire.Value(
    *SLOT.decision, bytes(32), IDS, (0, 1, 2, 3, 4, 5), seats(5), b"c" * 32, (0, 1), (b"o" * 32,) * 5, b"n" * 32, 900,
    credit=(900, 0),
)
E = Electorate(dict.fromkeys(IDS, 1))
KEPT = Charter(RUN, OWNER.peer_id, founders=frozenset(IDS[:1]), keepers=frozenset(IDS[:2]))


def test_founders_decide_the_first_round_and_after_a_roster_in_which_nobody_may_vote() -> None:
    assert electorate_after(None, KEPT) == Electorate({IDS[0]: 1})
    assert electorate_after(None, OPEN) == NOBODY
    assert electorate_after(replace(VALUE, members=IDS[2:], seats=seats(3)), KEPT) == Electorate({IDS[0]: 1})


def test_all_members_of_the_last_roster_vote_with_one_vote_each_who_contributed_or_not() -> None:
    assert electorate_after(VALUE, OPEN) == E
    assert electorate_after(replace(VALUE, members=IDS[1:4], seats=seats(3)), OPEN) == Electorate(
        dict.fromkeys(IDS[1:4], 1)
    )


def test_who_leaves_after_a_round_has_no_vote_in_the_next_one_unless_all_leave() -> None:
    leaving = replace(VALUE, seats=tuple(replace(seat, is_leaving=at < 2) for at, seat in enumerate(VALUE.seats)))
    assert electorate_after(leaving, OPEN).voters == IDS[2:]
    kept = replace(KEPT, keepers=frozenset(IDS[:2]))
    assert electorate_after(leaving, kept).voters == IDS[:2]
    assert electorate_after(leaving, replace(KEPT, keepers=frozenset(IDS[1:3]))).voters == IDS[2:3]


def test_a_voter_keeps_its_vote_until_it_has_missed_three_rosters_in_a_row() -> None:
    value, found = VALUE, list[tuple[str, ...]]()
    for _ in range(3):
        before = electorate_after(value, OPEN)
        value = replace(VALUE, members=IDS[1:], seats=seats(4), absent=absent_after(before, IDS[1:]))
        found.append(electorate_after(value, OPEN).voters)
    assert found == [IDS, IDS, IDS[1:]]
    back = replace(VALUE, absent=absent_after(electorate_after(value, OPEN), IDS))
    assert electorate_after(back, OPEN) == E
    assert absent_after(Electorate(E.votes, {IDS[0]: 2}), IDS) == ()


SEVEN = tuple(f"voter {number}" for number in range(7))


def after_two_were_away() -> wire.Value:
    """A roster of five of seven voters."""
    before = Electorate(dict.fromkeys(SEVEN, 1))
    bounds, outputs = tuple(range(6)), (b"o" * 32,) * 5
    absent = absent_after(before, SEVEN[2:])
    return replace(VALUE, members=SEVEN[2:], seats=seats(5), bounds=bounds, outputs=outputs, absent=absent)


def test_liars_are_no_third_because_honest_voters_missed_a_roster() -> None:
    liars, after = SEVEN[5:], electorate_after(after_two_were_away(), OPEN)
    assert after.votes_of(liars) < after.third
    last = Electorate(dict.fromkeys(SEVEN[2:], 1))
    assert last.votes_of(liars) >= last.third  # As they would be by the last roster alone.


def test_the_turns_of_who_missed_the_last_roster_are_given_to_the_others_and_nobody_elses_shift() -> None:
    electorates = electorate_after(after_two_were_away(), OPEN), Electorate(dict.fromkeys(SEVEN, 1))
    turns, whole = ([it.proposer(3, attempt) for attempt in range(70)] for it in electorates)
    assert {*turns} == {*SEVEN[2:]}
    assert all(mine == theirs for mine, theirs in zip(turns, whole, strict=True) if theirs in SEVEN[2:])


def test_those_that_missed_the_fewest_rosters_have_the_votes_that_are_left() -> None:
    missed = wire.Absence(SEVEN[0], 2), wire.Absence(SEVEN[1], 1)
    value = replace(after_two_were_away(), absent=missed)
    assert electorate_after(value, OPEN).voters == SEVEN
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "MAX_PARTS", 6)
        assert electorate_after(value, OPEN).voters == SEVEN[1:]


def test_of_more_members_than_parts_those_that_judge_vote() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "MAX_PARTS", 3)
        assert electorate_after(VALUE, OPEN).voters == tuple(sorted(IDS[:3]))


def test_of_a_longer_list_the_first_by_id_vote_on_the_first_round() -> None:
    listed = frozenset(f"peer {number:03}" for number in range(100))
    assert electorate_after(None, replace(OPEN, founders=listed)).voters == tuple(sorted(listed))[: wire.MAX_PARTS]


def test_a_roster_full_of_members_without_a_vote_takes_nobodys_vote() -> None:
    away, members = IDS[0], (IDS[1], *(f"free key {number:02}" for number in range(wire.MAX_PARTS - 1)))
    electorate = electorate_after(None, replace(KEPT, founders=frozenset(IDS[:4]), keepers=frozenset(IDS[:4])))
    assert away in {it.voter for it in absent_after(electorate, members)}


def test_who_leaves_in_order_while_another_one_is_away_leaves_no_run_that_waits_for_that_one() -> None:
    shown = tuple(replace(seat, is_leaving=at == 0) for at, seat in enumerate(seats(2)))
    value = replace(VALUE, members=IDS[:2], seats=shown, absent=(wire.Absence(IDS[2], 1),))
    assert electorate_after(value, OPEN) == Electorate({IDS[1]: 1})


def test_where_keepers_vote_those_of_the_roster_do_and_whom_the_owner_vouches_for() -> None:
    shown = [*seats(5)]
    for place in (3, 4):
        voucher = (
            OwnerStatements(RUN, OWNER.peer_id).sign(OWNER, OwnerStatement("vouch", IDS[place])).voucher(IDS[place])
        )
        shown[place] = replace(shown[place], voucher=voucher)
    shown[2] = replace(shown[2], voucher=shown[3].voucher)  # Another one's.
    forged = OwnerStatements(RUN, STRANGER.peer_id).sign(STRANGER, OwnerStatement("vouch", IDS[4]))
    shown[4] = replace(shown[4], voucher=forged.voucher(IDS[4]))
    assert electorate_after(replace(VALUE, seats=tuple(shown)), KEPT).voters == (IDS[0], IDS[1], IDS[3])


def test_who_is_not_invited_has_no_vote_though_a_roster_seats_it() -> None:
    ticket = Ticket(Invitation.sign(OWNER, RUN, STRANGER.peer_id, count=9), bytes([9]) * 32)
    invited = tuple(wire.Seat(1.0, 0, invite=ticket.credential(peer)) for peer in IDS[:3])
    value = replace(VALUE, seats=(*invited, *seats(2)))
    assert electorate_after(value, Charter(RUN, OWNER.peer_id, "invite")).voters == IDS[:3]


def test_who_was_added_to_a_list_votes() -> None:
    charter = Charter(RUN, OWNER.peer_id, "allow", frozenset(IDS[:4]))
    ticket = Ticket(Invitation.sign(OWNER, RUN, IDS[4]), b"")
    seats_ = (*seats(4), wire.Seat(1.0, 0, invite=ticket.credential(IDS[4])))
    assert electorate_after(replace(VALUE, seats=seats_), charter).voters == IDS


def test_every_copy_of_a_certificate_gives_the_same_electorate() -> None:
    before = certify(None, 100, roster=FIVE)
    copies = [certify(before, 100, roster=FIVE, signers=signers) for signers in (FIVE, FIVE[:4], FIVE[1:])]
    assert len({copy.voters for copy in copies}) == 3
    assert {electorate_after(value_of(copy), OPEN) for copy in copies} == {E}


# Who can decide.

OWNED = Charter(owner="c")
FOUR, TWO, THREE = (Electorate(dict.fromkeys(names, 1)) for names in ("abcd", "ab", "abc"))
MANY = Electorate(dict.fromkeys("abcde", 1))


@pytest.mark.parametrize(
    ("electorate", "charter", "here", "why"),
    [
        (FOUR, OPEN, "abcx", ""),
        (FOUR, OPEN, "abx", "waits for c, d: 2 of 4 votes are here, 3 needed"),
        (THREE, OPEN, "ab", ""),
        (TWO, OPEN, "a", "waits for b: 1 of 2 votes are here, 2 needed"),
        (FOUR, OPEN, "x", "waits for a, b, c, d: 0 of 4 votes are here, 3 needed"),
        (MANY, OWNED, "x", "waits for its owner, a, b, d, 1 more: 0 of 5 votes are here, 4 needed"),
        (NOBODY, OPEN, "x", ""),
    ],
)
def test_why_those_that_are_here_cannot_decide(
    electorate: Electorate, charter: Charter, here: str, why: str
) -> None:
    assert why_no_quorum(electorate, charter, set(here)) == why


# Leaving in order.


@pytest.mark.parametrize(
    ("voters", "here", "needed"),
    [
        (IDS[:4], IDS[:4], True),
        ((*IDS, "f", "g"), (*IDS, "f", "g"), False),
        (IDS[:1], IDS[:2], True),
        (IDS[:1], IDS[:1], False),
        (IDS[1:3], IDS[:3], False),
        (IDS[:3], (IDS[0], IDS[3]), False),
    ],
    ids=["three are left", "six are left", "heirs", "nobody is here", "no voter", "its own vote is no quorum"],
)
def test_who_leaves_is_needed_where_the_others_cannot_spare_its_vote_or_would_have_none(
    voters: tuple[str, ...], here: tuple[str, ...], needed: bool
) -> None:
    electorate = Electorate(dict.fromkeys(voters, 1))
    assert is_needed(IDS[0], here, electorate, OPEN) == needed


def test_the_last_voter_stays_for_those_that_its_round_would_give_a_vote() -> None:
    here, alone = (IDS[0], IDS[3]), Electorate({IDS[0]: 1})
    assert is_needed(IDS[0], here, alone, OPEN)
    assert not is_needed(IDS[0], here, alone, KEPT)  # A newcomer has no voucher.
    assert is_needed(IDS[0], IDS[:2], alone, KEPT)  # A keeper that is listed, and was not in the last roster.
