"""Documents that are streamed: parquet and JSON files, and datasets of the Hugging Face hub, packed into sequences.

    hf:org/name[/config], hf:FOLDER      a dataset of the hub, or one in a folder of its form
    parquet:PATH, json:PATH              files: a path, a folder or a glob; JSON is one object a line, or a list
    ...?split=train&column=text          which split, and which column holds the text; these are the defaults

The only user of the `datasets` package (extra `hf`). It downloads data and never code: version 4 knows no dataset that
is a program. A document goes through the tokenizer and is packed with its neighbours. Where the files (or the row groups
of parquet files) are many, a unit (`data_units`) is some of them, so that a peer reads hardly more than its share; where
they are few, it is a block of documents, and a peer skips those of the others. Every 20th document, chosen by the hash
of its text, is held out, so that it is the same ones everywhere, whatever their order is.
"""

import shlex
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from itertools import chain, islice
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import numpy as np
import torch
from torch import Tensor

from ...peer.digest import digest
from ...peer.disk import user_path
from ...peer.errors import LocalError, UsageError
from .datasets import Repeated, Units, source_of
from .text import files_of
from .tokenizer import Tokenizer
from .units import MAX_UNITS, drawn

STREAMS = ("hf", "parquet", "json")

HELD_OUT_EVERY = 20
"""Every 20th block or document, 5 %, is for evaluation only."""

LEAST_PIECES = 32
"""Files or row groups; with fewer of them, peers would often find none that is free."""

DOCUMENTS = 64
"""Documents that go through the tokenizer together, on several threads."""

MIXED = 256
"""Sequences that are shuffled together, so that those of a batch are not all of one document."""


class TokenStream(Units):
    """Training sequences of a stream, int64 (sequence_length + 1,), in units."""

    def __init__(self, stream: Any, *, name: str, column: str, tokenizer: Tokenizer, sequence_length: int) -> None:
        if stream.num_shards < LEAST_PIECES:
            stream = _resharded(stream)
        self._stream = stream
        self._column = column
        self._tokenizer = tokenizer
        self.name = name
        self.sequence_length = sequence_length
        self.vocab_size = tokenizer.vocab_size
        """How many tokens its tokenizer knows."""
        pieces = stream.num_shards
        self._blocks = Repeated(stream) if pieces < LEAST_PIECES else None
        self.forward = self._blocks is not None
        self.num_units = min(pieces, MAX_UNITS) if self._blocks is None else self._blocks.num_units
        about = name.rpartition("/")[2], column, tokenizer.digest, sequence_length, pieces, self.num_units
        self.source = source_of(*about)
        self.check()

    def check(self) -> None:
        """Raise `UsageError` where the first document is not there or has no text."""
        first = next(iter(self._texts(self._stream.take(1))), None)
        if first is None:
            raise UsageError(f"{self.name} holds no documents", remedy="check its name and its split")

    def read(self, epoch: int, unit: int, done: int) -> Iterator[Tensor]:
        """Sequences of a unit. Raises `LocalError` where they can no longer be read."""
        texts = (text for text in self._texts(self._documents(epoch, unit)) if not _is_held_out(text))
        order = drawn(MIXED, "order of a stream", self.source, str((epoch, unit)).encode())
        return islice(_mixed(self._packed(texts), np.argsort(order, kind="stable").tolist()), done, None)

    def held_out(self) -> Iterator[Tensor]:
        """Sequences of the held-out documents."""
        return self._packed(text for text in self._texts(self._stream) if _is_held_out(text))

    def _documents(self, epoch: int, unit: int) -> Iterable[dict[str, Any]]:
        if self._blocks is not None:
            return self._blocks.read(epoch, unit, 0)
        pieces = range(unit, self._stream.num_shards, self.num_units)
        return chain.from_iterable(self._stream.shard(self._stream.num_shards, piece) for piece in pieces)

    def _texts(self, documents: Iterable[dict[str, Any]]) -> Iterator[str]:
        try:
            for document in documents:
                if not isinstance(text := document.get(self._column), str):
                    raise UsageError(
                        f"{self.name} has no text in the column {self._column!r} of {sorted(document)}",
                        remedy="name its column of text: ?column=…",
                    )
                yield text
        except OSError as error:  # The package has tried for minutes by then.
            raise LocalError(f"cannot read {self.name}: {error}", remedy="check the disk or the network") from error

    def _packed(self, texts: Iterator[str]) -> Iterator[Tensor]:
        """L inputs and, shifted by one, L targets; what is left at the end of a unit is too short and dropped."""
        length, rest = self.sequence_length, np.empty(0, np.int64)
        while some := list(islice(texts, DOCUMENTS)):
            rest = np.concatenate([rest, *self._tokenizer.encode(some)], dtype=np.int64)
            count = (len(rest) - 1) // length
            for start in range(0, count * length, length):
                yield torch.from_numpy(rest[start : start + length + 1].copy())
            rest = rest[max(count, 0) * length :]


