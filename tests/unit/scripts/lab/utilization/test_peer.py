"""The synthetic model of `flockstep bench utilization`."""

import pytest
import torch
from flockstep.scripts.lab.utilization.peer import NUM_TENSORS, Synthetic, SyntheticOptimizer
from hypothesis import given
from hypothesis import strategies as st


@given(st.integers(1, 5000))
def test_the_model_has_exactly_so_many_parameters(params: int) -> None:
    sizes = [parameter.numel() for parameter in Synthetic(params).parameters()]
    assert sum(sizes) == params
    assert len(sizes) == min(params, NUM_TENSORS)
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("params", [1, 50, 3001])
def test_a_phase_moves_every_parameter_once(params: int) -> None:
    model = Synthetic(params)
    optimizer = SyntheticOptimizer(model, 3, index=0)
    optimizer.step()
    moved = [parameter.clone() for parameter in model.parameters()]
    assert all(bool((parameter != 0).all()) for parameter in moved)
    for _ in range(2):
        optimizer.step()
    assert all(torch.equal(parameter, before) for parameter, before in zip(model.parameters(), moved, strict=True))
    optimizer.step()
    assert not torch.equal(next(model.parameters()), moved[0])


def test_contributions_of_two_peers_have_something_in_common() -> None:
    moved = []
    for index in range(2):
        model = Synthetic(100_000)
        SyntheticOptimizer(model, 1, index).step()
        moved.append(torch.cat([parameter.detach() for parameter in model.parameters()]))
    assert float(torch.cosine_similarity(moved[0], moved[1], dim=0)) == pytest.approx(0.5, abs=0.1)
