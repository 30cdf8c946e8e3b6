"""int4 in both directions, and peers of other precisions, reach the loss of fp32: the pure functions of a round."""

import sysconfig
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from flockstep import PeerConfig
from flockstep.collectives.vector.arrays import Floats
from flockstep.collectives.vector.codec import Codec, codec_named, feedback, weighted_mean
from flockstep.dht.run.manifest import Data, Inner
from flockstep.optim.models.quantized import adamw_8bit, quantize_base
from flockstep.optim.models.registry import build_model, training_loss
from flockstep.optim.packing.encode import TokenizerFiles
from flockstep.optim.packing.pack import pack
from flockstep.optim.packing.sources import open_source
from flockstep.optim.shards.opening import open_tokens
from flockstep.optim.shards.reader import TokenShards, heldout_batches
from flockstep.optim.step.flat import FlatLayout
from flockstep.optim.step.inner import InnerOptimizers, build_inner, schedule_of
from flockstep.optim.step.micro_batches import MicroBatches
from flockstep.optim.step.outer import OuterSettings, outer_step
from flockstep.optim.step.precision import LossScale
from flockstep.optim.train.trainer import ForwardPass
from flockstep.peer.log.telemetry import Telemetry
from torch import nn

PEERS, ROUNDS, STEPS, BATCH = 4, 20, 5, 8
MODEL = {"size": "0.2m", "layers": 2}
INNER = Inner(steps=STEPS, warmup_steps=5)
CPU = torch.device("cpu")
LLAMA = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
BASE_STEPS = 300
OUTER = OuterSettings(lr=0.8, momentum=0.5)


class Peer:
    """One simulated peer: its model, its inner optimizers' state, its data, its error feedback, and its precision."""

    def __init__(self, model: nn.Module, inner: Inner, source: TokenShards, number: int, config: PeerConfig) -> None:
        if config.load_in_4bit:
            quantize_base(model, CPU)
        self.model, self.settings, self.batches = model, inner, batches(source, seed=number)
        self.inner = InnerOptimizers(build_inner(model, inner, adamw_8bit if config.optimizer_8bit else torch.optim.AdamW))
        self.residual = np.zeros(FlatLayout.of(model).size, np.float32)
        self.scale = LossScale(Telemetry()) if config.precision == "fp16" else None
        forward = ForwardPass(model, CPU, config)
        self.pieces = MicroBatches(model, forward.loss, Telemetry(), batch_size=BATCH, size=BATCH)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def inner_phase(peer: Peer, start: int) -> None:
    for step in range(start, start + STEPS):
        factor = 1.0 if peer.scale is None else peer.scale.value
        peer.pieces.backward(next(peer.batches), factor)
        if peer.scale is None or peer.scale.is_clean(peer.model):
            for parameter in peer.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.div_(factor)
            peer.inner.step(schedule_of(peer.settings, ROUNDS * STEPS)(step))
        peer.model.zero_grad()


def exchange(theta: Floats, peer: Peer, layout: FlatLayout, codec: Codec) -> bytes:
    """One peer's contribution after its inner phase."""
    x = np.empty(layout.size, np.float32)
    layout.gather(peer.model, x)
    np.subtract(theta, x, out=x)
    x += peer.residual
    encoded = codec.encode(x)
    feedback(x, codec, encoded, peer.residual)
    return bytes(encoded)


def batches(source: TokenShards, seed: int) -> Iterator[torch.Tensor]:
    """Endless random batches of sequences."""
    random, sequences = torch.Generator().manual_seed(seed), sequences_of(source)
    while True:
        yield torch.stack([sequences[int(i)] for i in torch.randint(len(sequences), (BATCH,), generator=random)])


@cache
def sequences_of(source: TokenShards) -> list[torch.Tensor]:
    return [sequence for unit in range(source.num_units) for sequence in source.read(0, unit, 0)]


def packed_files(folder: Path, source: str) -> TokenShards:
    """The bytes of some files."""
    pack(open_source(source), TokenizerFiles(), folder / "p")
    return open_tokens(Data("own", sequence_length=64), PeerConfig(home=folder, data=str(folder / "p")))


