"""Documents that are streamed: parquet and JSON files, here or on the Hugging Face hub, packed into sequences.

    hf:org/name[@commit][/folder], hf:FOLDER    files of a dataset of the hub, or of a folder of that form
    parquet:PATH, json:PATH                     files: a path, a folder or a glob; JSON is one object a line, or a list
    ...?split=train&column=text                 which split, and which column holds the text; these are the defaults

Of a dataset its files are read and nothing else: no README, no script, no configuration, and of the files one column of
text. A row without text is skipped. A document goes through the tokenizer and is packed with its neighbours. Where the
files (or the row groups of parquet files) are many, a unit (`data_units`) is some of them, so that a peer reads hardly
more than its share; where they are few, it is a block of documents, and a peer skips those of the others. Every 20th
document, chosen by the hash of its text, is held out, so that it is the same ones everywhere, whatever their order is.
"""

import gzip
import io
import json
import shlex
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast
from urllib.parse import parse_qsl

import numpy as np
import torch
from torch import Tensor

from ...peer.digest import digest
from ...peer.disk import user_path
from ...peer.errors import LocalError, UsageError
from ...peer.plain import shortened
from ..consent import HUB_DATASET
from .datasets import Repeated, Units, source_of
from .hub import ENDINGS, chosen, hub_files, newest_commit
from .pages import NotText, num_groups, texts
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

TOGETHER = 8 << 20
"""Their characters: a tokenizer takes some twenty times as much memory, and a token eight bytes."""

PIECE = 1 << 20
"""Characters of a document that go through it at once: a longer one is so many documents."""

MIXED = 256
"""Sequences that are shuffled together, so that those of a batch are not all of one document."""


MAX_DOCUMENT_BYTES = 16 << 20
"""The longest text, line of JSON, or item of a list: of empty objects, Python makes thirty times as many bytes."""

MARK = (b"\xef", b"\xbb", b"\xbf")
"""What some editors begin a file with."""

MAX_GAP = 1 << 12
"""Spaces before the first row."""

GAP = " \t\r\n,"
"""What may stand between two items of a list."""

BUFFER = 1 << 20
"""Characters of a list of JSON that are read together."""

LOOKED = 1000
"""The first rows, in which a column of text must have one."""

MAX_BARE_ROWS = 1 << 20
"""Rows after one another that may be without text: a file of line breaks is packed a thousandfold."""


MAX_REASON = 500
"""Characters of what is wrong: a file may have a million columns."""


class File(Protocol):
    """A file of documents, here or on the hub."""

    @property
    def name(self) -> str:
        """Return its name, for people."""

    def open(self) -> BinaryIO:
        """Open it for reading from any place. Raises `OSError`."""


@dataclass(frozen=True, slots=True)
class LocalFile:
    """A file on this computer."""

    path: Path

    @property
    def name(self) -> str:
        """See `File`."""
        return str(self.path)

    def open(self) -> BinaryIO:
        """See `File`."""
        return self.path.open("rb")


class Documents:
    """The texts of files, in pieces: the files, or where these are few the row groups of parquet files."""

    def __init__(self, kind: str, files: Sequence[File], column: str) -> None:
        self._kind = kind
        self._column = column
        self._columns: list[str] = []
        """What was seen instead of it."""
        self.pieces: list[tuple[File, int | None]] = [(file, None) for file in files]
        if kind == "parquet" and len(files) < LEAST_PIECES:
            groups = [(file, group) for file in files for group in range(self._num_groups(file))]
            self.pieces = [*groups]

    def __iter__(self) -> Iterator[str]:
        """All texts."""
        return chain.from_iterable(map(self.read, range(len(self.pieces))))

    def read(self, piece: int) -> Iterator[str]:
        """The texts of a piece. Raises `UsageError` for what is no file of that kind, `OSError` for one that is not read."""
        file, group = self.pieces[piece]
        bare = 0
        for text in self._rows(file, group):
            bare = 0 if text and isinstance(text, str) else bare + 1
            if not bare:
                yield text
            elif bare > MAX_BARE_ROWS:
                raise UsageError(f"{file.name}: {bare:,} rows after one another have no text", remedy="name other data")

    def check(self, name: str) -> None:
        """Raise `UsageError` where none of the first rows has text."""
        looked = 0
        for text in islice(chain.from_iterable(self._rows(file, group) for file, group in self.pieces), LOOKED):
            if isinstance(text, str):
                return
            looked += 1
        if not looked:
            raise UsageError(f"{name} holds no documents", remedy="check its name and its split")
        raise self._no_text(name)

    def _no_text(self, name: str) -> UsageError:
        what = f"{name} has no text in the column {self._column!r} of {self._columns}"
        return UsageError(shortened(what, MAX_REASON), remedy="name its column of text: ?column=…")

    def _rows(self, file: File, group: int | None) -> Iterator[Any]:
        return self._parquet(file, group) if self._kind == "parquet" else self._json(file)

    def _num_groups(self, file: File) -> int:
        with file.open() as opened:
            try:
                return num_groups(opened)
            except ValueError as error:
                raise _not_of_kind(file, "parquet", error) from error

    def _parquet(self, file: File, group: int | None) -> Iterator[Any]:
        with file.open() as opened:
            try:
                yield from texts(opened, self._column, group, MAX_DOCUMENT_BYTES)
            except NotText as error:
                self._columns = error.columns
                raise self._no_text(file.name) from error
            except ValueError as error:
                raise _not_of_kind(file, "parquet", error) from error

    def _json(self, file: File) -> Iterator[Any]:
        with file.open() as opened, _unpacked(file, opened) as data:
            first = data.read(1)
            for _ in range(MAX_GAP):
                if not first.isspace() and first not in MARK:
                    break
                first = data.read(1)
            rows = _items(data, file) if first == b"[" else _lines(first, data, file)
            for row in rows:
                if isinstance(row, dict) and self._column not in row:
                    self._columns = sorted(row)
                yield row.get(self._column) if isinstance(row, dict) else None


