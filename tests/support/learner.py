"""One peer of a swarm in one process, in a model of its own: what the laboratory's stack of models is compared with."""

from collections.abc import Sequence

import torch
from flockstep.optim.models.registry import build_model
from flockstep.optim.step.inner import InnerOptimizers, build_inner, schedule_of
from flockstep.scripts.lab.training.batches import Batches, TrainingSize
from torch import nn


class Learner:
    """One peer's model, inner optimizer and batches."""

    def __init__(self, size: TrainingSize, domains: Sequence[torch.Tensor], index: int, seed: int) -> None:
        self.size = size
        self.model = build_model("gpt", size.model, seed=seed)
        inner = size.inner()
        self.inner = InnerOptimizers(build_inner(self.model, inner))
        self.factor = schedule_of(inner, size.rounds * inner.steps)
        self.batches = Batches(size, domains, index, seed)

    def backward(self, tokens: torch.Tensor) -> None:
        """Add the gradients of a batch, int64 [rows, length + 1]."""
        self.model(tokens[:, :-1], tokens[:, 1:]).backward()

    def step(self, number: int) -> None:
        """Make inner step `number` of the swarm with the gradients that there are, clipped."""
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.inner.step(self.factor(number))
