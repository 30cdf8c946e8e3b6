"""What `join` sets up for memory and speed: recomputed activations, precision, compilation."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from flockstep import PeerConfig
from flockstep.dht.run.manifest import Data, EvalSettings, Manifest
from flockstep.optim.models.registry import build_model, recompute_activations, training_loss
from flockstep.optim.step.examples import BEGINS
from flockstep.optim.train.swarm import Swarm
from flockstep.optim.train.trainer import ForwardPass, can_separate, check_tokenizer, may_evaluate
from flockstep.peer.base.errors import UsageError
from flockstep.peer.identity import Identity
from flockstep.peer.log.telemetry import Event, Telemetry
from support.packed import text_tokens
from support.recorded import recorded
from torch import Tensor, nn

CPU = torch.device("cpu")
TOKENS = torch.randint(64, (4, 17), generator=torch.Generator().manual_seed(0))
LLAMA = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
GPT = {"size": "0.2m", "vocab_size": 64, "context": 16}


def model_of(name: str) -> nn.Module:
    if name == "hf:llama" and find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    model = build_model(name, GPT if name == "gpt" else LLAMA, seed=0)
    with torch.no_grad():  # A fresh gpt's blocks are the identity, and would have no gradients inside.
        for number, parameter in enumerate(model.parameters()):
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)))
    return model


def trained(model: nn.Module) -> tuple[dict[str, Tensor], int]:
    """The gradients of a pass, and how many elements it kept for the backward pass."""
    kept = 0

    def keep(tensor: Tensor) -> Tensor:
        nonlocal kept
        kept += tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = training_loss(model, TOKENS)
    loss.backward()  # type: ignore[no-untyped-call]  # of torch
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}, kept


@pytest.mark.parametrize("name", ["gpt", "hf:llama"])
def test_recomputed_activations_give_the_same_gradients_and_keep_less(name: str) -> None:
    expected, all_kept = trained(model_of(name))
    model = model_of(name)
    recompute_activations(model)
    gradients, kept = trained(model)
    torch.testing.assert_close(gradients, expected)
    assert kept < all_kept / 2


def test_a_model_without_a_switch_for_it_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="Linear has no switch"):
        recompute_activations(nn.Linear(2, 2))


class Seen(nn.Module):
    """A model that notes the dtype of its products."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 8)
        self.head = nn.Linear(8, 1)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        out: Tensor = self.head(self.embed(inputs))
        self.dtype = out.dtype
        return out.float().square().mean()


@pytest.mark.parametrize(
    ("precision", "dtype"), [("auto", torch.float32), ("fp32", torch.float32), ("bf16", torch.bfloat16)]
)
def test_passes_compute_in_the_precision_of_the_setting(precision: str, dtype: torch.dtype) -> None:
    model = Seen()
    loss = ForwardPass(model, CPU, PeerConfig(precision=precision)).loss(model, TOKENS)
    loss.backward()  # type: ignore[no-untyped-call]  # of torch
    assert model.dtype == dtype
    assert model.head.weight.grad is not None
    assert model.head.weight.grad.dtype == torch.float32


def test_bf16_gives_the_gradient_of_fp32_up_to_its_rounding() -> None:
    gradients = []
    for precision in ("fp32", "bf16"):
        model = model_of("gpt")
        ForwardPass(model, CPU, PeerConfig(precision=precision)).loss(model, TOKENS).backward()  # type: ignore[no-untyped-call]
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    assert float((gradients[1] - gradients[0]).norm() / gradients[0].norm()) < 0.02


@pytest.mark.parametrize("setting", [{"precision": "fp8"}, {"micro_batch": -1}])
def test_settings_out_of_their_range_are_usage_errors(setting: dict[str, object]) -> None:
    with pytest.raises(UsageError, match=str(next(iter(setting.values())))):
        PeerConfig(**setting)  # type: ignore[arg-type]


