"""The difference between two JSON values, applied."""

import copy
import json
from typing import Any

from flockstep.scripts.page.delta import operations_between
from flockstep.scripts.page.feed import StablePeers
from hypothesis import given
from hypothesis import strategies as st
from support.applied import applied
from support.fake_runs import FakeRun

LEAVES = st.none() | st.integers(0, 5) | st.text("abc", max_size=2)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=12) | st.dictionaries(st.text("xyz", max_size=2), inner, max_size=4)
)


@given(VALUES, VALUES)
def test_the_changes_turn_the_old_value_into_the_new_one(old: Any, new: Any) -> None:
    assert applied(old, list(operations_between(old, new))) == new
    assert not list(operations_between(new, copy.deepcopy(new)))


@given(st.lists(st.integers(0, 9), max_size=30), st.integers(0, 30), st.lists(st.integers(0, 9), max_size=5))
def test_a_list_that_slides_is_turned_into_the_next(items: list[int], dropped: int, come: list[int]) -> None:
    for new in ([*come, *items[: len(items) - dropped]], [*items[dropped:], *come]):
        assert applied(items, list(operations_between(items, new))) == new


def test_a_round_of_a_long_run_is_a_small_difference() -> None:
    run, peers = FakeRun(peers=16, planned=2000), StablePeers()
    run.advance(1500)
    before = peers.placed(run.picture)
    run.advance()
    # 16,500 numbers of rounds and 200 rounds by name: what changes is one of each, and the figures of the members.
    assert len(json.dumps(list(operations_between(before, peers.placed(run.picture))))) < 8_000 < len(json.dumps(before)) / 20


def test_new_items_in_front_do_not_change_those_behind() -> None:
    old = [{"n": number} for number in range(50, 0, -1)]
    new = [{"n": 51}, *old[:-1]]
    assert list(operations_between(old, new)) == [["splice", [], 0, 0, [{"n": 51}]], ["splice", [], 50, 1, []]]
