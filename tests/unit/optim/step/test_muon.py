"""Muon in float32: the same steps as torch's, and more exact ones."""

import copy

import pytest
import torch
from flockstep.optim.step.muon import Muon, orthogonalized
from torch import nn

COEFFICIENTS = 3.4445, -4.775, 2.0315
SHAPES = (24, 64), (64, 24), (32, 32)


@pytest.mark.parametrize("shape", SHAPES)
def test_steps_are_those_of_torch_up_to_the_precision_of_bfloat16(shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(1)
    mine = nn.Parameter(torch.randn(shape, generator=generator))
    theirs = copy.deepcopy(mine)
    optimizer = Muon([mine], lr=0.02, weight_decay=0.1)
    reference = torch.optim.Muon([theirs], lr=0.02, weight_decay=0.1, adjust_lr_fn="original")
    begin = mine.detach().clone()
    for _ in range(5):
        mine.grad = torch.randn(shape, generator=generator)
        theirs.grad = mine.grad.clone()
        optimizer.step()
        reference.step()  # type: ignore[no-untyped-call]
    moved = (mine - theirs).detach().norm() / (theirs.detach() - begin).norm()
    assert moved < 0.02


@pytest.mark.parametrize("shape", SHAPES)
def test_on_a_cpu_the_iterations_are_as_exact_as_float32(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    values = values / values.norm()
    a, b, c = COEFFICIENTS
    for _ in range(5):  # On singular values an iteration is this polynomial.
        values = a * values + b * values**3 + c * values**5
    exact = left @ values.diag() @ right
    result = orthogonalized(matrix, COEFFICIENTS, 5, 1e-7)
    assert result.dtype == torch.float32
    assert (result - exact).norm() < 1e-4 * exact.norm()


def test_a_parameter_without_a_gradient_stays_and_a_closure_is_called() -> None:
    used, unused = (nn.Parameter(torch.ones(2, 3)) for _ in range(2))
    optimizer = Muon([used, unused], lr=0.1)

    def closure() -> float:
        loss = (2 * used).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())

    assert optimizer.step(closure) == 12.0
    assert (unused == 1).all()
    assert (used < 1).all()


def test_in_float16_a_tiny_gradient_is_orthogonalized_like_a_large_one() -> None:
    matrix = torch.randn(24, 64, generator=torch.Generator().manual_seed(3))
    exact = orthogonalized(matrix, COEFFICIENTS, 5, 1e-12)
    tiny = orthogonalized(1e-9 * matrix, COEFFICIENTS, 5, 1e-12, torch.float16)
    assert (tiny.float() - exact).norm() < 0.01 * exact.norm()