def test_where_compiling_fails_the_model_trains_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._inductor.config as inductor

    monkeypatch.setattr(inductor.cpp, "cxx", ("no-such-compiler",))  # As on a computer without one.
    monkeypatch.setattr(inductor, "fx_graph_cache", False)
    telemetry, events = recorded()
    model = Seen()
    forward = ForwardPass(model, CPU, PeerConfig(compile_model=True))
    with pytest.raises(RuntimeError) as caught:
        forward.loss(model, TOKENS).backward()  # type: ignore[no-untyped-call]  # of torch
    assert forward.gives_up_compiling(caught.value, telemetry)
    forward.loss(model, TOKENS).backward()  # type: ignore[no-untyped-call]  # of torch
    assert [event["event"] for event in events] == ["device.uncompiled"]
    assert not forward.gives_up_compiling(caught.value, telemetry)  # Once.


def test_another_error_is_not_taken_for_one_of_compiling() -> None:
    forward = ForwardPass(Seen(), CPU, PeerConfig(compile_model=True))
    assert not forward.gives_up_compiling(RuntimeError("mat1 and mat2 shapes"), Telemetry())


def test_a_peer_that_cannot_evaluate_says_so_and_trains(tmp_path: Path) -> None:
    source, events = text_tokens(tmp_path, "A short document, of which nothing is held out.", 8), list[Event]()
    data, evaluation = Data(source=source.name), EvalSettings(1, ("Once",))
    manifest = Manifest(owner=Identity.from_seed(bytes(32)).peer_id, name="run", data=data, eval=evaluation)
    swarm = SimpleNamespace(manifest=manifest, speaks=True, telemetry=Telemetry(), evaluate_with=lambda evaluator: None)
    swarm.telemetry.subscribe(events.append)
    may_evaluate(cast(Swarm, swarm), source, CPU, PeerConfig(home=tmp_path), separate=False)
    assert [event["event"] for event in events] == ["eval.skipped"]
    assert "holds nothing out" in str(events[0]["reason"])


def test_examples_are_kept_apart_where_data_have_some_and_the_model_can(tmp_path: Path) -> None:
    chats = text_tokens(tmp_path / "chats", "a text", 4)
    chats.has_examples = True
    model, events = model_of("gpt"), list[Event]()
    swarm = SimpleNamespace(model=model, telemetry=Telemetry())
    swarm.telemetry.subscribe(events.append)
    assert can_separate(cast(Swarm, swarm), chats)
    text = text_tokens(tmp_path, "a text", 4)
    assert not can_separate(cast(Swarm, swarm), text)
    assert not events
    forward, tokens = ForwardPass(model, CPU, PeerConfig()), TOKENS.clone()
    tokens[:, 4] = ~(tokens[:, 4] | BEGINS)
    losses = []
    for separate in (False, True):
        forward.separate = separate
        losses.append(forward.loss(model, tokens).item())
        assert losses[-1] == training_loss(model, tokens, separate=separate).item()
    assert losses[0] != losses[1]
    swarm.model = nn.Linear(1, 1)
    assert not can_separate(cast(Swarm, swarm), chats)
    assert [event["event"] for event in events] == ["data.joined"]


def test_a_tokenizer_that_is_larger_than_the_model_is_one_line_before_it_trains(tmp_path: Path) -> None:
    source = text_tokens(tmp_path, "a text of bytes " * 200, 8)
    check_tokenizer(build_model("gpt", {"size": "0.2m", "vocab_size": 256}, seed=0), source)
    with pytest.raises(UsageError, match=r"has 256 tokens, the model knows 64") as refused:
        check_tokenizer(model_of("gpt"), source)
    assert refused.value.remedy.startswith("give the model a larger vocab_size")


def test_a_trainer_leaves_the_network_to_its_process() -> None:
    code = "import flockstep.scripts.peers.join, flockstep.optim.train.trainer, sys; print('libp2p' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
