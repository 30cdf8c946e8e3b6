"""From text to tokens: its bytes, or a tokenizer of Hugging Face's `tokenizers`, whose file lies beside the tokens.

A file is read once, compared with its hash, and only then parsed, by a child with limits: all texts and
tokens pass through it, since a file of 1 kB can make gigabytes of a letter (`peer.process.confined`). Every document ends in
a token that stands nowhere inside of one, whatever its text is: no text makes a control token (`controls`).
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ...peer.base.digest import digest
from ...peer.base.errors import UsageError
from ...peer.base.install import how_to_install
from ...peer.process.confined import Confined
from .controls import MAX_GROWTH, Controls, open_tokenizer, without_noncharacters

MAX_TOKENIZER_BYTES = 64 << 20
"""The largest vocabularies in use, 256,000 tokens with their merges, take 35 MB (`optim.shards.index` has the same)."""
ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")
"""The token that ends a document, by the names that GPT-2, Llama 3, Llama 2, Gemma, Qwen and BERT give it."""
CONVERT = "import sys, transformers as t; t.AutoTokenizer.from_pretrained(sys.argv[1]).save_pretrained(sys.argv[2])"
REMEDY = f"name a tokenizer.json; a folder in another form is converted by: python -c '{CONVERT}' FOLDER NEW"
"""In a tokenizer.model, a .tiktoken, a vocab.json words alone stand, and what else they do only a program knows."""
UNTAKEN = "has what the tokenizer has no token for or fails on; of bytes that is a zero byte, which ends a document"
MAX_ANSWER, MAX_NUMBERS = 1 << 20, 128
"""Bytes of tokens as JSON for a request, and for each of its characters: eight tokens and where they begin."""


class Tokenizer(ABC):
    """What makes tokens of text."""

    name: str
    digest: bytes
    """A hash of all that decides about the tokens."""
    vocab_size: int
    num_in_texts: int
    """The tokens from 0 on that a model of texts must know: control tokens behind these, as for padding, are in no text."""
    dtype: npt.DTypeLike
    """The type of its tokens."""

    end: int | None
    """The token that ends a document; None if it has none."""

    @abstractmethod
    def encode(self, documents: Sequence[str]) -> list[npt.NDArray[Any]]:
        """The tokens of each document, an end included, and no control token else; none of one that it does not take."""

    @abstractmethod
    def decode(self, tokens: npt.NDArray[Any]) -> str:
        """The text of tokens, those that end a document left out; what is no text becomes U+FFFD."""

    @abstractmethod
    def prompt(self, text: str) -> list[int]:
        """The tokens of a text that goes on, at least one."""


class ByteTokenizer(Tokenizer):
    """The UTF-8 bytes; a zero ends a document."""

    name = "bytes"
    digest = digest(b"bytes")
    vocab_size = num_in_texts = 256
    dtype = np.uint8
    end = 0

    def encode(self, documents: Sequence[str]) -> list[npt.NDArray[np.uint8]]:
        """uint8."""
        ended = (text.encode(errors="replace") + b"\0" for text in documents)
        return [np.frombuffer(content if content.index(0) == len(content) - 1 else b"", np.uint8) for content in ended]

    def prompt(self, text: str) -> list[int]:
        """The bytes."""
        return list(text.encode(errors="replace")) or [0]

    def decode(self, tokens: npt.NDArray[Any]) -> str:
        """The UTF-8 text."""
        return bytes(token for token in tokens.tolist() if 0 < token < self.vocab_size).decode(errors="replace")


class FileTokenizer(Tokenizer):
    """A `tokenizer.json`; `end` is the token that ends a document, if something else says so."""

    dtype = np.uint32

    def __init__(self, path: Path, data: bytes, end: str = "") -> None:
        if find_spec("tokenizers") is None:
            raise UsageError(
                f"the run's tokenizer {path.name} needs the package tokenizers", remedy=how_to_install("hf")
            )
        self.name = path.name
        self.digest = digest(data)
        try:
            self.controls = Controls(data, (end, *ENDS))
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise UsageError(f"{path} is no tokenizer: {error}", remedy=REMEDY) from error
        self.vocab_size, self.num_in_texts = self.controls.vocab_size, self.controls.num_in_texts
        self.end, self.end_text = self.controls.end_id, self.controls.end
        self._end = [] if self.end is None else [self.end]
        name = self.controls.names[self.end_text] if self.end_text else ""
        opened = name.encode() + b"\n" + self.controls.file
        self._parser = Confined(open_tokenizer, opened, f"the tokenizer {path}")

    def encode(self, documents: Sequence[str]) -> list[npt.NDArray[np.uint32]]:
        """uint32."""
        found = self._encoded("encode", [without_noncharacters(text) for text in documents])
        return [np.array(ids + self._end if self._takes(ids) else [], np.uint32) for ids, _ in found]

    def encode_at(self, texts: Sequence[str]) -> list[tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]]:
        """The tokens of each text without an end, and the character at which each begins; control tokens by their names."""
        found = self._encoded("encode at", texts)
        return [(np.array(ids if self._takes(ids) else [], np.uint32), np.array(at, np.int64)) for ids, at in found]

    def prompt(self, text: str) -> list[int]:
        """The tokens of a text that goes on, at least one; the control tokens that it names are meant."""
        ((tokens, _),) = self.encode_at([self.controls.written(without_noncharacters(text))])
        found: list[int] = tokens.tolist()
        return found or [self.end or 0]

    def decode(self, tokens: npt.NDArray[Any]) -> str:
        """The text, special tokens left out. Raises `UsageError` for tokens that it cannot read."""
        known = [token for token in tokens.tolist() if token < self.vocab_size]
        return self.controls.read(self._ask("decode", known, 4 * MAX_GROWTH * (len(known) + 1)).decode())

    def _encoded(self, what: str, texts: Sequence[str]) -> list[tuple[list[int], list[int]]]:
        most = MAX_ANSWER + MAX_NUMBERS * sum(map(len, texts))
        return [(ids, begins) for ids, begins in json.loads(self._ask(what, list(texts), most))]

    def _takes(self, ids: list[int]) -> bool:
        return max(ids, default=0) < self.vocab_size

    def _ask(self, what: str, argument: object, most: int) -> bytes:
        return self._parser.ask(f"{what}\n{json.dumps(argument)}".encode(), most)


BYTES = ByteTokenizer()


def files_folder(home: Path) -> Path:
    """Return the folder of indices and tokenizers from elsewhere, each named by its hash."""
    return home / "cache" / "files"


def read_tokenizer(path: Path) -> bytes:
    """The bytes of a tokenizer's file, within their limit. Raises `UsageError`."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_TOKENIZER_BYTES + 1)
    except OSError as error:
        raise UsageError(f"cannot read the tokenizer {path}: {error.strerror}", remedy=REMEDY) from error
    if len(data) > MAX_TOKENIZER_BYTES:
        raise UsageError(f"{path} is larger than any tokenizer, more than 64 MiB", remedy="name a tokenizer.json")
    return data
