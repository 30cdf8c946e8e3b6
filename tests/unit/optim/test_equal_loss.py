"""int4 in both directions reaches the loss of fp32: the pure functions of a round."""

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from flockstep.collectives.codec import Codec, codec_named, feedback, weighted_mean
from flockstep.dht.run.manifest import Inner
from flockstep.optim.data.sources import TokenSource, heldout_batches, open_source
from flockstep.optim.flat import FlatLayout
from flockstep.optim.inner import InnerOptimizers, build_inner, schedule_of
from flockstep.optim.models.registry import build_model
from flockstep.optim.outer import OuterSettings, outer_step
from flockstep.peer.arrays import Floats

PEERS, ROUNDS, STEPS = 4, 20, 5
MODEL = {"size": "0.2m", "layers": 2}
INNER = Inner(steps=STEPS, warmup_steps=5)
OUTER = OuterSettings(lr=0.8, momentum=0.5)


@dataclass
class Peer:
    """One simulated peer: its model, its inner optimizers' state, its data, its error feedback."""

    model: torch.nn.Module
    inner: InnerOptimizers
    batches: Iterator[torch.Tensor]
    residual: Floats


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def inner_phase(peer: Peer, start: int) -> None:
    for step in range(start, start + STEPS):
        batch = next(peer.batches)
        peer.model(batch[:, :-1], batch[:, 1:]).backward()
        peer.inner.step(schedule_of(INNER, ROUNDS * STEPS)(step))


def exchange(theta: Floats, peer: Peer, layout: FlatLayout, codec: Codec) -> bytes:
    """One peer's contribution after its inner phase."""
    x = np.empty(layout.size, np.float32)
    layout.gather(peer.model, x)
    np.subtract(theta, x, out=x)
    x += peer.residual
    encoded = codec.encode(x)
    feedback(x, codec, encoded, peer.residual)
    return bytes(encoded)


def batches(source: TokenSource, seed: int) -> Iterator[torch.Tensor]:
    """Endless random batches of eight sequences."""
    random = torch.Generator().manual_seed(seed)
    while True:
        yield torch.stack([source[int(i)] for i in torch.randint(len(source), (8,), generator=random)])


def train(codec: Codec, source: TokenSource) -> float:
    """The held-out loss after all rounds, with `codec` for contributions and for results."""
    models = [build_model("gpt", MODEL, seed=1) for _ in range(PEERS)]
    layout = FlatLayout.of(models[0])
    theta, momentum = np.empty(layout.size, np.float32), np.zeros(layout.size, np.float32)
    layout.gather(models[0], theta)
    peers = [
        Peer(
            model,
            InnerOptimizers(build_inner(model, INNER)),
            batches(source, seed=i),
            np.zeros_like(theta),
        )
        for i, model in enumerate(models)
    ]
    g = np.empty_like(theta)
    for r in range(ROUNDS):
        for peer in peers:
            inner_phase(peer, r * STEPS)
        contributions = [exchange(theta, peer, layout, codec) for peer in peers]
        codec.decode(codec.encode(weighted_mean(codec, contributions, [1.0] * PEERS, layout.num_cells)), g)
        outer_step(theta, momentum, g, OUTER)
        for peer in peers:
            layout.scatter(theta, peer.model)
    with torch.no_grad():
        losses = [
            models[0](batch[:, :-1], batch[:, 1:]) for batch in heldout_batches(source, batch_size=16, num_batches=8)
        ]
    return float(torch.stack(losses).mean())


@pytest.mark.explore  # A training of four peers, twice: a minute.
def test_int4_both_ways_ends_within_half_a_percent_of_fp32() -> None:
    source = open_source(f"text:{sysconfig.get_path('stdlib')}/a*.py", sequence_length=64)
    assert isinstance(source, TokenSource)
    full, quantized = (train(codec_named(name), source) for name in ("fp32", "int4"))
    assert full < 2.4  # It did learn: 5.55 is chance.
    assert quantized == pytest.approx(full, rel=0.005)
