"""Packing: the same bytes of the same input, every token of it once, and all or nothing on the disk."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flockstep.optim.data.tokenizer import FileTokenizer
from flockstep.optim.packing import encode, sources
from flockstep.optim.packing import pack as packing
from flockstep.optim.packing.encode import Encoder, Tell, TokenizerFiles
from flockstep.optim.packing.pack import LEAST_SHARD_TOKENS, Progress, pack
from flockstep.optim.packing.sources import Part, open_source
from flockstep.optim.shards.index import ShardIndex, read_index
from flockstep.optim.shards.tokenizer_config import encode_config
from flockstep.peer.base.digest import digest
from flockstep.peer.base.errors import LocalError, UsageError
from flockstep.scripts.cli.main import app
from flockstep.scripts.runs.pack import pack_data
from support.packed import STORIES, files_of, packed, train_tokenizer
from typer.testing import CliRunner

KINDS = {"uint8": "<u1", "uint16": "<u2", "uint32": "<u4"}


def tokens_of(folder: Path, index: ShardIndex) -> list[int]:
    return [token for shard in index.shards for token in np.fromfile(folder / shard.name, KINDS[index.dtype]).tolist()]


def pack_here(source: Path | str, to: Path, tokenizer: str = "bytes", **options: Any) -> list[str]:
    """What the command says."""
    said: list[str] = []
    pack_data(str(source), str(to), said.append, home=to.parent / "home", tokenizer=tokenizer, **options)
    return said


def rows_in(folder: Path, texts: Sequence[str] = STORIES, files: int = 1) -> str:
    """A source of JSON."""
    folder.mkdir(exist_ok=True)
    for number in range(files):
        lines = (json.dumps({"text": text}) for text in texts[number::files])
        (folder / f"{number}.jsonl").write_text("\n".join(lines) + "\n")
    return f"json:{folder}"


def test_every_piece_stands_once_in_order_or_is_held_out(tmp_path: Path) -> None:
    index = packed(tmp_path / "p")
    held = bytes(np.fromfile(tmp_path / "p" / "held-out.u8", "<u1").tolist()).split(b"\0")[:-1]
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
    assert index.vocab_size == FileTokenizer(tmp_path, data).num_in_texts
    assert index.held_out is not None
    for shard in (*index.shards, index.held_out):
        content = (tmp_path / "p" / shard.name).read_bytes()
        assert (len(content), digest(content)) == (shard.num_bytes, shard.hash)
    files = {path.name for path in (tmp_path / "p").iterdir()}
    assert files == {"index.json", "tokenizer.json", index.held_out.name, *(shard.name for shard in index.shards)}


def test_the_same_input_gives_the_same_bytes_however_many_threads_make_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "PART_BYTES", 1 << 14)
    monkeypatch.setattr(sources, "PART_BYTES", 1 << 14)
    files, source = files_of(train_tokenizer(tmp_path / "tokenizer.json")), open_source(rows_in(tmp_path / "x", files=3))
    assert len(source.parts) > 20
    indices = [pack(source, files, tmp_path / f"p{threads}", threads=threads).index for threads in (1, 3)]
    assert indices[0] == indices[1]
    for path in (tmp_path / "p1").iterdir():
        assert path.read_bytes() == (tmp_path / "p3" / path.name).read_bytes()


class Interrupting(Encoder):
    """An encoder whose third task is interrupted, and that notes the others."""

    done: list[int] = []  # noqa: RUF012  # Of all threads.

    def encode(self, parts: Sequence[Part], tell: Tell) -> Any:
        if len(self.done) == 2:
            raise KeyboardInterrupt
        self.done.append(parts[0].start)
        return super().encode(parts, tell)


def test_an_interrupted_packing_goes_on_where_it_was_unless_the_source_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "PART_BYTES", 1 << 17)
    monkeypatch.setattr(sources, "PART_BYTES", 1 << 17)
    name, files = rows_in(tmp_path / "x"), TokenizerFiles()
    whole = pack(open_source(name), files, tmp_path / "whole").index
    monkeypatch.setattr(packing, "Encoder", Interrupting)
    monkeypatch.setattr(os, "cpu_count", lambda: 1)  # What other threads have begun is lost, and done again.
    with pytest.raises(LocalError, match="the packing was interrupted") as refused:
        pack_here(name, tmp_path / "p")
    assert "goes on where it was" in str(refused.value.remedy)
    assert not (tmp_path / "p").exists()
    begun, Interrupting.done[:] = list(Interrupting.done), [-1, -2, -3]
    progress = Progress()
    assert pack(open_source(name), files, tmp_path / "p", progress=progress).index == whole
    assert not {*begun} & {*Interrupting.done}
    assert (progress.files, progress.documents, progress.bytes) == (1, len(STORIES), progress.num_bytes)
    assert 0 < progress.new_tokens < progress.tokens
    assert sorted(path.name for path in tmp_path.iterdir()) == ["home", "p", "whole", "x"] or not (tmp_path / "home").exists()
    Interrupting.done.clear()
    with pytest.raises(KeyboardInterrupt):
        pack(open_source(name), files, tmp_path / "q")
    rows_in(tmp_path / "x", STORIES[1:])
    Interrupting.done[:] = [-1, -2, -3]
    other = pack(open_source(name), files, tmp_path / "q")
    assert other.index.num_documents == len(STORIES) - 1
    assert 0 in Interrupting.done  # Nothing of the other text is taken.


@pytest.mark.parametrize("size", [1 << 13, 8 << 20])
def test_a_long_document_ends_once_and_few_tokens_make_many_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(sources, "PART_BYTES", size)
    monkeypatch.setattr(packing, "PART_BYTES", size)
    monkeypatch.setattr(encode, "PIECE", 1 << 12)
    files = files_of(train_tokenizer(tmp_path / "tokenizer.json"))
    (tmp_path / "x").mkdir()
    for number in range(3):
        (tmp_path / "x" / f"{number}.txt").write_text("".join(STORIES[:40]))
    packed = pack(open_source(f"text:{tmp_path}/x"), files, tmp_path / "p")
    tokens = tokens_of(tmp_path / "p", packed.index) + np.fromfile(tmp_path / "p" / "held-out.u16", "<u2").tolist()
    assert tokens.count(0) == packed.index.num_documents == packed.found.files == 3
    assert files.open().decode(np.array(tokens_of(tmp_path / "p", packed.index)))[:1000] == "".join(STORIES)[:1000]
    assert len(packed.index.shards) == -(-packed.index.num_tokens // LEAST_SHARD_TOKENS)


def test_what_a_folder_leaves_out_is_named_and_so_is_what_holds_nothing_out(tmp_path: Path) -> None:
    folder = tmp_path / "x"
    (folder / ".cache").mkdir(parents=True)
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": "once upon a time "}) + "\n" for _ in range(600)))
    for name in (".cache/a.jsonl", "b.jsonl.xz", "README.md", "a.jsonl~"):
        (folder / name).write_bytes((folder / "a.jsonl").read_bytes())
    (folder / "gone.jsonl").symlink_to("nothing")
    said = pack_here(f"json:{folder}", tmp_path / "p")
    assert said[0].startswith("Packed 600 documents of 1 files")
    assert said[1] == (
        f"What could not be read was left out, 1 in all, such as {folder}/gone.jsonl: is a link to nothing, or no file"
    )
    assert said[2].startswith("Files that were left out for what they are, 4 in all: ")
    assert all(name in said[2] for name in (".cache: is hidden", "README.md: is not named as json", "a.jsonl~: is hidden"))
    (folder / "a.jsonl").write_text(json.dumps({"text": "once"}) + "\n")
    assert any("few documents is held out" in line for line in pack_here(f"json:{folder}/a.json*", tmp_path / "q"))


def test_a_row_that_the_tokenizer_does_not_take_is_named_and_costs_that_row(tmp_path: Path) -> None:
    words = {"type": "WordLevel", "vocab": {"the": 0, "cat": 1, "</s>": 2}, "unk_token": "[UNK]"}
    file = {"version": "1.0", "pre_tokenizer": {"type": "WhitespaceSplit"}, "added_tokens": [], "model": words}
    (tmp_path / "tokenizer.json").write_text(json.dumps(file))
    long = "the cat " * encode.PIECE
    rows = ["the cat " * 3000, "the cow", "the </s> cat", f"{long}cow", f"cow {long}", "cat the"]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in rows))
    said = pack_here(f"{tmp_path}/x.jsonl", tmp_path / "p", str(tmp_path))
    assert said[0].startswith("Packed 4 documents")
    assert said[1].startswith("What could not be read was left out, 4 in all, such as")
    assert "x.jsonl: row 2 has what the tokenizer has no token for" in said[1]
    tokens = np.concatenate([np.fromfile(path, "<u1") for path in sorted((tmp_path / "p").glob("*.u8"))]).tolist()
    assert tokens.count(2) == 4
    ordered = np.concatenate([np.fromfile(path, "<u1") for path in sorted((tmp_path / "p").glob("0*.u8"))]).tolist()
    assert sum(ordered[at] == ordered[at - 1] == 2 for at in range(1, len(ordered))) == 0


def test_what_fails_leaves_no_pack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_source(rows_in(tmp_path / "x"))
    (tmp_path / "x" / "0.jsonl").unlink()
    with pytest.raises(LocalError, match="cannot read"):
        pack(source, TokenizerFiles(), tmp_path / "p")
    with pytest.raises(UsageError, match="holds no text"):
        pack(open_source(rows_in(tmp_path / "x", [""])), TokenizerFiles(), tmp_path / "p")
    assert not (tmp_path / "p").exists()
    packed(tmp_path / "p")
    with pytest.raises(UsageError, match="exists"):
        packed(tmp_path / "p")
    with pytest.raises(UsageError, match="a shard has from"):
        packed(tmp_path / "q", shard_tokens=100)
    monkeypatch.setattr(packing, "MAX_SHARDS", 3)
    with pytest.raises(UsageError, match="more than 3 shards") as refused:
        packed(tmp_path / "q")
    assert refused.value.remedy


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
    arguments = ["data", "pack", f"{kind}{place}", "--to", str(tmp_path / "p"), "--tokenizer", str(tmp_path)]
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert "Packed 400 documents" in done.output
    assert "held out" not in done.output
    texts = encode_config({"eos_token": "<|endoftext|>"})
    content = (tmp_path / "tokenizer.json").read_bytes()
    expected = packed(tmp_path / "q", tokenizer=content, config=texts, shard_tokens=0)
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
        pack_here(source.format(tmp=tmp_path), tmp_path / "p", tokenizer.format(tmp=tmp_path))
    assert refused.value.remedy
    assert not (tmp_path / "p").exists()
