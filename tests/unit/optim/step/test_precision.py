"""fp16: which device computes in it, and a loss scale under which gradients are those of float32."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from flockstep import PeerConfig
from flockstep.optim.member.progress import Losses
from flockstep.optim.models.registry import build_model
from flockstep.optim.step.micro_batches import MicroBatches
from flockstep.optim.step.precision import CLEAN_STEPS, FIRST_SCALE, LossScale, fast_half, pass_dtype
from flockstep.optim.train.trainer import ForwardPass, make_step
from flockstep.peer.log.telemetry import Event, Telemetry
from torch import Tensor, nn

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("kind", "capability", "bf16", "dtype"),
    [
        ("cuda", (9, 0), True, torch.bfloat16),  # H100
        ("cuda", (8, 6), True, torch.bfloat16),  # RTX 3090
        ("cuda", (7, 5), False, torch.float16),  # T4, RTX 2080
        ("cuda", (7, 0), False, torch.float16),  # V100
        ("cuda", (6, 1), False, None),  # GTX 1080
        ("cuda", (6, 0), False, torch.float16),  # P100
        ("cuda", (5, 2), False, None),
        ("cpu", (0, 0), True, None),
        ("mps", (0, 0), False, None),
    ],
)
def test_each_device_computes_in_what_it_is_fast_in(
    kind: str, capability: tuple[int, int], bf16: bool, dtype: torch.dtype | None
) -> None:
    assert fast_half(kind, capability, bf16=bf16) is dtype


def test_a_setting_overrides_the_choice() -> None:
    assert [pass_dtype(name, CPU) for name in ("auto", "fp32", "bf16", "fp16")] == [
        *(None, None, torch.bfloat16, torch.float16)
    ]


class Told(Telemetry):
    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []
        self.subscribe(self.events.append)


def gradient_of(precision: str, model: nn.Module, tokens: Tensor, scale: LossScale | None = None) -> Tensor:
    forward = ForwardPass(model, CPU, PeerConfig(precision=precision))
    pieces, factor = MicroBatches(model, forward.loss, Telemetry(), batch_size=len(tokens), size=2), 1.0
    if scale is not None:
        factor = scale.value
    pieces.backward(tokens, factor)
    assert scale is None or scale.is_clean(model)
    gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])
    model.zero_grad()
    return gradient / factor


def test_fp16_gives_the_gradient_of_fp32_and_closer_than_bf16() -> None:
    model = build_model("gpt", {"size": "0.2m", "vocab_size": 64, "context": 16}, seed=0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    tokens = torch.randint(64, (4, 17), generator=generator)
    exact = gradient_of("fp32", model, tokens)
    errors = {
        name: float((gradient_of(name, model, tokens, scale) - exact).norm() / exact.norm())
        for name, scale in (("fp16", LossScale(Telemetry())), ("bf16", None))
    }
    assert errors["fp16"] < 0.003
    assert errors["fp16"] < errors["bf16"] / 2


class Tiny(nn.Module):
    """A model whose gradient is `size`, in fp16 as its forward pass is."""

    def __init__(self, size: float) -> None:
        super().__init__()
        self.size = size
        self.weight = nn.Parameter(torch.zeros(()))

    def loss(self) -> Tensor:
        return (self.weight.half() * self.size).float()


def test_a_gradient_too_small_for_fp16_survives_by_the_scale() -> None:
    model, scale = Tiny(1e-8), LossScale(Telemetry())
    model.size = 1.0
    for factor, expected in ((1.0, 0.0), (scale.value, 1e-8)):
        model.zero_grad()
        (model.loss() * 1e-8 * factor).backward()  # type: ignore[no-untyped-call]  # of torch
        assert model.weight.grad is not None
        assert float(model.weight.grad) / factor == pytest.approx(expected, rel=1e-3)


def test_a_step_that_overflows_is_skipped_with_one_event_and_the_scale_is_halved() -> None:
    told = Told()
    model, scale = Tiny(2.0), LossScale(told)
    done = []
    for _ in range(3):
        (model.loss() * scale.value).backward()  # type: ignore[no-untyped-call]  # of torch
        done.append(scale.is_clean(model))
    assert done == [False, False, True]  # 2 · 2¹⁶ and 2 · 2¹⁵ are beyond fp16, 2 · 2¹⁴ is not.
    assert [(event["event"], event["skipped"], event["scale"]) for event in told.events] == [
        *(("step.skipped", 1, FIRST_SCALE / 2), ("step.skipped", 2, FIRST_SCALE / 4))
    ]
    assert model.weight.grad is not None
    assert float(model.weight.grad) == 2.0 * scale.value


def test_a_skipped_step_counts_no_tokens_and_steps_no_optimizer() -> None:
    made: list[str] = []
    swarm: Any = SimpleNamespace(
        model=Tiny(1.0),
        step=lambda loss, scale: made.append(f"step of {scale:g}"),
        after_step=lambda loss, tokens: made.append(f"skipped, {tokens} tokens"),
    )
    for gradient in (1.0, torch.inf, 1.0):
        swarm.model.weight.grad = torch.tensor(gradient)
        make_step(swarm, torch.tensor(1.0), 4.0, LossScale(Telemetry()))
    make_step(swarm, torch.tensor(1.0), 0.5, None)
    assert made == ["step of 4", "skipped, 0 tokens", "step of 4", "step of 0.5"]


def test_a_loss_that_diverges_is_no_overflow_for_ever() -> None:
    told = Told()
    model, scale = Tiny(1.0), LossScale(told)
    for _ in range(100):
        model.weight.grad = torch.tensor(torch.nan)
        if scale.is_clean(model):
            break
    assert scale.value == 1
    assert len(told.events) == 16
    assert model.weight.grad is not None
    assert not torch.isfinite(model.weight.grad)


def test_the_scale_doubles_after_many_clean_steps() -> None:
    model, scale = Tiny(1.0), LossScale(Telemetry())
    for _ in range(CLEAN_STEPS):
        model.weight.grad = torch.tensor(1.0)
        assert scale.is_clean(model)
    assert scale.value == 2 * FIRST_SCALE


def test_a_skipped_step_has_no_loss() -> None:
    losses = Losses()
    losses.add(torch.tensor(3.0), 10)
    losses.add(torch.tensor(torch.nan), 0)
    assert losses.take() == (30.0, 10)
