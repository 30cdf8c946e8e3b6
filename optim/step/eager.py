"""torch's optimizers without its compiler, which they load: two seconds and 80 MB of a process that compiles nothing.

torch marks some of their methods as none for the compiler, by decorators that import it at the first call. What these
wrap is called here, with no gradients as there; hooks of `step` stay, since torch puts them around each class's own.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch


class Eager(torch.optim.Optimizer):
    """An optimizer whose methods import nothing; it comes before torch's among the bases of one."""

    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)


class AdamW(Eager, torch.optim.AdamW):
    """torch's AdamW with its arguments."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step; returns what `closure` returns, if there is one."""
        return _adamw_step(self, closure)


_adamw_step = inspect.unwrap(torch.optim.AdamW.step)
