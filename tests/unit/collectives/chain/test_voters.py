"""Who votes on a round: the last roster's members that may, and after a stall a majority or those appointed."""

from dataclasses import replace
from functools import partial

import pytest
from flockstep.collectives.agreement.electorate import NOBODY, Electorate
from flockstep.collectives.chain.certificate import value_of
from flockstep.collectives.chain.voters import (
    Appointments,
    appointed,
    electorate_after,
    electorate_of,
    has_majority_term,
    heirs,
    is_needed,
    why_no_quorum,
)
from flockstep.dht.run.admission import OPEN, Charter, Invitation, Ticket
from flockstep.dht.run.statements import OwnerStatement, OwnerStatements
from flockstep.peer import wire
from flockstep.peer.errors import MalformedMessage, ProtocolViolation
from flockstep.peer.identity import Identity
from flockstep.peer.wire.schema import encode
from support.certificates import RUN, certify, decided, seats, signed

FIVE = sorted((Identity.from_seed(bytes([number]) * 32) for number in range(1, 6)), key=lambda one: one.peer_id)
IDS = tuple(identity.peer_id for identity in FIVE)
OWNER = Identity.from_seed(bytes([8]) * 32)
STRANGER = Identity.from_seed(bytes([9]) * 32)
SLOT = wire.Slot(RUN, 3, b"p" * 32, 0, 2)
TERM = SLOT.at(1, 2)
VALUE = wire.Value(
    *SLOT.decision, bytes(32), IDS, (0, 1, 2, 3, 4, 5), seats(5), b"c" * 32, (0, 1), (b"o" * 32,) * 5, b"n" * 32, 900
)
E = Electorate(dict.fromkeys(IDS, 1))
KEPT = Charter(RUN, OWNER.peer_id, founders=frozenset(IDS[:1]), keepers=frozenset(IDS[:2]), stall="wait")


def appointment(author: Identity, voters: tuple[str, ...], slot: wire.Slot = TERM) -> bytes:
    return encode(signed(author, wire.Appointment(slot.at(slot.term, 0), voters)))


def showing(data: bytes, slot: wire.Slot = TERM) -> wire.Certificate:
    """A certificate with this appointment, whoever signed it."""
    return replace(decided(VALUE, slot, FIVE, appointed=FIVE), appointment=data)


# The first term.


def test_founders_decide_the_first_round_and_after_a_roster_in_which_nobody_may_vote() -> None:
    assert electorate_after(None, KEPT) == Electorate({IDS[0]: 1})
    assert electorate_after(None, OPEN) == NOBODY
    assert electorate_after(replace(VALUE, members=IDS[2:], seats=seats(3)), KEPT) == Electorate({IDS[0]: 1})
    value = replace(VALUE, shares=(0,) * len(VALUE.contributors))
    assert electorate_after(value, replace(KEPT, keepers=None, by_work=True)) == Electorate({IDS[0]: 1})


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


def test_appointed_voters_have_the_votes_of_the_round_or_one_each_where_the_owner_adds_others() -> None:
    earned, owned = Electorate({IDS[0]: 5, IDS[1]: 7, IDS[2]: 2}), Charter(RUN, OWNER.peer_id)
    message = wire.Appointment(TERM, IDS[:2])
    assert dict(electorate_of(IDS[0], message, earned, OPEN).votes) == {IDS[0]: 5, IDS[1]: 7}
    assert dict(electorate_of(OWNER.peer_id, wire.Appointment(TERM, IDS[1:4]), earned, owned).votes) == dict.fromkeys(
        IDS[1:4], 1
    )


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


def test_the_owner_of_the_authority_votes_alone() -> None:
    charter = Charter(authority=IDS[2], founders=frozenset(IDS[2:3]))
    assert electorate_after(VALUE, charter) == electorate_after(None, charter) == Electorate({IDS[2]: 1})
    assert electorate_after(replace(VALUE, members=IDS[:2], seats=seats(2)), charter) == Electorate({IDS[2]: 1})


def test_who_is_not_invited_has_no_vote_though_a_roster_seats_it() -> None:
    ticket = Ticket(Invitation.sign(OWNER, RUN, STRANGER.peer_id, count=9), bytes([9]) * 32)
    invited = tuple(wire.Seat(1.0, 0, invite=ticket.credential(peer)) for peer in IDS[:3])
    value = replace(VALUE, seats=(*invited, *seats(2)))
    assert electorate_after(value, Charter(RUN, OWNER.peer_id, "invite")).voters == IDS[:3]


