"""Data that the members of a run provide, as its trainer reads them."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from flockstep.dht.run.manifest import Data
from flockstep.optim.consent import host_of, is_public_data
from flockstep.optim.data.tokenizer import hash_of
from flockstep.optim.shards.index import ShardIndex
from flockstep.optim.shards.opening import keep_tokenizer, open_corpus, tokenizer_of
from flockstep.optim.shards.packed import FromMembers, pinned_data, seed_folder
from flockstep.optim.shards.reader import TokenShards
from flockstep.optim.shards.tokenizer_config import decode_config
from flockstep.peer.base.config import PeerConfig
from flockstep.peer.base.digest import digest
from flockstep.peer.base.errors import LocalError, NetworkError, UsageError
from flockstep.scripts.runs.run import create_run
from support.packed import STORIES, packed, train_tokenizer

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
    return pinned_data(Data(source=f"tokens:swarm:{tmp_path}/p", sequence_length=LENGTH), "run.toml")[0]


def opened(tmp_path: Path, others: Others, awaits: Callable[[], bool] = lambda: False, **config: Any) -> TokenShards:
    members = FromMembers(others.bring, awaits)
    found = open_corpus(data_of(tmp_path), PeerConfig(home=tmp_path / "home", **config), members=members)
    assert isinstance(found, TokenShards)
    return found


def test_a_manifest_names_them_by_the_length_and_the_hash_of_their_index(tmp_path: Path, index: ShardIndex) -> None:
    data = data_of(tmp_path)
    size = (tmp_path / "p" / "index.json").stat().st_size
    assert data.source == f"tokens:swarm:{size}@{index.hash.hex()}"
    assert data.tokenizer == "tokenizer.json"
    assert is_public_data(data.source)
    assert host_of(data.source) == ""
    for place in (f"{size}", f"0@{'0' * 64}", f"12345678@{'0' * 64}", "/etc"):
        source = f"tokens:swarm:{place}"
        assert not is_public_data(source)
        with pytest.raises(UsageError):
            open_corpus(Data(source=source), PeerConfig(home=tmp_path / "home"))
    for wrong in (tmp_path / "none", f"{size}@{'0' * 64}"):
        with pytest.raises(UsageError, match="there are no packed data in"):
            seed_folder(f"tokens:swarm:{wrong}")


def test_what_members_have_is_read_as_from_anywhere(tmp_path: Path, index: ShardIndex) -> None:
    others = Others(tmp_path / "p")
    source = opened(tmp_path, others)
    config = PeerConfig(home=tmp_path / "b", data=f"tokens:{tmp_path}/p")
    here = open_corpus(Data(source="x", sequence_length=LENGTH), config)
    assert isinstance(here, TokenShards)
    assert here.source == source.source
    for unit in range(source.num_units):
        assert [a.tolist() for a in source.read(0, unit, 0)] == [b.tolist() for b in here.read(0, unit, 0)]
    for _ in range(2):  # The second time from the home folder.
        tokenizer = tokenizer_of(source, data_of(tmp_path), PeerConfig(home=tmp_path / "home"))
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


def test_a_tokenizer_alone_is_provided_too(tmp_path: Path, index: ShardIndex) -> None:
    (tmp_path / "corpus.txt").write_text("".join(STORIES))
    content = (tmp_path / "tokenizer.json").read_bytes()
    source, pinned = f"text:{tmp_path}/corpus.txt", hash_of(content, provided=True)
    data = Data(source=source, tokenizer="hf:org/name@x", tokenizer_hash=pinned, sequence_length=LENGTH)
    others, config = Others(tmp_path / "p"), PeerConfig(home=tmp_path / "home", allow_data=source)
    others.hidden.add(digest(content))

    def awaits() -> bool:
        others.awaited += 1
        others.hidden.clear()
        return True

    with pytest.raises(UsageError, match="tokenizer is not at"):
        open_corpus(data, config, members=FromMembers(others.bring, lambda: False))
    for _ in range(2):  # The second time from the home folder.
        found = open_corpus(data, config, members=FromMembers(others.bring, awaits))
        assert found.vocab_size == index.vocab_size
    assert (others.awaited, others.brought) == (1, [digest(content)])
    assert tokenizer_of(found, data, config).digest == digest(content)
    keep_tokenizer(found, data, config, tmp_path / "kept")
    assert (tmp_path / "kept" / "tokenizer.json").read_bytes() == content
    assert decode_config(tmp_path / "kept" / "tokenizer_config.json") == {"eos_token": "<|endoftext|>"}


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
        open_corpus(data_of(tmp_path), PeerConfig(home=tmp_path / "elsewhere"))
    alone = open_corpus(data_of(tmp_path), PeerConfig(home=tmp_path / "home"))  # Its index is here.
    assert isinstance(alone, TokenShards)


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
    bounded = open_corpus(data_of(tmp_path), config, members=members)
    assert isinstance(bounded, TokenShards)
    bounded.expect([0])
    assert list(bounded.read(0, 0, 0))
    for thread in threading.enumerate():
        if thread.name == "shards":
            thread.join()
    kept = list((tmp_path / "tiny").rglob("*.shard"))
    assert 2 <= len(kept) <= 4
    assert sum(path.stat().st_size for path in kept) <= 3.5 * size


def test_a_run_whose_newcomers_could_not_get_them_is_not_created(tmp_path: Path, index: ShardIndex) -> None:
    toml = tmp_path / "run.toml"
    toml.write_text(
        f'name = "x"\n[model]\nsize = "0.2m"\nvocab_size = 300\n[data]\nsource = "tokens:swarm:{tmp_path}/p"\n'
        '[admission]\nkind = "invite"\n'
    )
    with pytest.raises(UsageError, match="they cannot provide them") as refused:
        create_run(toml, [], PeerConfig(home=tmp_path), print)
    assert refused.value.remedy
    assert not list(tmp_path.glob("*.flockstep"))
