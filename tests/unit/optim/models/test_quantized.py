"""A base in 4 bits and optimizer states in 8: what they compute, what peers compare, and what is saved of them."""

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from flockstep import PeerConfig
from flockstep.dht.run.link import JoinLink
from flockstep.dht.run.manifest import Inner
from flockstep.optim.models.kept import parts_of
from flockstep.optim.models.quantized import FourBitLinear, adamw_8bit, load_bitsandbytes, quantize_base
from flockstep.optim.models.registry import build_model, training_loss
from flockstep.optim.step.flat import FlatLayout, frozen_fingerprint, whole_tensors
from flockstep.optim.step.inner import InnerOptimizers, build_inner
from flockstep.peer.base.errors import LocalError, UsageError
from flockstep.scripts.peers.join import TrainingOptions, join
from torch import Tensor, nn

needs_library = pytest.mark.skipif(
    any(find_spec(name) is None for name in ("bitsandbytes", "peft", "transformers")),
    reason="bitsandbytes is not installed",
)

CPU = torch.device("cpu")
VIA = "/ip4/192.0.2.1/tcp/4001/p2p/12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"
LINK = str(JoinLink("a" * 52, (VIA,)))
LORA = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "lora_rank": 4,
}
TOKENS = torch.randint(64, (4, 17), generator=torch.Generator().manual_seed(0))


def adapted(*, quantized: bool) -> nn.Module:
    model = build_model("hf:llama", LORA, seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    if quantized:
        quantize_base(model, CPU)
    return model


def gradients(model: nn.Module) -> Tensor:
    training_loss(model, TOKENS).backward()  # type: ignore[no-untyped-call]  # of torch
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


def four_bit(model: nn.Module) -> list[tuple[str, FourBitLinear]]:
    return [(name, module) for name, module in model.named_modules() if isinstance(module, FourBitLinear)]


@needs_library
def test_adapters_get_the_gradients_of_a_base_with_the_quantized_weights() -> None:
    model, same = adapted(quantized=True), adapted(quantized=False)
    layers = four_bit(model)
    assert len(layers) == 2 * 7
    with torch.no_grad():
        for name, layer in layers:
            weight = same.get_parameter(f"{name}.weight")
            rounded = layer(torch.eye(layer.in_features)).T
            assert 0.02 < float((rounded - weight).norm() / weight.norm()) < 0.12
            weight.copy_(rounded)
    torch.testing.assert_close(gradients(model), gradients(same))


@needs_library
def test_peers_compare_the_source_weights_and_train_the_same_layout() -> None:
    model, whole = adapted(quantized=True), adapted(quantized=False)
    assert frozen_fingerprint(model) == frozen_fingerprint(whole)
    assert FlatLayout.of(model).pin() == FlatLayout.of(whole).pin()
    other = adapted(quantized=False)
    with torch.no_grad():
        other.get_parameter(f"{four_bit(model)[0][0]}.weight")[0, 0] += 1e-3
    quantize_base(other, CPU)
    assert frozen_fingerprint(other) != frozen_fingerprint(model)


@needs_library
def test_nothing_of_the_quantized_base_is_kept_beside_the_adapter() -> None:
    parts, whole = parts_of(adapted(quantized=True)), parts_of(adapted(quantized=False))
    assert parts.buffers == whole.buffers
    assert parts.adapter is not None
    assert whole.adapter is not None
    assert parts.adapter.names == whole.adapter.names
    assert not any(name.endswith("base_layer.weight") for name in whole_tensors(adapted(quantized=True)))


@needs_library
def test_no_whole_weights_are_kept_for_the_backward_pass() -> None:
    layer = FourBitLinear(nn.Linear(64, 256, bias=True).requires_grad_(False), "layer", CPU)
    kept: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = layer(torch.randn(2, 64, requires_grad=True))
    assert out.shape == (2, 256)
    assert all(numel < 64 * 256 for numel in kept)


def test_a_run_that_trains_all_its_weights_has_no_base_to_quantize() -> None:
    with pytest.raises(UsageError, match="this run trains all linear layers") as raised:
        quantize_base(build_model("gpt", {"size": "0.2m"}, seed=0), CPU)
    assert raised.value.remedy


@needs_library
def test_eight_bits_make_the_steps_of_adamw_up_to_their_rounding() -> None:
    inner = Inner(optimizer="adamw")
    moved = []
    for adamw in (torch.optim.AdamW, adamw_8bit):
        model = nn.Linear(64, 128, bias=False)
        nn.init.zeros_(model.weight)
        optimizers = InnerOptimizers(build_inner(model, inner, adamw))
        generator = torch.Generator().manual_seed(0)
        for step in range(20):
            model.weight.grad = torch.randn(model.weight.shape, generator=generator)
            optimizers.step(schedule=0.5 if step else 1.0)
        optimizers.take_settings(build_inner(model, inner, adamw))
        optimizers.forget()
        model.weight.grad = torch.ones_like(model.weight)
        optimizers.step()
        moved.append(model.weight.detach().clone())
    assert float((moved[1] - moved[0]).norm() / moved[0].norm()) < 0.05


def test_states_of_eight_bits_are_not_for_a_sharded_model() -> None:
    with pytest.raises(UsageError, match="sharded"):
        PeerConfig(shard=True, optimizer_8bit=True)


def test_the_whole_model_cannot_be_saved_of_a_base_in_four_bits(tmp_path: Path) -> None:
    config = PeerConfig(home=tmp_path, load_in_4bit=True)
    with pytest.raises(UsageError, match="--save writes the whole model") as raised:
        join(LINK, config, print, TrainingOptions(save=tmp_path / "model.safetensors"))
    assert "export" in raised.value.remedy


def test_loading_the_library_fetches_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its backend for some CPUs would, by the package `kernels`: here a library that does so alone."""
    (tmp_path / "kernels.py").touch()
    (tmp_path / "bitsandbytes.py").write_text(
        "try:\n    import kernels\n    found = True\nexcept ImportError:\n    found = False"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("kernels", "bitsandbytes"):
        monkeypatch.setitem(sys.modules, name, None)
        del sys.modules[name]
    assert not load_bitsandbytes.__wrapped__().found
    assert find_spec("kernels") is not None  # Others find it again.


def test_without_the_library_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(LocalError, match="need bitsandbytes") as raised:
        load_bitsandbytes.__wrapped__()
    assert ".[gpu]" in raised.value.remedy
