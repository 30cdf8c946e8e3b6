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

import contextlib
import gzip
import shlex
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeVar
from urllib.parse import parse_qsl

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...peer.base.digest import digest
from ...peer.base.disk import user_path
from ...peer.base.errors import LocalError, UsageError
from ...peer.base.install import how_to_install
from .datasets import Repeated, SequenceUnits, source_of
from .hub import ENDINGS, chosen, hub_files
from .pages import NotText, group_starts, objects, texts
from .rows import BLANK, MAX_DOCUMENT_BYTES, Flaw, OtherForm, Skips, json_rows
from .text import listing
from .tokenizer import Tokenizer
from .units import MAX_UNITS, drawn

STREAMS = ("hf", "parquet", "json")

Tokens = npt.NDArray[np.int64]
T = TypeVar("T")

HELD_OUT_EVERY = 20
"""Every 20th block or document, 5 %, is for evaluation only."""

SAVED = ("state.json", "dataset_dict.json")
"""Either is in a folder of `save_to_disk`, beside files of Arrow."""

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

LOOKED = 1000
"""Rows that are looked at before training, one of which must have text."""

LOOKED_FILES = 32
"""Files or row groups on this computer of which the first rows are looked at; of the hub's, the first ones."""

MAX_BARE_ROWS = 1 << 20
"""Rows after one another that may be without text: a file of line breaks is packed a thousandfold."""

MAX_BARREN = 8
"""Pieces after one another that may have so many of them."""


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


@dataclass(frozen=True, slots=True)
class Piece:
    """A file, or a row group of a parquet file."""

    file: File
    group: int | None = None
    first: int = 0
    """Rows of the file before this group."""


