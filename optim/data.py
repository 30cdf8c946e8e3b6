"""Data sources by name, cut into sequences, shards, and a held-out twentieth that nobody trains on.

    text:PATH       a file, a folder (every text file below it) or a glob; tokens are the UTF-8 bytes
    text:{stdlib}   the sources of Python's standard library: text that every computer has at hand
    tokens:PATH     a file of uint16 or uint32, little-endian: `x.u16`, `x.u32`, or `x.bin?dtype=uint16`

Sequence i is `tokens[i·L : i·L + L + 1]`: L inputs and, shifted by one, L targets. A shard is a run of sequences, all
shards are of one length, and every 20th is held out: spread over the whole text, and the same on every peer with the
same data.
"""

import glob
import sysconfig
from collections.abc import Iterable, Iterator
from itertools import chain, count, islice
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import default_collate

from ..peer.errors import UsageError
from .shards import Shares

SHARD_SEQUENCES = 64
"""Sequences of a shard of a large source; a small one has shorter shards, so that there are enough to share."""

HELD_OUT_EVERY = 20
"""Every 20th shard, 5 %, is for evaluation only."""

OPEN_SHARDS = 16
"""Shards that a peer reads from in turn, so that the sequences of a batch are not neighbours."""

MAX_TEXT_BYTES = 2 << 30
"""Text is held in memory: beyond this, a memory-mapped `tokens:` file is the better way."""

MAX_STDLIB_BYTES = 32 << 20
"""Enough for any demonstration; keeps a distribution with unusual additions from growing it."""

Tokens: TypeAlias = npt.NDArray[np.uint8] | npt.NDArray[np.uint16] | npt.NDArray[np.uint32]


