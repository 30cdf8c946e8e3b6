"""Budgets of strangers, of their address and of all of them."""

import pytest
from flockstep.peer.errors import ProtocolViolation, StreamClosed
from flockstep.peer.node.guard import ADDRESS_SHARE, BURST, BURST_BYTES, BURST_SIGNATURES, STRANGERS_SHARE, Cost, Guard
from flockstep.peer.telemetry import Telemetry


def test_new_ids_give_a_stranger_no_more_than_its_address_has() -> None:
    guard = Guard(Telemetry())
    whole = Cost(messages=BURST)
    for number in range(ADDRESS_SHARE):
        guard.take(f"id {number}", whole, 0.0, address="192.0.2.1")
    with pytest.raises(StreamClosed, match=r"address 192\.0\.2\.1 is used up"):
        guard.take("another id", Cost(messages=1), 0.0, address="192.0.2.1")
    guard.take("neighbour", Cost(messages=1), 0.0, address="192.0.2.2")
    guard.take("member", whole, 0.0)
    guard.take("another id", Cost(messages=1), 1.0, address="192.0.2.1")


def test_all_strangers_have_one_budget_and_members_are_not_in_it() -> None:
    guard = Guard(Telemetry())
    for number in range(STRANGERS_SHARE):
        guard.take(f"id {number}", Cost(num_bytes=BURST_BYTES), 0.0, address=str(number))
    with pytest.raises(StreamClosed, match="strangers is used up"):
        guard.take("a stranger", Cost(num_bytes=1), 0.0, address="elsewhere")
    guard.take("member", Cost(num_bytes=BURST_BYTES), 0.0)


@pytest.mark.parametrize("cost", [Cost(messages=BURST), Cost(num_bytes=BURST_BYTES), Cost(signatures=BURST_SIGNATURES)])
def test_each_kind_of_cost_has_its_budget(cost: Cost) -> None:
    guard = Guard(Telemetry())
    guard.take("peer", cost, 0.0)
    with pytest.raises(ProtocolViolation):
        guard.take("peer", cost, 0.0)
    with pytest.raises(StreamClosed):
        guard.take("peer", cost, 0.0)
    guard.take("peer", cost, 1000.0)