def open_stream(
    kind: str, place: str, *, tokenizer: Tokenizer, sequence_length: int, trusted: bool = True
) -> TokenStream:
    """The stream of that name; if it is not `trusted`, a public one of the hub. Raises `UsageError`."""
    name = f"{kind}:{place}"
    if find_spec("datasets") is None:
        raise UsageError(f"{name} needs the package datasets", remedy="pip install 'flockstep[hf]'")
    path, _, query = place.partition("?")
    options = {"split": "train", "column": "text", **dict(parse_qsl(query, keep_blank_values=True))}
    if unknown := sorted(set(options) - {"split", "column"}):
        raise UsageError(f"{name}: there is no option {unknown[0]!r}", remedy="known are split= and column=")
    import datasets

    try:
        if kind == "hf":
            stream = _load_hf(path, options["split"], trusted=trusted)
            if not trusted:  # Other columns may be images or files, which are opened from where their rows say.
                stream = stream.select_columns([options["column"]])
        else:
            files = [str(file) for file in _files(kind, path)]
            split = options["split"]
            stream = datasets.load_dataset(kind, data_files={split: files}, split=split, streaming=True)
        return TokenStream(
            stream, name=name, column=options["column"], tokenizer=tokenizer, sequence_length=sequence_length
        )
    except (OSError, ValueError, StopIteration, datasets.exceptions.DatasetsError) as error:  # StopIteration: no line.
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        private = "" if trusted else f"; if it is private or gated, pass --allow-data {shlex.quote(name)}"
        remedy = f"check its name, its split, and the network{private}"
        raise UsageError(f"cannot open {name}: {reason}", remedy=remedy) from error


def _load_hf(path: str, split: str, *, trusted: bool) -> Any:
    import datasets

    folder = user_path(path)
    if trusted and folder.is_dir():
        return datasets.load_dataset(str(folder), split=split, streaming=True)
    parts = path.split("/")
    if len(parts) not in (2, 3) or not all(parts):
        raise UsageError(f"hf:{path} is neither a folder here nor org/name", remedy="write hf:org/name or hf:FOLDER")
    config = parts[2] if len(parts) == 3 else None
    builder = datasets.load_dataset_builder("/".join(parts[:2]), config, token=None if trusted else False)
    if not trusted:
        check_files(path, builder)
    return builder.as_streaming_dataset(split=split)


def check_files(name: str, builder: Any) -> None:
    """Raise `UsageError` for a dataset with files outside of the hub: its description may name any path or address."""
    if not builder.config.data_files:  # As of what an earlier download left in the cache, a private dataset perhaps.
        raise UsageError(f"hf:{name} has no files on the hub", remedy="check its name and the network")
    for files in builder.config.data_files.values():
        for file in files:
            if not file.startswith("hf://datasets/"):
                raise UsageError(
                    f"hf:{name} names the file {file}, which is not on the hub",
                    remedy="tell the run's owner, and do not join it",
                )


def _files(kind: str, path: str) -> list[Path]:
    folder = user_path(path)
    endings = {"parquet": ["*.parquet"], "json": ["*.json", "*.jsonl"]}[kind]
    if not folder.is_dir():
        return files_of(path, kind)
    files = sorted(file for ending in endings for file in folder.rglob(ending) if file.is_file())
    if not files:
        raise UsageError(f"{kind}:{path}: no file below it ends in {' or '.join(endings)}", remedy="check the path")
    return files


def _resharded(stream: Any) -> Any:
    """The row groups of parquet files as pieces; a stream that has no such thing as it is."""
    try:
        return stream.reshard()
    except NotImplementedError:
        return stream


def _is_held_out(text: str) -> bool:
    return int.from_bytes(digest(text.encode(errors="replace"))[:8], "little") % HELD_OUT_EVERY == 0


def _mixed(sequences: Iterator[Tensor], order: list[int]) -> Iterator[Tensor]:
    while some := list(islice(sequences, len(order))):
        yield from (some[index] for index in order if index < len(some))
