"""The loss of a large vocabulary in chunks: the loss and gradients of torch's own, and never all logits at once."""

import contextlib
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from flockstep.optim.models import head
from flockstep.optim.models.head import head_loss
from flockstep.optim.models.registry import build_model, training_loss
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

ROWS, WIDTH, VOCABULARY = 50, 4, 1000
CHUNK = 4 * VOCABULARY * 8
"""Eight rows at a time; the last chunk has two."""
NEEDS_TRANSFORMERS = pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
LLAMA = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
GEMMA = {**LLAMA, "num_key_value_heads": 2, "head_dim": 16}


def leaves() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, WIDTH, generator=generator).requires_grad_()
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator).requires_grad_()
    targets = torch.randint(VOCABULARY, (ROWS,), generator=generator)
    targets[3:9] = -100
    return hidden, weight, targets


def found(chunk_bytes: int, precision: torch.dtype | None, factor: float) -> tuple[Tensor, Tensor, Tensor]:
    """The loss, and its gradients divided by a factor that the loss had in the backward pass."""
    hidden, weight, targets = leaves()
    with contextlib.nullcontext() if precision is None else torch.autocast("cpu", precision):
        loss = head_loss(hidden, weight, targets, chunk_bytes)
    (loss * factor).backward()  # type: ignore[no-untyped-call]  # of torch
    assert hidden.grad is not None
    assert weight.grad is not None
    return loss.detach(), hidden.grad / factor, weight.grad / factor


@pytest.mark.parametrize(("precision", "tolerance"), [(None, 1e-6), (torch.bfloat16, 0.01), (torch.float16, 0.002)])
def test_chunks_give_the_loss_and_the_gradients_of_the_whole(precision: torch.dtype | None, tolerance: float) -> None:
    exact = found(1 << 40, None, 1.0)
    for result, expected in zip(found(CHUNK, precision, 2.0**10), exact, strict=True):
        assert (result - expected).norm() <= tolerance * expected.norm()


def test_a_gradient_that_the_mean_makes_too_small_for_fp16_is_kept() -> None:
    hidden, weight, targets = leaves()
    exact = found(1 << 40, None, 1.0)[1]
    with torch.autocast("cpu", torch.float16):
        (head_loss(hidden, weight, targets, CHUNK) * 1e-7).backward()  # type: ignore[no-untyped-call]  # of torch
    assert hidden.grad is not None
    assert (hidden.grad / 1e-7 - exact).norm() <= 0.002 * exact.norm()


class Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]  # of torch
    """Notes the most elements that a result has, and counts products of matrices."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # of torch
        self.numel = self.products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.numel = max(self.numel, result.numel())
            self.products += func is torch.ops.aten.mm.default
        return result


@pytest.mark.parametrize("trains", [True, False])
def test_no_more_logits_are_there_than_a_chunk_has(trains: bool) -> None:
    hidden, weight, targets = leaves()
    with Largest() as largest, torch.set_grad_enabled(trains):
        loss = head_loss(hidden, weight, targets, CHUNK)
        if trains:
            loss.backward()  # type: ignore[no-untyped-call]  # of torch
    assert largest.numel == 8 * VOCABULARY
    assert largest.products == (3 if trains else 1) * 7


def test_a_frozen_head_gets_no_gradient() -> None:
    hidden, weight, targets = leaves()
    weight.requires_grad_(False)
    head_loss(hidden, weight, targets, CHUNK).backward()  # type: ignore[no-untyped-call]  # of torch
    assert hidden.grad is not None
    assert (hidden.grad - found(1 << 40, None, 1.0)[1]).norm() < 1e-6
    assert weight.grad is None


def gradients(model: nn.Module, tokens: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    loss = training_loss(model, tokens)
    loss.backward()  # type: ignore[no-untyped-call]  # of torch
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@NEEDS_TRANSFORMERS
@pytest.mark.parametrize(
    ("name", "options", "plain"),
    [
        ("hf:llama", LLAMA, True),
        ("hf:llama", {**LLAMA, "tie_word_embeddings": True}, True),
        ("hf:llama", {**LLAMA, "lora_rank": 2}, True),
        ("hf:gemma2", {**GEMMA, "final_logit_softcapping": 5.0}, False),  # Caps its logits.
        ("hf:cohere", {**LLAMA, "logit_scale": 0.5}, False),
        ("hf:granite", {**LLAMA, "logits_scaling": 8.0}, False),
    ],
)
def test_models_of_transformers_take_chunks_where_their_loss_is_plain(
    monkeypatch: pytest.MonkeyPatch, name: str, options: dict[str, Any], plain: bool
) -> None:
    model = build_model(name, options, seed=0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    tokens = torch.randint(90, (3, 17), generator=generator)
    tokens[1, :9] = ~tokens[1, :9]
    loss, expected = gradients(model, tokens)
    monkeypatch.setattr(head, "CHUNK_BYTES", 4 * 96 * 10)
    calls = 0

    def counted(*arguments: Any) -> Tensor:
        nonlocal calls
        calls += 1
        return head_loss(*arguments)

    monkeypatch.setattr(head, "head_loss", counted)
    chunked, same = gradients(model, tokens)
    torch.testing.assert_close(chunked, loss)
    torch.testing.assert_close(same, expected)
    assert calls == (2 if plain else 1)  # One of them was the trial.


def test_models_are_imported_without_the_compiler() -> None:
    code = "import flockstep.optim.models.registry, sys; print('torch' in sys.modules, 'torch._dynamo' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True False\n"
