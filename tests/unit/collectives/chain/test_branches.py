"""The rule of branches: which of two chains holds, the same from either side."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
from flockstep.collectives.agreement.electorate import Electorate
from flockstep.collectives.chain.branches import Relation, Step, order, rank_of, relation, steps_of
from flockstep.collectives.chain.certificate import genesis, open_value, value_of
from flockstep.collectives.chain.packed import checked
from flockstep.dht.run.admission import OPEN, Charter
from flockstep.peer import wire
from flockstep.peer.base.errors import ProtocolViolation
from flockstep.peer.identity import Identity
from flockstep.peer.wire.schema import encode
from flockstep.peer.wire.signed import verify_signed
from hypothesis import given
from hypothesis import strategies as st
from support.certificates import RUN, certify, decided

SEVEN = sorted((Identity.from_seed(bytes([number]) * 32) for number in range(1, 8)), key=lambda one: one.peer_id)
STRANGERS = [Identity.from_seed(bytes([number]) * 32) for number in range(40, 60)]
COMMON = certify(None, 100, roster=SEVEN)
"""The last common certificate: the seven of its roster are the voters of the round after."""


def of(roster: Sequence[Identity], mark: bytes = b"") -> wire.Certificate:
    return certify(COMMON, 100, roster=roster, mark=mark)


def step(certificate: wire.Certificate, charter: Charter = OPEN) -> Step:
    (found,) = steps_of([certificate], COMMON, charter)
    return found


def check(*certificates: wire.Certificate, charter: Charter = OPEN, before: wire.Certificate | None = COMMON) -> None:
    checked(certificates, RUN, verify_signed, charter, before=before)


def listing(voters: Sequence[Identity], named: Sequence[Identity], appointed: Sequence[Identity]) -> wire.Certificate:
    """A certificate of a later term by `voters` whose roster names `named`, under an appointment of `appointed`."""
    value = open_value(of(named).value)
    return decided(value, wire.Slot(RUN, 2, value.previous).at(1, 0), voters, appointed=appointed)


@pytest.mark.parametrize(("left", "right"), [(4, 3), (3, 4), (2, 1), (6, 1)])
def test_the_branch_whose_roster_held_more_votes_wins_from_either_side(left: int, right: int) -> None:
    one, other = step(of(SEVEN[:left])), step(of(SEVEN[7 - right :]))
    check(of(SEVEN[:left]))
    check(of(SEVEN[7 - right :]))
    assert (one.votes, other.votes) == (left, right)
    goes = relation(one, other, OPEN), relation(other, one, OPEN)
    assert goes == ((Relation.LOSES, Relation.WINS) if left > right else (Relation.WINS, Relation.LOSES))


def test_at_equal_votes_the_smaller_hash_wins() -> None:
    one, other = step(of(SEVEN[:3])), step(of(SEVEN[4:]))
    small, large = sorted((one, other), key=lambda it: it.hash)
    assert relation(large, small, OPEN) is Relation.WINS
    assert relation(small, large, OPEN) is Relation.LOSES


def test_newcomers_in_a_roster_are_no_votes() -> None:
    crowd, few = step(of([*SEVEN[:3], *STRANGERS])), step(of(SEVEN[3:]))
    assert (crowd.votes, few.votes) == (3, 4)
    assert relation(few, crowd, OPEN) is Relation.LOSES


def test_two_certificates_of_one_term_by_the_same_voters_leave_everybody_where_it_is() -> None:
    one, other = step(of(SEVEN[:5])), step(of(SEVEN[2:], b"other"))
    assert relation(one, other, OPEN) is relation(other, one, OPEN) is Relation.TWICE


def test_a_run_with_an_authority_never_changes_its_chain() -> None:
    owner = Charter(authority=SEVEN[0].peer_id, owner=SEVEN[0].peer_id)
    few, many = (step(of(roster), OPEN) for roster in (SEVEN[:2], SEVEN[2:]))
    assert relation(few, many, owner) is Relation.TWICE


def test_where_not_those_that_are_present_decide_the_later_term_wins() -> None:
    owner = SEVEN[6]
    waits = Charter(owner=owner.peer_id, stall="wait")
    value = open_value(of(SEVEN[:2], b"later").value)
    slot = wire.Slot(RUN, 2, value.previous)
    names = tuple(one.peer_id for one in SEVEN[:2])
    later = decided(value, slot.at(1, 0), SEVEN[:2], appointed=SEVEN[:2])
    appointment = wire.Appointment(slot.at(1, 0), names)
    code, payload = wire.code_of(appointment), encode(appointment)
    signed = wire.Signed(owner.peer_id, code, payload, owner.sign(wire.signed_bytes(code, payload)))
    later = replace(later, appointment=encode(signed))
    check(later, charter=waits)
    first, second = step(of(SEVEN[:6]), waits), step(later, waits)
    assert relation(first, second, waits) is Relation.WINS
    assert relation(second, first, waits) is Relation.LOSES
    assert second.doubted is None


def test_branches_that_part_at_the_first_round_are_compared_by_the_founders_in_their_rosters() -> None:
    founders = Charter(founders=frozenset(one.peer_id for one in SEVEN), stall="present")
    slot = wire.Slot(RUN, 1, genesis(RUN)).at(1, 0)
    one, other = (
        steps_of([decided(value_of(certify(None, 100, roster=few)), slot, few, appointed=few)], None, founders)[0]
        for few in (SEVEN[:1], SEVEN[1:3])
    )
    assert (relation(one, other, founders), one.votes, other.votes) == (Relation.WINS, 1, 2)


def test_a_first_round_follows_nothing_else_than_the_genesis_of_its_run() -> None:
    elsewhere = replace(open_value(certify(None, 1, roster=SEVEN).value), previous=b"elsewhere".ljust(32, b"\0"))
    slot = wire.Slot(RUN, 1, elsewhere.previous).at(1, 0)
    with pytest.raises(ProtocolViolation, match="first round that follows another one"):
        check(decided(elsewhere, slot, SEVEN, appointed=SEVEN), before=None)


def test_keys_without_a_vote_cannot_appoint_themselves() -> None:
    with pytest.raises(ProtocolViolation, match="which has no vote in this round"):
        check(of(STRANGERS))
    with pytest.raises(ProtocolViolation, match="which has no vote in this round"):
        check(
            listing(STRANGERS[:9], STRANGERS[:9] + SEVEN, sorted([*STRANGERS[:9], *SEVEN[:4]], key=lambda i: i.peer_id))
        )


def test_voters_that_name_others_in_their_roster_have_no_more_votes_for_it() -> None:
    alone = listing(SEVEN[:1], SEVEN, SEVEN[:1])
    check(alone)
    assert step(alone).votes == 1
    pair = listing(SEVEN[:2], SEVEN, SEVEN[:4])
    with pytest.raises(ProtocolViolation, match="2 of 3 votes"):
        check(pair)
    assert relation(step(of(SEVEN[2:])), step(alone), OPEN) is Relation.LOSES


@given(st.integers(1, 12), st.data())
def test_liars_below_a_third_never_win_against_a_quorum(total: int, data: st.DataObject) -> None:
    """Their appointment may name honest voters, of which it needs no signature: a quorum of it are liars."""
    voters = [Identity.from_seed(bytes([number]) * 32) for number in range(1, total + 1)]
    before = certify(None, 1, roster=voters)
    liars = data.draw(st.integers(0, (total - 1) // 3))
    named = next((n for n in range(total, 0, -1) if liars >= Electorate({str(at): 1 for at in range(n)}).quorum), 0)
    if not named:
        return
    value = open_value(certify(before, 1, roster=voters, mark=b"lie").value)
    lie = decided(value, wire.Slot(RUN, 2, value.previous).at(1, 0), voters[:liars], appointed=voters[:named])
    check(lie, before=before)
    honest = certify(before, 1, roster=voters[liars:])
    check(honest, before=before)
    (one,), (other,) = steps_of([lie], before, OPEN), steps_of([honest], before, OPEN)
    assert relation(other, one, OPEN) is Relation.LOSES
    assert (one.doubted is not None) or total < 4


def test_what_less_than_half_of_the_votes_decided_after_a_stall_is_doubted() -> None:
    for size in range(1, 8):
        found = step(of(SEVEN[:size]))
        assert (found.doubted is not None) is (size <= 3), size


STEPS = st.builds(
    lambda weight, mark, ballot: Step(2, bytes([mark]) * 32, weight, bytes([ballot]) * 32, weight, None),
    st.integers(0, 3),
    st.integers(0, 3),
    st.integers(0, 9),
)


@given(st.lists(st.lists(STEPS, max_size=4), min_size=3, max_size=3))
def test_branches_are_totally_ordered(branches: list[list[Step]]) -> None:
    for one, other, third in itertools.permutations(branches):
        assert (rank_of(one) < rank_of(other)) + (rank_of(other) < rank_of(one)) + (rank_of(one) == rank_of(other)) == 1
        if rank_of(one) <= rank_of(other) <= rank_of(third):
            assert rank_of(one) <= rank_of(third)
        if len(one) > len(other) and list(map(order, one[: len(other)])) == list(map(order, other)):
            assert rank_of(one) < rank_of(other)


@given(STEPS, STEPS)
def test_two_sides_of_a_partition_find_the_same(one: Step, other: Step) -> None:
    here, there = relation(one, other, OPEN), relation(other, one, OPEN)
    if one.ballot == other.ballot:
        assert here is there is Relation.TWICE
    elif order(one) != order(other):
        assert {here, there} == {Relation.WINS, Relation.LOSES}
