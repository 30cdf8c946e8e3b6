"""A small version of `sybils.py`: fresh keys of one host against a run that goes on."""

from chaos.sybils import PAGE, besieged


def test_fresh_keys_of_one_host_neither_stop_rounds_nor_vote_nor_keep_a_newcomer_out() -> None:
    cost = besieged(peers=5, keys=8 * PAGE, rounds=3)
    assert not cost.violations
    assert cost.rounds == 3
    assert cost.settled == 6  # The newcomer among them.
    assert len(cost.sybils) == 8
    assert len(cost.voters) == 5
    assert not cost.voters & cost.sybils
    assert cost.megabytes < 64
