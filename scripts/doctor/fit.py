"""Measures what this device trains of a run: how many samples at once, tokens/s, and so the hours of the run."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from ...dht.run.manifest import Manifest
from ...optim.models.registry import build_model, vocabulary_of
from ...optim.step.inner import InnerOptimizers, build_inner
from ...optim.step.micro_batches import FASTER, out_of_memory
from ...optim.train.trainer import ForwardPass
from ...peer.base.config import PeerConfig


@dataclass(frozen=True, slots=True)
class Fit:
    """So many samples of a step pass through the model at once, and the steps train so many tokens/s."""

    samples: int
    tokens_per_s: float


def fits(
    manifest: Manifest,
    device: torch.device,
    config: PeerConfig,
    seconds: float,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Fit]:
    """Yield the fit of 1, 2, 4 … samples at once, as long as more are faster, there is memory, and `seconds` last.

    The passes and the optimizer's step are those of `join`; the weights are fresh, the tokens are
    random. The first pass of each size warms up. If one sample takes longer than `seconds`, it ends
    late, and yields that.
    """
    data, end, best = manifest.data, clock() + seconds, 0.0
    model = build_model(manifest.model.name, manifest.model.options, seed=manifest.seed).to(device)
    forward, inner = ForwardPass(model, device, config), InnerOptimizers(build_inner(model, manifest.inner))

    def timed(do: Callable[[], object]) -> float:
        began = clock()
        do()
        if device.type != "cpu":
            getattr(torch, device.type).synchronize()
        return clock() - began

    samples, optimizing = 1, 0.0
    while samples <= data.batch_size:
        tokens = torch.randint(vocabulary_of(model) or 2, (samples, data.sequence_length + 1), device=device)

        def one_pass(tokens: torch.Tensor = tokens) -> None:
            forward.loss(model, tokens).backward()  # type: ignore[no-untyped-call]  # of torch

        try:
            passing = timed(one_pass)
            if samples == 1:
                optimizing = timed(inner.step)
            if clock() + passing <= end:
                passing = timed(one_pass)
                optimizing = timed(inner.step) if samples == 1 else optimizing
        except (RuntimeError, MemoryError) as error:
            if out_of_memory(error):
                return
            raise
        model.zero_grad(set_to_none=True)
        rate = data.batch_size * data.sequence_length / (passing * data.batch_size / samples + optimizing)
        if rate < FASTER * best:
            return
        best = rate
        yield Fit(samples, rate)
        if clock() + 4 * passing > end:
            return
        samples *= 2
