"""Packed data as training sequences: from a folder, a web server and the hub, whatever happens on the way."""

import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from flockstep.dht.run.manifest import Data
from flockstep.optim.shards import cache as caching
from flockstep.optim.shards import places
from flockstep.optim.shards.cache import Shards
from flockstep.optim.shards.index import INDEX, MAX_INDEX_BYTES, ShardIndex, read_index
from flockstep.optim.shards.opening import open_tokens, tokenizer_of
from flockstep.optim.shards.packed import Pin, pinned_data, seed_file
from flockstep.optim.shards.reader import TokenShards, heldout_batches
from flockstep.optim.shards.web import NotThere, Web
from flockstep.peer.base.config import PeerConfig
from flockstep.peer.base.disk import write_whole
from flockstep.peer.base.errors import LocalError, UsageError
from flockstep.peer.base.home_lock import home_lock
from flockstep.peer.base.troubles import NEEDS_PROGRAM
from support.hub import COMMIT, REPOSITORY, StandIn, stand_in
from support.packed import STORIES, packed, train_tokenizer
from support.web import WebStandIn, web_stand_in

LENGTH = 32
HASH = "0" * 64


@pytest.fixture
def index(tmp_path: Path) -> ShardIndex:
    """Packed bytes in `tmp_path / "p"`."""
    return packed(tmp_path / "p")


@pytest.fixture
def web(tmp_path: Path, index: ShardIndex, monkeypatch: pytest.MonkeyPatch) -> Iterator[WebStandIn]:
    """A web server that has them, and readers who ask again at once."""
    monkeypatch.setattr("flockstep.optim.shards.places.time.sleep", lambda seconds: None)
    with web_stand_in(WebStandIn(tmp_path / "p")) as web:
        yield web


def opened(where: Path | WebStandIn, home: Path, data_cache: float = 4.0) -> TokenShards:
    """The data of a folder of this peer's own, or of a server of this network, which no manifest may name."""
    if isinstance(where, Path):
        return open_tokens(Data(source="own", sequence_length=LENGTH), PeerConfig(home=home, data=str(where)))
    place = Web(where.url, public=False)
    index = read_index(places.patiently(lambda: place.whole(INDEX, MAX_INDEX_BYTES)), place.name)
    shards = Shards(place, index.dtype, home, int(data_cache * 1e9))
    return TokenShards(index, shards, place, name=where.url, sequence_length=LENGTH)


def whole(source: TokenShards, epoch: int = 0) -> list[list[int]]:
    return [item.tolist() for unit in range(source.num_units) for item in source.read(epoch, unit, 0)]


