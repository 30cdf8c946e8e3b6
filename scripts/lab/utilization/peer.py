"""The bench's own system: a `Swarm` that trains a synthetic model, whose steps take a given time.

Theory of operation. A given step only waits, as a trainer does whose GPU computes, so that the CPU is the network's. Its
optimizer moves one slice of every tensor by noise, another slice in each step: after a phase the pseudo-gradient is
nowhere zero, for a memory traffic that does not count. Half of the noise is common to all peers, since contributions
without anything in common would look like an attack. Real steps train a gpt on random tokens, on the CPU.

What counts as training: the given seconds of a step, or the measured ones of a real step, and the inner optimizer's. All
else is `Swarm.step`, in which a peer decides, measures, waits for a round and starts again.
"""

import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ....optim.models.gpt import GPT
from ....optim.models.gpt_config import GPT_SIZES
from ....optim.train.swarm import Swarm
from ....optim.train.trainer import inner_of
from ....peer.base.config import PeerConfig
from ..bench import worker
from ..bench.worker import WorkerAnswer
from .figures import StepClock

NUM_TENSORS = 16
"""Tensors of the synthetic model: several for each fragment of a streaming run, and large as those of a real model."""
STEP_TOKENS = 1024
NOISE_SEED = 7
SYNTHETIC_RATE = 1e-3
"""Size of the moves: any one will do, since nothing depends on the values."""
STALL_SECONDS = 0.1
"""Calls of `Swarm.step` longer than this are drawn as gaps in the picture."""
REAL_BATCH, REAL_LENGTH = 4, 128
"""Sequences of a real step, and their tokens."""


class Synthetic(nn.Module):
    """A model of a few big tensors, zeros at first: every peer starts with the same state."""

    def __init__(self, params: int) -> None:
        super().__init__()
        sizes = [params // NUM_TENSORS + (index < params % NUM_TENSORS) for index in range(NUM_TENSORS)]
        self.tensors = nn.ParameterList(torch.zeros(size) for size in sizes if size)


class SyntheticOptimizer(torch.optim.Optimizer):
    """Moves one slice of every tensor by noise in each step; `cover` steps move all of it."""

    def __init__(self, model: nn.Module, cover: int, index: int) -> None:
        super().__init__(model.parameters(), {"lr": SYNTHETIC_RATE})
        self._cover = cover
        self._steps = 0
        longest = -(-max(parameter.numel() for parameter in model.parameters()) // cover)
        common = torch.randn(longest, generator=torch.Generator().manual_seed(NOISE_SEED))
        own = torch.randn(longest, generator=torch.Generator().manual_seed(NOISE_SEED + 1 + index))
        self._noise = common.add_(own)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Move the next slice."""
        for group in self.param_groups:
            for parameter in group["params"]:
                length = -(-parameter.numel() // self._cover)
                start = self._steps % self._cover * length
                piece = parameter.view(-1)[start : start + length]
                piece.add_(self._noise[: piece.numel()], alpha=-group["lr"])
        self._steps += 1


class UtilizationPeer:
    """One peer: joins, trains until the run is finished, and reports its boundaries."""

    def open(self, command: WorkerAnswer) -> WorkerAnswer:
        """Join the run."""
        torch.set_num_threads(1)
        self._parent = os.getppid()
        self._seconds: float | None = command["step_seconds"]
        self._trained = 0.0
        config = PeerConfig(home=Path(command["home"]), upnp=False, device="cpu")
        model: nn.Module
        if self._seconds is None:
            model = self._gpt = GPT(GPT_SIZES[command["size"]])
            self._gpt.initialize(0)
            self._swarm = Swarm(command["link"], model, inner_of, config=config)
        else:
            model = Synthetic(command["params"])
            optimizer = SyntheticOptimizer(model, command["cover"], command["index"])
            self._swarm = Swarm(command["link"], model, optimizer, config=config)
        self._swarm.__enter__()
        for one in self._swarm.optimizers:
            one.register_step_pre_hook(self._before_optimizer)
            one.register_step_post_hook(self._after_optimizer)
        return {"peer": self._swarm.peer_id}

    def train(self, command: WorkerAnswer) -> WorkerAnswer:
        """Train until the run is finished, or the bench has gone."""
        swarm = self._swarm
        boundaries: list[tuple[float, float, int]] = []
        stalls: list[tuple[float, float]] = []
        steps = 0
        clock = StepClock(self._seconds or 0.0, time.monotonic())
        while not swarm.finished and os.getppid() == self._parent:
            if self._seconds is None:
                loss = self._compute()
            else:
                time.sleep(clock.wait(time.monotonic()))
                self._trained += self._seconds
                loss = torch.ones(())
            before, round_ = time.time(), swarm.round
            if self._seconds is None:
                swarm.step(loss, tokens=STEP_TOKENS)
            else:  # It needs no gradients, which `step` would miss.
                swarm.optimizers[0].step()
                swarm.after_step(loss, tokens=STEP_TOKENS)
            after = time.time()
            clock.blocked(after - before)
            steps += 1
            if after - before > STALL_SECONDS:
                stalls.append((before, after))
            if swarm.round > round_:
                boundaries.append((after, self._trained, swarm.round))
        return {"boundaries": boundaries, "stalls": stalls, "steps": steps, "root": swarm.root}

    def _compute(self) -> Tensor:
        """Make a real inner step up to its gradients, and return the loss."""
        began = time.monotonic()
        tokens = torch.randint(self._gpt.config.vocab_size, (REAL_BATCH, REAL_LENGTH + 1))
        loss: Tensor = self._gpt(tokens[:, :-1], tokens[:, 1:])
        loss.backward()  # type: ignore[no-untyped-call]
        self._trained += time.monotonic() - began
        return loss.detach()

    def _before_optimizer(self, *_arguments: Any) -> None:
        self._optimizer_began = time.monotonic()

    def _after_optimizer(self, *_arguments: Any) -> None:
        self._trained += time.monotonic() - self._optimizer_began


def main() -> None:
    """Run the worker."""
    peer = UtilizationPeer()
    worker.serve_worker({name: getattr(peer, name) for name in ("open", "train")})
