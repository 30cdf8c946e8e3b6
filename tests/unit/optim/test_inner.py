"""The inner optimizer: the optimizer of each parameter, and the learning-rate schedule."""

import itertools

import pytest
import torch
from flockstep.dht.run.manifest import Inner
from flockstep.optim.inner import build_inner, lr_factor, schedule_of, set_lr_factor
from flockstep.optim.models.registry import build_model
from flockstep.peer.errors import UsageError
from torch import nn


def names_by_optimizer(model: nn.Module, settings: Inner) -> dict[str, set[str]]:
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        type(optimizer).__name__: {name_of[id(p)] for group in optimizer.param_groups for p in group["params"]}
        for optimizer in build_inner(model, settings)
    }


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.hidden = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.conv = nn.Conv1d(4, 4, 3)
        self.frozen = nn.Linear(4, 4, bias=False).requires_grad_(False)
        self.tied = nn.Linear(4, 8, bias=False)
        self.tied.weight = self.embed.weight
        self.lm_head = nn.Linear(4, 8, bias=False)


REST = {"embed.weight", "hidden.bias", "norm.weight", "norm.bias", "conv.weight", "conv.bias", "lm_head.weight"}


def test_muon_takes_the_hidden_matrices_and_adamw_the_rest() -> None:
    assert names_by_optimizer(Mixed(), Inner()) == {"Muon": {"hidden.weight"}, "AdamW": REST}


def test_adamw_alone_takes_all() -> None:
    assert names_by_optimizer(Mixed(), Inner(optimizer="adamw")) == {"AdamW": {*REST, "hidden.weight"}}


def test_gpt_is_all_muon_but_for_its_embedding() -> None:
    model = build_model("gpt", {"size": "0.2m"}, seed=0)
    names = names_by_optimizer(model, Inner())
    assert names["AdamW"] == {"embed.weight"}
    assert len(names["Muon"]) == 4 * 6


def test_only_matrices_decay() -> None:
    model = Mixed()
    settings = Inner(optimizer="adamw", adamw_lr=0.1, weight_decay=0.5)
    (optimizer,) = build_inner(model, settings)
    for parameter in model.parameters():
        nn.init.ones_(parameter)
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert (model.hidden.weight == 0.95).all()
    assert (model.hidden.bias == 1).all()


def test_lr_factor_multiplies_the_rate_that_each_optimizer_was_made_with() -> None:
    muon, adamw = build_inner(Mixed(), Inner())
    for factor in (0.5, 0.1):
        set_lr_factor([muon, adamw], factor)
        assert {group["lr"] for group in muon.param_groups} == {factor * 0.02}
        assert [group["lr"] for group in adamw.param_groups] == [factor * 3e-3] * 2


@pytest.mark.parametrize("schedule", ["constant", "cosine", "linear"])
def test_rate_warms_up_to_its_peak_and_never_rises_again(schedule: str) -> None:
    factor = schedule_of(Inner(warmup_steps=10, steps=5, schedule=schedule), rounds=20)
    factors = [factor(step) for step in range(150)]
    assert factors[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert factors[10] == 1
    assert all(low >= high for low, high in itertools.pairwise(factors[9:]))
    assert factors[55] == pytest.approx({"constant": 1, "cosine": 0.55, "linear": 0.5}[schedule])
    assert factors[-1] == factors[100] == pytest.approx({"constant": 1, "cosine": 0.1, "linear": 0}[schedule])


def test_a_run_shorter_than_its_warm_up_never_divides_by_zero() -> None:
    assert [lr_factor(step, warmup=4, total=4, schedule="linear") for step in (3, 4, 5)] == [1, 1, 0]


def test_an_unknown_schedule_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="'step'"):
        lr_factor(10, warmup=0, total=20, schedule="step")
