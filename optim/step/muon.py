"""Muon (K. Jordan and others 2024, https://kellerjordan.github.io/posts/muon) that is fast on any CPU.

`torch.optim.Muon` orthogonalizes in bfloat16, which most CPUs emulate: on one core of an EPYC a
matrix of 128 × 512 takes 85 ms instead of 2.5, one of 256 × 1024 827 ms instead of 21. Here each
device uses what it computes fast, after the matrix has been divided by its norm: a gradient of 1e-8
would be zero in float16.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .eager import Eager
from .precision import half_on


class Muon(Eager, torch.optim.Muon):
    """torch's Muon with its arguments; steps are scaled by √(max(1, rows / columns)), its `adjust_lr_fn="original"`.

    A parameter put into a group later may be a stack of matrices, each of which is orthogonalized by itself.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step; returns what `closure` returns, if there is one."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            rate, decay, momentum = float(group["lr"]), group["weight_decay"], group["momentum"]
            for parameter in group["params"]:
                if (gradient := parameter.grad) is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(gradient)
                average = state["momentum_buffer"].lerp_(gradient, 1 - momentum)
                update = gradient.lerp(average, momentum) if group["nesterov"] else average
                dtype = half_on(parameter.device) or torch.float32
                update = orthogonalized(update, group["ns_coefficients"], group["ns_steps"], group["eps"], dtype)
                rows, columns = parameter.shape[-2:]
                parameter.mul_(1 - rate * decay)
                parameter.add_(update, alpha=-rate * math.sqrt(max(1, rows / columns)))
        return loss


def orthogonalized(
    matrix: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return a matrix with the singular vectors of `matrix` and singular values near 1, by Newton-Schulz iterations.

    `matrix` is (rows, columns), or (count, rows, columns) for that of each matrix.
    """
    x, add = matrix.float(), torch.addmm if matrix.ndim == 2 else torch.baddbmm
    is_tall = matrix.size(-2) > matrix.size(-1)
    x = x.mT if is_tall else x
    x = (x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=eps)).to(dtype)
    a, b, c = coefficients
    for _ in range(steps):
        gram = x @ x.mT
        x = add(x, add(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x