def test_who_was_added_to_a_list_votes_and_is_appointed_as_long_as_it_has_a_vote() -> None:
    charter = Charter(RUN, OWNER.peer_id, "allow", frozenset(IDS[:4]))
    ticket = Ticket(Invitation.sign(OWNER, RUN, IDS[4]), b"")
    seats_ = (*seats(4), wire.Seat(1.0, 0, invite=ticket.credential(IDS[4])))
    first = electorate_after(replace(VALUE, seats=seats_), charter)
    assert first.voters == IDS
    assert appointed(showing(appointment(FIVE[0], IDS)), first, charter).voters == IDS
    without = electorate_after(replace(VALUE, members=IDS[:4], seats=seats(4)), charter)
    with pytest.raises(ProtocolViolation):
        appointed(showing(appointment(FIVE[0], IDS)), without, charter)


def test_every_copy_of_a_certificate_gives_the_same_electorate() -> None:
    before = certify(None, 100, roster=FIVE)
    copies = [certify(before, 100, roster=FIVE, signers=signers) for signers in (FIVE, FIVE[:4], FIVE[1:])]
    assert len({copy.voters for copy in copies}) == 3
    assert {electorate_after(value_of(copy), OPEN) for copy in copies} == {E}


# Later terms.


def test_the_first_term_needs_no_appointment_and_takes_none() -> None:
    assert appointed(decided(VALUE, SLOT, FIVE), E, OPEN) == E
    with pytest.raises(ProtocolViolation, match="this is term 0"):
        appointed(showing(appointment(FIVE[0], IDS), SLOT), E, OPEN)


def test_a_later_term_is_that_of_its_appointment() -> None:
    assert appointed(showing(appointment(FIVE[1], IDS[1:])), E, OPEN) == Electorate(dict.fromkeys(IDS[1:], 1))
    with pytest.raises(ProtocolViolation, match="this is term 1"):
        appointed(showing(b""), E, OPEN)


@pytest.mark.parametrize(
    "slot",
    [
        SLOT.at(2, 0),
        SLOT.at(0, 0),
        wire.Slot("b" * 52, 3, b"p" * 32, 1),
        wire.Slot(RUN, 4, b"p" * 32, 1),
        wire.Slot(RUN, 3, b"q" * 32, 1),
    ],
)
def test_an_appointment_for_another_term_round_chain_or_run_does_not_count(slot: wire.Slot) -> None:
    with pytest.raises(ProtocolViolation, match="for another term"):
        appointed(showing(appointment(FIVE[0], IDS, slot)), E, OPEN)


def test_an_appointment_in_a_later_attempt_does_not_count() -> None:
    with pytest.raises(ProtocolViolation, match="for another term"):
        appointed(showing(encode(signed(FIVE[0], wire.Appointment(TERM, IDS)))), E, OPEN)


@pytest.mark.parametrize("voters", [(IDS[1], IDS[0]), (IDS[0], IDS[1], IDS[1])])
def test_an_appointment_lists_its_voters_once_each_and_in_order(voters: tuple[str, ...]) -> None:
    with pytest.raises(ProtocolViolation, match="once each, in order"):
        electorate_of(IDS[0], wire.Appointment(TERM, voters), E, OPEN)


def test_who_may_appoint_follows_from_the_manifest() -> None:
    statement = wire.Appointment(TERM, IDS[1:])
    present, wait, authority = OPEN, KEPT, Charter(owner=OWNER.peer_id, authority=OWNER.peer_id)
    assert electorate_of(IDS[1], statement, E, present).voters == IDS[1:]
    for author in (IDS[0], IDS[2], STRANGER.peer_id):
        with pytest.raises(ProtocolViolation, match="only the first of the voters"):
            electorate_of(author, statement, E, present)
    for charter, why in ((wait, "only the run's owner"), (authority, "the run's owner alone decides")):
        assert electorate_of(OWNER.peer_id, statement, E, charter).voters == IDS[1:]
        with pytest.raises(ProtocolViolation, match=why):
            electorate_of(IDS[1], statement, E, charter)


def test_only_the_owner_gives_a_vote_to_who_has_none() -> None:
    first, statement = Electorate(dict.fromkeys(IDS[:4], 1)), wire.Appointment(TERM, IDS)
    with pytest.raises(ProtocolViolation, match=f"an appointment of {IDS[4]}, which has no vote in this round"):
        electorate_of(IDS[0], statement, first, OPEN)
    assert electorate_of(IDS[0], statement, E, OPEN).voters == IDS
    assert electorate_of(OWNER.peer_id, statement, first, KEPT).voters == IDS


