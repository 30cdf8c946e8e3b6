"""The sums of an inner phase."""

import math
from decimal import Decimal
from fractions import Fraction
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from flockstep.optim.member.progress import MAX_STEP_TOKENS, Losses, Progress, loss_of, tokens_of
from flockstep.peer.base.errors import UsageError
from flockstep.peer.log.telemetry import Telemetry
from torch import nn


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


def test_a_phase_is_as_long_as_its_steps_and_no_wait_for_a_round_is_a_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others wait for late members by what is stated here: a wait that were a part of it would lengthen the next one."""
    clock = Clock()
    monkeypatch.setattr("flockstep.optim.member.progress.time", clock)
    progress = Progress(Telemetry(), cast(Any, None))
    for _ in range(3):
        clock.now += 2.0
        progress.count(10)
    assert progress.phase_seconds == 6.0
    trained = progress.phase_seconds
    progress.begin_phase()
    clock.now += 100.0  # The round is void.
    progress.waited()
    progress.resume_phase(3, 30, 1.0, trained)
    clock.now += 2.0
    progress.count(10)
    assert (progress.phase_steps, progress.phase_tokens, progress.phase_seconds) == (4, 40, 8.0)


@pytest.mark.parametrize(
    "given",
    [
        *(1.5, Fraction(3, 2), Decimal("1.5"), np.float32(1.5), np.array(1.5), np.array([[1.5]])),
        *(torch.tensor(1.5, requires_grad=True), torch.tensor([1.5], dtype=torch.bfloat16), nn.Parameter(torch.tensor(1.5))),
        *(SimpleNamespace(loss=torch.tensor(1.5), logits=None), {"loss": 1.5}),
    ],
)
def test_losses_of_any_usual_kind_are_taken(given: object) -> None:
    losses = Losses()
    losses.add(loss_of(given), 4)
    losses.add(loss_of(2), 2)
    assert losses.take() == (10.0, 6)


def test_a_loss_that_is_not_known_or_not_finite_makes_the_mean_unknown() -> None:
    assert loss_of(None) is None
    for given in (None, math.nan, torch.tensor(torch.inf)):
        losses = Losses()
        losses.add(loss_of(given), 4)
        assert not math.isfinite(losses.take()[0])


@pytest.mark.parametrize(
    "given",
    [
        *("1.5", b"1", (1.5,), [1.5], {"loss": [1.0]}, {}, SimpleNamespace(loss="low"), True, 1j, object()),
        *(np.zeros(2), np.array("low"), np.array([]), np.array(1j)),
        *(torch.zeros(4), torch.zeros(0), torch.tensor(1j), torch.zeros((), device="meta"), torch.eye(1).to_sparse()),
    ],
)
def test_what_is_no_loss_is_one_line(given: object) -> None:
    with pytest.raises(UsageError, match=r"^the loss is a [^\n]+$") as refused:
        loss_of(given)
    assert "loss.mean()" in refused.value.remedy


@pytest.mark.parametrize("given", [None, 0, 7, np.int64(7), torch.tensor(7), MAX_STEP_TOKENS])
def test_tokens_are_whole_numbers_of_any_kind(given: object) -> None:
    assert tokens_of(given) == given
    assert given is None or type(tokens_of(given)) is int


@pytest.mark.parametrize("given", [-1, 2**70, 1.5, math.nan, "7", torch.tensor([1, 2]), MAX_STEP_TOKENS + 1])
def test_what_is_no_number_of_tokens_is_one_line(given: object) -> None:
    with pytest.raises(UsageError, match=r"^a step cannot have .+ tokens$") as refused:
        tokens_of(given)
    assert refused.value.remedy
