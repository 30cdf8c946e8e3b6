"""A peer of `bench utilization`: a `Swarm` that trains a synthetic model, whose steps take a given time.

Theory of operation. A given step only waits, as a trainer does whose GPU computes, so that the CPU is the network's. Its
optimizer moves all of the model by noise once in a phase: the pseudo-gradient is nowhere zero then, for a memory traffic that
does not count. Half of the noise is common to all peers, since contributions without anything in common would look like an
attack.

What counts as training: a step's wait, and the inner optimizer. All else is `Swarm.step`, in which a peer decides, measures,
waits for a round and starts again.
"""

import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ....optim.train.swarm import Swarm
from ....peer.base.config import PeerConfig
from ..bench import worker
from ..bench.worker import WorkerAnswer

NUM_TENSORS = 16
"""Tensors of the synthetic model: several for each fragment of a streaming run, and large as those of a real model."""
STEP_TOKENS = 1024
NOISE_SEED = 7
SYNTHETIC_RATE = 1e-3
"""Size of the moves: any one will do, since nothing depends on the values."""


class Synthetic(nn.Module):
    """A model of a few big tensors, zeros at first: every peer starts with the same state."""

    def __init__(self, params: int) -> None:
        super().__init__()
        sizes = [params // NUM_TENSORS + (index < params % NUM_TENSORS) for index in range(NUM_TENSORS)]
        self.tensors = nn.ParameterList(torch.zeros(size) for size in sizes if size)


class SyntheticOptimizer(torch.optim.Optimizer):
    """Moves all tensors by the same noise, half of it common to all peers, in the first of every `cycle` steps."""

    def __init__(self, model: nn.Module, cycle: int, index: int) -> None:
        super().__init__(model.parameters(), {"lr": SYNTHETIC_RATE})
        self._cycle = cycle
        self._steps = 0
        longest = max(parameter.numel() for parameter in model.parameters())
        common = torch.randn(longest, generator=torch.Generator().manual_seed(NOISE_SEED))
        own = torch.randn(longest, generator=torch.Generator().manual_seed(NOISE_SEED + 1 + index))
        self._noise = common.add_(own)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Move it, if it is time."""
        for group in self.param_groups if self._steps % self._cycle == 0 else ():
            for parameter in group["params"]:
                parameter.add_(self._noise[: parameter.numel()], alpha=-group["lr"])
        self._steps += 1


class UtilizationPeer:
    """One peer: joins, trains until the run is finished, and reports when it had the result of each round."""

    def open(self, command: WorkerAnswer) -> WorkerAnswer:
        """Join the run."""
        torch.set_num_threads(1)
        self._parent = os.getppid()
        self._seconds: float = command["step_seconds"]
        config = PeerConfig(home=Path(command["home"]), upnp=False, device="cpu")
        model = Synthetic(command["params"])
        optimizer = SyntheticOptimizer(model, command["steps"], command["index"])
        self._swarm = Swarm(command["link"], model, optimizer, config=config)
        self._swarm.__enter__()
        return {"peer": self._swarm.peer_id}

    def train(self, command: WorkerAnswer) -> WorkerAnswer:
        """Train until the run is finished, or the bench has gone.

        Returns (time, seconds in steps so far, round) of each result.
        """
        swarm = self._swarm
        boundaries: list[tuple[float, float, int]] = []
        trained = 0.0
        while not swarm.finished and os.getppid() == self._parent:
            began, round_ = time.monotonic(), swarm.round
            time.sleep(self._seconds)
            swarm.optimizers[0].step()  # It needs no gradients, which `step` would miss.
            trained += time.monotonic() - began
            swarm.after_step(torch.ones(()), tokens=STEP_TOKENS)
            if swarm.round > round_:
                boundaries.append((time.monotonic(), trained, swarm.round))
        return {"boundaries": boundaries}


def main() -> None:
    """Run the worker."""
    peer = UtilizationPeer()
    worker.serve_worker({name: getattr(peer, name) for name in ("open", "train")})