def test_a_steward_appoints_more_than_half_of_the_voters_in_terms_of_its_own() -> None:
    steward = STRANGER.peer_id
    charter = replace(KEPT, steward=steward)
    odd, even = (partial(wire.Appointment, SLOT.at(term, 0)) for term in (1, 2))
    assert electorate_of(steward, odd(IDS[:3]), E, charter).voters == IDS[:3]
    assert electorate_of(OWNER.peer_id, even(IDS[:1]), E, charter).voters == IDS[:1]
    four = Electorate(dict.fromkeys(IDS[:4], 1))
    for author, statement, first, why in (
        (steward, even(IDS[:3]), E, "term 2 is for the owner to appoint"),
        (OWNER.peer_id, odd(IDS[:3]), E, "term 1 is for its steward to appoint"),
        (steward, odd(IDS[:2]), E, "more than half of the votes only"),
        (steward, odd(IDS[:2]), four, "more than half of the votes only"),
        (steward, odd(IDS), four, f"{IDS[4]}, which has no vote"),
        (IDS[0], odd(IDS), E, "only the run's owner or its steward may make it"),
    ):
        with pytest.raises(ProtocolViolation, match=why):
            electorate_of(author, statement, first, charter)
    with pytest.raises(ProtocolViolation, match="only the run's owner may make it"):
        electorate_of(steward, odd(IDS[:3]), E, KEPT)


def test_what_is_no_signed_appointment_is_malformed() -> None:
    for data in (b"junk", encode(signed(FIVE[0], wire.Accept(TERM, bytes(32))))):
        with pytest.raises(MalformedMessage):
            appointed(showing(data), E, OPEN)


# The term of a majority.


def test_after_a_stall_a_majority_decides_where_the_manifest_says_so_or_less_than_four_vote() -> None:
    three, majority = Electorate(dict.fromkeys(IDS[:3], 1)), replace(KEPT, stall="majority")
    assert has_majority_term(E, majority)
    assert has_majority_term(three, KEPT)
    assert not has_majority_term(E, KEPT)
    assert not has_majority_term(three, replace(KEPT, stall="present"))
    assert not has_majority_term(three, replace(majority, authority=OWNER.peer_id))
    assert appointed(showing(b""), three, KEPT) == Electorate(three.votes, is_majority=True)
    assert appointed(showing(b""), E, majority) == Electorate(E.votes, is_majority=True)
    with pytest.raises(ProtocolViolation, match="this is term 2"):
        appointed(showing(b"", SLOT.at(2, 0)), three, KEPT)
    with pytest.raises(ProtocolViolation, match="this is term 1"):
        appointed(showing(b""), E, KEPT)
    # The owner may appoint others even there, but not for the term that has an electorate already.
    later = SLOT.at(2, 0)
    assert appointed(showing(appointment(OWNER, IDS[3:], later), later), E, majority).voters == IDS[3:]
    for charter, first in ((majority, E), (KEPT, three)):
        with pytest.raises(ProtocolViolation, match="term 1, which a majority"):
            appointed(showing(appointment(OWNER, IDS[3:])), first, charter)


WAITS, BY_MAJORITY, BY_PRESENT = (Charter(stall=stall) for stall in ("wait", "majority", "present"))
FOUR, TWO, THREE = (Electorate(dict.fromkeys(names, 1)) for names in ("abcd", "ab", "abc"))


@pytest.mark.parametrize(
    ("electorate", "term", "charter", "here", "why"),
    [
        (FOUR, 0, WAITS, "abcx", ""),
        (FOUR, 0, WAITS, "abx", "2 of 4 votes are here, 3 needed; missing: c, d"),
        (FOUR, 0, BY_MAJORITY, "abc", ""),
        (FOUR, 0, BY_MAJORITY, "ab", "2 of 4 votes are here, 3 needed; missing: c, d"),
        (THREE, 0, WAITS, "ab", ""),  # Fewer than four decide by majority after a stall,
        (THREE, 1, WAITS, "ab", "2 of 3 votes are here, 3 needed; missing: c"),  # which is the next term only once.
        (TWO, 0, WAITS, "a", "1 of 2 votes are here, 2 needed; missing: b"),
        (FOUR, 0, BY_PRESENT, "ax", ""),
        (FOUR, 0, BY_PRESENT, "x", "0 of 4 votes are here, 3 needed; missing: a, b, c, d"),  # Who appoints itself votes.
        (NOBODY, 0, WAITS, "x", ""),
    ],
)
def test_why_those_that_are_here_cannot_decide(
    electorate: Electorate, term: int, charter: Charter, here: str, why: str
) -> None:
    assert why_no_quorum(electorate, term, charter, set(here)) == why


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
    assert is_needed(IDS[0], here, electorate, replace(OPEN, stall="wait")) == needed


