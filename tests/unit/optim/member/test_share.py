"""Shares of datasets: batches by leases, announced to the network, resumed from disk."""

import json
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from flockstep.optim.data.datasets import BLOCK_ITEMS, MAX_SKIPPED, Indexed, Repeated, Units, units_of
from flockstep.optim.data.leases import (
    EPOCHS_AHEAD,
    MAX_DONE,
    MAX_EPOCH,
    MAX_JUMP,
    MAX_LEASES,
    Lease,
    Ranking,
    Share,
    View,
    look,
    open_share,
)
from flockstep.optim.member.border import NO_PULSE
from flockstep.optim.member.client import PeerClient
from flockstep.optim.member.share import Shares, read_share
from flockstep.peer.base.errors import LocalError, UsageError
from flockstep.peer.log.telemetry import Event, Telemetry
from flockstep.peer.wire.schema import encode
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

SEED = 7


class Connection:
    """The network as a peer's shares see it: the peers that it joins see each other's leases at once."""

    def __init__(self, peer_id: str, all_peers: dict[str, Share]) -> None:
        self.peer_id = peer_id
        self.pulse = NO_PULSE
        self.num_published = 0
        self._all = all_peers

    def publish_first(self, share: Share, ranking: Ranking) -> View:
        return self._take(share, ranking)

    def publish_leases(self, share: Share, ranking: Ranking, *, urgent: bool) -> None:
        self.num_published += 1
        self._take(share, ranking)

    def receive(self) -> None:
        """Bring the view up to date, as the network process does several times a second."""
        if self._all[self.peer_id].source:
            self.pulse = replace(NO_PULSE, leases=self._view(self._all[self.peer_id]))

    def _take(self, share: Share, ranking: Ranking) -> View:
        self._all[self.peer_id] = share
        self._ranking = ranking
        return self._view(share)

    def _view(self, mine: Share) -> View:
        others = [(peer, share, True) for peer, share in self._all.items() if peer != self.peer_id]
        return look(others, self.peer_id, mine, self._ranking)


class Stop(threading.Event):
    """A stop that is asked for after so many waits, which take no time."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[float] = []
        self.after = 10**9

    def wait(self, timeout: float | None = None) -> bool:
        self.waits.append(timeout or 0.0)
        return len(self.waits) >= self.after


class Peer:
    """One peer's shares, and its events."""

    def __init__(self, name: str, home: Path, all_peers: dict[str, Share]) -> None:
        self.events: list[Event] = []
        telemetry = Telemetry()
        telemetry.subscribe(self.events.append)
        all_peers.setdefault(name, Share())
        self.connection = Connection(name, all_peers)
        self.stop = Stop()
        self.shares = Shares(cast(PeerClient, self.connection), telemetry, home, seed=SEED, stop=self.stop)

    def batches(self, dataset: Any, *, batch_size: int = 4, workers: int = 0) -> Iterator[Any]:
        return self.shares.batches(dataset, batch_size=batch_size, workers=workers)

    def named(self, name: str) -> list[Event]:
        return [event for event in self.events if event["event"] == name]


class Clock:
    """Seconds that pass only when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("flockstep.optim.member.share.time", clock)
    return clock


class Numbers(IterableDataset[int]):
    """The numbers below `count`, one after the other."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.count))


def flat(batches: Iterator[Any], count: int) -> list[int]:
    return [int(item) for batch in islice(batches, count) for item in batch]


def test_alone_an_epoch_has_every_sample_once_and_the_next_another_order(tmp_path: Path, clock: Clock) -> None:
    peer = Peer("a", tmp_path, {})
    batches = peer.batches(list(range(100)))
    drawn: list[int] = []
    for clock.now in range(50):
        drawn += flat(batches, 1)
    assert sorted(drawn[:100]) == sorted(drawn[100:]) == list(range(100))
    assert drawn[:100] != drawn[100:]
    assert [event["epoch"] for event in peer.named("data.epoch")] == [1, 2]
    (shared,) = peer.named("data.shared")
    assert (shared["units"], shared["peers"]) == (32, 1)


