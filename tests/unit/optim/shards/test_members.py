"""Data that the members of a run provide, as its trainer reads them."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from flockstep.dht.run.manifest import Data
from flockstep.optim.shards.index import ShardIndex
from flockstep.optim.shards.opening import open_tokens, tokenizer_of
from flockstep.optim.shards.packed import FromMembers, pinned_data
from flockstep.optim.shards.reader import TokenShards
from flockstep.peer.base.config import PeerConfig
from flockstep.peer.base.digest import digest
from flockstep.peer.base.errors import LocalError, NetworkError, UsageError
from support.packed import packed, train_tokenizer

LENGTH = 32


class Others:
    """The other members, which have every file of a folder but what is hidden."""

    def __init__(self, folder: Path) -> None:
        self.files = {digest(path.read_bytes()): path.read_bytes() for path in folder.iterdir()}
        self.hidden: set[bytes] = set()
        self.brought: list[bytes] = []
        self.awaited = 0
        self.news = threading.Condition()

    def bring(self, hash_: bytes, size: int, path: Path) -> None:
        with self.news:
            if hash_ in self.hidden:
                raise NetworkError("no member that has it is here")
            self.brought.append(hash_)
            self.news.notify_all()
        assert len(self.files[hash_]) == size
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(self.files[hash_])

    def has_brought(self, count: int) -> bool:
        with self.news:
            return self.news.wait_for(lambda: len(self.brought) >= count, timeout=120)


@pytest.fixture
def index(tmp_path: Path) -> ShardIndex:
    """Packed data with a tokenizer in `tmp_path / "p"`."""
    return packed(tmp_path / "p", tokenizer=train_tokenizer(tmp_path / "tokenizer.json"))


def data_of(tmp_path: Path) -> Data:
    return pinned_data(Data(source=f"tokens:{tmp_path}/p", sequence_length=LENGTH), "run.toml", tmp_path / "owner")[0]


def opened(tmp_path: Path, others: Others, awaits: Callable[[], bool] = lambda: False, **config: Any) -> TokenShards:
    members = FromMembers(others.bring, awaits)
    return open_tokens(data_of(tmp_path), PeerConfig(home=tmp_path / "home", **config), members)


def test_what_members_have_is_read_as_from_anywhere(tmp_path: Path, index: ShardIndex) -> None:
    others = Others(tmp_path / "p")
    source = opened(tmp_path, others)
    here = open_tokens(Data(source="x", sequence_length=LENGTH), PeerConfig(home=tmp_path / "b", data=f"{tmp_path}/p"))
    assert here.source == source.source
    for unit in range(source.num_units):
        assert [a.tolist() for a in source.read(0, unit, 0)] == [b.tolist() for b in here.read(0, unit, 0)]
    for _ in range(2):  # The second time from the home folder.
        tokenizer = tokenizer_of(source, tmp_path / "home")
        assert tokenizer.decode(next(source.held_out()).numpy()).startswith("00010 once")
    assert len(others.brought) == len(set(others.brought)) == len(others.files)
    assert not list((tmp_path / "home").rglob("*.part"))


def test_who_trains_waits_for_a_member_that_has_a_file(tmp_path: Path, index: ShardIndex) -> None:
    others = Others(tmp_path / "p")
    missing = [index.hash, index.shards[2].hash]
    others.hidden.update(missing)

    def awaits() -> bool:
        others.awaited += 1
        if others.awaited % 3 == 0:
            others.hidden.discard(missing[others.awaited // 3 - 1])
        return True

    source = opened(tmp_path, others, awaits)
    assert others.awaited == 3
    assert list(source.read(0, 2, 0))
    assert others.awaited == 6


def test_who_leaves_or_is_no_member_is_told_in_one_line(tmp_path: Path, index: ShardIndex) -> None:
    others = Others(tmp_path / "p")
    others.hidden.add(index.hash)
    with pytest.raises(UsageError, match="no member that has it is here"):
        opened(tmp_path, others)
    others.hidden = {index.shards[0].hash}
    with pytest.raises(LocalError, match=r"cannot read 00000\.u16: no member that has it is here") as refused:
        list(opened(tmp_path, others).read(0, 0, 0))
    assert refused.value.remedy
    with pytest.raises(UsageError, match=r"are asked by `flockstep join` alone; name a copy with --data"):
        open_tokens(data_of(tmp_path), PeerConfig(home=tmp_path / "elsewhere"))
    assert open_tokens(data_of(tmp_path), PeerConfig(home=tmp_path / "home")).index == index  # Which is here.


def test_other_bytes_than_the_run_pins_are_not_kept(tmp_path: Path, index: ShardIndex) -> None:
    others = Others(tmp_path / "p")
    source = opened(tmp_path, others)
    shard = index.shards[1]
    others.files[shard.hash] = bytes(shard.num_bytes)
    with pytest.raises(LocalError, match="its hash is not the one that the run pins"):
        list(source.read(0, 1, 0))
    assert not list((tmp_path / "home").rglob("*.shard"))


def test_what_is_not_needed_here_is_fetched_for_others_as_long_as_there_is_room(tmp_path: Path, index: ShardIndex) -> None:
    others = Others(tmp_path / "p")
    source = opened(tmp_path, others)
    source.expect([0])
    assert others.has_brought(len(others.files) - 1)  # All but the tokenizer.
    size = index.shards[0].num_bytes
    tiny = Others(tmp_path / "p")
    members = FromMembers(tiny.bring, lambda: False)
    config = PeerConfig(home=tmp_path / "tiny", data_cache=3.5 * size / 1e9)
    bounded = open_tokens(data_of(tmp_path), config, members)
    bounded.expect([0])
    assert list(bounded.read(0, 0, 0))
    for thread in threading.enumerate():
        if thread.name == "shards":
            thread.join()
    kept = list((tmp_path / "tiny").rglob("*.shard"))
    assert 2 <= len(kept) <= 4
    assert sum(path.stat().st_size for path in kept) <= 3.5 * size
