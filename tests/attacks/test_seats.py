"""Attacks on the draw of seats: of more than 256 members some take no part in a round, and keys are free."""

from dataclasses import replace

import pytest
from flockstep.collectives.chain.quorum import drawn_for, ranked
from flockstep.collectives.round.gather import willing
from flockstep.peer import wire
from support.rounds import SLOT, a_ready, a_setup, a_vote, signed

VOTERS = [f"12D3KooWvoter{index:039d}" for index in range(40)]
HONEST = [f"12D3KooWhonest{index:038d}" for index in range(600)]
FREE = 256 - len(VOTERS)
LATER = wire.Slot(SLOT.run, 2, b"the hash of round 1".ljust(32))


def keys(count: int) -> list[str]:
    return [f"12D3KooWliar{index:040d}" for index in range(count)]


@pytest.fixture(autouse=True)
def rosters_of_256(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_ROSTER", 256)


@pytest.mark.parametrize("num_liars", [24, 400])
def test_who_is_ready_without_having_been_drawn_takes_no_seat_of_who_was(num_liars: int) -> None:
    """The honest are 640, of which 256 were drawn; the others are not Ready, and the liars all are, with the best ranks."""
    drawn = drawn_for(SLOT, [*VOTERS, *HONEST], VOTERS, HONEST)
    liars = ranked(SLOT, keys(10 * num_liars))[:num_liars]
    vote = a_vote(VOTERS[0], VOTERS)
    for peer in [*liars, *drawn]:
        vote.receive(signed(peer, a_ready()), a_ready(), 0.0)
    assert willing(a_setup(VOTERS[0], drawn), vote).keys() == drawn
    absent = set(HONEST[:400])  # Seats that nobody else takes are for who comes.
    assert len(willing(a_setup(VOTERS[0], drawn - absent), vote)) == wire.MAX_ROSTER


def test_keys_made_before_a_round_was_certified_do_not_suit_the_draw_after_it() -> None:
    """The best of 10,000 keys for the draw after another value, of the same round, are drawn no more often than others."""
    foreseen = replace(LATER, previous=b"the hash that was foreseen".ljust(32))
    made = keys(10_000)
    best = sorted(drawn_for(foreseen, made, (), made))[:FREE]
    assert len(drawn_for(foreseen, [*VOTERS, *HONEST, *best], VOTERS, HONEST) & set(best)) == 0  # All came later.
    members = [*VOTERS, *HONEST, *best]
    assert len(drawn_for(foreseen, members, VOTERS, members) & set(best)) >= 0.9 * FREE
    assert len(drawn_for(LATER, members, VOTERS, members) & set(best)) <= FREE // 3


def test_keys_made_after_a_round_was_certified_are_not_drawn_before_who_was_there() -> None:
    best = sorted(drawn_for(LATER, keys(10_000), (), ()))
    drawn = drawn_for(LATER, [*VOTERS, *HONEST, *best], VOTERS, HONEST)
    assert not drawn & set(best)
    assert drawn >= set(VOTERS)
    assert set(best[:3]) <= drawn_for(LATER, [*VOTERS, *best[:3]], VOTERS, VOTERS)  # Where there is room, all are.
