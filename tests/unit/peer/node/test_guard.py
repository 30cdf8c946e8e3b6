"""Budgets of peers, of their address and network, and of all strangers."""

from contextlib import suppress

import pytest
from flockstep.peer.base.errors import ProtocolViolation, StreamClosed
from flockstep.peer.log.telemetry import Telemetry
from flockstep.peer.node.guard import (
    ADDRESS_SHARE,
    BEATS,
    BULKY,
    BURST,
    BURST_BYTES,
    BURST_SIGNATURES,
    BYTES_PER_SECOND,
    MAX_BUDGETS,
    NETWORK_SHARE,
    PER_SECOND,
    SIGNATURES_PER_SECOND,
    STRANGERS_SHARE,
    Cost,
    Guard,
    Standing,
)
from flockstep.peer.quota.origins import NOWHERE, Origins

ORIGINS = Origins(("192.168.0.0/16",))
HERE, NEIGHBOUR, ELSEWHERE = map(ORIGINS.of, ("192.0.2.1", "192.0.2.2", "203.0.113.1"))
VOTER, MEMBER, STRANGER = Standing
WHOLE = Cost(messages=BURST)


@pytest.mark.parametrize("standing", [MEMBER, STRANGER])
def test_new_ids_give_nobody_more_than_its_address_has_members_or_not(standing: Standing) -> None:
    """In an open run a key is a member once it has said so: 64 of them from one address had 64 budgets."""
    guard = Guard(Telemetry())
    for number in range(ADDRESS_SHARE):
        guard.take(f"id {number}", WHOLE, 0.0, HERE, standing)
    for other in (MEMBER, STRANGER):
        with pytest.raises(StreamClosed, match=r"address 192\.0\.2\.1 is used up"):
            guard.take("another id", Cost(messages=1), 0.0, HERE, other)
    guard.take("neighbour", Cost(messages=1), 0.0, NEIGHBOUR, standing)
    guard.take("voter", WHOLE, 0.0, HERE, VOTER)
    guard.take("another id", Cost(messages=1), 1.0, HERE, standing)


def test_new_addresses_of_one_network_share_a_budget() -> None:
    guard = Guard(Telemetry())
    for number in range(NETWORK_SHARE):
        guard.take(f"id {number}", Cost(signatures=BURST_SIGNATURES), 0.0, ORIGINS.of(f"192.0.2.{number}"), MEMBER)
    with pytest.raises(StreamClosed, match=r"network 192\.0\.2\.0/24 is used up"):
        guard.take("another id", Cost(signatures=1), 0.0, ORIGINS.of("192.0.2.99"), MEMBER)
    guard.take("elsewhere", Cost(signatures=1), 0.0, ELSEWHERE, MEMBER)


def test_members_at_home_or_in_memory_have_their_own_budgets_alone() -> None:
    guard = Guard(Telemetry())
    for number in range(2 * STRANGERS_SHARE):
        for origin in (ORIGINS.of("192.168.1.5"), NOWHERE):
            guard.take(f"id {number} {origin.address}", WHOLE, 0.0, origin, MEMBER)


def test_bytes_of_a_full_roster_behind_one_relay_fit_into_its_budget() -> None:
    guard = Guard(Telemetry())
    for number in range(64):
        guard.take(f"id {number}", Cost(100, 3_000_000), 0.0, HERE, MEMBER)
    assert ADDRESS_SHARE * BULKY * BURST_BYTES > 64 * 3_000_000


@pytest.mark.parametrize(
    ("cost", "most"),
    [
        (Cost(messages=1), PER_SECOND * BEATS),
        (Cost(num_bytes=1 << 16), BYTES_PER_SECOND / (1 << 16)),
        (Cost(signatures=1), SIGNATURES_PER_SECOND),
    ],
)
def test_all_keys_of_an_address_have_a_second_what_is_5_per_cent_of_a_core(cost: Cost, most: float) -> None:
    guard = Guard(Telemetry())

    def taken(second: int) -> int:
        """How often fresh keys get this cost in a second that follows on others."""
        count = 0
        with suppress(StreamClosed):
            while True:
                guard.take(f"id {second} {count}", cost, float(second), HERE, MEMBER)
                count += 1
        return count

    taken(0)
    assert [taken(second) for second in (1, 2, 3)] == [most] * 3


def test_all_strangers_have_one_budget_and_members_are_not_in_it() -> None:
    guard = Guard(Telemetry())
    for number in range(STRANGERS_SHARE):
        origin = ORIGINS.of(f"198.51.{number}.1")
        guard.take(f"id {number}", Cost(num_bytes=BURST_BYTES), 0.0, origin, STRANGER)
    with pytest.raises(StreamClosed, match="strangers is used up"):
        guard.take("a stranger", Cost(num_bytes=1), 0.0, ELSEWHERE, STRANGER)
    guard.take("member", Cost(num_bytes=BURST_BYTES), 0.0, ELSEWHERE, MEMBER)


def test_a_flood_of_ids_or_addresses_renews_no_budget_that_is_used_up() -> None:
    """Budgets of new ids pushed out the one of their address, which was whole again."""
    guard = Guard(Telemetry())
    for number in range(ADDRESS_SHARE):
        guard.take(f"id {number}", WHOLE, 0.0, HERE, STRANGER)
    for number in range(2 * MAX_BUDGETS):
        with pytest.raises(StreamClosed, match="used up"):
            guard.take(f"fresh {number}", Cost(messages=1), 0.0, HERE, STRANGER)
    for number in range(2 * MAX_BUDGETS):
        guard.take(f"home {number}", Cost(messages=1), 0.0, ORIGINS.of(f"2001:db8:{number:x}::1"), MEMBER)
        if not number % 100:
            with pytest.raises(StreamClosed, match="used up"):
                guard.take("fresh", Cost(messages=1), 0.0, HERE, STRANGER)
    assert len(guard._shared) <= MAX_BUDGETS


@pytest.mark.parametrize("cost", [Cost(messages=BURST), Cost(num_bytes=BURST_BYTES), Cost(signatures=BURST_SIGNATURES)])
def test_each_kind_of_cost_has_its_budget(cost: Cost) -> None:
    guard = Guard(Telemetry())
    guard.take("peer", cost, 0.0, HERE, VOTER)
    with pytest.raises(ProtocolViolation):
        guard.take("peer", cost, 0.0, HERE, VOTER)
    with pytest.raises(StreamClosed):
        guard.take("peer", cost, 0.0, HERE, VOTER)
    guard.take("peer", cost, 1000.0, HERE, VOTER)