def test_an_epoch_has_every_sequence_once_and_another_order(tmp_path: Path, index: ShardIndex) -> None:
    source = opened(tmp_path / "p", tmp_path / "home")
    first, second = whole(source), whole(source, 1)
    assert sorted(first) == sorted(second)
    assert first != second
    assert len(first) == sum((shard.num_tokens - 1) // LENGTH for shard in index.shards)
    assert {len(sequence) for sequence in first} == {LENGTH + 1}
    assert source.num_units == len(index.shards)
    text = b"|".join(bytes(sequence[:-1]) for sequence in first)
    assert b"00000 once" in text
    assert b"00010 once" not in text
    held = torch.cat(list(heldout_batches(source, batch_size=4, num_batches=3)))
    assert bytes(held[0].tolist()).startswith(b"00010 once")


def test_a_unit_is_resumed_where_it_was(tmp_path: Path, index: ShardIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flockstep.optim.shards.reader.MAX_UNITS", 8)
    source = opened(tmp_path / "p", tmp_path / "home")
    assert source.num_units == 8 < len(index.shards)
    items = list(source.read(3, 1, 0))
    for done in (1, len(items) // 2, len(items) - 1, len(items), len(items) + 5):
        assert [item.tolist() for item in source.read(3, 1, done)] == [item.tolist() for item in items[done:]]


def test_the_same_data_are_known_by_their_index_wherever_they_are(tmp_path: Path, web: WebStandIn, index: ShardIndex) -> None:
    here, there = opened(tmp_path / "p", tmp_path / "a"), opened(web, tmp_path / "b")
    assert here.source == there.source
    assert whole(here) == whole(there)
    other = packed(tmp_path / "q", STORIES[1:])
    assert other.hash != index.hash
    assert opened(tmp_path / "q", tmp_path / "a").source != here.source


def test_only_the_shards_of_a_unit_are_fetched_and_each_once(tmp_path: Path, web: WebStandIn, index: ShardIndex) -> None:
    source = opened(web, tmp_path / "home")
    for _ in range(2):
        assert list(source.read(0, 3, 0))
    assert web.names == ["index.json", "00003.u8"]
    again = opened(web, tmp_path / "home")
    assert list(again.read(0, 3, 0))


def test_what_comes_next_is_fetched_while_another_unit_is_read(tmp_path: Path, web: WebStandIn, index: ShardIndex) -> None:
    source = opened(web, tmp_path / "home")
    source.expect([4, 5])
    assert web.was_asked("00004.u8")
    assert web.was_asked("00005.u8")
    assert list(source.read(0, 5, 0))
    source.expect([4, 5])
    assert sorted(web.names[1:]) == ["00004.u8", "00005.u8"]


@pytest.mark.parametrize("ranges", [True, False])
def test_a_shard_that_breaks_off_is_resumed(tmp_path: Path, web: WebStandIn, index: ShardIndex, ranges: bool) -> None:
    web.cuts, web.ranges = 2, ranges
    assert list(opened(web, tmp_path / "home").read(0, 1, 0))
    half = index.shards[1].num_bytes // 2
    assert [asked for name, asked in web.asked if name != "index.json"] == [
        None, f"bytes={half}-", f"bytes={half + half // 2 if ranges else half}-",
    ]  # fmt: skip


def test_a_later_process_goes_on_with_the_part_of_a_former_one(tmp_path: Path, web: WebStandIn, index: ShardIndex) -> None:
    shard, home = index.shards[2], tmp_path / "home"
    part = home / "cache" / "shards" / f"{shard.hash.hex()}.part"
    part.parent.mkdir(parents=True)
    part.write_bytes((tmp_path / "p" / shard.name).read_bytes()[:100])
    assert list(opened(web, home).read(0, 2, 0))
    assert web.asked[-1] == (shard.name, "bytes=100-")
    part.write_bytes(bytes(shard.num_bytes + 10))  # Of no use: it is taken for another one and fetched anew.
    part.with_suffix(".shard").unlink()
    with pytest.raises(LocalError, match="its hash is not the one that the run pins"):
        list(opened(web, home).read(0, 2, 0))
    assert not part.exists()


def test_a_server_that_is_busy_for_a_moment_ends_nothing(tmp_path: Path, web: WebStandIn, index: ShardIndex) -> None:
    web.breaks = places.TRIES - 1
    source = opened(web, tmp_path / "home")
    web.breaks = places.TRIES - 1
    assert list(source.read(0, 0, 0))
    web.breaks = places.TRIES
    with pytest.raises(LocalError, match="503") as refused:
        list(source.read(0, 1, 0))
    assert refused.value.remedy
    assert list(source.read(0, 1, 0))  # The next time it is asked anew.


def test_a_body_that_does_not_end_is_read_to_its_length(tmp_path: Path, web: WebStandIn, index: ShardIndex) -> None:
    source = opened(web, tmp_path / "home")
    web.endless = True
    assert list(source.read(0, 0, 0))
    with pytest.raises(UsageError, match="has no index"):
        opened(web, tmp_path / "home")


def test_a_false_shard_is_one_line_and_leaves_nothing(tmp_path: Path, web: WebStandIn, index: ShardIndex) -> None:
    source = opened(web, tmp_path / "home")
    path = tmp_path / "p" / "00000.u8"
    path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(LocalError, match=r"00000\.u8 of http.*its hash is not the one that the run pins") as refused:
        list(source.read(0, 0, 0))
    assert refused.value.remedy
    assert web.names.count("00000.u8") == 1
    assert [path.name for path in (tmp_path / "home" / "cache" / "shards").iterdir()] == ["lock"]
    with pytest.raises(LocalError, match=r"00000\.u8 is not what its index says"):
        list(opened(tmp_path / "p", tmp_path / "home").read(0, 0, 0))


def test_a_false_index_a_redirect_and_a_file_that_is_not_there_are_one_line(
    tmp_path: Path, web: WebStandIn, index: ShardIndex
) -> None:
    config = PeerConfig(home=tmp_path / "home")
    write_whole(seed_file(config.home, bytes(32)), f"{tmp_path}/p".encode())
    for data, reason in (
        (Data(source=f"tokens:swarm:9@{HASH}"), f"{tmp_path}/p holds other data than the run pins"),
        (Data(source=f"tokens:swarm:9@{HASH[1:]}1"), "are asked by `flockstep join` alone"),
    ):
        with pytest.raises(UsageError, match=reason) as refused:
            open_tokens(data, config)
        assert refused.value.remedy
    with pytest.raises(UsageError, match=f"cannot read packed data of {tmp_path}/none: .*No such file") as refused:
        opened(tmp_path / "none", tmp_path / "home")
    assert "data pack" in str(refused.value.remedy)
    web.redirect = "http://127.0.0.1/router/reboot"
    with pytest.raises(NotThere, match=r"is redirected to http://127\.0\.0\.1/router/reboot, where none of its files may"):
        opened(web, tmp_path / "home")
    assert len(web.asked) == 1


def test_a_cache_is_bounded_and_the_longest_unused_goes_first(tmp_path: Path, web: WebStandIn, index: ShardIndex) -> None:
    size = index.shards[0].num_bytes
    source = opened(web, tmp_path / "home", data_cache=3.5 * size / 1e9)
    folder = tmp_path / "home" / "cache" / "shards"
    folder.mkdir(parents=True)
    (folder / "x.shard").symlink_to(folder / "gone")  # As a file that another thread has just renamed.
    for number in (0, 1, 2):
        assert list(source.read(0, number, 0))
        os.utime(folder / f"{index.shards[number].hash.hex()}.shard", (number + 10, number + 10))
    assert list(source.read(0, 0, 0))  # Now shard 1 is the one whose use is longest ago.
    assert list(source.read(0, 3, 0))
    kept = {path.stem for path in folder.glob("*.shard") if path.is_file()}
    assert kept == {index.shards[number].hash.hex() for number in (0, 2, 3)}
    tiny = opened(web, tmp_path / "tiny", data_cache=0.0)
    tiny.expect([1, 2, 3])
    for number in (0, 1, 2):
        assert list(tiny.read(0, number, 0))
        assert len(list((tmp_path / "tiny").rglob("*.shard"))) == 1


def test_what_is_read_next_stays_however_long_ago_it_was_used(tmp_path: Path, web: WebStandIn, index: ShardIndex) -> None:
    source = opened(web, tmp_path / "home", data_cache=3.5 * index.shards[0].num_bytes / 1e9)
    folder = tmp_path / "home" / "cache" / "shards"
    for number in (0, 1, 2):
        assert list(source.read(0, number, 0))
        os.utime(folder / f"{index.shards[number].hash.hex()}.shard", (number + 10, number + 10))
    source.expect([0, 3])
    assert list(source.read(0, 3, 0))
    assert {path.stem for path in folder.glob("*.shard")} == {index.shards[number].hash.hex() for number in (0, 2, 3)}


def test_a_full_disk_is_one_line(tmp_path: Path, web: WebStandIn, index: ShardIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caching, "DISK_RESERVE", 1 << 60)
    with pytest.raises(LocalError, match=r"cannot keep shards in .*MiB would be left") as refused:
        list(opened(web, tmp_path / "home").read(0, 0, 0))
    assert refused.value.remedy
    (tmp_path / "file").touch()
    with pytest.raises(LocalError, match="cannot write in"):
        list(opened(web, tmp_path / "file").read(0, 0, 0))


def test_a_damaged_file_of_the_cache_is_fetched_once_more(tmp_path: Path, web: WebStandIn, index: ShardIndex) -> None:
    expected = whole(opened(tmp_path / "p", tmp_path / "a"))
    assert whole(opened(web, tmp_path / "home")) == expected
    for path in (tmp_path / "home" / "cache" / "shards").glob("*.shard"):
        path.write_bytes(path.read_bytes()[:-2] + b"\1\1")
    assert whole(opened(web, tmp_path / "home")) == expected


def test_a_second_process_of_a_home_folder_has_a_cache_of_its_own(tmp_path: Path, web: WebStandIn, index: ShardIndex) -> None:
    folder = tmp_path / "home" / "cache" / "shards"
    with home_lock(folder, pid=os.getpid()):
        source = opened(web, tmp_path / "home")
        assert list(source.read(0, 0, 0))
        assert not list(folder.glob("*.shard"))
        assert len(list((tmp_path / "home").rglob("*.shard"))) == 1
        del source
    assert not list((tmp_path / "home").rglob("*.shard"))


def test_a_reader_that_waits_is_told_of_a_failure_in_the_fetching_thread(
    tmp_path: Path, web: WebStandIn, index: ShardIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise ZeroDivisionError("a bug")

    source = opened(web, tmp_path / "home")
    monkeypatch.setattr(caching.Shards, "_go_on", fail)
    with pytest.raises(LocalError, match="ZeroDivisionError: a bug"):
        list(source.read(0, 0, 0))
    assert all(thread.name != "shards" for thread in threading.enumerate() if not thread.daemon)


@pytest.fixture
def hub(tmp_path: Path, index: ShardIndex, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """A hub that has them, in a folder of a dataset."""
    with stand_in(StandIn({f"sample/{path.name}": path.read_bytes() for path in (tmp_path / "p").iterdir()})) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        yield hub


def test_shards_of_the_hub_are_read_at_the_commit(tmp_path: Path, index: ShardIndex, hub: StandIn) -> None:
    name = f"tokens:hf://datasets/{REPOSITORY}@{COMMIT}/sample"
    data, found = pinned_data(Data(source=name, sequence_length=LENGTH), "run.toml", tmp_path / "home")
    assert (data.source, found) == (f"{name}@{index.hash.hex()}", index)
    source = open_tokens(data, PeerConfig(home=tmp_path / "home"))
    folder = f"/datasets/{REPOSITORY}/resolve/{COMMIT}/sample"
    hub.redirects[f"{folder}/00001.u8"] = "http://127.0.0.1:9/x"
    with pytest.raises(LocalError, match=r"is redirected to .*, where none of its files may be"):
        list(source.read(0, 1, 0))
    hub.redirects[f"{folder}/00001.u8"] = f"{folder}/elsewhere"
    hub.files["sample/elsewhere"] = hub.files["sample/00001.u8"]
    assert list(source.read(0, 1, 0))
    assert {token for _, token in hub.asked} == {None}
    assert {*hub.paths} == {f"{folder}/{file}" for file in ("index.json", "00001.u8", "elsewhere")}
    hub.files.pop("sample/00002.u8")
    with pytest.raises(LocalError, match=r"00002\.u8: 404"):
        list(source.read(0, 2, 0))
    other = replace(data, source=f"{name}@{HASH}")
    with pytest.raises(UsageError, match="holds other data than the run pins"):
        open_tokens(other, PeerConfig(home=tmp_path / "home"))
    with pytest.raises(UsageError, match=r"run\.toml: .* holds other data than 0000"):
        pinned_data(other, "run.toml", tmp_path / "home")


def test_a_run_pins_its_index_and_the_tokenizer_beside_it(tmp_path: Path) -> None:
    content, home = train_tokenizer(tmp_path / "tokenizer.json"), tmp_path / "home"
    index = packed(tmp_path / "p", tokenizer=content)
    given = Data(source=f"tokens:{tmp_path}/p", sequence_length=LENGTH)
    data, found = pinned_data(given, "run.toml", home)
    assert found == index
    assert data.source == f"tokens:swarm:{(tmp_path / 'p' / INDEX).stat().st_size}@{index.hash.hex()}"
    assert data.tokenizer == "tokenizer.json"
    source = open_tokens(data, PeerConfig(home=home))  # From the folder of this home.
    for _ in range(2):
        assert tokenizer_of(source, home).decode(next(source.held_out()).numpy()).startswith("00010 once")
        (tmp_path / "p" / "tokenizer.json").unlink(missing_ok=True)  # The second time it is in the home folder.
    (tmp_path / "p" / "tokenizer.json").write_bytes(content + b" ")
    with pytest.raises(UsageError, match="is not the one of its shards"):
        tokenizer_of(source, tmp_path / "other")
    for wrong, reason in (
        (replace(given, tokenizer="other.json"), "say themselves what tokenizer made them"),
        (replace(given, sequence_length=1 << 20), "no shard has"),
        (replace(given, source="tokens:http://10.0.0.1/x"), "a run may not name"),
        (replace(given, source="tokens:hf://datasets/a/b/c"), "a run may not name"),
        (replace(given, source=f"tokens:{tmp_path}/none"), "cannot read packed data of"),
    ):
        with pytest.raises(UsageError, match=reason) as refused:
            pinned_data(wrong, "run.toml", home)
        assert refused.value.remedy
    packed(tmp_path / "q")
    assert pinned_data(Data(source=f"tokens:{tmp_path}/q"), "run.toml", home)[0].tokenizer == "bytes"


PUBLIC = [
    *(f"tokens:https://data.example.org/{path}@{HASH}" for path in ("a", "a/b-1/c_2", "x.y/~z=1+2")),
    f"tokens:https://bucket.s3.eu-central-1.amazonaws.com/corpus@{HASH}",
    f"tokens:hf://datasets/org/name@{COMMIT}/folder@{HASH}",
    f"tokens:hf://datasets/org/name@{COMMIT}@{HASH}",
]
NOT_PUBLIC = [
    "tokens:https://data.example.org/a",
    f"tokens:https://data.example.org/a@{HASH[1:]}",
    f"tokens:https://data.example.org/a@{HASH}\n",
    f"tokens:http://data.example.org/a@{HASH}",
    f"tokens:https://data.example.org:8443/a@{HASH}",
    f"tokens:https://data.example.org/a?x=1@{HASH}",
    f"tokens:https://data.example.org/../a@{HASH}",
    f"tokens:https://data.example.org/a/%2e%2e/b@{HASH}",
    f"tokens:https://data.example.org@{HASH}",
    f"tokens:https://user@data.example.org/a@{HASH}",
    f"tokens:https://127.0.0.1/a@{HASH}",
    f"tokens:https://127.1/a@{HASH}",
    f"tokens:https://2130706433/a@{HASH}",
    f"tokens:https://[::1]/a@{HASH}",
    f"tokens:https://localhost/a@{HASH}",
    f"tokens:https://router/a@{HASH}",
    f"tokens:ftp://data.example.org/a@{HASH}",
    f"tokens:file:///etc/passwd@{HASH}",
    f"tokens:~/.ssh@{HASH}",
    f"tokens:.@{HASH}",
    f"tokens:hf://datasets/org/name/folder@{HASH}",
    f"tokens:hf://datasets/org/name@main/folder@{HASH}",
    f"tokens:hf://org/name@{COMMIT}@{HASH}",
    f"text:https://data.example.org/a@{HASH}",
    *("text:{stdlib}", "text:~/.ssh/id_*", "json:x.json", f"hf:a/b@{COMMIT}", "tokens:a.u16", "x", "tokens:swarm:/etc"),
    *(f"tokens:swarm:0@{HASH}", f"tokens:swarm:12345678@{HASH}", f"tokens:swarm:9@{HASH}\n"),
]


@pytest.mark.parametrize("source", PUBLIC)
def test_what_a_manifest_may_name(source: str) -> None:
    pin = Pin.of(source)
    assert pin is not None
    assert pin.host in ("data.example.org", "bucket.s3.eu-central-1.amazonaws.com", "huggingface.co")
    members = Pin.of(f"tokens:swarm:99@{HASH}")
    assert members is not None
    assert (members.host, members.size, members.index) == ("", 99, bytes(32))


@pytest.mark.parametrize("source", NOT_PUBLIC)
def test_what_a_manifest_may_not_name(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert Pin.of(source) is None
    with pytest.raises(UsageError, match="are no packed data that a manifest may name") as refused:
        open_tokens(Data(source=source), PeerConfig(home=tmp_path))
    assert refused.value.remedy


def test_a_run_whose_members_bring_their_own_is_joined_by_a_program(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=NEEDS_PROGRAM.cause) as refused:
        open_tokens(Data(source="own"), PeerConfig(home=tmp_path))
    assert refused.value.remedy == NEEDS_PROGRAM.remedy
