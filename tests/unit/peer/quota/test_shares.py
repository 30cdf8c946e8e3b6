"""Fair shares: no address and no network keeps those out that have less."""

from collections import Counter

from flockstep.peer.quota.origins import MAX_REMEMBERED, Origin, Origins
from flockstep.peer.quota.shares import ALL_BURST_SHARE, ALL_SHARE, NETWORK_SHARE, FairBucket, Shares
from hypothesis import given
from hypothesis import strategies as st

ORIGINS = Origins(("127.0.0.0/8",))
RATE, BURST_SECONDS = 8.0, 16.0
BURST = int(RATE * BURST_SECONDS)


def home(network: int, address: int = 0) -> Origin:
    return ORIGINS.of(f"2001:db8:{network:x}:{address:x}::1")


def taken(shares: Shares, origin: Origin, now: float, most: int = 100_000) -> int:
    return next((count for count in range(most) if shares.exceeded(origin, now)), most)


def test_a_network_has_the_burst_of_an_address_and_a_newcomer_in_it_an_equal_part() -> None:
    shares = Shares(RATE, BURST_SECONDS)
    assert taken(shares, home(1, 1), 0.0) == BURST
    assert shares.exceeded(home(1, 1), 0.0) == "one address"
    assert taken(shares, home(1, 2), 0.0) == BURST // 2
    assert shares.exceeded(home(1, 2), 0.0) == "one network"
    assert taken(shares, home(2, 1), 0.0) == BURST


def test_many_addresses_of_one_network_have_what_it_has() -> None:
    """A /48 had the rate of each of its 65,536 addresses."""
    shares, seconds = Shares(RATE, BURST_SECONDS), 200
    served = 0
    for second in range(seconds):
        for address in range(100):
            served += taken(shares, home(1, address), float(second), most=int(RATE))
    assert served <= 1.1 * NETWORK_SHARE * RATE * seconds + 6 * BURST
    assert taken(shares, home(1, 200), float(seconds)) >= 1


def test_all_networks_have_a_limit_and_a_newcomer_is_served() -> None:
    shares, seconds = Shares(RATE, BURST_SECONDS), 200
    served = 0
    for second in range(seconds):
        for network in range(40):
            served += taken(shares, home(network), float(second), most=int(RATE))
    assert served <= 1.1 * ALL_SHARE * RATE * seconds + 5 * ALL_BURST_SHARE * BURST
    assert shares.exceeded(home(0), float(seconds)) in ("one address", "all networks")
    assert taken(shares, home(100), float(seconds)) >= ALL_BURST_SHARE * BURST // 41


def test_nothing_is_counted_of_an_exempt_network() -> None:
    shares = Shares(RATE, BURST_SECONDS)
    assert taken(shares, ORIGINS.of("127.0.0.1"), 0.0, most=10 * BURST) == 10 * BURST
    assert shares.spend(ORIGINS.of("127.0.0.1"), 0.0, 1e9) == 0.0


def test_those_who_wait_are_those_who_sent_most() -> None:
    shares = Shares(RATE, BURST_SECONDS)
    waits = [shares.spend(home(1, address % 10), 0.0, 4.0) for address in range(BURST // 4 + 10)]
    assert waits == [0.0] * (BURST // 4) + waits[-10:]
    assert all(waits[-10:])
    assert shares.spend(home(1, 99), 0.0, 4.0) == 0.0
    assert shares.spend(home(2, 0), 0.0, 1.0) == 0.0


def test_a_burst_is_whole_late_too() -> None:
    shares = Shares(3 / 10.0, 10.0)
    assert [shares.exceeded(home(1), 1e6) for _ in range(4)] == ["", "", "", "one address"]


def test_a_bucket_remembers_a_bounded_number_and_for_a_bounded_time() -> None:
    bucket = FairBucket(1.0, 10.0)
    for number in range(MAX_REMEMBERED + 10):
        bucket.spend(str(number), 0.0)
    assert len(bucket) == MAX_REMEMBERED
    bucket.spend("late", 10.5)
    assert len(bucket) == 1


@given(st.lists(st.tuples(st.integers(0, 5), st.floats(0, 3), st.floats(0.1, 4)), max_size=200))
def test_a_bucket_is_never_exceeded_by_more_than_the_parts_of_all(steps: list[tuple[int, float, float]]) -> None:
    rate, burst, now, served = 2.0, 12.0, 0.0, 0.0
    bucket, of = FairBucket(rate, burst), Counter[int]()
    for who, pause, amount in steps:
        now += pause
        if bucket.take(str(who), now, amount):
            served += amount
            of[who] += 1
    assert served <= 2 * rate * now + burst * sum(1 / number for number in range(1, 7)) + 6 * 4
