"""Shares of the data: complete, repeatable, and of each peer's own order."""

from flockstep.optim.shards import Shares


def test_order_is_a_permutation_that_the_seed_the_peer_and_the_epoch_decide() -> None:
    orders = [
        tuple(Shares(seed, peer, 50).order(epoch))
        for seed, peer, epoch in [(1, "a", 0), (2, "a", 0), (1, "b", 0), (1, "a", 1)]
    ]
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert len(set(orders)) == 4
    assert orders[0] == tuple(Shares(1, "a", 50).order(0))


def test_first_shards_of_many_peers_are_spread() -> None:
    assert len({next(Shares(1, f"peer {i}", 10_000).order(0)) for i in range(100)}) > 90
