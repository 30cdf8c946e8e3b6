"""torchft's DiLoCo, an independent one, comes to the same parameters.

With a delay torchft throws away the inner steps since the capture (α = 0) or a part of them, which the rebase keeps, so
only its cases without a delay and without mixing mean the same.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from threading import Barrier
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from flockstep.collectives.vector.arrays import Floats
from flockstep.collectives.vector.codec import CELL
from flockstep.optim.step.flat import FlatLayout
from flockstep.optim.step.inner import InnerOptimizers, build_inner
from flockstep.optim.step.outer import OuterSettings, outer_step
from flockstep.scripts.lab.training.batches import SIZES
from flockstep.scripts.lab.training.swarm import Training, TrainingSwarm
from support.learner import Learner
from torch import nn

PUBLISHED = {3: (-11, -5), 6: (-17, -23), 9: (-35, -29), 12: (-41, -47), 15: (-59, -53), 18: (-65, -71), 21: (-83, -77)}
"""`test_fixtures/…test_diloco_mocked_updates_0.json` (73dafea): the weights of two fragments after so many inner steps, of
-2 each, from 1 and 1; plain outer steps of rate 2, one fragment at a time, each after 6 inner steps but the first time."""


def test_two_fragments_take_the_published_trajectory() -> None:
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    layout = FlatLayout.of(model)
    theta: Floats = np.zeros(layout.size, np.float32)
    theta[::CELL] = 1
    layout.scatter(theta, model)
    momentum, g = np.zeros_like(theta), np.zeros(CELL, np.float32)
    for step in range(1, max(PUBLISHED) + 1):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(2)
        if step in PUBLISHED:
            fragment = (step // 3 + 1) % 2
            span = slice(fragment * CELL, (fragment + 1) * CELL)
            layout.pseudo_gradient(theta, model, g, span)
            captured = layout.capture(model, span)
            outer_step(theta[span], momentum[span], g, OuterSettings(lr=2, momentum=0))
            layout.rebase(theta, model, span, captured)
            assert tuple(parameter.item() for parameter in model.parameters()) == PUBLISHED[step]


@dataclass
class Replicas:
    """What DiLoCo asks of torchft's manager: all replicas are there, and an all-reduce is the mean of theirs."""

    barrier: Barrier
    sent: list[torch.Tensor] = field(default_factory=list)
    _use_async_quorum: bool = False

    def allreduce(self, tensor: torch.Tensor, should_quantize: bool) -> Any:
        """Replace the tensor by the mean of all replicas'; what it returns is waited for."""
        self.sent.append(tensor.clone())
        self.barrier.wait()
        tensor.copy_(torch.stack(self.sent).mean(dim=0))
        if not self.barrier.wait():
            self.sent.clear()
        self.barrier.wait()
        return self

    def wait(self) -> bool:
        """The all-reduce is over."""
        return True

    def should_commit(self) -> bool:
        """Each one succeeds."""
        return True

    def current_step(self) -> int:
        """There is one fragment."""
        return 0

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


def diloco(monkeypatch: pytest.MonkeyPatch) -> Any:
    """torchft's DiLoCo without its package, which wants a lighthouse and OpenTelemetry."""
    spec = importlib.util.find_spec("torchft")
    if spec is None or spec.submodule_search_locations is None:
        pytest.skip("an independent reference, not installed: scripts/test-references runs this")
    package, manager = ModuleType("torchft"), ModuleType("torchft.manager")
    package.__path__ = list(spec.submodule_search_locations)
    manager.Manager = object  # type: ignore[attr-defined]  # Named in annotations alone.
    monkeypatch.setitem(sys.modules, "torchft", package)
    monkeypatch.setitem(sys.modules, "torchft.manager", manager)
    return importlib.import_module("torchft.local_sgd").DiLoCo


def test_blocking_rounds_end_where_torchft_does(monkeypatch: pytest.MonkeyPatch) -> None:
    reference = diloco(monkeypatch)
    size, settings, peers = replace(SIZES["tiny"], rounds=4, steps=5), OuterSettings(lr=0.7, momentum=0.9), 2
    swarm = TrainingSwarm(Training(size=size, outer=settings, peers=peers))
    manager = Replicas(Barrier(peers, timeout=120))

    def train(index: int) -> Floats:
        peer = Learner(size, swarm.domains, index, 0)
        (inner,) = optimizers = build_inner(peer.model, size.inner())
        peer.inner = InnerOptimizers(optimizers)
        outer = torch.optim.SGD(peer.model.parameters(), lr=settings.lr, momentum=settings.momentum, nesterov=True)
        with reference(manager, [peer.model], inner, outer, sync_every=size.steps):
            for step in range(size.rounds * size.steps):
                peer.backward(peer.batches.draw())
                peer.step(step)
        end = np.zeros_like(swarm.theta)
        swarm.layout.gather(peer.model, end)
        return end

    with ThreadPoolExecutor(peers) as threads:
        ends = list(threads.map(train, range(peers)))
    swarm.run(lambda round_, weights: None)
    for end in ends:
        np.testing.assert_allclose(end, swarm.theta, rtol=0, atol=2e-5)
