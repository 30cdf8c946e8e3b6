"""Data leases in real processes over real sockets, and a peer that resumes after a restart."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest
import torch
from flockstep.optim.data.datasets import Units, source_of
from support.trainers import PATIENCE, RUN, TRUTH, Trainer, dataset, run_rounds
from torch import Tensor


class Endless(Units):
    """Units that nobody finishes. As every peer begins with the first one, only news of the others keeps them apart."""

    name = "endless"
    num_units = 32
    source = source_of(name)
    forward = True

    def __init__(self) -> None:
        self.trained: list[tuple[str, int, int, int]] = []
        """Thread, epoch, unit and number of each sample, as they are drawn."""
        self.apart = threading.Event()
        """Set once three threads train different units."""
        self._units: dict[str, tuple[int, int]] = {}

    def read(self, epoch: int, unit: int, done: int) -> Iterator[tuple[Tensor, Tensor]]:
        reader = threading.current_thread().name
        self._units[reader] = epoch, unit
        if len(set(self._units.values())) == 3:
            self.apart.set()
        for number in count(done):
            x = torch.randn(3, generator=torch.Generator().manual_seed(number))
            self.trained.append((reader, epoch, unit, number))
            yield x, TRUTH @ x


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> Endless:
    """What all peers train."""
    units = Endless()
    monkeypatch.setattr("support.trainers.dataset", lambda seed: units)
    return units


def test_three_peers_train_no_sample_twice(publish: Callable[..., str], tmp_path: Path, endless: Endless) -> None:
    link = publish(RUN.format(rounds=1000, peers=3), "a")
    peers = [Trainer(link, tmp_path / name, seed) for seed, name in enumerate("abc")]
    for peer in peers:
        peer.start()
    # Others may begin the unit of a peer that they lose, but from here on nobody begins a second one.
    assert endless.apart.wait(PATIENCE)
    before = len(endless.trained)
    for _ in range(2):  # All steps of the second round's phase come after the first.
        since = [len(peer.events) for peer in peers]
        for peer, number in zip(peers, since, strict=True):
            peer.heard("round.done", since=number)
    for peer in peers:
        peer.stop.set()
    for peer in peers:
        peer.join(timeout=120)
        assert peer.error is None
    readers = Counter(reader for reader, *_ in endless.trained[before:])
    assert len(readers) == 3
    assert min(readers.values()) >= 10 * 16
    samples = [(epoch, unit, number) for _, epoch, unit, number in endless.trained[before:]]
    assert len(samples) == len(set(samples))


def test_a_loss_that_no_record_can_hold_ends_nobodys_training(publish: Callable[..., str], tmp_path: Path) -> None:
    class Diverged(Trainer):
        def train(self) -> None:
            with self.swarm as swarm:
                for x, y in swarm.share_of(dataset(0), batch_size=16):
                    loss = (self.model(x) - y).square().mean()
                    loss.backward()
                    swarm.step(loss * float("nan"))
                    if swarm.finished:
                        break

    peer = Diverged(publish(RUN.format(rounds=2, peers=1)), tmp_path, 0)
    run_rounds([peer])
    assert peer.swarm.round == 2
    assert {event["loss"] for event in peer.named("round.done")} == {None}
    assert not peer.named("network.failed")