def _unpacked(file: File, opened: BinaryIO) -> BinaryIO:
    return cast(BinaryIO, gzip.GzipFile(fileobj=opened)) if file.name.endswith(".gz") else opened


def _lines(first: bytes, data: BinaryIO, file: File) -> Iterator[Any]:
    """The objects of a file that has one a line, behind the first byte."""
    number = 0
    while line := first + data.readline(MAX_DOCUMENT_BYTES + 1):
        first, number = b"", number + 1
        if len(line) > MAX_DOCUMENT_BYTES:
            raise UsageError(f"{file.name}: line {number} is longer than {MAX_DOCUMENT_BYTES >> 20} MiB")
        if line.isspace():
            yield None
            continue
        try:
            yield json.loads(line)
        except (ValueError, RecursionError) as error:
            raise _not_of_kind(file, f"JSON in line {number}", error) from error


def _items(data: BinaryIO, file: File) -> Iterator[Any]:
    """The items of a list, behind its bracket."""
    decoder, pieces = json.JSONDecoder(), io.TextIOWrapper(data, encoding="utf-8")
    text, place, number, grows = "", 0, 1, True
    try:
        while grows:
            grows = bool(piece := pieces.read(BUFFER))
            text, place = text[place:] + piece, 0
            while (place := _after_gap(text, place)) < len(text):
                if text[place] == "]":
                    return
                try:
                    item, end = decoder.raw_decode(text, place)
                except ValueError:
                    if not grows or len(text) - place > MAX_DOCUMENT_BYTES:
                        raise
                    break
                if end == len(text) and grows:  # A number may go on.
                    break
                yield item
                number, place = number + 1, end
            else:
                if len(text) >= BUFFER and not text.strip(GAP):
                    raise ValueError(f"nothing stands in {len(text):,} characters")
    except (ValueError, RecursionError) as error:
        raise _not_of_kind(file, f"JSON in item {number}", error) from error


def _after_gap(text: str, place: int) -> int:
    while place < len(text) and text[place] in GAP:
        place += 1
    return place


def _not_of_kind(file: File, kind: str, error: Exception) -> UsageError:
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    reason = shortened(reason, MAX_REASON)
    return UsageError(f"cannot open {file.name}: it is no {kind}: {reason}", remedy="check the file, or name others")


