"""The built-in model: sizes, causality, determinism; custom models by `pkg.module:function`."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from flockstep.optim.models.gpt import GPT
from flockstep.optim.models.gpt_config import GPT_SIZES
from flockstep.optim.models.needs import ModelSize
from flockstep.optim.models.registry import build_model, outline_of, size_of_model
from flockstep.optim.step.flat import FlatLayout, bytes_of
from flockstep.peer.base.digest import digest
from flockstep.peer.base.errors import LocalError, UsageError
from torch import nn

TINY = {"size": "0.2m", "layers": 2, "context": 16}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def tiny(**options: int) -> GPT:
    model = build_model("gpt", {**TINY, **options}, seed=3)
    assert isinstance(model, GPT)
    # The zeros that it starts with would hide what the blocks do.
    for block in model.blocks:
        nn.init.normal_(block.get_parameter("down.weight"), std=0.1)
        nn.init.normal_(block.get_parameter("attention.out.weight"), std=0.1)
    return model


@pytest.mark.parametrize(("size", "millions"), [("0.2m", 0.2), ("1m", 1), ("10m", 10), ("25m", 25), ("124m", 124)])
def test_a_size_is_what_it_says(size: str, millions: float) -> None:
    with torch.device("meta"):
        parameters = sum(p.numel() for p in GPT(GPT_SIZES[size]).parameters())
    assert parameters == pytest.approx(millions * 1e6, rel=0.15)
    assert len(GPT_SIZES) == 5


def test_no_logit_sees_a_later_token() -> None:
    torch.manual_seed(0)
    model, tokens = tiny(), torch.arange(12)[None]
    changed = tokens.clone()
    changed[0, 7] = 99
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :7], after[:, :7])
    assert not torch.isclose(before[:, 7:], after[:, 7:]).all(dim=-1).any()


def test_order_matters() -> None:
    torch.manual_seed(0)
    model = tiny()
    assert not torch.isclose(model(torch.tensor([[1, 2, 3]]))[0, -1], model(torch.tensor([[2, 1, 3]]))[0, -1]).all()


def test_loss_is_the_mean_over_all_targets() -> None:
    model, tokens = tiny(), torch.randint(256, (3, 9))
    logits = model(tokens[:, :-1])
    loss = model(tokens[:, :-1], tokens[:, 1:])
    expected = -torch.log_softmax(logits, dim=-1).gather(2, tokens[:, 1:, None]).mean()
    torch.testing.assert_close(loss, expected)


def test_a_new_model_guesses_evenly_and_every_parameter_can_learn() -> None:
    model = build_model("gpt", TINY, seed=0)
    tokens = torch.randint(256, (4, 17), generator=torch.Generator().manual_seed(0))
    assert model(tokens[:, :-1], tokens[:, 1:]).item() == pytest.approx(5.545, abs=0.05)
    model = tiny()
    model(tokens[:, :-1], tokens[:, 1:]).backward()
    assert all(p.grad is not None and p.grad.any() for p in model.parameters())


def test_initial_bits_are_those_of_the_golden_hash_and_the_callers_random_state_is_kept() -> None:
    torch.manual_seed(5)
    state = torch.get_rng_state()
    model = build_model("gpt", TINY, seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    flat = torch.cat([p.detach().flatten() for _, p in sorted(model.named_parameters())])
    assert digest(flat.numpy().tobytes()).hex().startswith("9476401cbb85e529")
    other = build_model("gpt", TINY, seed=4)
    assert not torch.equal(model.get_parameter("embed.weight"), other.get_parameter("embed.weight"))


def test_generation_is_greedy_at_zero_repeatable_by_seed_and_passes_the_context() -> None:
    torch.manual_seed(0)
    model, prompt = tiny(), torch.tensor([7, 8])
    likeliest = model(prompt[None])[0, -1].argmax().item()
    assert model.generate(prompt, 20, temperature=0)[0] == likeliest
    first, again, other = (model.generate(prompt, 20, generator=torch.Generator().manual_seed(s)) for s in (1, 1, 2))
    assert first.shape == (20,)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("gtp", {}, "did you mean 'gpt'"),
        ("gpt", {"size": "10M"}, "did you mean '10m'"),
        ("gpt", {"layer": 3}, "did you mean 'layers'"),
        ("gpt", {"seed": 3}, "no option 'seed'$"),
        ("gpt", {"lora_rank": 8}, "lora_rank is for pretrained weights"),
        ("gpt", {"layers": 0}, "positive integer"),
        ("gpt", {"layers": True}, "positive integer"),
        ("gpt", {"layers": 10**400}, "positive integer"),
        ("gpt", {"width": 2, "heads": 1, "layers": 10**4 + 1}, "up to 10000"),
        ("gpt", {"size": []}, "no size"),
        ("gpt", {"width": "64"}, "positive integer"),
        ("gpt", {"heads": 5}, "does not split"),
    ],
)
def test_wrong_names_are_usage_errors_with_a_hint(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        build_model(name, options, seed=0)


def test_a_model_that_memory_cannot_hold_is_one_line_and_its_outline_costs_nothing() -> None:
    enormous = {"size": "0.2m", "vocab_size": 1 << 31, "width": 1 << 20}
    with pytest.raises(LocalError, match="this computer has no memory for the model gpt"):
        build_model("gpt", enormous, seed=0)
    outline = outline_of("gpt", enormous)
    assert outline is not None
    with pytest.raises(UsageError, match="more than any computer holds"):
        FlatLayout.of(outline, of_values=False).pin()
    assert size_of_model("gpt", enormous) == ModelSize(sum(p.numel() for p in outline.parameters()), bytes_of(outline))


OWN = """
from torch import nn

def build(*, width):
    return nn.Linear(width, width)

def weights(*, width):
    return [0.0] * width
"""


@pytest.fixture
def lent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of an importable module with functions of the user's own."""
    (tmp_path / "lent_model.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "lent_model", raising=False)
    return "lent_model"


def test_a_model_of_ones_own_is_not_even_imported_without_consent(lent: str) -> None:
    for allowed in ("", f"{lent}:weights", lent):
        with pytest.raises(UsageError, match="is custom code") as refused:
            build_model(f"{lent}:build", {"width": 4}, seed=0, allow_model=allowed)
        assert refused.value.remedy.endswith(f"--allow-model {lent}:build")
    assert lent not in sys.modules


def test_a_model_of_ones_own_is_built_by_seed(lent: str) -> None:
    name = f"{lent}:build"
    weights = [build_model(name, {"width": 4}, seed=s, allow_model=name).get_parameter("weight") for s in (1, 1, 2)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_what_cannot_be_built_is_a_usage_error(lent: str) -> None:
    for name, message in [
        ("not_installed_anywhere:build", "cannot import"),
        (f"{lent}:buidl", "cannot import"),
        (f"{lent}:weights", "returned list, not a torch.nn.Module"),
    ]:
        with pytest.raises(UsageError, match=message):
            build_model(name, {"width": 4}, seed=0, allow_model=name)
