"""Liars among four voters and three contributors, or two among seven voters, and what they can do at the steps of an attempt.

The machines of a round alone (`support.deeds`), with every validity function in them. At each *step* of an attempt a
liar is honest, or does one of the `DEEDS`: each deed of the proposer, of another voter and of a key without a vote is tried,
the same deed of two voters of seven, and the pairs of deeds that once failed. Where the voters alone judge, as in a roster
with more members than parts, a key without a vote only contributes. In each case

- all honest members end with one certified value, all honest contributors are in it, and nothing raises in any of them; if
  a liar proposed it, at least one of them ends with it, and the others know that they are behind;
- no attempt fails but the one that a liar proposes;
- no honest member is charged.
"""

from collections.abc import Iterator
from typing import TypeAlias

import pytest
from flockstep.collectives.allreduce.actions import OutcomeKind
from flockstep.peer import wire
from flockstep.peer.base.digest import keyed
from flockstep.peer.wire.schema import encode
from support.deeds import STEPS, Deed, Lied, Step
from support.rounds import PEERS, order_of

VOTERS, MEMBERS = PEERS[:4], PEERS[:7]
SEVEN = MEMBERS
DEEDS = "silent", "to some", "to others", "twice", "false"
PLACES = "proposer", "voter", "contributor"
OTHER, NEXT = "other contributor", "next voter"
Deeds: TypeAlias = dict[Step, str]


def run(lies: dict[str, Deeds], seed: int = 0, voters: list[str] = VOTERS) -> None:
    """Run one case, of deeds by place. Raises `AssertionError` if the others suffer from it."""
    order = order_of(voters)
    places = {"proposer": order[0], "voter": order[2], NEXT: order[3], "contributor": MEMBERS[-1], OTHER: MEMBERS[-2]}
    liars = {places[place]: {step: Deed(kind) for step, kind in deeds.items()} for place, deeds in lies.items()}
    rounds = Lied(MEMBERS, seed=seed, voters=voters, attempts=4, lies=liars)
    rounds.false.add(keyed("another", b""))
    rounds.start()
    rounds.settle()
    ended = {peer: rounds.machines[peer].outcome for peer in MEMBERS if peer not in liars}
    outcomes = [outcome for outcome in ended.values() if outcome is not None]
    done = [outcome for outcome in outcomes if outcome.kind is OutcomeKind.DONE]
    assert len({encode(outcome.value) for outcome in done}) == 1, "honest members ended with no value, or with two"
    value, (slot,) = done[0].value, {outcome.slot for outcome in done}
    if value.members[0] not in liars:  # Who proposes may leave some out, in its turn; they catch up.
        assert len(done) == len(ended), {peer[-2:]: it.reason for peer, it in ended.items() if it and it not in done}
        assert {*done[0].cut} >= ended.keys(), f"it left out {ended.keys() - {*done[0].cut}}"
    most = 1 if "proposer" in lies else 0
    assert slot.attempt <= most, f"it took attempt {slot.attempt}"
    charged = {note.peer for note in rounds.notes if note.event == "peer.charged"} - liars.keys()
    assert not charged, f"honest members were charged: {charged}"


def singles() -> Iterator[Deeds]:
    yield from ({step: deed} for step in STEPS for deed in DEEDS)


@pytest.fixture
def voters_alone_judge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_PARTS", len(VOTERS))


@pytest.mark.parametrize("place", PLACES)
def test_no_single_deed_of_one_member_costs_the_others_more_than_its_own_attempt(place: str) -> None:
    for deeds in singles():
        run({place: deeds})


@pytest.mark.usefixtures("voters_alone_judge")
def test_no_single_deed_of_who_only_contributes_costs_anything() -> None:
    for deeds in singles():
        run({"contributor": deeds})


def test_two_voters_of_seven_that_do_the_same_cost_the_others_no_attempt() -> None:
    for deeds in singles():
        run({"voter": deeds, NEXT: deeds}, voters=SEVEN)


def test_an_output_that_was_named_and_replaced_is_known_when_it_is_named_again() -> None:
    """The owner offers an output that it does not send; the proposer has the one that a deputy made, and named the other."""
    run({"proposer": {"second word": "false"}, NEXT: {"result": "false", "bytes": "false"}}, voters=SEVEN)
