"""Tokenizers: bytes, and files that are parsed only after their hash was checked."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flockstep.dht.run.manifest import Data
from flockstep.optim.data.controls import without_noncharacters
from flockstep.optim.data.sources import TokenSource, open_data
from flockstep.optim.data.tokenizer import (
    BYTES,
    MAX_TOKENIZER_BYTES,
    FileTokenizer,
    files_folder,
    find_tokenizer,
    hash_of,
    pinned_tokenizer,
    provided_tokenizer,
    read_tokenizer,
)
from flockstep.peer.base.config import PeerConfig
from flockstep.peer.base.digest import digest
from flockstep.peer.base.errors import LocalError, UsageError
from hypothesis import given
from hypothesis import strategies as st
from support.hub import COMMIT, REPOSITORY, StandIn, stand_in

tokenizers = pytest.importorskip("tokenizers")

TEXT = "the swarm makes the outer step, not lockstep\n" * 400


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A small byte-pair encoding of a text that lies beside it."""
    (tmp_path / "corpus.txt").write_text(TEXT)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.save(str(tmp_path / "own.json"))
    return tmp_path / "own.json"


def data_of(path: Path, **changes: str) -> Data:
    settings = {"tokenizer": path.name, "tokenizer_hash": hash_of(path.read_bytes(), provided=False), **changes}
    return Data(source=f"text:{path.parent}/corpus.txt", sequence_length=16, **settings)  # type: ignore[arg-type] # texts


def test_bytes_end_every_document_with_a_zero() -> None:
    first, second = BYTES.encode(["é", ""])
    assert bytes(first) == "é".encode() + b"\0"
    assert bytes(second) == b"\0"


def test_a_file_is_found_beside_the_data_and_gives_back_the_text(path: Path) -> None:
    tokenizer = find_tokenizer(data_of(path), PeerConfig(home=path.parent))
    (tokens,) = tokenizer.encode([TEXT])
    back = tokenizers.Tokenizer.from_file(str(path))
    assert back.decode(tokens[:-1].tolist()) == TEXT
    assert tokens[-1] == back.token_to_id("<|endoftext|>")
    assert len(tokens) < len(TEXT) / 2
    assert tokenizer.vocab_size == back.get_vocab_size()


def test_a_file_whose_hash_is_another_is_not_even_parsed(path: Path) -> None:
    data = data_of(path)
    path.write_text(path.read_text() + " ")
    with pytest.raises(UsageError, match="is not the run's tokenizer") as caught:
        find_tokenizer(data, PeerConfig(home=path.parent))
    assert caught.value.remedy
    with pytest.raises(UsageError, match="the manifest pins none"):
        find_tokenizer(data_of(path, tokenizer_hash=""), PeerConfig(home=path.parent))


def test_a_file_that_is_elsewhere_is_named_by_a_dial(path: Path, tmp_path: Path) -> None:
    data = data_of(path)
    moved = path.rename(tmp_path / "moved.json")
    with pytest.raises(UsageError, match=r"is not at own.json or .*corpus.txt/own.json") as caught:
        find_tokenizer(data, PeerConfig(home=tmp_path))
    assert "--tokenizer" in caught.value.remedy
    assert find_tokenizer(data, PeerConfig(home=tmp_path, tokenizer=str(moved))).vocab_size > 256


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"version": "1.0", "model": {"type": "BPE"}}', "\0" * 100])
def test_what_is_no_tokenizer_is_one_clear_line(tmp_path: Path, content: str) -> None:
    with pytest.raises(UsageError, match="is no tokenizer"):
        FileTokenizer(tmp_path / "x.json", content.encode())


