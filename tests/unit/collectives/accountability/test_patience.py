"""Who was waited for in vain is waited for in ever fewer rounds, and of a pair the one with more others is at fault."""

from flockstep.collectives.accountability.patience import MAX_ROUNDS, Faults, Lapses, Patience
from flockstep.collectives.accountability.trust import TRUST_WINDOW
from hypothesis import given
from hypothesis import strategies as st


def test_each_failure_doubles_the_rounds_without_a_wait() -> None:
    patience, waited = Patience(1), list[int]()
    for round_ in range(1, 100):
        if patience.awaits("a", round_):
            waited.append(round_)
        patience.fail("a", round_)
    assert waited == [1, 3, 6, 11, 20, 37, 70]
    assert patience.awaits("b", 3)


def test_who_is_not_waited_for_does_not_fail_again() -> None:
    patience = Patience(10)
    for round_ in (2, 3, 12):
        patience.fail("a", round_)
    assert [patience.awaits("a", round_) for round_ in (12, 13)] == [False, True]


@given(st.lists(st.integers(1, 400), min_size=1))
def test_what_was_long_ago_is_forgotten_and_nothing_is_remembered_for_ever(failures: list[int]) -> None:
    patience = Patience(1)
    for round_ in sorted(failures):
        patience.fail("a", round_)
    last = max(failures) + MAX_ROUNDS
    assert patience.awaits("a", last + 1)
    later = last + 20 * TRUST_WINDOW
    patience.fail("b", later)
    assert "a" not in patience._failed
    patience.fail("a", later)
    assert [patience.awaits("a", later + after) for after in (1, 2)] == [False, True]


KNOWN = {"a", "b", "c", "liar", "honest", *(f"liar {place}" for place in range(3))}


def test_a_contributor_without_parts_at_several_holders_is_at_fault_and_not_they() -> None:
    faults = Faults()
    assert faults.add([("key", "a")], KNOWN, 1, 4) == (set(), set())  # It may be either.
    assert faults.add([("key", "b")], KNOWN, 2, 4) == ({"key"}, set())


def test_a_holder_that_denies_several_contributors_is_at_fault_and_not_they() -> None:
    assert Faults().add([("a", "liar"), ("b", "liar")], KNOWN, 1, 4) == (set(), {"liar"})


def test_free_keys_put_the_blame_on_nobody() -> None:
    keys = [f"key {place}" for place in range(9)]
    assert Faults().add([*(("honest", key) for key in keys), *((key, "a") for key in keys)], KNOWN, 1, 4) == (set(), set())


def test_a_third_of_the_owners_lie_and_cannot_make_an_honest_contributor_look_like_a_liar() -> None:
    faults = Faults()
    for round_ in range(1, 20):
        contributors, _ = faults.add([("honest", f"liar {place}") for place in range(3)], KNOWN, round_, 10)
        assert not contributors


def test_pairs_of_long_ago_are_forgotten() -> None:
    faults = Faults()
    faults.add([("key", "a")], KNOWN, 1, 4)
    assert faults.add([("key", "b")], KNOWN, 1 + TRUST_WINDOW, 4) == (set(), set())


def test_who_is_late_under_more_proposers_than_may_lie_is_slow() -> None:
    lapses = Lapses()
    for round_ in range(1, 9):
        assert lapses.add(["honest"], "liar", round_, 4) == set()
    assert lapses.add(["honest"], "other", 9, 4) == {"honest"}
    assert lapses.add(["honest"], "other", 9 + TRUST_WINDOW, 4) == set()
