"""The inner optimizer of a manifest: Muon on hidden matrices, AdamW on the rest, one schedule.

As the inner optimizer of DiLoCo, Muon degrades less than AdamW as more peers are averaged (arXiv:2505.23725). The
state of both starts fresh on every peer and is never sent.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from ...dht.run.manifest import Inner
from ...peer.base.errors import UsageError
from .eager import AdamW
from .muon import Muon

COSINE_END = 0.1
"""The final rate of a cosine relative to the peak, as in most published runs since Chinchilla (arXiv:2203.15556)."""

_HEADS = ("lm_head", "head", "unembed", "output")
"""Usual names of untied unembeddings: Muon's authors optimize them, like embeddings, by AdamW."""
HOLDS_WEIGHTS = re.compile(
    r"(?i:schedule_?free|look_?ahead|ranger|(bf|fp|float)_?16.*optimizer|mixed_?precision)|SF[A-Z]|^SWA|^EMA"
)
"""Classes of optimizers that keep weights beside the model's: Schedule-Free, slow weights, averages, float32 copies."""


def build_inner(
    model: nn.Module, inner: Inner, adamw: Callable[..., torch.optim.Optimizer] = AdamW
) -> list[torch.optim.Optimizer]:
    """Build fresh optimizers that together hold every trainable parameter of `model` once; `adamw` makes that one."""
    hidden = _hidden_matrices(model) if inner.optimizer == "muon" else []
    chosen = set(map(id, hidden))
    rest = [parameter for parameter in model.parameters() if parameter.requires_grad and id(parameter) not in chosen]
    optimizers: list[torch.optim.Optimizer] = []
    if hidden:
        # Its steps are scaled by the shape of a matrix: one rate then suits every width.
        optimizers.append(Muon(hidden, lr=inner.lr, weight_decay=inner.weight_decay, momentum=inner.momentum))
    groups = [
        {"params": [p for p in rest if p.ndim >= 2], "weight_decay": inner.weight_decay},
        {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0},
    ]
    if rest:
        groups = [group for group in groups if group["params"]]
        first, second = inner.betas
        optimizers.append(adamw(groups, lr=inner.adamw_lr, betas=(first, second)))
    return optimizers


def check_optimizers(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Raise `UsageError` for an optimizer that holds weights: after a round it would go on from its own, not from θ."""
    for inside in (each for optimizer in optimizers for each in (optimizer, _innermost(optimizer))):
        if any(HOLDS_WEIGHTS.search(kind.__name__) for kind in type(inside).__mro__):
            raise UsageError(
                f"{type(inside).__name__} keeps weights of its own, which no round moves",
                remedy="train with one whose state holds no weights, such as AdamW, SGD or Muon",
            )


def lr_factor(step: int, *, warmup: int, total: int, schedule: str) -> float:
    """Return the factor on the peak rate at `step` of the swarm (not of the peer, which may have joined late).

    Linear warm-up, then `constant`, `cosine` (to a tenth) or `linear` (to zero, arXiv:2502.15938) until `total`.
    Raises `UsageError` for an unknown schedule.
    """
    if step < warmup:
        return (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    if schedule == "constant":
        return 1.0
    if schedule == "cosine":
        return COSINE_END + (1 - COSINE_END) * (1 + math.cos(math.pi * progress)) / 2
    if schedule == "linear":
        return 1 - progress
    raise UsageError(f"there is no schedule {schedule!r}", remedy="choose constant, cosine or linear")


def schedule_of(inner: Inner, total: int) -> Callable[[int], float]:
    """Return the `lr_factor` of a run of `total` inner steps as a function of the swarm's step."""
    return partial(lr_factor, warmup=inner.warmup_steps, total=total, schedule=inner.schedule)


class InnerOptimizers:
    """Optimizers whose steps follow the run's schedule, until somebody else sets their learning rates.

    The rates of a step are the ones that the groups have times a factor; between two steps the groups have their own again.
    Whoever changes these has a scheduler, and from then on the run's schedule applies no more. Steps that somebody else
    makes are counted, since a second one with the same gradients would be a mistake.
    """

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        self._optimizers = list(optimizers)
        self._seen = [float(rate) for rate in self._rates()]
        self.have_own_rates = False
        """True once a rate was set between two steps by somebody else."""
        self.num_own_steps = 0
        """Steps of the optimizers that somebody else has made; whoever has taken notice of them sets it to 0."""
        self._hooks = [_innermost(optimizer).register_step_post_hook(self._count) for optimizer in self._optimizers]
        self._steps_here = False

    def step(self, schedule: float = 1.0, warmup: float = 1.0) -> None:
        """Step all optimizers at `schedule · warmup` times their rates, or `warmup` times own ones. Clears gradients."""
        self._steps_here = True
        rates = self._rates()
        seen, self._seen = self._seen, [float(rate) for rate in rates]
        self.have_own_rates = self.have_own_rates or self._seen != seen
        self._set([rate * warmup * (1.0 if self.have_own_rates else schedule) for rate in rates])
        try:
            for optimizer in self._optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
        finally:
            self._steps_here = False
            self._set(rates)

    def take_settings(self, like: Iterable[torch.optim.Optimizer]) -> None:
        """Take the settings of optimizers made alike for the same parameters, and keep my state and rates set by others."""
        fresh = [group for optimizer in like for group in optimizer.param_groups]
        for group, settings in zip(self._groups(), fresh, strict=True):
            kept = {"params"} | ({"lr"} if self.have_own_rates else set())
            group.update({key: value for key, value in settings.items() if key not in kept})
        self._seen = [float(rate) for rate in self._rates()]

    def forget(self) -> None:
        """Begin with a fresh state."""
        for optimizer in self._optimizers:
            optimizer.state.clear()

    def close(self) -> None:
        """Leave the optimizers to themselves."""
        for hook in self._hooks:
            hook.remove()

    def _count(self, *_: object) -> None:
        self.num_own_steps += not self._steps_here

    def _groups(self) -> Iterator[dict[str, Any]]:
        return (group for optimizer in self._optimizers for group in optimizer.param_groups)

    def _rates(self) -> list[Any]:
        return [group["lr"] for group in self._groups()]  # Numbers, or tensors of one, which may be set in place.

    def _set(self, rates: Sequence[Any]) -> None:
        for group, rate in zip(self._groups(), rates, strict=True):
            group["lr"] = rate


def _innermost(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer inside of what Accelerate wraps it in, which has no hooks of its own."""
    inside = getattr(optimizer, "optimizer", None)
    return _innermost(inside) if isinstance(inside, torch.optim.Optimizer) else optimizer


def _hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """Return the trainable matrices other than embeddings, weights tied to them, and unembeddings."""
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    return [
        parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
        and parameter.ndim == 2
        and id(parameter) not in embeddings
        and not any(part in _HEADS for part in name.split("."))
    ]
