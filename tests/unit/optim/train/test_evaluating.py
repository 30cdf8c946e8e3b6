"""Measuring a model: the same numbers from the same weights, within the time that there is, and nothing is changed."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from flockstep.optim.data.tokenizer import BYTES
from flockstep.optim.models.registry import build_model, training_loss
from flockstep.optim.step.flat import FlatLayout, whole_tensors
from flockstep.optim.train.evaluating import (
    CONTINUED_TOKENS,
    HELDOUT_BATCH,
    HELDOUT_BATCHES,
    TEMPERATURE,
    TOLD_BATCHES,
    HeldOutText,
)
from flockstep.optim.train.trainer import num_shards, spread
from flockstep.peer.base.errors import LocalError
from support.packed import text_tokens
from torch import Tensor, nn

LENGTH = 16
CPU = torch.device("cpu")


@pytest.fixture
def text(tmp_path: Path) -> HeldOutText:
    source = text_tokens(tmp_path, "the quick brown fox jumps over the lazy dog\n" * 20_000, LENGTH)
    return HeldOutText(source, BYTES, ("the quick", "é"), device=CPU, loss_of=training_loss)


def a_model(seed: int = 0) -> nn.Module:
    return build_model("gpt", {"layers": 1, "width": 16, "heads": 2, "context": LENGTH}, seed=seed)


def test_the_same_weights_give_the_same_numbers_on_all_held_out_sequences(text: HeldOutText) -> None:
    one, again, other = text.evaluate(a_model()), text.evaluate(a_model()), text.evaluate(a_model(1))
    assert one == again != other
    assert one.tokens == HELDOUT_BATCH * HELDOUT_BATCHES * LENGTH
    assert 5 < one.loss < 6.5  # About ln 256.
    assert [bool(sample) for sample in one.samples] == [True, True]
    assert all(len(sample) <= CONTINUED_TOKENS for sample in one.samples)


def test_samples_are_drawn_with_one_seed_on_all_peers_and_not_the_likeliest_token(tmp_path: Path) -> None:
    source = text_tokens(tmp_path, "the quick brown fox jumps over the lazy dog\n" * 20_000, LENGTH)
    odds = torch.log(torch.tensor([0.0] * 97 + [0.6, 0.3, 0.1]))  # Of a, b and c.
    text = HeldOutText(
        source, BYTES, ("x",) * 40, device=CPU, loss_of=lambda *_: torch.tensor(1.0), logits_of=lambda *_: odds
    )
    one, again = (text.evaluate(nn.Linear(1, 1)).samples for _ in range(2))
    assert one == again
    assert len(set(one)) == len(one)  # Each prompt has a seed of its own.
    weights = np.array([0.6, 0.3, 0.1]) ** (1 / TEMPERATURE)
    found = np.array([sum(sample.count(letter) for sample in one) for letter in "abc"]) / (40 * CONTINUED_TOKENS)
    assert found == pytest.approx(weights / weights.sum(), abs=0.03)


def test_each_step_is_told_before_it_begins(text: HeldOutText) -> None:
    steps: list[str] = []
    text.evaluate(a_model(), tell=steps.append)
    assert steps[:2] == [f"measuring held-out batch {number} of {HELDOUT_BATCHES}" for number in (1, 1 + TOLD_BATCHES)]
    assert steps[HELDOUT_BATCHES // TOLD_BATCHES :] == ["continuing prompt 1 of 2", "continuing prompt 2 of 2"]


def test_without_time_one_batch_is_measured_and_nothing_said(text: HeldOutText) -> None:
    found = text.evaluate(a_model(), 0.0)
    assert (found.tokens, found.samples) == (HELDOUT_BATCH * LENGTH, ())


def test_a_model_that_has_diverged_or_gives_no_logits_is_an_error(text: HeldOutText) -> None:
    broken = a_model()
    for parameter in broken.parameters():
        nn.init.constant_(parameter, float("nan"))
    with pytest.raises(LocalError, match="held-out loss is nan"):
        text.evaluate(broken)

    class Silent(nn.Module):
        def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
            return torch.tensor(1.0)

    with pytest.raises(LocalError, match="no logits"):
        text.evaluate(Silent())


def test_prompts_are_tokens_without_an_end_and_samples_are_text() -> None:
    assert BYTES.prompt("ab") == [97, 98]
    assert BYTES.decode(np.array([97, 0, 195, 300, 98])) == "a\ufffdb"


def test_a_model_that_lends_its_parameters_is_as_before() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Dropout(), nn.Linear(2, 2))
    model[1].eval()
    layout, before = FlatLayout.of(model), [parameter.detach().clone() for parameter in model.parameters()]
    other = np.ones(layout.size, np.float32)

    def fail() -> None:
        with layout.holding(other, model) as lent:
            assert all((parameter == 1).all() for parameter in lent.parameters())
            assert not any(module.training for module in lent.modules())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert all(torch.equal(now, then) for now, then in zip(model.parameters(), before, strict=True))
    assert [module.training for module in model.modules()] == [True, True, False, True]


@pytest.fixture
def alone() -> Iterator[None]:
    store = dist.HashStore()  # type: ignore[attr-defined]  # It has no stub.
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_sharded_model_that_lends_its_parameters_trains_on_as_before(alone: None) -> None:
    model, tokens = build_model("gpt", {"size": "0.2m", "context": 16}, seed=0), torch.arange(34).view(2, 17)
    layout, before = FlatLayout.of(model), whole_tensors(model)
    spread(model, CPU, shard=True)
    training_loss(model, tokens).backward()  # type: ignore[no-untyped-call]  # of torch
    loss = training_loss(model, tokens)
    with torch.no_grad(), layout.holding(np.zeros(layout.size, np.float32), model) as lent:
        assert training_loss(lent, tokens) != loss
    assert all(torch.equal(now, before[name]) for name, now in whole_tensors(model).items())
    assert training_loss(model, tokens) == loss


@pytest.mark.parametrize(("nodes", "local", "size", "shards"), [(1, 4, 4, 4), (2, 2, 4, 2), (4, 1, 4, 4), (2, 4, 6, 6)])
def test_the_ranks_of_a_node_share_one_copy_of_a_model(
    nodes: int, local: int, size: int, shards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in ("WORLD_SIZE", size), ("GROUP_WORLD_SIZE", nodes), ("LOCAL_WORLD_SIZE", local):
        monkeypatch.setenv(name, str(value))
    assert num_shards() == shards
