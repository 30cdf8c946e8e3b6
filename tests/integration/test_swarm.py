"""`Swarm` for a module of one's own: real processes, real sockets, and what happens when one of them is killed."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch
from flockstep import PeerConfig, Swarm
from flockstep.peer.errors import FlockstepError, NetworkError, UsageError
from flockstep.peer.telemetry import Event
from torch import nn
from torch.utils.data import TensorDataset

RUN = """
name = "regression"
[data]
source = "own"
[inner]
optimizer = "adamw"
warmup_steps = 0
schedule = "constant"
steps = 10
[outer]
rounds = {rounds}
lr = 1.0
momentum = 0.0
[codec]
contribution = "int8"
result = "int8"
[admission]
min_peers = {peers}
[timing]
floor = 20.0
"""
TRUTH = torch.tensor([[1.0, -2.0, 3.0]])


def dataset(seed: int) -> TensorDataset:
    x = torch.randn(256, 3, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x @ TRUTH.T)


class Peer(threading.Thread):
    """One member in a thread of this process; its network is a process of its own."""

    def __init__(self, link: str, home: Path, seed: int, on_event: Callable[[Event], None] | None = None) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.model = nn.Linear(3, 1, bias=False)
        self.events: list[Event] = []
        self.roots: list[str] = []
        self.error: BaseException | None = None
        self._listen = on_event or (lambda event: None)
        inner = torch.optim.AdamW(self.model.parameters(), lr=0.2)
        config = PeerConfig(home=home, host="127.0.0.1", port=0)
        self.swarm = Swarm(link, self.model, inner, config=config, on_event=self._hear)
        self._seed = seed

    def _hear(self, event: Event) -> None:
        self.events.append(event)
        self._listen(event)

    def run(self) -> None:
        try:
            self.train()
        except BaseException as error:  # noqa: BLE001 - carried to the thread that joins this one
            self.error = error

    def train(self) -> None:
        with self.swarm as swarm:
            for x, y in swarm.share_of(dataset(self._seed), batch_size=16):
                loss = (self.model(x) - y).square().mean()
                loss.backward()
                if swarm.step(loss).averaged:
                    self.roots.append(swarm.root)
                if swarm.finished:
                    break

    def named(self, name: str) -> list[Event]:
        return [event for event in self.events if event["event"] == name]


def fly(peers: list[Peer]) -> None:
    for peer in peers:
        peer.start()
    for peer in peers:
        peer.join(timeout=120)
        assert not peer.is_alive()
        if peer.error is not None:
            raise peer.error


def network_of(parent: int) -> Iterator[psutil.Process]:
    for child in psutil.Process(parent).children(recursive=True):
        if "flockstep.peer.bridge" in child.cmdline():
            yield child


def test_two_peers_with_different_beginnings_end_bit_identical(publish: Callable[[str], str], tmp_path: Path) -> None:
    link = publish(RUN.format(rounds=4, peers=2))
    peers = [Peer(link, tmp_path / name, seed) for seed, name in enumerate("ab")]
    assert not torch.equal(peers[0].model.weight, peers[1].model.weight)
    fly(peers)
    assert peers[0].roots == peers[1].roots
    assert len(set(peers[0].roots)) == 4
    assert torch.equal(peers[0].model.weight, peers[1].model.weight)
    assert (peers[0].model.weight - TRUTH).abs().max() < 0.5
    assert not list(network_of(os.getpid()))


def test_a_killed_network_process_is_reported_and_healed(publish: Callable[[str], str], tmp_path: Path) -> None:
    link = publish(RUN.format(rounds=8, peers=1))
    killed: list[int] = []

    def strike(event: Event) -> None:
        if event["event"] == "round.done" and event["round"] == 3 and not killed:
            (victim,) = network_of(os.getpid())
            killed.append(victim.pid)
            victim.kill()

    peer = Peer(link, tmp_path, 0, strike)
    fly([peer])
    assert killed
    assert len(peer.named("network.died")) == 1
    assert len(peer.named("network.restarted")) == 1
    assert [event["round"] for event in peer.named("round.done")] == list(range(1, 9))
    assert peer.swarm.round == 8


def test_killing_the_trainer_leaves_no_process_behind(publish: Callable[[str], str], tmp_path: Path) -> None:
    link = publish(RUN.format(rounds=1000, peers=1).replace('"own"', '"text:{stdlib}"') + '[model]\nsize = "0.2m"\n')
    home = ["--home", str(tmp_path), "--host", "127.0.0.1", "--port", "0", "--threads", "1", "--json"]
    command = [sys.executable, "-m", "flockstep", "join", link, *home]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        for line in trainer.stdout:
            if '"step"' in line:
                break
        children = psutil.Process(trainer.pid).children(recursive=True)
        assert children
        trainer.send_signal(signal.SIGKILL)
        _, left = psutil.wait_procs(children, timeout=2)
    # Where nobody reaps orphans (a container without an init) a process that has ended stays as a zombie.
    assert not [process for process in left if process.status() != psutil.STATUS_ZOMBIE]


def test_what_is_not_finite_is_not_sent(publish: Callable[[str], str], tmp_path: Path) -> None:
    link = publish(RUN.format(rounds=2, peers=1))
    peer = Peer(link, tmp_path, 0)

    def spoil(event: Event) -> None:
        if event["event"] == "phase.end" and len(peer.named("phase.end")) == 1:
            with torch.no_grad():
                peer.model.weight[0, 0] = float("nan")

    peer._listen = spoil
    fly([peer])
    (abstained,) = peer.named("round.abstained")
    assert "weight is not finite" in str(abstained["reason"])
    assert [event["round"] for event in peer.named("round.done")] == [1, 2]
    assert torch.isfinite(peer.model.weight).all()


def test_a_run_that_nobody_knows_is_one_clear_error(door: str, tmp_path: Path) -> None:
    config = PeerConfig(home=tmp_path, host="127.0.0.1", port=0)
    model = nn.Linear(2, 2)
    swarm = Swarm(f"flockstep://{'a' * 52}?via={door}", model, torch.optim.SGD(model.parameters()), config=config)
    with pytest.raises(NetworkError, match=r"know no run a{52}"), swarm:
        pass


def test_a_bootstrap_that_is_not_there_is_named_with_its_cause(tmp_path: Path) -> None:
    config = PeerConfig(home=tmp_path, host="127.0.0.1", port=0)
    model = nn.Linear(2, 2)
    nobody = "12D3KooWK98A5qKRAA9qZccvoJLvcLu68PCFZLNfdd81iQLvHj6W"
    link = f"flockstep://{'a' * 52}?via=/ip4/127.0.0.1/tcp/9/p2p/{nobody}"
    with pytest.raises(FlockstepError, match=r"/ip4/127.0.0.1/tcp/9 .*refused") as caught:
        Swarm(link, model, torch.optim.SGD(model.parameters()), config=config).__enter__()
    assert caught.value.remedy


def test_a_wrong_link_is_a_usage_error(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(UsageError, match=r"does not contain"):
        Swarm(
            "http://example", model, torch.optim.SGD(model.parameters()), config=PeerConfig(home=tmp_path)
        ).__enter__()
