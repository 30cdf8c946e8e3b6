"""Origins of peers, their quotas, and the report of refused ones."""

import pytest
from flockstep.peer.base.errors import UsageError
from flockstep.peer.log.telemetry import Event, Telemetry
from flockstep.peer.quota.limits import BootstrapLimits, GateLimits
from flockstep.peer.quota.origins import BURST_SECONDS, MAX_REMEMBERED, UNKNOWN, Origins, Rates
from flockstep.peer.quota.refusals import REFUSAL_PERIOD, Refusals

ORIGINS = Origins(("127.0.0.0/8", "192.168.0.0/16", "::1/128"))


@pytest.mark.parametrize(
    ("ip", "address", "network", "exempt"),
    [
        ("203.0.113.7", "203.0.113.7", "203.0.113.0/24", False),
        ("127.0.0.1", "127.0.0.1", "127.0.0.0/24", True),
        ("192.168.3.4", "192.168.3.4", "192.168.3.0/24", True),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64", "2001:db8:1::/48", False),
        ("::1", "::/64", "::/48", True),
        ("::ffff:203.0.113.7", "203.0.113.7", "203.0.113.0/24", False),
    ],
)
def test_an_address_has_a_network(ip: str, address: str, network: str, exempt: bool) -> None:
    origin = ORIGINS.of(ip)
    assert (origin.address, origin.network, origin.exempt) == (address, network, exempt)


@pytest.mark.parametrize("limits", [BootstrapLimits(), BootstrapLimits().gate, GateLimits()])
@pytest.mark.parametrize("ip", ["127.0.0.1", "10.0.0.1", "172.17.0.1", "192.168.3.4", "169.254.1.1", "::1", "fd00::1"])
def test_nobody_is_exempt_for_being_local(limits: BootstrapLimits | GateLimits, ip: str) -> None:
    assert not Origins(limits.exempt).of(ip).exempt


def test_what_is_no_address_counts_together() -> None:
    assert ORIGINS.of("nonsense") == ORIGINS.of("") == UNKNOWN
    assert not UNKNOWN.exempt


def test_a_rate_allows_a_burst_and_then_so_many_a_second() -> None:
    rates = Rates(2.0)
    origin = ORIGINS.of("203.0.113.7")
    burst = int(2 * BURST_SECONDS)
    assert [rates.take(origin, 0.0) for _ in range(burst + 2)] == [True] * burst + [False] * 2
    assert [rates.take(origin, 1.0) for _ in range(3)] == [True, True, False]
    assert rates.take(ORIGINS.of("203.0.113.8"), 1.0)
    assert all(rates.take(ORIGINS.of("127.0.0.1"), 1.0) for _ in range(100))


def test_rates_remember_a_bounded_number_of_addresses() -> None:
    rates = Rates(1.0)
    for number in range(MAX_REMEMBERED + 10):
        rates.take(ORIGINS.of(f"198.18.{number // 256}.{number % 256}"), 0.0)
    hidden: dict[str, float] = rates._dry_at
    assert len(hidden) == MAX_REMEMBERED


def test_a_flood_of_refusals_leaves_few_events_and_loses_no_count() -> None:
    now, events = [0.0], list[Event]()
    telemetry = Telemetry()
    telemetry.subscribe(events.append)
    refusals = Refusals(telemetry, lambda: now[0], "bootstrap.refused")
    for number in range(1000):
        refusals.add("connection", "too many", ORIGINS.of(f"203.0.113.{number % 200}"))
    assert [event["count"] for event in events] == [1]
    now[0] = REFUSAL_PERIOD
    refusals.add("connection", "too many", ORIGINS.of("198.51.100.9"), peer="a peer")
    assert [event["count"] for event in events] == [1, 1000]
    assert (events[1]["origin"], events[1]["peer"], events[1]["step"]) == ("198.51.100.9", "a peer", "connection")
    refusals.add("connection", "too many")
    refusals.report()
    refusals.report()
    assert [event["count"] for event in events] == [1, 1000, 1]
    assert refusals.counts == {("connection", "too many"): 1002}


@pytest.mark.parametrize("wrong", [{"connections": 0}, {"circuit_rate": -1.0}, {"relay_rate": float("nan")}])
def test_a_limit_that_is_not_positive_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=f"--{next(iter(wrong)).replace('_', '-')} must be positive"):
        BootstrapLimits(**wrong)  # type: ignore[arg-type]  # Of whatever type each is.


def test_an_exempt_network_that_is_none_is_refused() -> None:
    with pytest.raises(UsageError, match=r"--exempt '10\.0\.0\.1/8' is no network"):
        BootstrapLimits(exempt=("10.0.0.1/8",))
