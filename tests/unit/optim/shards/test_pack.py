"""Packing: the same bytes of the same input, every token of it once, and all or nothing on the disk."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from flockstep.optim.data.rows import Document, Skips
from flockstep.optim.data.tokenizer import BYTES, FileTokenizer
from flockstep.optim.shards import pack as packing
from flockstep.optim.shards.index import ShardIndex, read_index
from flockstep.optim.shards.pack import LEAST_SHARD_TOKENS, pack
from flockstep.optim.shards.tokenizer_config import encode_config
from flockstep.peer.base.digest import digest
from flockstep.peer.base.errors import LocalError, UsageError
from flockstep.scripts.cli.main import app
from flockstep.scripts.runs.pack import pack_data
from support.packed import STORIES, packed, train_tokenizer
from typer.testing import CliRunner


def tokens_of(folder: Path, index: ShardIndex) -> list[int]:
    kind = {"uint16": "<u2", "uint32": "<u4"}[index.dtype]
    return [token for shard in index.shards for token in np.fromfile(folder / shard.name, kind).tolist()]


def test_every_piece_stands_once_in_order_or_is_held_out(tmp_path: Path) -> None:
    index = packed(tmp_path / "p")
    held = bytes(np.fromfile(tmp_path / "p" / "held-out.u16", "<u2").tolist()).split(b"\0")[:-1]
    trained = bytes(tokens_of(tmp_path / "p", index)).split(b"\0")[:-1]
    stories = [story.encode() for story in STORIES]
    assert trained == [story for number, story in enumerate(stories) if number % 20 != 10]
    assert held == stories[10::20]
    assert index.num_documents == len(STORIES)
    assert {shard.num_tokens for shard in index.shards[:-1]} == {LEAST_SHARD_TOKENS}


def test_the_index_says_what_the_files_are(tmp_path: Path) -> None:
    data = train_tokenizer(tmp_path / "tokenizer.json")
    index = packed(tmp_path / "p", tokenizer=data)
    assert read_index((tmp_path / "p" / "index.json").read_bytes(), "x") == index
    assert index.tokenizer == f"blake3:{digest((tmp_path / 'p' / 'tokenizer.json').read_bytes()).hex()}"
    assert index.vocab_size == FileTokenizer(tmp_path, data).vocab_size
    assert index.held_out is not None
    for shard in (*index.shards, index.held_out):
        content = (tmp_path / "p" / shard.name).read_bytes()
        assert (len(content), digest(content)) == (shard.num_bytes, shard.hash)
    files = {path.name for path in (tmp_path / "p").iterdir()}
    assert files == {"index.json", "tokenizer.json", index.held_out.name, *(shard.name for shard in index.shards)}


def test_the_same_input_gives_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = train_tokenizer(tmp_path / "tokenizer.json")
    first = packed(tmp_path / "a", tokenizer=data)
    monkeypatch.setattr("flockstep.optim.shards.pack.os.cpu_count", lambda: 1)
    assert packed(tmp_path / "b", tokenizer=data) == first
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()


def test_a_long_document_ends_once_and_few_tokens_make_many_shards(tmp_path: Path) -> None:
    long = "".join(STORIES)
    tokenizer = FileTokenizer(tmp_path, train_tokenizer(tmp_path / "tokenizer.json"))
    assert len(long) > 4 * packing.PIECE
    index = pack([Document(long)] * 3, tokenizer, tmp_path / "p", skips=Skips(), tokenizer_file=b"x")
    tokens = tokens_of(tmp_path / "p", index)
    assert tokens.count(tokenizer.end or 0) == 3
    assert len(index.shards) == -(-index.num_tokens // LEAST_SHARD_TOKENS)
    large = pack([Document("x" * 100_000)] * 40, BYTES, tmp_path / "q", skips=Skips())
    assert len(large.shards) == packing.ENOUGH_SHARDS


def test_no_more_than_a_million_tokens_are_held_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "HELD_OUT_TOKENS", 3000)
    index = packed(tmp_path / "p")
    assert index.held_out is not None
    assert 3000 <= index.held_out.num_tokens < 3000 + len(STORIES[0]) + 1


def test_what_a_folder_leaves_out_is_named_and_so_is_what_holds_nothing_out(tmp_path: Path) -> None:
    folder = tmp_path / "x"
    (folder / ".cache").mkdir(parents=True)
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": "once upon a time "}) + "\n" for _ in range(600)))
    for name in (".cache/a.jsonl", "b.jsonl.xz", "README.md", "a.jsonl~"):
        (folder / name).write_bytes((folder / "a.jsonl").read_bytes())
    (folder / "gone.jsonl").symlink_to("nothing")
    said: list[str] = []
    pack_data(f"json:{folder}", tmp_path / "p", said.append)
    assert said[0].startswith("Packed 600 documents")
    assert said[1] == (
        f"What could not be read was left out, 2 in all, such as {folder}/gone.jsonl: is a link to nothing, or no file"
    )
    assert said[2].startswith("Files that were left out for what they are, 3 in all: ")
    assert all(name in said[2] for name in (".cache: is hidden", "README.md: is not named as json", "a.jsonl~: is hidden"))
    assert said[3].startswith("All texts are one, so what is held out is trained on")
    (folder / "a.jsonl").write_text(json.dumps({"text": "once"}) + "\n")
    said.clear()
    pack_data(f"json:{folder}/a.json*", tmp_path / "q", said.append)
    assert any("few documents is held out" in line for line in said)


def test_a_row_that_the_tokenizer_does_not_take_is_named_and_costs_that_row(tmp_path: Path) -> None:
    words = {"type": "WordLevel", "vocab": {"the": 0, "cat": 1, "</s>": 2}, "unk_token": "[UNK]"}
    file = {"version": "1.0", "pre_tokenizer": {"type": "WhitespaceSplit"}, "added_tokens": [], "model": words}
    (tmp_path / "tokenizer.json").write_text(json.dumps(file))
    long = "the cat " * packing.PIECE
    rows = ["the cat " * 3000, "the cow", "the </s> cat", f"{long}cow", f"cow {long}", "cat the"]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in rows))
    said: list[str] = []
    pack_data(f"{tmp_path}/x.jsonl", tmp_path / "p", said.append, tokenizer=str(tmp_path))
    assert said[0].startswith("Packed 4 documents")
    assert said[1].startswith("What could not be read was left out, 4 in all, such as")
    assert "x.jsonl: row 2 has what the tokenizer has no token for" in said[1]
    files = [*sorted((tmp_path / "p").glob("0*.u16")), tmp_path / "p" / "held-out.u16"]
    tokens = np.concatenate([np.fromfile(path, "<u2") for path in files]).tolist()
    assert tokens.count(2) == 4
    assert sum(tokens[at] == tokens[at - 1] == 2 for at in range(1, len(tokens))) == 0


def test_what_fails_leaves_nothing(tmp_path: Path) -> None:
    def broken() -> Iterator[Document]:
        yield from map(Document, STORIES)
        raise LocalError("the disk is gone")

    with pytest.raises(LocalError, match="the disk is gone"):
        pack(broken(), BYTES, tmp_path / "p", skips=Skips())
    with pytest.raises(UsageError, match="no text to pack"):
        pack([], BYTES, tmp_path / "p", skips=Skips())
    assert list(tmp_path.iterdir()) == []
    packed(tmp_path / "p")
    with pytest.raises(UsageError, match="exists"):
        packed(tmp_path / "p")
    with pytest.raises(UsageError, match="a shard has from"):
        packed(tmp_path / "q", shard_tokens=100)


def test_what_a_killed_process_has_left_is_removed(tmp_path: Path) -> None:
    left, fresh = tmp_path / ".p.0123.draft", tmp_path / ".p.4567.draft"
    for draft in (left, fresh):
        draft.mkdir()
        (draft / "x").touch()
    os.utime(left / "x", (0, 0))
    packed(tmp_path / "p")
    assert {path.name for path in tmp_path.iterdir()} == {"p", fresh.name}


@pytest.mark.parametrize("kind", ["text:", "json:", "parquet:", ""])
def test_the_command_packs_every_kind(tmp_path: Path, kind: str) -> None:
    train_tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "x").mkdir()
    if kind == "json:":
        place = tmp_path / "x" / "x.jsonl"
        place.write_text("\n".join(json.dumps({"text": story}) for story in STORIES))
    elif kind == "parquet:":
        pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        place = tmp_path / "x" / "x.parquet"
        parquet.write_table(pyarrow.table({"text": STORIES}), place, row_group_size=50)
    else:
        place = tmp_path / "x"
        for number, story in enumerate(STORIES):
            (place / f"{number:03d}.txt").write_text(story)
    arguments = ["data", "pack", f"{kind}{place}", str(tmp_path / "p"), "--tokenizer", str(tmp_path)]
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert "Packed 400 documents" in done.output
    assert "held out" not in done.output
    texts = encode_config({"eos_token": "<|endoftext|>"})
    content = (tmp_path / "tokenizer.json").read_bytes()
    expected = packed(tmp_path / "q", tokenizer=content, tokenizer_config=texts, shard_tokens=0)
    assert read_index((tmp_path / "p" / "index.json").read_bytes(), "x") == expected


@pytest.mark.parametrize(
    ("source", "tokenizer", "reason"),
    [
        ("text:{tmp}/none", "bytes", "no such file or folder"),
        ("{tmp}/none.jsonl", "bytes", "no such file or folder"),
        ("text:{tmp}/a.txt", "{tmp}/none.json", "cannot read the tokenizer"),
        ("text:{tmp}/a.txt", "{tmp}/a.txt", "is no tokenizer"),
        ("json:{tmp}/a.txt", "bytes", "is no JSON"),
    ],
)
def test_what_cannot_be_packed_is_one_line(tmp_path: Path, source: str, tokenizer: str, reason: str) -> None:
    (tmp_path / "a.txt").write_text("no JSON")
    with pytest.raises(UsageError, match=reason) as refused:
        pack_data(source.format(tmp=tmp_path), tmp_path / "p", print, tokenizer=tokenizer.format(tmp=tmp_path))
    assert refused.value.remedy
    assert not (tmp_path / "p").exists()


def test_texts_that_are_left_out_are_named(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "a.txt").write_text("".join(STORIES[:20]))
    (tmp_path / "x" / "b.txt").write_bytes("Straße".encode("latin-1") * 10)
    said: list[str] = []
    pack_data(str(tmp_path / "x"), tmp_path / "p", said.append)
    assert "None of so few documents is held out" in said[2]
    assert said[1].startswith("What could not be read was left out, 1 in all, such as ")
    assert "b.txt: row 1 is no UTF-8: byte 0xdf" in said[1]
    with pytest.raises(UsageError, match=r"holds no text: .*b\.txt: row 1 is no UTF-8") as refused:
        pack_data(str(tmp_path / "x" / "b.txt"), tmp_path / "q", said.append)
    assert "iconv -f LATIN1" in str(refused.value.remedy)
