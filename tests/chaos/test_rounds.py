"""A peer dies or stops at each message of a round: the survivors end with the right bytes.

`Group.round` checks every round; this file names the victims and the additional assertions.
"""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack

import pytest
from chaos.chaos import Chaos, Strike
from chaos.group import Group, Report
from chaos.packets import Networks
from flockstep.collectives.vector.codec import CELL
from flockstep.peer.base.errors import LocalError

NUM_PEERS = 4
NUM_CELLS = 64


@pytest.fixture(scope="module")
def group() -> Iterator[Group]:
    with Group(NUM_PEERS, params=NUM_CELLS * CELL) as group:
        yield group


def strike(group: Group, chaos: Chaos) -> tuple[int, Report]:
    """The victim of the group's next round, and the round; whoever was struck is back behind it."""
    before = group.living()
    (report,) = chaos.run_rounds(group, 1)
    (victim,) = {peer.index for peer in before} - {peer.index for peer in group.living()}
    return victim, report


def assert_all_take_part(rounds: Iterable[Report]) -> None:
    """Whoever has left a round before its end is not waited for in the next one, and is in the one after it at the latest."""
    assert any(set(report.cut) == set(range(NUM_PEERS)) for report in rounds)


@pytest.mark.parametrize(
    ("role", "word"),
    [("sender", "Commit"), ("owner", "Have"), ("owner", "Serve"), ("proposer", "Roster"), ("proposer", "Cut")],
)
def test_who_is_killed_costs_the_others_nothing_but_its_share(group: Group, role: str, word: str) -> None:
    victim, report = strike(group, Chaos(seed=1).kill(peer=role, at=word, round=1))
    survivors = set(range(NUM_PEERS)) - {victim}
    assert report.attempts == (2 if role == "proposer" else 1)
    assert survivors <= set(report.cut)
    assert all(report.first(index, "peer.lost", peer=group.peers[victim].id) for index in survivors)
    group.revive(victim)
    assert_all_take_part(group.round() for _ in range(2))


@pytest.mark.parametrize(("role", "word"), [("owner", "Have"), ("proposer", "Roster")])
def test_who_is_stopped_is_left_out_and_takes_part_again(group: Group, role: str, word: str) -> None:
    victim, report = strike(group, Chaos(seed=2).stop(peer=role, at=word, round=1))
    assert report.attempts == (2 if role == "proposer" else 1)
    for index in set(range(NUM_PEERS)) - {victim}:
        lost = report.first(index, "peer.lost", peer=group.peers[victim].id)
        assert lost is not None
        assert "silent" in str(lost["reason"])
    group.resume(victim)
    assert_all_take_part(group.round() for _ in range(2))


@pytest.fixture
def networks() -> Iterator[Networks]:
    with ExitStack() as stack:
        try:
            yield stack.enter_context(Networks(NUM_PEERS))
        except LocalError as error:
            pytest.skip(str(error))


def test_whose_packets_are_dropped_is_left_out_and_takes_part_again(networks: Networks) -> None:
    with Group(NUM_PEERS, params=NUM_CELLS * CELL, launch=networks.launch) as group:
        chaos = Chaos(seed=3).drop(peer="owner", at="Commit", round=1).resume(after=1)
        cut_off, *healed = chaos.run_rounds(group, 3, cut_off=networks.cut_off)
    assert len(cut_off.cut) == NUM_PEERS - 1
    assert_all_take_part(healed)


def test_a_script_that_nobody_can_play_is_refused() -> None:
    for wrong in ({"peer": "master", "at": "Have"}, {"peer": 1, "at": "Lunch"}):
        with pytest.raises(ValueError, match="nobody says"):
            Strike("kill", round=1, **wrong)
