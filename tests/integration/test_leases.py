"""Data leases in real processes over real sockets, and a peer that resumes after a restart."""

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from flockstep.optim.data.datasets import Indexed
from support.trainers import RUN, TRUTH, Trainer, run_rounds
from torch import Tensor
from torch.utils.data import Dataset

Trained = dict[str, list[tuple[int, int]]]


class Line(Dataset[tuple[Tensor, Tensor]]):
    """So many points of a line that a unit of them takes longer than it takes to hear who trains it."""

    def __len__(self) -> int:
        return 4_000_000

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(3, generator=torch.Generator().manual_seed(index))
        return x, TRUTH @ x


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> Trained:
    """Thread → (epoch, sample) of everything that it has trained."""
    trained: Trained = {}
    monkeypatch.setattr("support.trainers.dataset", lambda seed: Line())

    def read(self: Indexed, epoch: int, unit: int, done: int) -> Iterator[int]:
        for item in self._cut.items(epoch, unit)[done:].tolist():
            trained.setdefault(threading.current_thread().name, []).append((epoch, item))
            yield item

    monkeypatch.setattr(Indexed, "read", read)
    return trained


def test_three_peers_train_no_sample_twice(publish: Callable[[str], str], tmp_path: Path, trained: Trained) -> None:
    link = publish(RUN.format(rounds=4, peers=3))
    peers = [Trainer(link, tmp_path / name, seed) for seed, name in enumerate("abc")]
    run_rounds(peers)
    everything = [place for places in trained.values() for place in places]
    assert len(trained) == 3
    assert len(everything) > 3 * 4 * 10 * 16
    assert len(everything) == len(set(everything))
    assert all(peer.swarm._first._network.pulse.leases is not None for peer in peers)


def test_a_peer_that_is_started_again_goes_on_with_its_unit(
    publish: Callable[[str], str], tmp_path: Path, trained: Trained
) -> None:
    link = publish(RUN.format(rounds=1000, peers=1))
    kept_done: list[object] = []
    for _ in range(2):
        peer = Trainer(link, tmp_path / "a", 0)
        peer.start()
        peer.heard("phase.end")
        peer.stop.set()
        peer.join(timeout=60)
        assert peer.error is None
        assert [event["done"] for event in peer.named("unit.begun")] == kept_done
        (kept,) = (tmp_path / "a" / "runs").glob("*/data.json")
        kept_done = [done for *_, done in json.loads(kept.read_text())["units"]]
        assert len(kept_done) == 1
    everything = [place for places in trained.values() for place in places]
    assert len(everything) - len(set(everything)) <= 1  # Each life has read one sample ahead.
