"""Tokenizers: bytes, and files that are parsed only after their hash was checked."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flockstep.optim.data.controls import without_noncharacters
from flockstep.optim.data.tokenizer import (
    BYTES,
    FileTokenizer,
    read_tokenizer,
)
from flockstep.peer.base.errors import LocalError, UsageError
from hypothesis import given
from hypothesis import strategies as st

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


def test_bytes_end_every_document_with_a_zero() -> None:
    first, second = BYTES.encode(["é", ""])
    assert bytes(first) == "é".encode() + b"\0"
    assert bytes(second) == b"\0"


def test_a_file_gives_back_the_text(path: Path) -> None:
    tokenizer = FileTokenizer(path, path.read_bytes())
    (tokens,) = tokenizer.encode([TEXT])
    back = tokenizers.Tokenizer.from_file(str(path))
    assert back.decode(tokens[:-1].tolist()) == TEXT
    assert tokens[-1] == back.token_to_id("<|endoftext|>")
    assert len(tokens) < len(TEXT) / 2
    assert tokenizer.vocab_size == back.get_vocab_size()


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"version": "1.0", "model": {"type": "BPE"}}', "\0" * 100])
def test_what_is_no_tokenizer_is_one_clear_line(tmp_path: Path, content: str) -> None:
    with pytest.raises(UsageError, match="is no tokenizer"):
        FileTokenizer(tmp_path / "x.json", content.encode())


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