def test_tokens_are_made_once_and_kept_by_hash(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = PeerConfig(home=path.parent / "home")
    first = open_data(data_of(path), config, mine=True)
    (kept,) = (config.home / "cache").iterdir()
    assert kept.suffix == ".u32"
    monkeypatch.setattr(FileTokenizer, "encode", lambda *_: pytest.fail("tokenized anew"))
    again = open_data(data_of(path), config, mine=True)
    assert isinstance(first, TokenSource)
    assert isinstance(again, TokenSource)
    assert first.source == again.source
    assert first.vocab_size == again.vocab_size
    assert np.fromfile(kept, "<u4").max() < (first.vocab_size or 0)


def test_a_cache_that_cannot_be_written_is_one_clear_line(path: Path) -> None:
    (path.parent / "home").write_text("a file where the folder should be")
    with pytest.raises(LocalError, match="cannot write") as caught:
        open_data(data_of(path), PeerConfig(home=path.parent / "home"), mine=True)
    assert "--home" in caught.value.remedy


def test_the_end_of_a_document_is_left_out_where_the_tokenizer_has_none(path: Path) -> None:
    plain = json.loads(path.read_text())
    plain["added_tokens"] = []
    plain["model"]["vocab"]["<ended>"] = plain["model"]["vocab"].pop("<|endoftext|>")
    (tokens,) = FileTokenizer(path, json.dumps(plain).encode()).encode(["the swarm"])
    assert 0 not in tokens


def test_a_file_on_which_the_package_panics_is_one_line(path: Path) -> None:
    known = json.loads(path.read_text())
    nested = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    on_text = FileTokenizer(path, json.dumps(known | {"pre_tokenizer": nested}).encode())
    hard = "a" * 64 + "b"
    assert [len(tokens) > 0 for tokens in on_text.encode(["swarm", hard, "step"])] == [True, False, True]
    assert [len(tokens) > 0 for tokens, _ in on_text.encode_at([hard, "swarm"])] == [False, True]
    cut = {"type": "Strip", "content": "z", "start": 9, "stop": 9}
    with pytest.raises(UsageError, match=r"own\.json cannot be read: index out of bounds"):
        FileTokenizer(path, json.dumps(known | {"decoder": cut}).encode())


def test_a_tokenizer_of_another_form_is_told_how_to_convert(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read the tokenizer") as missing:
        read_tokenizer(tmp_path / "tokenizer.json")
    with pytest.raises(UsageError, match="is no tokenizer") as named:
        FileTokenizer(tmp_path / "tokenizer.model", b"\n\x0e\n\x05<unk>")
    assert missing.value.remedy == named.value.remedy
    assert "in another form is converted by: python -c 'import sys, transformers" in named.value.remedy


def repeated(pattern: dict[str, str], content: str, times: int) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": [{"type": "Replace", "pattern": pattern, "content": content}] * times}


E, RARE = {"String": "e"}, {"Regex": r"\p{Han}"}
BOMBS: dict[str, dict[str, Any]] = {
    "a letter": {"normalizer": repeated(E, "e" * 100, 5)},
    "a letter, in less memory": {"normalizer": repeated(E, "e" * 100, 2)},
    "a letter that the file names": {"normalizer": repeated({"String": "\u4e00"}, "\u4e00" * 100, 2)},
    "what tokens are read as": {
        "decoder": {"type": "Sequence", "decoders": [{"type": "Replace", "pattern": E, "content": "e" * 100}] * 2}
    },
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_file_that_makes_too_much_of_a_text_is_one_line_when_it_is_opened(path: Path, bomb: str) -> None:
    known = json.loads(path.read_text()) | {"pre_tokenizer": None, "decoder": None}
    known["model"]["vocab"] |= {letter: 1000 + number for number, letter in enumerate("et \u4e00")}
    with pytest.raises(LocalError, match=r"the tokenizer own\.json (makes [\d,]+ tokens|ends the process that reads it)"):
        FileTokenizer(Path("own.json"), json.dumps(known | BOMBS[bomb]).encode())


def test_a_text_of_which_a_file_makes_too_much_is_one_line(path: Path) -> None:
    known = json.loads(path.read_text()) | {"pre_tokenizer": None}
    known["model"]["vocab"]["e"] = 1000
    normalizer = repeated(RARE, "e" * 1_000_000, 1)  # The probe has no such letter.
    tokenizer = FileTokenizer(Path("own.json"), json.dumps(known | {"normalizer": normalizer}).encode())
    assert len(tokenizer.encode(["swarm"])[0])
    with pytest.raises(LocalError, match=r"the tokenizer own.json ends the process .* limits on memory, .* and answers"):
        tokenizer.encode(["\u4e00"])


LETTERS = {"<": 0, "/": 1, "s": 2, ">": 3, "a": 4, " ": 5, "</s>": 6}
PIECES = [[letter, -1.0] for letter in LETTERS]
WITHOUT_UNKNOWN: dict[str, dict[str, Any]] = {
    "words": {"type": "WordLevel", "vocab": LETTERS, "unk_token": "[UNK]"},
    "pieces of words": {
        "type": "WordPiece", "vocab": LETTERS, "unk_token": "[UNK]", "continuing_subword_prefix": "",
        "max_input_chars_per_word": 100,
    },
    "pairs": {
        "type": "BPE", "vocab": LETTERS | {"</": 7, "s>": 8}, "merges": ["< /", "s >", "</ s>"], "ignore_merges": True,
    },
    "pieces": {"type": "Unigram", "vocab": PIECES, "unk_id": None, "byte_fallback": False},
}  # fmt: skip


@pytest.mark.parametrize("kind", WITHOUT_UNKNOWN)
def test_a_text_for_which_a_file_has_no_token_has_none_and_costs_no_other(kind: str) -> None:
    words = {"type": "Split", "pattern": {"String": " "}, "behavior": "Isolated", "invert": False}
    file = {"version": "1.0", "pre_tokenizer": words, "added_tokens": [], "model": WITHOUT_UNKNOWN[kind]}
    tokenizer = FileTokenizer(Path("x.json"), json.dumps(file).encode())
    tokens = tokenizer.encode(["a a", "a cow a", "s a"])
    assert [len(each) for each in tokens] == [4, 0, 4]
    assert [int(each[-1]) for each in tokens if len(each)] == [6, 6]
    assert tokenizer.vocab_size == len(WITHOUT_UNKNOWN[kind]["vocab"])


FLAGS = ("single_word", "lstrip", "rstrip")


@cache
def controlled(kind: str) -> FileTokenizer:
    """A tokenizer of every kind of model, with control tokens in its model and beyond it."""
    model = WITHOUT_UNKNOWN[kind]
    beyond = len(model["vocab"])
    added = [
        {"id": number, "content": content, "special": special, "normalized": True} | dict.fromkeys(FLAGS, False)
        for number, content, special in ((6, "</s>", True), (beyond, "<a>", False), (beyond + 1, "as", False))
    ]
    file = {"version": "1.0", "normalizer": {"type": "NFKC"}, "added_tokens": added, "model": model}
    return FileTokenizer(Path("x.json"), json.dumps(file).encode())


PARTS = ("</s>", "\uff1c/s\uff1e", "<a>", "<", "a", "s", ">", "\ufdd06\ufdd1", "\ufdd0", " ")
TEXTS = st.lists(st.sampled_from(PARTS)).map("".join)


@given(TEXTS, st.sampled_from(list(WITHOUT_UNKNOWN)))
def test_no_text_makes_a_control_token(text: str, kind: str) -> None:
    tokenizer = controlled(kind)
    controls = {int(name[1:-1]) for name in tokenizer.controls.names.values()}
    (tokens,), ((located, _),) = tokenizer.encode([text]), tokenizer.encode_at([without_noncharacters(text)])
    assert not controls & set(located.tolist())
    assert not controls & set(tokens[:-1].tolist())
    if len(tokens):
        assert tokens[-1] == tokenizer.end


@pytest.mark.parametrize("kind", WITHOUT_UNKNOWN)
def test_who_means_a_control_token_writes_its_name(kind: str) -> None:
    tokenizer = controlled(kind)
    assert tokenizer.controls.is_special == {"</s>": True, "<a>": False}
    assert tokenizer.prompt("</s>a<a>as")[0] == tokenizer.end
    assert len(tokenizer.prompt("</s>a<a>as")) == 4
    assert tokenizer.decode(np.array(tokenizer.prompt("</s>a<a>"))).replace(" ", "") == "a<a>"


def test_a_zero_byte_inside_of_a_text_is_no_end_of_bytes() -> None:
    assert [len(tokens) for tokens in BYTES.encode(["a\0b", "\0", "ab"])] == [0, 0, 3]
    assert BYTES.prompt("\0")


ZEROS = f"blake3:{'0' * 64}"


def test_what_members_have_brought_is_found_before_another_file_of_its_name(path: Path, tmp_path: Path) -> None:
    content = path.read_bytes()
    data = data_of(path, tokenizer_hash=hash_of(content, provided=True))
    assert provided_tokenizer(data) == (digest(content), len(content))
    path.write_bytes(content + b" ")
    with pytest.raises(UsageError, match="is not the run's tokenizer"):
        find_tokenizer(data, PeerConfig(home=tmp_path))
    brought = files_folder(tmp_path) / digest(content).hex()
    brought.parent.mkdir(parents=True)
    brought.write_bytes(content)
    assert find_tokenizer(data, PeerConfig(home=tmp_path)).digest == digest(content)


@pytest.mark.parametrize(
    "pinned", ["", ZEROS, f"{ZEROS}/0", f"{ZEROS}/{MAX_TOKENIZER_BYTES + 1}", f"{ZEROS}/5x", f"{ZEROS[:-1]}/5"]
)
def test_a_tokenizer_of_no_bounded_length_is_not_provided(pinned: str) -> None:
    assert provided_tokenizer(Data(source="text:x", tokenizer="x.json", tokenizer_hash=pinned)) is None


def test_a_tokenizer_of_the_hub_is_pinned_with_its_commit(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("httpx")
    content, wrong = path.read_bytes(), {"config.json": b"{}", "bad/tokenizer.json": b"{}"}
    with stand_in(StandIn({"tokenizer.json": content, **wrong}, is_model=True)) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        for name in (f"hf:{REPOSITORY}", f"hf:{REPOSITORY}@{COMMIT}"):
            found = (f"hf:{REPOSITORY}@{COMMIT}", content, FileTokenizer(path, content).vocab_size)
            assert pinned_tokenizer(name, path.parent) == found
        for name, reason in (
            (f"hf:{REPOSITORY}@{COMMIT}/bad", "is no tokenizer"),
            (f"hf:{REPOSITORY}@{COMMIT}/none", "it has no none/tokenizer.json"),
            (f"hf:{REPOSITORY}@{'1' * 40}", "the hub answers with commit"),
            ("hf:../x", "is no tokenizer of the hub"),
        ):
            with pytest.raises(UsageError, match=reason) as refused:
                pinned_tokenizer(name, path.parent)
            assert refused.value.remedy
        hub.sizes["tokenizer.json"] = MAX_TOKENIZER_BYTES + 1
        with pytest.raises(UsageError, match="at most"):
            pinned_tokenizer(f"hf:{REPOSITORY}", path.parent)


def test_special_tokens_that_no_text_makes_need_no_place_in_a_model(path: Path) -> None:
    plain = FileTokenizer(path, path.read_bytes())
    assert plain.num_in_texts == plain.vocab_size
    made = tokenizers.Tokenizer.from_file(str(path))
    made.add_special_tokens(["[PAD]"])
    padded = FileTokenizer(path, made.to_str().encode())
    assert (padded.num_in_texts, padded.vocab_size) == (plain.vocab_size, plain.vocab_size + 1)
    ending = FileTokenizer(path, made.to_str().encode(), "[PAD]")
    made.add_tokens(["lockstep"])
    worded = FileTokenizer(path, made.to_str().encode())
    assert ending.num_in_texts == ending.vocab_size
    assert worded.num_in_texts == worded.vocab_size
