"""Data leases in real processes over real sockets, and a peer that resumes after a restart."""

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count
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
from flockstep.optim.data.datasets import Units, source_of, units_of
from flockstep.optim.data.leases import EPOCHS_AHEAD, MAX_DONE, MAX_EPOCH, Lease, Share
from flockstep.optim.member.share import read_share
from flockstep.peer import wire
from flockstep.peer.base.config import PeerConfig
from flockstep.peer.log.telemetry import Telemetry
from flockstep.peer.node.node import Node
from flockstep.peer.wire.schema import encode
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


def test_a_peer_that_is_started_again_goes_on_with_its_unit(
    publish: Callable[..., str], tmp_path: Path, endless: Endless
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
    samples = [(epoch, unit, number) for _, epoch, unit, number in endless.trained]
    assert len(samples) - len(set(samples)) <= 1  # Each life has read one sample ahead.


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