def test_the_last_voter_stays_for_those_that_its_round_would_give_a_vote() -> None:
    last, here = Electorate(dict.fromkeys(IDS[:3], 1)), (IDS[0], IDS[3])
    assert is_needed(IDS[0], here, last, OPEN)  # It decides alone after a stall.
    alone = Electorate({IDS[0]: 1})
    assert not is_needed(IDS[0], here, alone, KEPT)  # A newcomer has no voucher.
    assert is_needed(IDS[0], IDS[:2], alone, KEPT)  # A keeper that is listed, and was not in the last roster.
    assert not is_needed(IDS[0], here, alone, replace(OPEN, authority=IDS[0]))


# Heirs: listed peers without a vote, where no voter is left.

LISTED = Charter(RUN, OWNER.peer_id, "allow", frozenset(IDS), founders=frozenset(IDS))


@pytest.mark.parametrize(
    ("charter", "voters", "here", "found"),
    [
        (LISTED, IDS[:1], (*IDS[1:3], STRANGER.peer_id), IDS[1:3]),
        (LISTED, IDS[:3], IDS[3:], IDS[3:]),
        (LISTED, IDS[:3], IDS[2:], ()),  # A voter is here, ready or not.
        (LISTED, IDS[:4], IDS[4:], ()),  # Four voters would not follow it when they return.
        (replace(LISTED, stall="wait"), IDS[:1], IDS[1:], ()),
        (replace(LISTED, kind="open"), IDS[:1], IDS[1:], ()),
        (replace(LISTED, kind="invite"), IDS[:1], IDS[1:], ()),
        (replace(LISTED, authority=IDS[0]), IDS[:1], IDS[1:], ()),
        (replace(LISTED, by_work=True), IDS[:1], IDS[1:], ()),
        (replace(LISTED, keepers=frozenset(IDS[:2])), IDS[:1], IDS[1:], IDS[1:2]),
    ],
)
def test_listed_peers_inherit_the_votes_of_a_few_voters_none_of_which_is_here(
    charter: Charter, voters: tuple[str, ...], here: tuple[str, ...], found: tuple[str, ...]
) -> None:
    electorate = Electorate(dict.fromkeys(voters, 1))
    assert heirs(here, electorate, charter) == frozenset(found)
    may_go_on = charter.stall == "present" and bool({*found, *voters} & {*here})
    assert bool(why_no_quorum(electorate, 0, charter, here)) != may_go_on


def test_heirs_appoint_nobody_but_themselves() -> None:
    first = Electorate(dict.fromkeys(IDS[:2], 1))
    assert electorate_of(IDS[2], wire.Appointment(TERM.at(1, 0), IDS[2:4]), first, LISTED) == Electorate(
        dict.fromkeys(IDS[2:4], 1)
    )
    refused = [
        (LISTED, (IDS[1], IDS[2])),  # Beside a voter a newcomer gets no vote.
        (LISTED, tuple(sorted((IDS[2], STRANGER.peer_id)))),
        (OPEN, IDS[2:4]),
    ]
    for charter, voters in refused:
        with pytest.raises(ProtocolViolation, match="which has no vote in this round"):
            electorate_of(voters[0], wire.Appointment(TERM.at(1, 0), voters), first, charter)


def test_who_lets_the_term_stall_that_it_was_appointed_for_is_not_appointed_again() -> None:
    """Under `present`: one Ready of an earlier term, as of a liar that falls silent, would else stall all later ones."""
    me, slot, charter = IDS[0], SLOT.at(0, 0), Charter(founders=frozenset(IDS), stall="present")
    held = Appointments(E, charter)
    first = held.following(me, slot, E, dict.fromkeys(IDS, 0), IDS, ())
    assert isinstance(first, wire.Appointment)
    assert first.voters == IDS
    four = Electorate(dict.fromkeys(IDS[:4], 1))
    second = held.following(me, slot.at(1, 0), four, dict(zip(IDS, (1, 1, 0, 0, 0), strict=True)), IDS, ())
    assert isinstance(second, wire.Appointment)
    assert second.voters == (IDS[0], IDS[1], IDS[4])  # The last one was not appointed before.
    assert held.following(IDS[1], slot.at(1, 0), four, dict(zip(IDS, (0, 1, 0, 0, 0), strict=True)), IDS, ()) is not None
    assert held.keep(signed(FIVE[0], second), second) is False  # A voter's is shown when it is entered.
    entered = held.following(IDS[1], slot.at(1, 0), four, dict(zip(IDS, (1, 1, 0, 0, 0), strict=True)), IDS, ())
    assert entered == (signed(FIVE[0], second), second)  # More than half of those that are prompt are in it.
