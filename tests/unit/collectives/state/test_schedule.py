"""The leaf schedule: rarest first, most from the fastest, late twice, failing never."""

import heapq
import random
from collections import Counter

from flockstep.collectives.state.schedule import LATE_FACTOR, MAX_LEAF_FAILURES, LeafSchedule
from hypothesis import given
from hypothesis import strategies as st

LEAVES = [bytes([number]) * 32 for number in range(20)]


def test_what_fewest_can_give_is_asked_for_first() -> None:
    taking = LeafSchedule(LEAVES[:3], ["a", "b", "c"])
    assert taking.next("a", 0.0) == LEAVES[0]
    taking.failed("a", LEAVES[0])
    assert taking.next("a", 0.0) == LEAVES[1]
    taking.failed("c", LEAVES[2])
    assert taking.next("b", 0.0) == LEAVES[0]
    assert taking.next("b", 0.0) == LEAVES[2]
    assert taking.next("b", 0.0) is None


def test_who_fails_several_times_in_a_row_is_asked_no_more() -> None:
    taking = LeafSchedule(LEAVES, ["a", "b"])
    for count in range(2 * MAX_LEAF_FAILURES):
        key = taking.next("a", 0.0)
        assert key is not None
        if count % 2:
            assert taking.came("a", key, 1.0)
        else:
            taking.failed("a", key)
    assert "a" in taking.providers
    for _ in range(MAX_LEAF_FAILURES):
        key = taking.next("a", 0.0)
        assert key is not None
        taking.failed("a", key)
    assert taking.providers == ("b",)
    assert taking.next("a", 0.0) is None


def test_a_late_leaf_is_asked_of_who_has_nothing_else_to_do_and_the_first_counts() -> None:
    taking = LeafSchedule(LEAVES[:3], ["slow", "fast"])
    late = taking.next("slow", 0.0)
    assert late is not None
    for second in (1.0, 2.0):
        key = taking.next("fast", second - 1)
        assert key is not None
        assert key != late
        assert taking.came("fast", key, second)
    assert taking.next("fast", 2.0) is None
    again = taking.look_again("fast")
    assert again == LATE_FACTOR
    assert taking.next("fast", again) == late
    assert taking.next("fast", 10 * again) is None
    assert taking.came("fast", late, 4.0)
    assert not taking.came("slow", late, 5.0)
    assert taking.done


def test_what_an_excluded_provider_was_asked_for_is_asked_of_others_and_what_it_sends_still_counts() -> None:
    taking = LeafSchedule(LEAVES[:2], ["liar", "b"])
    first, second = taking.next("liar", 0.0), taking.next("liar", 0.0)
    assert first is not None
    assert second is not None
    taking.exclude("liar")
    assert taking.came("liar", first, 1.0)
    assert taking.next("b", 1.0) == second
    taking.failed("liar", second)
    assert not taking.done
    assert taking.came("b", second, 2.0)
    assert taking.done


@given(st.integers(0, 2**32), st.integers(1, 6))
def test_in_any_order_of_events_every_leaf_is_taken_once_if_somebody_gives_it(seed: int, num_providers: int) -> None:
    chance = random.Random(seed)
    providers = [f"provider {number}" for number in range(num_providers)]
    honest = chance.choice(providers)
    reliability = {provider: 1.0 if provider == honest else chance.random() for provider in providers}
    pace = {provider: chance.choice([0.1, 1.0, 30.0]) for provider in providers}
    taking = LeafSchedule(LEAVES, providers)
    now, taken, refused = 0.0, Counter[bytes](), set[tuple[str, bytes]]()
    under_way: list[tuple[float, str, bytes]] = []
    while not taking.done:
        for provider in providers:
            while sum(other == provider for _, other, _ in under_way) < 2:
                key = taking.next(provider, now)
                if key is None:
                    break
                assert (provider, key) not in refused
                assert (provider, key) not in {(other, asked) for _, other, asked in under_way}
                heapq.heappush(under_way, (now + pace[provider] * (0.5 + chance.random()), provider, key))
        assert under_way, "nobody is asked for what is left"
        now, provider, key = heapq.heappop(under_way)
        if chance.random() < reliability[provider]:
            taken[key] += taking.came(provider, key, now)
        elif chance.random() < 0.2:
            taking.exclude(provider)
        else:
            refused.add((provider, key))
            taking.failed(provider, key)
    assert taken == Counter(LEAVES)