def train(
    codec: Codec,
    source: TokenShards,
    configs: Sequence[PeerConfig] = (PeerConfig(),) * PEERS,
    inner: Inner = INNER,
    made: Callable[[], nn.Module] = lambda: build_model("gpt", MODEL, seed=1),
) -> float:
    """The held-out loss after all rounds, with `codec` for contributions and for results, and these peers."""
    peers = [Peer(made(), inner, source, number, config) for number, config in enumerate(configs)]
    layout, whole = FlatLayout.of(peers[0].model), made()
    theta, momentum = np.empty(layout.size, np.float32), np.zeros(layout.size, np.float32)
    layout.gather(whole, theta)
    g = np.empty_like(theta)
    for r in range(ROUNDS):
        for peer in peers:
            inner_phase(peer, r * STEPS)
        contributions = [exchange(theta, peer, layout, codec) for peer in peers]
        codec.decode(codec.encode(weighted_mean(codec, contributions, [1.0] * len(peers), layout.num_cells)), g)
        outer_step(theta, momentum, g, OUTER)
        for peer in peers:
            layout.scatter(theta, peer.model)
    layout.scatter(theta, whole)
    with torch.no_grad():
        losses = [training_loss(whole, batch) for batch in heldout_batches(source, batch_size=16, num_batches=8)]
    return float(torch.stack(losses).mean())


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> TokenShards:
    return packed_files(tmp_path_factory.mktemp("source"), f"text:{sysconfig.get_path('stdlib')}/a*.py")


@pytest.fixture(scope="module")
def full(source: TokenShards) -> float:
    loss = train(codec_named("fp32"), source)
    assert loss < 2.4  # It did learn: 5.55 is chance.
    return loss


@pytest.mark.explore  # A training of four peers, twice: a minute.
def test_int4_both_ways_ends_within_half_a_percent_of_fp32(source: TokenShards, full: float) -> None:
    assert train(codec_named("int4"), source) == pytest.approx(full, rel=0.005)


@pytest.mark.explore
def test_peers_in_fp16_bf16_and_fp32_together_end_within_half_a_percent_of_fp32(source: TokenShards, full: float) -> None:
    configs = [PeerConfig(precision=name) for name in ("fp16", "bf16", "fp16", "fp32")]
    assert train(codec_named("fp32"), source, configs) == pytest.approx(full, rel=0.005)


@pytest.mark.explore
def test_adapters_on_a_base_in_four_bits_end_within_half_a_percent_of_a_whole_one(
    source: TokenShards, tmp_path: Path
) -> None:
    for name in "bitsandbytes", "peft", "transformers":
        pytest.importorskip(name)
    base = build_model("hf:llama", LLAMA, seed=0)
    optimizer, random = torch.optim.AdamW(base.parameters(), 0.003), batches(source, seed=99)
    for _ in range(BASE_STEPS):  # Random weights would be a base that teaches nothing.
        training_loss(base, next(random)).backward()  # type: ignore[no-untyped-call]  # of torch
        optimizer.step()
        optimizer.zero_grad()
    base.save_pretrained(tmp_path / "base")  # type: ignore[operator]  # of transformers

    def adapted() -> nn.Module:
        return build_model(f"hf:{tmp_path}/base", {"lora_rank": 8}, seed=0, allow_model=f"hf:{tmp_path}/base")

    other = packed_files(tmp_path, f"text:{sysconfig.get_path('stdlib')}/email")
    with torch.no_grad():
        before = float(training_loss(base, next(heldout_batches(other, batch_size=64, num_batches=1))))
    inner = Inner(optimizer="adamw", adamw_lr=0.002, steps=STEPS, warmup_steps=5)
    small = PeerConfig(load_in_4bit=True, optimizer_8bit=True)
    losses = [train(codec_named("fp32"), other, [config] * 2, inner, adapted) for config in (PeerConfig(), small)]
    assert losses[0] < 0.95 * before
    assert losses[1] == pytest.approx(losses[0], rel=0.005)
