"""Data leases in real processes over real sockets, and a peer that resumes after a restart."""

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import trio
from flockstep.dht.directory.interface import Directory
from flockstep.dht.members.body import MEMBER_KIND, MemberBody, MemberState
from flockstep.dht.members.table import LIFETIME
from flockstep.dht.records import Record
from flockstep.dht.rendezvous import visit
from flockstep.dht.run.link import JoinLink
from flockstep.optim.data.datasets import Indexed, units_of
from flockstep.optim.data.leases import EPOCHS_AHEAD, MAX_DONE, MAX_EPOCH, Lease, Share
from flockstep.optim.member.share import read_share
from flockstep.peer import wire
from flockstep.peer.config import PeerConfig
from flockstep.peer.node.node import Node
from flockstep.peer.telemetry import Telemetry
from flockstep.peer.wire.schema import encode
from support.trainers import RUN, TRUTH, Trainer, dataset, run_rounds
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


def test_three_peers_train_no_sample_twice(publish: Callable[..., str], tmp_path: Path, trained: Trained) -> None:
    link = publish(RUN.format(rounds=4, peers=3), "a")
    peers = [Trainer(link, tmp_path / name, seed) for seed, name in enumerate("abc")]
    run_rounds(peers)
    everything = [place for places in trained.values() for place in places]
    assert len(trained) == 3
    assert len(everything) > 3 * 4 * 10 * 16
    assert len(everything) == len(set(everything))
    assert all(peer.swarm._first._network.pulse.leases is not None for peer in peers)


def test_a_peer_that_is_started_again_goes_on_with_its_unit(
    publish: Callable[..., str], tmp_path: Path, trained: Trained
) -> None:
    link = publish(RUN.format(rounds=1000, peers=1), "a")
    kept_done: list[object] = []
    for _ in range(2):
        peer = Trainer(link, tmp_path / "a", 0)
        peer.start()
        peer.heard("phase.end")
        peer.stop.set()
        peer.join(timeout=120)
        assert peer.error is None
        assert [event["done"] for event in peer.named("unit.begun")] == kept_done
        (kept,) = (tmp_path / "a" / "runs").glob("*/data.json")
        kept_done = [done for *_, done in json.loads(kept.read_text())["units"]]
        assert len(kept_done) == 1
    everything = [place for places in trained.values() for place in places]
    assert len(everything) - len(set(everything)) <= 1  # Each life has read one sample ahead.


def test_a_strangers_member_record_ends_nobodys_training(publish: Callable[..., str], tmp_path: Path) -> None:
    link = publish(RUN.format(rounds=1000, peers=1), "a")
    all_done = (b"\xff" * 128,) * EPOCHS_AHEAD

    async def tell(node: Node, directory: Directory) -> None:
        """Send the member two records: of an epoch that its field has no room for, and of the last one."""
        (peer,) = await directory.find(peer_run)
        node.learn(peer, directory.addresses(peer))
        source = units_of(dataset(0), 0).source
        far = encode(Share(source, MAX_EPOCH, all_done, (Lease(MAX_EPOCH, 1, MAX_DONE),)))
        beyond = far.replace(MAX_EPOCH.to_bytes(4), (MAX_EPOCH + 1).to_bytes(4), 1)
        for sequence, share in enumerate((beyond, far), 1):
            body = encode(MemberBody(state=MemberState.TRAINING, share=share))
            record = Record.sign(
                node.identity, run=peer_run, kind=MEMBER_KIND, sequence=sequence, lifetime=LIFETIME, body=body
            )
            await node.ask(peer, wire.MembersAsk(peer_run, b""), timeout=120.0)
            node.send(peer, wire.Members((record.encode(),)))
            while not ignored.is_set():  # noqa: ASYNC110  A thread's event.
                await trio.sleep(0.1)
        while not peer_told.is_set():  # noqa: ASYNC110  A thread's event, and this one must stay connected until then.
            await trio.sleep(0.1)

    for _ in range(2):  # The second time with what the first one has left on the disk.
        peer_told, ignored = threading.Event(), threading.Event()
        peer = Trainer(link, tmp_path / "a", 0)
        peer.start()
        peer.heard("round.done")
        peer_run = peer.swarm.run_id
        config = PeerConfig(home=tmp_path / "stranger", host="127.0.0.1", port=0)
        stranger = threading.Thread(target=visit, args=(JoinLink.parse(link), config, Telemetry(), tell))
        stranger.start()
        peer.heard("share.ignored")
        epochs = len(peer.events)
        ignored.set()
        peer.heard("data.epoch", since=epochs)
        for _ in range(3):
            peer.heard("round.done", since=len(peer.events))
        peer_told.set()
        stranger.join(timeout=120)
        peer.stop.set()
        peer.join(timeout=120)
        assert peer.error is None
    share = read_share(tmp_path / "a" / "runs" / peer_run / "data.json")
    assert share is not None
    assert share.epoch > 0


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
