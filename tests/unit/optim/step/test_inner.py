"""The inner optimizer: the optimizer of each parameter, and the learning-rate schedule."""

import itertools
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from flockstep.collectives.vector.mixed import codecs_named
from flockstep.dht.run.manifest import Data, EvalSettings, Inner, Manifest
from flockstep.dht.run.revision import UNREVISED, Revision, revised, settings_of
from flockstep.optim.models.registry import build_model
from flockstep.optim.step.inner import InnerOptimizers, build_inner, check_optimizers, lr_factor, schedule_of
from flockstep.optim.step.outer import OuterSettings
from flockstep.peer.base.errors import UsageError
from flockstep.peer.identity import Identity
from support.revisions import NAMES, WALKED
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


def test_momenta_are_those_of_the_manifest() -> None:
    settings = Inner(momentum=0.7, betas=(0.6, 0.99))
    groups = {type(made).__name__: made.param_groups for made in build_inner(Mixed(), settings)}
    assert {group["momentum"] for group in groups["Muon"]} == {0.7}
    assert {group["betas"] for group in groups["AdamW"]} == {(0.6, 0.99)}


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


def descent(rate: float) -> tuple[torch.optim.SGD, Callable[[], float]]:
    """An optimizer of one number with the gradient 1, and a function that tells how far the last step moved it."""
    number = nn.Parameter(torch.zeros((), dtype=torch.float64))
    number.grad = torch.ones_like(number)

    def moved() -> float:
        distance = -float(number.detach())
        with torch.no_grad():
            number.zero_()
        number.grad = torch.ones_like(number)
        return distance

    return torch.optim.SGD([number], lr=rate), moved


def test_a_schedule_multiplies_the_rate_that_each_optimizer_was_made_with() -> None:
    (fast, fast_moved), (slow, slow_moved) = descent(0.5), descent(0.1)
    inner = InnerOptimizers([fast, slow])
    for factor, warmup in ((0.5, 1.0), (0.25, 1.0), (0.5, 0.5)):
        inner.step(factor, warmup)
        assert (fast_moved(), slow_moved()) == pytest.approx((factor * warmup * 0.5, factor * warmup * 0.1))
    assert not inner.have_own_rates


@pytest.mark.parametrize("begins", ["before", "after"])
def test_a_scheduler_of_the_callers_keeps_its_rates(begins: str) -> None:
    optimizer, moved = descent(0.8)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) if begins == "before" else None
    inner = InnerOptimizers([optimizer])
    scheduler = scheduler or torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    inner.step(0.25)
    assert moved() == pytest.approx(0.2)  # Not yet seen to have a scheduler.
    for rate in (0.4, 0.2, 0.1):
        scheduler.step()
        inner.step(0.25)
        assert inner.have_own_rates
        assert moved() == pytest.approx(rate)
    inner.step(0.25, 0.5)
    assert moved() == pytest.approx(0.05)  # A newcomer's warm-up applies to any rate.


def test_a_rate_that_is_a_tensor_may_be_set_in_place() -> None:
    optimizer, moved = descent(0.8)
    optimizer.param_groups[0]["lr"] = rate = torch.tensor(0.8)
    inner = InnerOptimizers([optimizer])
    inner.step(0.25)
    assert moved() == pytest.approx(0.2)
    rate.fill_(0.4)
    inner.step(0.25)
    assert moved() == pytest.approx(0.4)
    assert optimizer.param_groups[0]["lr"] is rate


def test_rates_are_given_back_after_a_step_that_fails() -> None:
    optimizer, _ = descent(0.8)

    def fail(*_: object) -> None:
        raise RuntimeError

    optimizer.register_step_pre_hook(fail)
    with pytest.raises(RuntimeError):
        InnerOptimizers([optimizer]).step(0.25)
    assert optimizer.param_groups[0]["lr"] == 0.8


@pytest.mark.parametrize("schedule", ["constant", "cosine", "linear"])
def test_rate_warms_up_to_its_peak_and_never_rises_again(schedule: str) -> None:
    factor = schedule_of(Inner(warmup_steps=10, steps=5, schedule=schedule), total=100)
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


@pytest.mark.parametrize("owns_rates", [False, True])
def test_revised_settings_are_taken_over_with_the_state_and_own_rates_kept(owns_rates: bool) -> None:
    model = Mixed()
    made = build_inner(model, Inner(lr=0.02, adamw_lr=0.004, weight_decay=0.1))
    inner = InnerOptimizers(made)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    inner.step(0.5)
    if owns_rates:
        for optimizer in made:
            optimizer.param_groups[0]["lr"] = 0.5
        inner.step(0.5)
    num_states = [len(optimizer.state) for optimizer in made]
    inner.take_settings(build_inner(model, Inner(lr=0.04, adamw_lr=0.008, weight_decay=0.2)))
    assert [len(optimizer.state) for optimizer in made] == num_states
    muon, adamw = (optimizer.param_groups for optimizer in made)
    assert [group["lr"] for group in (*muon, *adamw)] == ([0.5, 0.5, 0.004] if owns_rates else [0.04, 0.008, 0.008])
    assert [group["weight_decay"] for group in (*muon, *adamw)] == [0.2, 0.2, 0.0]
    inner.step(0.5)
    assert inner.have_own_rates is owns_rates


@pytest.mark.parametrize("name", NAMES)
def test_whoever_trains_takes_over_every_value_that_can_be_signed(name: str) -> None:
    owner, evaluation = Identity.from_seed(bytes(32)).peer_id, EvalSettings(1, ("Once",))
    manifest = Manifest(owner=owner, name="run", data=Data("text:own"), eval=evaluation)
    model = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 8), nn.Linear(8, 10))
    optimizers = InnerOptimizers(build_inner(model, manifest.inner))
    for value in WALKED[name]:
        after = revised(manifest, Revision(1, settings_of(manifest, UNREVISED, {name: value})))
        optimizers.take_settings(build_inner(model, after.inner))
        model(torch.tensor([[1, 2, 3]])).square().sum().backward()
        optimizers.step(schedule_of(after.inner, after.num_rounds * after.phase_steps)(3))
        OuterSettings.of(after).at(3)
        codecs_named(after.codec.contributions)
    optimizers.close()


class AdamWScheduleFree(torch.optim.AdamW):
    """Named as the reference implementation of arXiv:2405.15682."""


class Mine(AdamWScheduleFree):
    pass


class Lookahead:
    """Holds slow weights beside those of what it wraps, as that of several libraries does."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.param_groups = optimizer, optimizer.param_groups


class Accelerated(torch.optim.Optimizer):
    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer


def test_optimizers_that_hold_weights_are_refused_by_name() -> None:
    parameters = [nn.Parameter(torch.zeros(2))]
    inner = torch.optim.AdamW(parameters)
    check_optimizers([inner, Accelerated(inner), torch.optim.SGD(parameters), torch.optim.RAdam(parameters)])
    wrong: list[tuple[object, str]] = [
        *((kind(parameters), kind.__name__) for kind in (AdamWScheduleFree, Mine)),
        (Lookahead(inner), "Lookahead"),
        (Accelerated(Mine(parameters)), "Mine"),
    ]
    for optimizer, name in wrong:
        with pytest.raises(UsageError, match=f"{name} keeps weights of its own") as refused:
            check_optimizers([inner, cast(Any, optimizer)])
        assert refused.value.remedy
