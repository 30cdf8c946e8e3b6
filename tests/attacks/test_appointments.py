"""Appointments by liars: the last term of all, and more of them than anybody needs."""

import pytest
from flockstep.collectives.agreement.actions import Note
from flockstep.collectives.allreduce.actions import Forward
from flockstep.collectives.chain.voters import MAX_SHOWN_APPOINTMENTS, MAX_SKIPPED_TERMS
from flockstep.collectives.round.vote import Vote
from flockstep.dht.run.admission import Charter
from flockstep.peer import wire
from support.rounds import PEERS, SLOT, a_ready, a_vote, signed

FIRST, ME, *OTHERS = VOTERS = PEERS[:4]
OWNER = PEERS[8]
OWNED = Charter(SLOT.run, OWNER, founders=frozenset(VOTERS), keepers=frozenset(VOTERS), stall="wait")


def receive(vote: Vote, sender: str, message: wire.VoteMessage) -> list[object]:
    return [*vote.receive(signed(sender, message), message, 1.0)]


def ready_together(charter: Charter | None = None) -> Vote:
    """My vote, with the Readys of all voters."""
    vote = a_vote(ME, VOTERS) if charter is None else a_vote(ME, VOTERS, charter=charter)
    vote.begin(a_ready(), VOTERS, 0.0)
    for voter in (FIRST, *OTHERS):
        receive(vote, voter, a_ready())
    return vote


@pytest.mark.parametrize("term", [MAX_SKIPPED_TERMS + 1, wire.MAX_TERM])
def test_nobody_uses_up_the_terms_of_a_round_and_leaves(term: int) -> None:
    vote = ready_together()
    receive(vote, FIRST, wire.Appointment(SLOT.at(term, 0), tuple(VOTERS)))
    vote.stall(VOTERS, (), 2.0)
    assert vote.slot.term == 0
    vote.stall(VOTERS[1:], (), 3.0)  # It left; I am the first of those that are here.
    assert (vote.slot.term, vote.electorate.voters) == (1, tuple(VOTERS[1:]))


def test_who_has_been_in_some_terms_alone_appoints_the_next_one() -> None:
    vote = ready_together()
    receive(vote, FIRST, wire.Appointment(SLOT.at(MAX_SKIPPED_TERMS, 0), tuple(VOTERS)))
    vote.stall(VOTERS, (), 2.0)
    assert vote.slot.term == MAX_SKIPPED_TERMS


def test_the_owner_may_skip_terms_that_it_has_signed() -> None:
    vote = ready_together(OWNED)
    receive(vote, OWNER, wire.Appointment(SLOT.at(2 * MAX_SKIPPED_TERMS, 0), tuple(VOTERS[:3])))
    vote.stall(VOTERS[:3], (), 2.0)
    assert vote.slot.term == 2 * MAX_SKIPPED_TERMS


def test_of_a_flood_of_appointments_few_are_shown_to_all_in_a_term() -> None:
    vote = ready_together(OWNED)
    done: list[object] = []
    for number in range(20):
        done += receive(vote, OWNER, wire.Appointment(SLOT.at(1 + number, 0), tuple(VOTERS[:3])))
    assert sum(isinstance(action, Forward) for action in done) == MAX_SHOWN_APPOINTMENTS
    refused = [action for action in done if isinstance(action, Note) and action.event == "agreement.refused"]
    assert {note.peer for note in refused} == {OWNER}
    assert len(refused) == 20 - MAX_SHOWN_APPOINTMENTS
