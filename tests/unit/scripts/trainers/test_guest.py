"""The order of another library's data loader, and what a callback refuses."""

from types import SimpleNamespace

import pytest
import torch
from flockstep.peer.base.errors import UsageError
from flockstep.scripts.trainers.guest import count_tokens, reorder
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, RandomSampler, TensorDataset

DATA = TensorDataset(torch.arange(64))


def loader(kind: str) -> DataLoader[tuple[torch.Tensor, ...]]:
    """A loader whose samples come in a random order, seeded as libraries seed theirs: alike in every process."""
    torch.manual_seed(42)
    if kind == "accelerate":
        accelerate = pytest.importorskip("accelerate")
        config = accelerate.DataLoaderConfiguration(use_seedable_sampler=True)
        prepared: DataLoader[tuple[torch.Tensor, ...]] = accelerate.Accelerator(cpu=True, dataloader_config=config).prepare(
            DataLoader(DATA, batch_size=8, shuffle=True)
        )
        return prepared
    if kind == "distributed":
        return DataLoader(DATA, batch_size=8, sampler=DistributedSampler(DATA, num_replicas=1, rank=0))
    if kind == "batches":
        return DataLoader(DATA, batch_sampler=BatchSampler(RandomSampler(DATA), 8, drop_last=True))
    generator = torch.Generator().manual_seed(7) if kind == "generator" else None
    return DataLoader(DATA, batch_size=8, shuffle=True, generator=generator)


def order(kind: str, peer_id: str) -> list[int]:
    made = loader(kind)
    if peer_id:
        assert "an order of its own" in reorder(made, peer_id)
    return [int(number) for (batch,) in made for number in batch]


@pytest.mark.parametrize("kind", ["plain", "generator", "distributed", "batches", "accelerate"])
def test_each_peer_draws_the_same_samples_in_an_order_of_its_own(kind: str) -> None:
    assert order(kind, "") == order(kind, "")
    mine = order(kind, "a")
    assert mine == order(kind, "a")  # Also after a restart.
    assert len({tuple(mine), tuple(order(kind, "b")), tuple(order(kind, ""))}) == 3
    assert sorted(mine) == list(range(64))


class Endless(IterableDataset[int]):
    def __iter__(self):  # type: ignore[no-untyped-def]  # of a test
        yield from range(8)


@pytest.mark.parametrize("fixed", [DataLoader(DATA, batch_size=8), DataLoader(Endless(), batch_size=8)])
def test_a_loader_without_a_random_order_is_said_to_have_none(fixed: DataLoader[int]) -> None:
    assert "no random order" in reorder(fixed, "a")


def test_tokens_are_counted_by_their_name_and_samples_else() -> None:
    assert count_tokens({"labels": torch.zeros(4).long(), "input_ids": torch.zeros(4, 9).long()}) == 32
    assert count_tokens((torch.zeros(4, 3), torch.zeros(4))) == 4


@pytest.mark.parametrize("bad", [{"deepspeed": "zero3.json"}, {"fsdp": "full_shard"}, {"n_gpu": 2}])
def test_what_the_callback_does_not_support_is_an_error_with_its_name(bad: dict[str, object]) -> None:
    pytest.importorskip("transformers")
    from flockstep.scripts.trainers.transformers import check_arguments

    (name,) = bad
    check_arguments(SimpleNamespace(deepspeed=None, fsdp=None, n_gpu=1))
    with pytest.raises(UsageError, match=name.replace("n_gpu", "DataParallel over 2 GPUs")):
        check_arguments(SimpleNamespace(**{"deepspeed": None, "fsdp": None, "n_gpu": 1, **bad}))
