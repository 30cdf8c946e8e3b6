"""Places: a newcomer always gets one, and nobody who has little loses it to who has much."""

from collections import Counter

from flockstep.peer.quota.origins import Origin, Origins
from flockstep.peer.quota.places import Places
from hypothesis import given
from hypothesis import strategies as st

ORIGINS = Origins(("127.0.0.0/8",))


def home(network: int, address: int = 0) -> Origin:
    return ORIGINS.of(f"2001:db8:{network:x}:{address:x}::1")


def test_in_its_network_the_address_with_most_gives_up_its_oldest_and_who_has_most_its_own() -> None:
    places = Places[int](in_all=100, per_address=3, per_network=4)
    assert [places.enter(number, home(1, 1)) for number in range(3)] == [None] * 3
    assert places.enter(3, home(1, 1)) == 0  # Its own.
    assert places.enter(4, home(1, 2)) is None
    assert places.enter(5, home(1, 2)) == 1
    assert places.enter(6, home(1, 3)) == 2
    assert places.enter(7, home(1, 3)) == 6
    assert places.enter(8, home(2)) is None
    for number in range(9):
        places.leave(number)
    assert len(places) == 0
    assert places.enter(9, home(1, 2)) is None


def test_when_all_places_are_taken_the_network_that_holds_most_gives_one() -> None:
    places = Places[int](in_all=4, per_address=9, per_network=9)
    for number in range(4):
        places.enter(number, home(number // 3))
    assert places.enter(4, home(1)) == 0
    assert places.enter(5, home(1)) == 3  # Both have two now.
    assert places.enter(6, home(2)) == 1
    assert places.enter(7, ORIGINS.of("127.0.0.1")) == 4
    assert [places.enter(number, home(number)) for number in (8, 9)] == [2, 5]  # All are alone: the oldest of all.
    assert len(places) == 4


def test_an_exempt_address_has_the_limit_of_all_and_its_peers_equal_parts() -> None:
    places = Places[int](in_all=4, per_address=1, per_network=1, per_peer=3)
    proxy = ORIGINS.of("127.0.0.1")
    assert places.enter(0, proxy, "honest") is None
    assert [places.enter(number, proxy, "flood") for number in range(1, 6)] == [None, None, None, 1, 2]
    assert places.enter(6, proxy, "newcomer") == 3
    assert places.enter(7, proxy, "another") == 4
    assert 0 in places


def test_who_has_no_place_to_give_gives_none() -> None:
    places = Places[int](in_all=0)
    assert places.enter(1, home(1)) == 1
    assert len(places) == 0


def test_the_newest_gives_way_where_a_lost_place_is_worse_than_one_not_won() -> None:
    places = Places[int](in_all=4, per_address=2, newest=True)
    assert [places.enter(number, home(1, 1)) for number in range(3)] == [None, None, 2]
    assert [places.enter(number, home(1, 2)) for number in (3, 4)] == [None, None]
    assert places.enter(5, home(1, 3)) == 4
    assert places.enter(6, home(2)) == 1
    assert [places.enter(number, home(number)) for number in (7, 8, 9)] == [5, 3, 9]
    assert 0 in places


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3), st.integers(0, 3)), max_size=80), st.booleans())
def test_places_are_never_more_than_their_limits(steps: list[tuple[bool, int, int]], newest: bool) -> None:
    places, held = Places[int](9, 3, 5, newest=newest), dict[int, Origin]()
    for number, (enters, network, address) in enumerate(steps):
        if enters or not held:
            held[number] = home(network, address)
            lost = places.enter(number, home(network, address))
            assert newest or lost != number
            if lost is not None:
                del held[lost]
        else:
            places.leave(held.popitem()[0])
        assert len(places) == len(held) <= 9
        assert all(one in places for one in held)
        assert max(Counter(origin.address for origin in held.values()).values(), default=0) <= 3
        assert max(Counter(origin.network for origin in held.values()).values(), default=0) <= 5


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 4), st.integers(0, 3)), min_size=20, max_size=100), st.booleans())
def test_whatever_four_networks_do_another_one_enters_and_keeps_its_place(
    steps: list[tuple[bool, int, int]], newest: bool
) -> None:
    """Sleepers that are older, keys that always reconnect, many addresses of a network: none wins a place of others."""
    places, held, came = Places[int](8, 6, 8, newest=newest), list[int](), len(steps) // 2
    for number, (enters, network, address) in enumerate(steps):
        if number == came:
            assert places.enter(-1, home(0)) != -1
        if enters or not held:
            held.append(number)
            places.enter(number, home(network, address))
        else:
            places.leave(held.pop(0))
        assert (-1 in places) == (number >= came)