def test_what_is_leased_next_is_expected_while_another_unit_is_read(tmp_path: Path) -> None:
    class Ahead(Units):
        name, source, num_units = "ahead", bytes(16), 40

        def __init__(self) -> None:
            self.expected: list[list[int]] = []
            self.read_units: list[int] = []

        def read(self, epoch: int, unit: int, done: int) -> Iterator[int]:
            self.read_units.append(unit)
            return iter(range(done, 16))

        def expect(self, units: Sequence[int]) -> None:
            self.expected.append(list(units))

    units = Ahead()
    batches = Peer("a", tmp_path, {}).shares.batches(units, batch_size=4, workers=0)
    while len(units.read_units) < 3:
        next(batches)
    assert all(units.expected)
    begun, following = units.read_units[-2:]
    assert any(following in expected for expected in units.expected)
    assert begun not in units.expected[-1]


def test_two_peers_split_the_data(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[tuple[int, int]] = []

    def read(self: Indexed, epoch: int, unit: int, done: int) -> Iterator[int]:
        for item in self._cut.items(epoch, unit)[done:].tolist():
            trained.append((epoch, item))
            yield item

    monkeypatch.setattr(Indexed, "read", read)
    everybody = {"a": Share(), "b": Share()}
    peers = [Peer(name, tmp_path / name, everybody) for name in everybody]
    streams = [peer.batches(list(range(640))) for peer in peers]
    for _ in range(200):
        for peer, stream in zip(peers, streams, strict=True):
            clock.now += 0.2
            peer.connection.receive()
            next(stream)
    assert all(share.epoch > 0 for share in everybody.values())
    assert {item for epoch, item in trained if epoch == 0} == set(range(640))
    assert len(trained) == len(set(trained))


def test_a_peer_goes_on_where_it_was_and_hands_back_what_it_had(tmp_path: Path) -> None:
    everybody: dict[str, Share] = {}
    first = Peer("a", tmp_path, everybody)
    before = flat(first.batches(list(range(400))), 33)
    first.shares.hand_back()
    (lease,) = [lease for lease in everybody["a"].leases if lease.done is not None]
    assert 0 < (lease.done or 0) < 13
    kept = json.loads((tmp_path / "data.json").read_text())
    assert kept["units"] == [[lease.epoch, lease.unit, lease.done]]
    again = Peer("a", tmp_path, {})
    after = flat(again.batches(list(range(400))), 67)
    assert sorted(before + after) == list(range(400))
    assert again.named("unit.begun")[0]["done"] == lease.done


@pytest.mark.parametrize(
    "content",
    [
        *("", "[]", "{", '{"source": 1}', "[" * 10_000, "\0"),
        '{"source":"","epoch":-1,"finished":[],"units":[]}',
        '{"source":"","epoch":0,"finished":[],"units":[[0,5000,1]]}',
        '{"source":"","epoch":0,"finished":["x"],"units":[]}',
        '{"source":"","epoch":0,"finished":["00","00","00","00","00"],"units":[]}',
    ],
)
def test_a_damaged_file_is_said_and_not_used(tmp_path: Path, content: str) -> None:
    (tmp_path / "data.json").write_text(content)
    with pytest.raises(UsageError, match="damaged"):
        read_share(tmp_path / "data.json")
    peer = Peer("a", tmp_path, {})
    assert len(flat(peer.batches(list(range(100))), 25)) == 100
    assert "damaged" in str(peer.named("data.forgotten")[0]["reason"])


def test_a_liars_record_stops_no_training_and_nothing_of_it_stays_on_the_disk(tmp_path: Path, clock: Clock) -> None:
    all_done, far = (b"\xff" * 128,) * EPOCHS_AHEAD, tuple(Lease(MAX_EPOCH, unit, MAX_DONE) for unit in range(MAX_LEASES))
    everybody: dict[str, Share] = {}
    peer = Peer("a", tmp_path, everybody)
    batches = peer.batches(list(range(400)))
    next(batches)
    for turn in range(100):
        source = everybody["a"].source if turn % 2 else b""
        everybody["liar"] = Share(source, MAX_EPOCH - turn % 5, all_done[: turn % 5], far[: turn % 9])
        clock.now += 1.0
        peer.connection.receive()
        next(batches)
    peer.shares.hand_back()
    assert open_share(encode(everybody["a"])) == everybody["a"]
    kept = read_share(tmp_path / "data.json")
    assert kept is not None
    assert kept.epoch <= MAX_JUMP + 101 * 2 * EPOCHS_AHEAD
    again = Peer("a", tmp_path, everybody)
    assert len(flat(again.batches(list(range(400))), 25)) == 100


def test_a_disk_that_fails_stops_nobody(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("a file where the folder should be")
    peer = Peer("a", tmp_path / "home", {})
    assert sorted(flat(peer.batches(list(range(100))), 25)) == list(range(100))
    peer.shares.hand_back()
    assert peer.named("data.not_kept")


def test_another_dataset_is_trained_in_an_order_of_ones_own_and_said(tmp_path: Path) -> None:
    everybody = {"b": Share()}
    peer = Peer("a", tmp_path, everybody)
    flat(peer.batches(list(range(100))), 3)
    published = peer.connection.num_published
    assert sorted(flat(peer.batches(list(range(200))), 50)) == list(range(200))
    assert peer.connection.num_published == published
    assert len(peer.named("data.unshared")) == 1


class Locked(list[int]):
    """Samples beside a lock, as of many an open file."""

    def __init__(self) -> None:
        super().__init__(range(9))
        self.lock = threading.Lock()


def test_workers_load_the_same_batches(tmp_path: Path) -> None:
    dataset = TensorDataset(torch.arange(64))
    plain = flat((batch for (batch,) in Peer("a", tmp_path / "1", {}).batches(dataset)), 16)
    peer = Peer("a", tmp_path / "2", {})
    batches = peer.batches(dataset, workers=1)
    loaded = flat((batch for (batch,) in batches), 16)
    assert loaded == plain
    assert peer.connection._all["a"].epoch == 0  # What a worker has loaded but nobody has trained does not count.


@pytest.mark.filterwarnings("ignore:Got pickle error:UserWarning")
def test_a_dataset_that_workers_cannot_be_given_is_one_line(tmp_path: Path) -> None:
    for number, (data, collate) in enumerate(((Locked(), None), (list(range(9)), lambda samples: samples))):
        shares = Peer(str(number), tmp_path, {}).shares
        with pytest.raises(UsageError, match=r"cannot be sent to its 1 workers: [^\n]+$") as refused:
            next(shares.batches(data, batch_size=4, workers=1, collate_fn=collate))
        assert "leave workers at 0" in refused.value.remedy


def test_an_iterable_is_repeated_and_cut_into_blocks(tmp_path: Path, clock: Clock) -> None:
    everybody = {"a": Share(), "b": Share()}
    peers = [Peer(name, tmp_path / name, everybody) for name in everybody]
    streams = [peer.batches(Numbers(4 * BLOCK_ITEMS), batch_size=64) for peer in peers]
    drawn: list[int] = []
    for _ in range(32):  # As many items as four passes have.
        for peer, stream in zip(peers, streams, strict=True):
            clock.now += 2.0
            peer.connection.receive()
            drawn += next(stream).tolist()
    counts = torch.bincount(torch.tensor(drawn))
    assert counts.sum() == 16 * BLOCK_ITEMS
    assert counts.min() > 0
    assert counts.max() - counts.min() <= 2  # The peers are in neighbouring blocks when this ends.


def test_a_repetition_skips_no_more_than_it_may_however_far_a_block_is() -> None:
    read = 0

    class Endless(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            nonlocal read
            while True:
                read += 1
                yield read

    units = Repeated(Endless())
    for turn in range(1, 4):
        assert len(list(units.read(2**31, turn, 0))) == BLOCK_ITEMS
        assert read <= turn * (MAX_SKIPPED + BLOCK_ITEMS)
    near = Repeated(Endless())
    read = 0
    assert list(near.read(0, 255, 0)) == list(range(MAX_SKIPPED - BLOCK_ITEMS + 1, MAX_SKIPPED + 1))
    assert next(near.read(1, 255, 0)) == 2 * MAX_SKIPPED - BLOCK_ITEMS + 1  # Reading has made room for as many.


def test_a_repetition_reads_any_block_from_any_place() -> None:
    units = Repeated(Numbers(1000))

    def block(unit: int) -> list[int]:
        return [(unit * BLOCK_ITEMS + i) % 1000 for i in range(BLOCK_ITEMS)]

    for unit in (0, 1, 7, 3, 4, 200, 0):
        assert list(units.read(0, unit, 0)) == block(unit)
    assert list(units.read(1, 2, 250)) == block(256 + 2)[250:]


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ([], "empty"),
        (iter([1, 2]), "only once"),
        (3, "neither be indexed nor iterated"),
        ((n for n in [1]), "only once"),
        ("data.jsonl", "a text is no dataset"),
        ({"train": [1, 2], "test": [3]}, r"dict\[0\] is no sample: KeyError: 0"),  # As a DatasetDict, or a table by columns.
    ],
)
def test_what_cannot_be_shared_is_a_usage_error_with_a_remedy(dataset: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        units_of(dataset, SEED)
    assert caught.value.remedy


def test_an_iterable_without_items_or_with_workers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no items"):
        next(Peer("a", tmp_path, {}).batches(Numbers(0)))
    with pytest.raises(UsageError, match="needs a dataset that can be indexed"):
        next(Peer("b", tmp_path, {}).batches(Numbers(10), workers=2))


def ragged(count: int) -> list[torch.Tensor]:
    """Samples of different lengths: sample i holds i, i % 5 + 1 times."""
    return [torch.full((index % 5 + 1,), index) for index in range(count)]


@pytest.mark.parametrize("workers", [0, 1])
def test_samples_of_different_lengths_are_batched_by_the_collate_fn(tmp_path: Path, workers: int) -> None:
    peer = Peer("a", tmp_path, {})
    batches = peer.shares.batches(ragged(40), batch_size=4, workers=workers, collate_fn=pad_sequence)
    padded = next(batches)
    assert padded.shape[1] == 4
    with pytest.raises(UsageError, match="do not make a batch") as refused:
        for _ in zip(range(9), Peer("b", tmp_path, {}).batches(ragged(40), workers=workers), strict=False):
            pass
    assert workers or "collate_fn=" in refused.value.remedy


def test_a_loader_in_the_place_of_its_dataset_is_one_line(tmp_path: Path) -> None:
    loader = SimpleNamespace(dataset=[1], collate_fn=None)
    for given in (DataLoader(TensorDataset(torch.arange(9)), batch_size=3), loader):
        with pytest.raises(UsageError, match="makes the batches itself") as refused:
            next(Peer("a", tmp_path, {}).batches(given))
        assert "loader.dataset" in refused.value.remedy


class Failing(Units):
    """Units of ten items each, of which reading fails so often behind the third item of a unit."""

    name, source, num_units = "failing", bytes(16), 8

    def __init__(self, failures: int, first: int = 3) -> None:
        self.failures, self.first = failures, first

    def read(self, epoch: int, unit: int, done: int) -> Iterator[int]:
        for item in range(done, 10):
            if item >= self.first and self.failures:
                self.failures -= 1
                raise LocalError("cannot read failing: the disk is away")
            yield 10 * unit + item


def test_data_that_cannot_be_read_are_waited_for_longer_each_time_and_nothing_is_lost(tmp_path: Path) -> None:
    peer = Peer("a", tmp_path, {})
    drawn = flat(peer.batches(Failing(9)), 20)
    assert sorted(drawn) == list(range(80))
    assert peer.stop.waits == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0]
    assert [event["reason"] for event in peer.named("data.awaited")] == ["cannot read failing: the disk is away"] * 9


def test_a_stop_ends_the_wait_for_data_and_the_batches(tmp_path: Path) -> None:
    peer = Peer("a", tmp_path, {})
    peer.stop.after = 3
    assert len(list(peer.batches(Failing(10**9, first=5)))) == 1


def test_data_that_cannot_be_read_from_the_start_is_the_error_that_it_is(tmp_path: Path) -> None:
    with pytest.raises(LocalError, match="the disk is away"):
        next(Peer("a", tmp_path, {}).batches(Failing(1, first=0)))


def test_a_repetition_whose_iterator_raises_begins_anew_and_knows_no_end() -> None:
    failures = [True]

    class Breaks(Numbers):
        def __iter__(self) -> Iterator[int]:
            for item in super().__iter__():
                if item == 300 and failures:
                    failures.clear()
                    raise LocalError("gone")
                yield item

    units = Repeated(Breaks(1000))
    assert list(units.read(0, 0, 0)) == list(range(256))
    with pytest.raises(LocalError):
        list(units.read(0, 1, 0))
    assert list(units.read(0, 1, 0)) == list(range(256, 512))
    assert list(units.read(0, 4, 0))[:2] == [24, 25]