class TokenStream(Units):
    """Training sequences of a stream, int64 (sequence_length + 1,), in units."""

    def __init__(
        self, documents: Documents, *, name: str, column: str, tokenizer: Tokenizer, sequence_length: int
    ) -> None:
        self._all = documents
        self._tokenizer = tokenizer
        self.name = name
        self.sequence_length = sequence_length
        self.vocab_size = tokenizer.vocab_size
        """How many tokens its tokenizer knows."""
        pieces = len(documents.pieces)
        self._blocks = Repeated(documents) if pieces < LEAST_PIECES else None
        self.forward = self._blocks is not None
        self.num_units = min(pieces, MAX_UNITS) if self._blocks is None else self._blocks.num_units
        about = name.rpartition("/")[2], column, tokenizer.digest, sequence_length, pieces, self.num_units
        self.source = source_of(*about)

    def read(self, epoch: int, unit: int, done: int) -> Iterator[Tensor]:
        """Sequences of a unit. Raises `LocalError` where they can no longer be read."""
        texts = (text for text in self._texts(self._documents(epoch, unit)) if not _is_held_out(text))
        order = drawn(MIXED, "order of a stream", self.source, str((epoch, unit)).encode())
        return islice(_mixed(self._packed(texts), np.argsort(order, kind="stable").tolist()), done, None)

    def held_out(self) -> Iterator[Tensor]:
        """Sequences of the held-out documents."""
        return self._packed(text for text in self._texts(self._all) if _is_held_out(text))

    def _documents(self, epoch: int, unit: int) -> Iterable[str]:
        if self._blocks is not None:
            return self._blocks.read(epoch, unit, 0)
        return chain.from_iterable(map(self._all.read, range(unit, len(self._all.pieces), self.num_units)))

    def _texts(self, documents: Iterable[str]) -> Iterator[str]:
        try:
            yield from documents
        except (OSError, EOFError, zlib.error) as error:  # The hub was asked for half a minute by then.
            raise LocalError(f"cannot read {self.name}: {error}", remedy="check the disk or the network") from error

    def _packed(self, texts: Iterator[str]) -> Iterator[Tensor]:
        """L inputs and, shifted by one, L targets; what is left at the end of a unit is too short and dropped."""
        length, rest = self.sequence_length, np.empty(0, np.int64)
        for some in _together(texts):
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
    if find_spec("pyarrow") is None:
        raise UsageError(f"{name} needs the package pyarrow", remedy="pip install 'flockstep[hf]'")
    path, _, query = place.partition("?")
    options = {"split": "train", "column": "text", **dict(parse_qsl(query, keep_blank_values=True))}
    if unknown := sorted(set(options) - {"split", "column"}):
        raise UsageError(f"{name}: there is no option {unknown[0]!r}", remedy="known are split= and column=")
    try:
        reader, files = _files_of(kind, path, options["split"], trusted=trusted)
        documents = Documents(reader, files, options["column"])
        documents.check(name)
    except (OSError, EOFError, zlib.error) as error:
        private = "" if trusted else f"; if it is private or gated, pass --allow-data {shlex.quote(name)}"
        remedy = f"check its name, its split, and the network{private}"
        raise UsageError(f"cannot open {name}: {error}", remedy=remedy) from error
    return TokenStream(
        documents, name=name, column=options["column"], tokenizer=tokenizer, sequence_length=sequence_length
    )


def _files_of(kind: str, path: str, split: str, *, trusted: bool) -> tuple[str, Sequence[File]]:
    """Return the reader and the files of a name. Raises `UsageError` and `OSError`."""
    if kind != "hf":
        return kind, [LocalFile(file) for file in _files(kind, path)]
    folder = user_path(path)
    if trusted and folder.is_dir():
        names = [str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()]
        kind, found = chosen(names, "", split, f"hf:{path}")
        return kind, [LocalFile(folder / name) for name in found]
    return hub_files(path, split, trusted=trusted)


def pinned_source(source: str) -> str:
    """Return a source with the present commit of a dataset of the hub that names none. Raises `UsageError`."""
    kind, _, place = source.partition(":")
    path, mark, query = place.partition("?")
    match = HUB_DATASET.fullmatch(path)
    if kind != "hf" or match is None or match["commit"] or user_path(path).is_dir():
        return source
    commit = newest_commit("datasets", match["repository"])
    folder = f"/{match['folder']}" if match["folder"] else ""
    return f"hf:{match['repository']}@{commit}{folder}{mark}{query}"


def _files(kind: str, path: str) -> list[Path]:
    folder, endings = user_path(path), ENDINGS[kind]
    if not folder.is_dir():
        return files_of(path, kind)
    files = sorted(file for file in folder.rglob("*") if file.name.endswith(endings) and file.is_file())
    if not files:
        raise UsageError(f"{kind}:{path}: no file below it ends in {' or '.join(endings)}", remedy="check the path")
    return files


def _together(texts: Iterator[str]) -> Iterator[list[str]]:
    """Documents, or pieces of long ones, that go through the tokenizer together."""
    some, size = list[str](), 0
    for text in texts:
        for start in range(0, max(1, len(text)), PIECE):
            some.append(text[start : start + PIECE])
            size += len(some[-1])
            if len(some) == DOCUMENTS or size >= TOGETHER:
                yield some
                some, size = [], 0
    if some:
        yield some


def _is_held_out(text: str) -> bool:
    return int.from_bytes(digest(text.encode(errors="replace"))[:8], "little") % HELD_OUT_EVERY == 0


def _mixed(sequences: Iterator[Tensor], order: list[int]) -> Iterator[Tensor]:
    while some := list(islice(sequences, len(order))):
        yield from (some[index] for index in order if index < len(some))