class TokenSource:
    """Sequences of `sequence_length` + 1 tokens, grouped in training shards and held-out shards."""

    def __init__(self, tokens: Tokens, sequence_length: int, *, name: str) -> None:
        num_sequences = (len(tokens) - 1) // sequence_length
        if num_sequences < HELD_OUT_EVERY:
            raise UsageError(
                f"{name} has {len(tokens)} tokens, too few for {HELD_OUT_EVERY} sequences of {sequence_length}",
                remedy="use more data or a shorter sequence length",
            )
        self.name = name
        self.sequence_length = sequence_length
        self.shard_sequences = min(SHARD_SEQUENCES, max(1, num_sequences // (5 * HELD_OUT_EVERY)))
        shards = np.arange(num_sequences // self.shard_sequences)
        self._tokens = tokens
        self._held_out = shards[HELD_OUT_EVERY // 2 :: HELD_OUT_EVERY]
        self._training = np.setdiff1d(shards, self._held_out)

    @property
    def num_shards(self) -> int:
        """Training shards."""
        return len(self._training)

    def sequence(self, shard: int, index: int) -> Tokens:
        """Sequence `index` of training shard `shard`: `sequence_length` + 1 tokens."""
        return self._sequence(int(self._training[shard]), index)

    @property
    def num_held_out(self) -> int:
        """Held-out sequences."""
        return len(self._held_out) * self.shard_sequences

    def held_out(self, index: int) -> Tokens:
        """Held-out sequence `index`: `sequence_length` + 1 tokens."""
        shard, index = divmod(index, self.shard_sequences)
        return self._sequence(int(self._held_out[shard]), index)

    def _sequence(self, shard: int, index: int) -> Tokens:
        start = (shard * self.shard_sequences + index) * self.sequence_length
        return self._tokens[start : start + self.sequence_length + 1]


class Batches(Iterator[Tensor]):
    """Endless training batches of one peer: int64 (batch_size, sequence_length + 1).

    `position` counts the sequences given so far; a new `Batches` with that position goes on from there.
    """

    def __init__(self, source: TokenSource, shares: Shares, *, batch_size: int, position: int = 0) -> None:
        self.position = position
        self._source = source
        self._shares = shares
        self._batch_size = batch_size
        self._epoch = -1
        self._order: list[int] = []

    def __next__(self) -> Tensor:
        batch = _stack(self._sequence(self.position + i) for i in range(self._batch_size))
        self.position += self._batch_size
        return batch

    def _sequence(self, position: int) -> Tokens:
        length = self._source.shard_sequences
        epoch, position = divmod(position, self._source.num_shards * length)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, list(self._shares.order(epoch))
        first = position // (OPEN_SHARDS * length) * OPEN_SHARDS
        opened = self._order[first : first + OPEN_SHARDS]
        index, turn = divmod(position - first * length, len(opened))
        return self._source.sequence(opened[turn], index)


def share_of(dataset: Any, shares: Shares, *, batch_size: int) -> Iterator[Any]:
    """Endless batches of one peer from a map-style dataset (`dataset[i]`), collated as torch's DataLoader does.

    The shards of `shares` are the samples. Raises `UsageError` where there are none.
    """
    if not shares.num_shards:
        raise UsageError("the dataset is empty", remedy="give share_of a dataset with at least one sample")
    samples = chain.from_iterable(shares.order(epoch) for epoch in count())
    while True:
        yield default_collate([dataset[i] for i in islice(samples, batch_size)])


def heldout_batches(source: TokenSource, *, batch_size: int, num_batches: int) -> Iterator[Tensor]:
    """At most `num_batches` full batches of held-out sequences, int64 (batch_size, sequence_length + 1), always the same.

    They are spread evenly over all that is held out. Where that is less than one batch, it comes as one smaller batch.
    """
    total = source.num_held_out
    batch_size = min(batch_size, total)
    used = min(num_batches, total // batch_size) * batch_size
    for start in range(0, used, batch_size):
        yield _stack(source.held_out(i * total // used) for i in range(start, start + batch_size))


def open_source(source: str, *, tokenizer: str = "bytes", sequence_length: int) -> TokenSource:
    """The source that a manifest or a volunteer names. Raises `UsageError` where it is missing, empty or no text."""
    if sequence_length < 1:
        raise UsageError(f"sequence length {sequence_length} is not positive")
    kind, _, place = source.partition(":")
    if kind == "tokens":
        return TokenSource(_map_tokens(place), sequence_length, name=source)
    if kind != "text":
        raise UsageError(f"there is no data source {source!r}", remedy=f"write text:{source} or tokens:{source}")
    if tokenizer != "bytes":
        raise UsageError(
            f"text is read as bytes, not by the tokenizer {tokenizer!r}",
            remedy="write its tokens to a file and use tokens:PATH",
        )
    if place == "{stdlib}":
        text = _read_text(_stdlib_files(), most=MAX_STDLIB_BYTES)
    else:
        text = _read_text(_text_files(place), most=MAX_TEXT_BYTES + 1)
        if len(text) > MAX_TEXT_BYTES:
            raise UsageError(
                f"{source} holds more than 2 GiB of text", remedy="use a tokens: file, which is not loaded"
            )
    if not text:
        raise UsageError(f"{source} holds no text", remedy="name a file of UTF-8 text, or a folder that has some")
    return TokenSource(np.frombuffer(text, np.uint8), sequence_length, name=source)


def _stack(sequences: Iterable[Tokens]) -> Tensor:
    return torch.from_numpy(np.stack([sequence.astype(np.int64) for sequence in sequences]))


def _map_tokens(place: str) -> Tokens:
    name, _, query = place.partition("?")
    path = Path(name).expanduser()
    kind = {"dtype=uint16": "<u2", "dtype=uint32": "<u4", ".u16": "<u2", ".u32": "<u4"}.get(query or path.suffix)
    if kind is None:
        raise UsageError(
            f"tokens:{place} does not say how wide its tokens are",
            remedy=f"write tokens:{name}?dtype=uint16 or =uint32",
        )
    try:
        size = path.stat().st_size
        if size % np.dtype(kind).itemsize or not size:
            raise UsageError(f"{path}: {size} bytes are no whole number of tokens", remedy="check its dtype")
        tokens: Tokens = np.memmap(path, kind, mode="r")
    except OSError as error:
        raise UsageError(
            f"cannot read {path}: {error.strerror}", remedy="check the path and its permissions"
        ) from error
    return tokens


def _text_files(place: str) -> list[Path]:
    """The files of a path or glob, in the order of their names; hidden ones below a folder are left out."""
    path = Path(place).expanduser()
    if path.is_dir():
        return _below(path, "*", skip=())
    files = [path] if path.is_file() else sorted(Path(found) for found in glob.glob(str(path), recursive=True))
    if not files:
        raise UsageError(f"text:{place}: there is no such file or folder", remedy="check the path")
    return [file for file in files if file.is_file()]


def _stdlib_files() -> list[Path]:
    # Tests are a third of it and much of their text is data; site-packages differs from computer to computer.
    return _below(Path(sysconfig.get_path("stdlib")), "*.py", skip=("site-packages", "test", "tests", "idle_test"))


def _below(folder: Path, pattern: str, *, skip: tuple[str, ...]) -> list[Path]:
    found = [(file.relative_to(folder).parts, file) for file in folder.rglob(pattern) if file.is_file()]
    return [file for parts, file in sorted(found) if not any(part in skip or part.startswith(".") for part in parts)]


def _read_text(files: Iterable[Path], *, most: int) -> bytearray:
    """Whole files, each closed by a zero byte (which no text contains), up to `most` bytes; binary files are skipped."""
    text = bytearray()
    for file in files:
        try:
            content = file.read_bytes()
            content.decode()
        except UnicodeDecodeError:
            continue
        except OSError as error:
            raise UsageError(f"cannot read {file}: {error.strerror}", remedy="check its permissions") from error
        if content and b"\0" not in content:
            text += content + b"\0"
        if len(text) >= most:
            break
    del text[most:]
    return text
