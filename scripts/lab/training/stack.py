"""The models of all peers of a training as one stack: one pass, one step of the optimizers.

A micro model's step is a thousand small calls of torch, whose cost hardly depends on the size of their tensors: 8 peers
one after the other take three times as long as their stack. Rows of `weights` are the peers' flat vectors (`FlatLayout`),
and the stacked parameters are views into it.
"""

import math

import torch
from torch.func import functional_call, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from ....optim.models.registry import build_model
from ....optim.step.flat import FlatLayout
from ....optim.step.inner import InnerOptimizers, build_inner, schedule_of
from .batches import TrainingSize

CLIP = 1.0
"""The norm to which each peer's gradient is clipped, the default of a run."""


class Stack:
    """`count` models from one seed, each with its row of batches, gradients, clipping and optimizer states."""

    def __init__(self, size: TrainingSize, count: int, seed: int, device: str) -> None:
        inner = size.inner()
        self.model = build_model("gpt", size.model, seed=seed).to(device)
        self.layout = FlatLayout.of(self.model)
        self.weights = torch.zeros(count, self.layout.size, device=device)
        """Float32 [count, size]: all parameters of each model."""
        self.parameters: dict[str, torch.Tensor] = {}
        for tensor in self.layout.tensors:
            view = self.weights[:, tensor.start : tensor.stop].view(count, *tensor.shape)
            view.copy_(self.model.get_parameter(tensor.name).detach())
            self.parameters[tensor.name] = view.requires_grad_()
        optimizers = build_inner(self.model, inner)
        stacked = {id(self.model.get_parameter(name)): parameter for name, parameter in self.parameters.items()}
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["params"] = [stacked[id(parameter)] for parameter in group["params"]]
        self.optimizers = InnerOptimizers(optimizers)
        self.factor = schedule_of(inner, size.rounds * size.steps)
        self.losses = vmap(self._loss)
        self._batches = 0
        """Batches of which the gradients are the sum."""

    def step(self, batches: torch.Tensor, number: int, n: int = 1, *, is_step: bool = True, flipped: int = 0) -> None:
        """Make inner step `number` of the swarm on each model's batch, int64 [count, rows, length + 1].

        `n` batches make one step of the optimizers; unless `is_step`, this batch's gradients wait for it. The last
        `flipped` models learn inverted targets.
        """
        tokens = batches.to(self.weights.device)
        inputs, targets = tokens[..., :-1], tokens[..., 1:].clone()
        honest = len(targets) - flipped
        targets[honest:] = 255 - targets[honest:]
        with sdpa_kernel(SDPBackend.MATH):  # The others run once a model under vmap.
            loss: torch.Tensor = self.losses(self.parameters, inputs, targets).sum()
            loss.backward()  # type: ignore[no-untyped-call]  # of torch
        self._batches += 1
        if not is_step:
            return
        gradients = [parameter.grad for parameter in self.parameters.values() if parameter.grad is not None]
        norms = torch.stack([gradient.flatten(1).norm(dim=1) for gradient in gradients]).norm(dim=0)
        # As torch.nn.utils.clip_grad_norm_ of the mean over the batches.
        scale = (CLIP / (norms + 1e-6 * self._batches)).clamp(max=1.0 / self._batches)
        self._batches = 0
        for gradient in gradients:
            gradient.mul_(scale.view(-1, *[1] * (gradient.ndim - 1)))
        self.optimizers.step(self.factor(number), math.sqrt(n))

    def _loss(self, parameters: dict[str, torch.Tensor], inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = functional_call(self.model, parameters, (inputs, targets))
        return loss