class Documents:
    """The texts of files, in pieces: the files, or where these are few the row groups of parquet files.

    A row without text is skipped, and so is what cannot be read of a file: `skips` names it. So one row of a stranger's
    data ends no training.
    """

    def __init__(self, kind: str, files: Sequence[File], column: str, skips: Skips) -> None:
        self._kind = kind
        self._column = column
        self.skips = skips
        self._failure: OSError | None = None
        """Why a file was not read last, other than for what it holds."""
        self._barren = 0
        self.place = "", 0
        """The file and the row of what was read last."""
        self.pieces = [Piece(file) for file in files]
        if kind == "parquet" and len(files) < LEAST_PIECES:
            self.pieces = [piece for file in files for piece in self._groups(file)]

    def __iter__(self) -> Iterator[str]:
        """All texts."""
        return chain.from_iterable(map(self.read, range(len(self.pieces))))

    def read(self, piece: int) -> Iterator[str]:
        """Yield the texts of a piece.

        Raises `OSError` where the files cannot be reached now, and `UsageError` where many have a million rows without text.
        """
        bare, file = 0, self.pieces[piece].file
        for text in self._texts(self.pieces[piece]):
            if text:
                bare = self._barren = 0
                yield text
                continue
            bare += 1
            if bare > MAX_BARE_ROWS:
                what = f"{bare:,} rows after one another have no text"
                self.skips.add(file.name, 0, what)
                self._barren += 1
                if self._barren >= MAX_BARREN:
                    raise UsageError(f"{file.name}: {what}, as in the files before it", remedy="name other data")
                return

    def made(self, piece: int, columns: Sequence[str], make: Callable[[Any], T | Flaw | None]) -> Iterator[T]:
        """Yield what `make` makes of each row of a piece, of parquet with these columns alone; a `Flaw` is skipped, and None.

        Raises `OSError` as `read`.
        """
        rows = self._kept(self.pieces[piece], self._made(self.pieces[piece], columns, make))
        return (row for row in rows if row is not None)

    def check(self, name: str) -> None:
        """Warn if more than 1 % of the first rows have no text.

        Raises `UsageError` where none of them has, and `OSError` where that is for a file that cannot be read.
        """
        looked = found = 0
        for text in islice(self._first_rows(), LOOKED):
            looked += text != ""
            found += bool(text)
        if not found:
            raise self._failure or self._unusable(name)
        num_skipped = self.skips.count
        if num_skipped > looked / 100:
            self.skips.warning = f"{name}: of the first {looked:,} rows {num_skipped} are skipped, such as {self.skips.first}"

    def _first_rows(self) -> Iterator[str | None]:
        pieces, each = self.pieces, LOOKED
        if pieces and isinstance(pieces[0].file, LocalFile):
            pieces = pieces[:: -(-len(pieces) // LOOKED_FILES)]
            each = -(-LOOKED // len(pieces))
        return chain.from_iterable(islice(self._texts(piece), each) for piece in pieces)

    def _unusable(self, name: str) -> UsageError:
        first = self.skips.first
        if first is None:
            return UsageError(f"{name} holds no documents: no row of its files has text", remedy="name other files")
        remedy = first.remedy or "name other files"
        if "the column" in first.reason:
            remedy = "name its column of text by ?column=…, or other files"
        elif "is no JSON" in first.reason:
            remedy = "write one object a line, or one list of objects"
        return UsageError(f"cannot open {name}: {first}", remedy=remedy)

    def _texts(self, piece: Piece) -> Iterator[str | None]:
        """Yield each row's text, None for one that is skipped."""
        return self._kept(piece, self._rows(piece))

    def _kept(self, piece: Piece, rows: Iterator[tuple[int, T | Flaw | None]]) -> Iterator[T | None]:
        """Yield each row, None for one that is skipped; end where the rest of the piece is no data."""
        file, number = piece.file, piece.first
        try:
            for number, row in rows:
                if not isinstance(row, Flaw):
                    self.place = file.name, number
                    yield row
                    continue
                self.skips.add(file.name, number, row.reason, row.encoding)
                yield None
        except OtherForm as error:
            self.skips.add(file.name, 0, str(error), error.encoding)
        except gzip.BadGzipFile as error:
            self.skips.add(file.name, 0, f"is no gzip: {error}")
        except NotText as error:
            kind = error.kinds.get(self._column)
            why = f"has {kind}, no text, in the column {self._column!r}" if kind else self._no_text(sorted(error.kinds))
            self.skips.add(file.name, 0, why)
        except (ValueError, EOFError, zlib.error, OSError) as error:
            if isinstance(error, OSError) and (isinstance(error, ConnectionError) or self._are_away()):
                raise
            if isinstance(error, OSError):
                self._failure = error
            broken = number + 1 if number or self._kind == "json" else 0
            rest = "and all behind it cannot be read: " if broken else ""
            self.skips.add(file.name, broken, rest + self._reason(error))

    def _rows(self, piece: Piece) -> Iterator[tuple[int, str | Flaw]]:
        """Yield each row with its number: its text, or why it has none; "" for a blank line."""
        with piece.file.open() as opened:
            if self._kind == "parquet":
                for number, text in enumerate(texts(opened, self._column, piece.group, MAX_DOCUMENT_BYTES), piece.first + 1):
                    yield number, Flaw(f"has null in the column {self._column!r}") if text is None else text
                return
            for number, row in json_rows(opened):
                yield number, "" if row is BLANK else row if isinstance(row, Flaw) else self._text_of(row)

    def _made(
        self, piece: Piece, columns: Sequence[str], make: Callable[[Any], T | Flaw | None]
    ) -> Iterator[tuple[int, T | Flaw | None]]:
        with piece.file.open() as opened:
            if self._kind == "parquet":
                for number, row in enumerate(objects(opened, columns, piece.group), piece.first + 1):
                    yield number, make(row)
                return
            for number, row in json_rows(opened):
                if row is not BLANK:
                    yield number, row if isinstance(row, Flaw) else make(row)

    def _text_of(self, row: Any) -> str | Flaw:
        """Return the text of a row of JSON; a lone surrogate, which no tokenizer takes, is replaced."""
        if not isinstance(row, dict):
            return Flaw(f"is {_kind_of(row)}, no object with a column {self._column!r}")
        if self._column not in row:
            return Flaw(self._no_text(sorted(row)))
        text = row[self._column]
        if not isinstance(text, str):
            return Flaw(f"has {_kind_of(text)}, no text, in the column {self._column!r}")
        return text if text.isascii() else text.encode(errors="replace").decode()

    def _no_text(self, columns: list[str]) -> str:
        return f"has no text in the column {self._column!r} of {columns}"

    def _groups(self, file: File) -> Iterator[Piece]:
        with file.open() as opened:
            try:
                starts = group_starts(opened)
            except ValueError as error:
                self.skips.add(file.name, 0, self._reason(error))
                return
        yield from (Piece(file, group, first) for group, first in enumerate(starts))

    def _reason(self, error: Exception) -> str:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        return reason if self._kind == "json" else f"is no parquet: {reason}"

    def _are_away(self) -> bool:
        """Return True if none of some files can be opened: a disk that is not there, and no file that is gone."""
        for piece in self.pieces[:: -(-len(self.pieces) // LOOKED_FILES)]:
            with contextlib.suppress(OSError), piece.file.open():
                return False
        return True


def _kind_of(value: Any) -> str:
    """Return what a value of JSON is, in a word for people."""
    kinds = {bool: "true or false", int: "a number", float: "a number", list: "a list", dict: "an object", str: "a text"}
    return kinds.get(type(value), "null")


class TokenStream(SequenceUnits):
    """Training sequences of a stream, int64 (sequence_length + 1,), in units."""

    def __init__(
        self, documents: Documents, *, name: str, column: str, tokenizer: Tokenizer, sequence_length: int
    ) -> None:
        self._all = documents
        self._tokenizer = tokenizer
        self.name = name
        self.sequence_length = sequence_length
        self.vocab_size = tokenizer.num_in_texts
        self._ends: Tokens = np.empty(0, np.int64)
        """Of the units that this peer has read, what was left at their ends: documents may be shorter than a sequence."""
        pieces = len(documents.pieces)
        self._blocks = Repeated(documents) if pieces < LEAST_PIECES else None
        self.forward = self._blocks is not None
        self.num_units = min(pieces, MAX_UNITS) if self._blocks is None else self._blocks.num_units
        about = name.rpartition("/")[2], column, tokenizer.digest, sequence_length, pieces, self.num_units
        self.source = source_of(*about)

    def check(self) -> None:
        """Raise `UsageError` where all that is not held out is shorter than a sequence, and `OSError`."""
        num_tokens = 0
        for some in _together(text for text in self._all if not _is_held_out(text)):
            num_tokens += sum(map(len, self._tokenizer.encode(some)))
            if num_tokens > self.sequence_length:
                return
        what = f"{self.name} holds {num_tokens:,} tokens to train on, too few for a sequence of {self.sequence_length}"
        remedy = "use more data or a shorter sequence length; a text that is repeated is held out each time, or never"
        raise UsageError(what, remedy=remedy)

    def read(self, epoch: int, unit: int, done: int) -> Iterator[Tensor]:
        """Yield the sequences of a unit, and then those that fill up from the ends of this peer's units.

        Raises `LocalError` where they cannot be read now.
        """
        texts = (text for text in self._texts(self._documents(epoch, unit)) if not _is_held_out(text))
        order = drawn(MIXED, "order of a stream", self.source, str((epoch, unit)).encode())
        rest: list[Tokens] = []
        number = 0
        for number, sequence in enumerate(_mixed(self._packed(texts, rest), np.argsort(order, kind="stable").tolist()), 1):
            if number > done:
                yield sequence
        if number > done or not done:  # Else another peer, or a former life, has come to its end.
            self._ends = np.concatenate([self._ends, *rest])
            while len(self._ends) > self.sequence_length:
                yield torch.from_numpy(self._ends[: self.sequence_length + 1].copy())
                self._ends = self._ends[self.sequence_length :]

    def held_out(self) -> Iterator[Tensor]:
        """Sequences of the held-out documents."""
        return self._packed((text for text in self._texts(self._all) if _is_held_out(text)), [])

    def _documents(self, epoch: int, unit: int) -> Iterable[str]:
        if self._blocks is not None:
            return self._blocks.read(epoch, unit, 0)
        return chain.from_iterable(map(self._all.read, range(unit, len(self._all.pieces), self.num_units)))

    def _texts(self, documents: Iterable[str]) -> Iterator[str]:
        try:
            yield from documents
        except OSError as error:  # The hub was asked for half a minute by then.
            raise LocalError(f"cannot read {self.name}: {error}", remedy="check the disk or the network") from error

    def _packed(self, texts: Iterator[str], left: list[Tokens]) -> Iterator[Tensor]:
        """Yield L inputs and, shifted by one, L targets; what is too short at the end goes to `left`."""
        length, rest = self.sequence_length, np.empty(0, np.int64)
        for some in _together(texts):
            rest = np.concatenate([rest, *self._tokenizer.encode(some)], dtype=np.int64)
            count = (len(rest) - 1) // length
            for start in range(0, count * length, length):
                yield torch.from_numpy(rest[start : start + length + 1].copy())
            rest = rest[max(count, 0) * length :]
        left.append(rest)


def open_stream(
    kind: str,
    place: str,
    *,
    tokenizer: Tokenizer,
    sequence_length: int,
    trusted: bool = True,
    skips: Skips | None = None,
) -> TokenStream:
    """The stream of that name; if it is not `trusted`, a public one of the hub. Raises `UsageError`.

    `skips` takes what is skipped of it, now and in training.
    """
    name = f"{kind}:{place}"
    with _reaching(name, trusted=trusted):
        documents, column = open_documents(kind, place, trusted=trusted, skips=skips)
        stream = TokenStream(documents, name=name, column=column, tokenizer=tokenizer, sequence_length=sequence_length)
        stream.check()
    return stream


def open_documents(
    kind: str,
    place: str,
    *,
    trusted: bool = True,
    column: str = "text",
    is_text: bool = True,
    skips: Skips | None = None,
) -> tuple[Documents, str]:
    """The documents of that name, and the column of their text, or of something else. Raises `UsageError`."""
    name = f"{kind}:{place}"
    if find_spec("pyarrow") is None:
        raise UsageError(f"{name} needs the package pyarrow", remedy=how_to_install("hf"))
    path, _, query = place.partition("?")
    options = {"split": "train", "column": column, **dict(parse_qsl(query, keep_blank_values=True))}
    if unknown := sorted(set(options) - {"split", "column"}):
        raise UsageError(f"{name}: there is no option {unknown[0]!r}", remedy="known are split= and column=")
    column = options["column"]
    with _reaching(name, trusted=trusted):
        skips = skips or Skips()
        reader, files = _files_of(kind, path, options["split"], trusted=trusted, skips=skips)
        documents = Documents(reader, files, column, skips)
        if is_text:
            documents.check(name)
    return documents, column


@contextlib.contextmanager
def _reaching(name: str, *, trusted: bool) -> Iterator[None]:
    """Raise `UsageError` for what cannot be reached."""
    try:
        yield
    except OSError as error:
        private = "" if trusted else f"; if it is private or gated, pass --allow-data {shlex.quote(name)}"
        remedy = f"check its name, its split, and the network{private}"
        raise UsageError(f"cannot open {name}: {error}", remedy=remedy) from error


def _files_of(kind: str, path: str, split: str, *, trusted: bool, skips: Skips) -> tuple[str, Sequence[File]]:
    """Return the reader and the files of a name. Raises `UsageError` and `OSError`."""
    folder = user_path(path)
    if kind == "hf" and trusted and any((folder / name).is_file() for name in SAVED):
        code = shlex.quote("import sys, datasets as d; d.load_from_disk(sys.argv[1]).to_parquet(sys.argv[2])")
        remedy = f"convert it: python -c {code} {shlex.quote(path)} NEW.parquet, and write parquet:NEW.parquet"
        raise UsageError(f"hf:{path} is what save_to_disk has written, which datasets alone reads", remedy=remedy)
    if kind == "hf" and not (trusted and folder.is_dir()):
        return hub_files(path, split, trusted=trusted)
    files = wanted = listing(kind, path, skips)
    if kind == "hf":
        kind, names = chosen([str(file.relative_to(folder)) for file in files], "", split, f"hf:{path}")
        wanted = [folder / name for name in names]
    elif folder.is_dir():
        wanted = [file for file in files if file.name.lower().endswith(ENDINGS[kind])]
        if not wanted:
            raise UsageError(f"{kind}:{path}: no file below it ends in {' or '.join(ENDINGS[kind])}", remedy="check the path")
    for file in sorted({*files} - {*wanted}):
        name, endings = file.name.lower(), sum(ENDINGS.values(), ())
        if not name.endswith(endings) and any(ending in name for ending in endings):
            skips.add(str(file), 0, "is packed, or a copy: unpack it")
        else:
            skips.leave(str(file), f"is not named as {kind} of the split {split} is")
    return kind, [LocalFile(file) for file in wanted]


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
