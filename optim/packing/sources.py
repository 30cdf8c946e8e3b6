"""Sources of documents by name, in parts that are read independently of each other.

    text:PATH                                   a file, a folder (every text file below it) or a glob
    text:{stdlib}                               the sources of Python's standard library
    parquet:PATH, json:PATH                     a path, a folder or a glob; JSON is one object a line, or a list
    hf:org/name[@commit][/folder], hf:FOLDER    files of a dataset of the hub, or of a folder of that form
    ...?split=train&column=text                 which split, and which column holds the text; these are the defaults
    ...?chat=1                                  rows are chats, of which the answers alone are learned

A part is some megabytes of lines, a row group, or a whole file where it cannot be cut. What of a source cannot be read is
left out and named (`skips`): one row ends no packing.
"""

import codecs
import contextlib
import gzip
import json
import math
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import Any, BinaryIO, cast
from urllib.parse import parse_qsl

from ...peer.base.disk import user_path
from ...peer.base.errors import LocalError, UsageError
from ...peer.base.install import how_to_install
from ...peer.base.plain import shortened
from .hub import ADDRESS, ENDINGS, chosen, dataset_files, opened
from .listing import listing, stdlib_files
from .skips import MAX_REASON, Flaw, Skips

TABLES = ("hf", "parquet", "json")
"""The kinds of sources whose documents are rows."""
STDLIB = "{stdlib}"
PART_BYTES = 8 << 20
"""A part of a file of lines: a few seconds of a tokenizer."""
MAX_DOCUMENT_BYTES = 16 << 20
"""The longest text of a row, and line of JSON."""
ROWS = 64
"""Rows of parquet that are decoded together."""
FEW = 1000
"""Bytes of a text for each zero in it, at least; what is no text has more of them."""
PROBE_BYTES = 4096
"""Of a file, by which it is known what it is."""
GZIP = b"\x1f\x8b"
"""What a file packed by gzip begins with (RFC 1952)."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a source that is read by itself."""

    kind: str
    """How it is read: text, json or parquet."""
    file: str
    """A path, or an address on the hub."""
    size: int
    """Bytes of the file in this part, for the progress."""
    start: int = 0
    """Where it begins: a byte, or of parquet a row group."""
    first: int = 0
    """Lines or rows of the file before it."""
    is_last: bool = True
    """Whether the file ends with it."""


@dataclass(slots=True)
class Source:
    """What a name of a source means now."""

    name: str
    column: str
    is_chat: bool
    parts: list[Part] = field(default_factory=list)
    skips: Skips = field(default_factory=Skips)
    """What is left out by the names of files, or by their first look."""
    stamps: list[tuple[str, int]] = field(default_factory=list)
    """Each file on this computer, and when it was changed."""


def open_source(name: str, *, chat: bool = False) -> Source:
    """Find the files of a source and cut them into parts. Raises `FlockstepError`.

    A name without a kind is a path, whose ending says how it is read. `chat` is as good as `?chat=1`.
    """
    kind, _, place = name.partition(":")
    if kind not in ("text", *TABLES):
        if ":" in name and not user_path(name).exists():
            remedy = "write text:, json:, parquet: or hf: and a place, or the path of a file"
            raise UsageError(f"there is no data source {name!r}", remedy=remedy)
        kind, place = next((kind for kind, ends in ENDINGS.items() if name.lower().endswith(ends)), "text"), name
    path, options = (place, {}) if kind == "text" else _options(name, place)
    is_chat = chat or options.get("chat") == "1"
    if is_chat and kind == "text":
        raise UsageError(f"{name} has no rows with messages", remedy="name a source of JSON or parquet")
    source = Source(name, options.get("column", "messages" if is_chat else "text"), is_chat)
    for how, file, size in _files_of(kind, path, options.get("split", "train"), source.skips):
        if how == "parquet" and find_spec("pyarrow") is None:
            raise LocalError(f"{name} needs the package pyarrow", remedy=how_to_install("hf"))
        if not file.startswith(ADDRESS):
            source.stamps.append((file, os.stat(file).st_mtime_ns))
        source.parts += _cut(how, file, size, source.skips)
    if not source.parts:
        raise nothing_in(source)
    return source


def nothing_in(source: Source) -> UsageError:
    """Return the error for a source without a document."""
    first, remedy = source.skips.first, "name other files, of text in UTF-8"
    why, reason = (f": {first}", first.reason) if first is not None else ("", "")
    if source.is_chat:
        remedy = "an answer is a message with the role assistant; ?column=NAME names another column of messages"
        return UsageError(f"no row of {source.name} is a chat with an answer{why}", remedy=remedy)
    if "the column" in reason:
        remedy = "name its column of text by ?column=…, or other files"
    elif "is no JSON" in reason:
        remedy = "write one object a line, or one list of objects"
    return UsageError(f"{source.name} holds no text{why}", remedy=remedy)


def read(part: Part, columns: Sequence[str], skips: Skips) -> Iterator[tuple[int, Any]]:
    """Yield the rows of a part with their numbers: of text the text, else an object with those of some columns that it has.

    Raises `LocalError` where a file cannot be reached.
    """
    number = 0
    try:
        with _open(part.file) as file:
            for number, row in _READERS[part.kind](file, part, columns):
                if isinstance(row, Flaw):
                    skips.add(part.file, number, row)
                else:
                    yield number, row
    except _Unreadable as error:
        skips.add(part.file, number and number + 1, error.flaw)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        skips.add(part.file, number + 1, Flaw(f"and all behind it cannot be unpacked: {_reason(error)}"))
    except OSError as error:
        remedy = "check the disk or the network: what is packed stays, and the same command goes on with it"
        raise LocalError(f"cannot read {part.file}: {error}", remedy=remedy) from error


class _Unreadable(Exception):
    """The rest of a file is not what it should be, as a flaw says."""

    @property
    def flaw(self) -> Flaw:
        """What is wrong."""
        found: Flaw = self.args[0]
        return found


def text_of(row: Any, column: str) -> str | Flaw:
    """Return the text in a column of a row; a lone surrogate, which no tokenizer takes, is replaced."""
    if not isinstance(row, dict):
        return Flaw(f"is {_kind_of(row)}, no object with a column {column!r}")
    if column not in row:
        return Flaw(f"has no text in the column {column!r} of {sorted(row)}")
    text = row[column]
    if isinstance(text, bytes):  # Some writers of parquet do not say that their bytes are UTF-8.
        try:
            text = text.decode()
        except UnicodeDecodeError as error:
            return Flaw(f"is no UTF-8: {error.reason} at byte {error.start}")
    if not isinstance(text, str):
        return Flaw(f"has {_kind_of(text)}, no text, in the column {column!r}")
    if len(text) > MAX_DOCUMENT_BYTES:
        return Flaw(f"has a text of {len(text) >> 20} MiB, more than {MAX_DOCUMENT_BYTES >> 20}")
    return text if text.isascii() else text.encode(errors="replace").decode()


def _kind_of(value: Any) -> str:
    """Return what a value is, in a word for people."""
    kinds = {bool: "true or false", int: "a number", float: "a number", list: "a list", dict: "an object", str: "a text"}
    return kinds.get(type(value), "null")


def _options(name: str, place: str) -> tuple[str, dict[str, str]]:
    path, _, query = place.partition("?")
    options = dict(parse_qsl(query, keep_blank_values=True))
    if unknown := sorted(set(options) - {"split", "column", "chat"}):
        raise UsageError(f"{name}: there is no option {unknown[0]!r}", remedy="known are split=, column= and chat=1")
    return path, options


def _files_of(kind: str, path: str, split: str, skips: Skips) -> Iterator[tuple[str, str, int]]:
    """Yield how each file of a source is read, its name and its size. Raises `FlockstepError`."""
    if kind == "text":
        files = stdlib_files() if path == STDLIB else listing(kind, path, skips)
        yield from (("text", str(file), file.stat().st_size) for file in files)
        return
    folder = user_path(path)
    if kind == "hf" and not folder.is_dir():
        how, found = dataset_files(path, split)
        yield from ((how, address, size) for address, size in found)
        return
    files = wanted = listing(kind, path, skips)
    if kind == "hf":
        kind, names = chosen([str(file.relative_to(folder)) for file in files], "", split, f"hf:{path}")
        wanted = [folder / name for name in names]
    elif folder.is_dir():
        wanted = [file for file in files if file.name.lower().endswith(ENDINGS[kind])]
        if not wanted:
            raise UsageError(f"{kind}:{path}: no file below it ends in {' or '.join(ENDINGS[kind])}", remedy="check the path")
    for file in sorted({*files} - {*wanted}):
        skips.leave(str(file), f"is not named as {kind} of the split {split} is")
    yield from ((kind, str(file), file.stat().st_size) for file in wanted)


def _cut(kind: str, name: str, size: int, skips: Skips) -> Iterator[Part]:
    """Yield the parts of a file; none of one that holds no such data at its beginning."""
    try:
        with _open(name) as file:
            if kind == "parquet":
                yield from _row_groups(name, file)
                return
            head = file.read(PROBE_BYTES)
            is_packed = kind == "json" and head.startswith(GZIP)
            if not head:
                return
            if kind == "text" and head.count(0) * FEW >= len(head):
                skips.leave(name, "is no text")
            elif name.startswith(ADDRESS) or is_packed or (kind == "json" and _is_list(head)):
                yield Part(kind, name, size)
            else:
                file.seek(0)
                yield from _lines(kind, name, file, size)
    except _Unreadable as error:
        skips.add(name, 0, error.flaw)
    except OSError as error:
        skips.add(name, 0, Flaw(f"cannot be read: {error.strerror or error}"))


def _lines(kind: str, name: str, file: BinaryIO, size: int) -> Iterator[Part]:
    """Yield parts of some megabytes that end with a line; of a text without lines, before a character."""
    cuts, at, lines = [(0, 0)], 0, 0
    while at < size and (block := file.read(PART_BYTES)):
        end = block.rfind(b"\n") + 1
        if not end and kind == "text":
            end = next((place for place in range(len(block) - 1, 0, -1) if block[place] & 0xC0 != 0x80), 0)
        at, lines = at + len(block), lines + block.count(b"\n")
        if end and at < size:
            cuts.append((at - len(block) + end, lines))
    for (start, first), (stop, _) in pairwise([*cuts, (size, 0)]):
        yield Part(kind, name, stop - start, start, first, stop == size)


def _row_groups(name: str, file: BinaryIO) -> list[Part]:
    from pyarrow import parquet

    with _parsing(name):
        metadata = parquet.read_metadata(file)
        groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    firsts = accumulate((group.num_rows for group in groups), initial=0)
    return [
        Part("parquet", name, group.total_byte_size, number, first, number == len(groups) - 1)
        for number, (group, first) in enumerate(zip(groups, firsts, strict=False))
    ]


def _read_text(file: BinaryIO, part: Part, columns: Sequence[str]) -> Iterator[tuple[int, str | Flaw]]:
    file.seek(part.start)
    data = file.read(part.size)
    broken, flaw = data.find(b"\0"), Flaw("holds a zero byte, which ends a document: remove it")
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        broken = error.start
        flaw = Flaw(f"is no UTF-8: byte {data[broken]:#04x}")
    line = part.first + 1
    yield (line, text) if broken < 0 else (line + data.count(b"\n", 0, broken), flaw)


def _read_json(file: BinaryIO, part: Part, columns: Sequence[str]) -> Iterator[tuple[int, Any]]:
    is_whole, head = part.start == 0 and part.is_last, file.read(PROBE_BYTES)
    file.seek(part.start)
    if is_whole and head.startswith(GZIP):
        file = cast(BinaryIO, gzip.GzipFile(fileobj=file))
        head = file.read(PROBE_BYTES)
        file.seek(0)
    if is_whole and _is_list(head):
        try:
            yield from enumerate(json.load(file), 1)
        except (ValueError, RecursionError) as error:
            raise _Unreadable(Flaw(f"is no JSON: {_reason(error)}")) from error
        return
    number, left = part.first, math.inf if is_whole else part.size
    while left > 0 and (line := file.readline(MAX_DOCUMENT_BYTES + 1)):
        number, left = number + 1, left - len(line)
        if len(line) > MAX_DOCUMENT_BYTES:
            while not line.endswith(b"\n") and left > 0 and (line := file.readline(PART_BYTES)):
                left -= len(line)
            yield number, Flaw(f"is longer than {MAX_DOCUMENT_BYTES >> 20} MiB")
        elif not line.isspace():
            yield number, _parsed(line)


def _read_parquet(file: BinaryIO, part: Part, columns: Sequence[str]) -> Iterator[tuple[int, Any]]:
    from pyarrow import parquet

    with _parsing(part.file):
        opened = parquet.ParquetFile(file)
        found = [name for name in columns if name in opened.schema_arrow.names]
        if not found:
            raise _Unreadable(Flaw(f"has no text in the column {columns[0]!r} of {sorted(opened.schema_arrow.names)}"))
        batches = opened.iter_batches(ROWS, row_groups=[part.start], columns=found)
        yield from enumerate(chain.from_iterable(batch.to_pylist() for batch in batches), part.first + 1)


_READERS = {"text": _read_text, "json": _read_json, "parquet": _read_parquet}


@contextlib.contextmanager
def _parsing(name: str) -> Iterator[None]:
    """Raise what the library says of a broken file as `_Unreadable`; what a disk or the network says stays an `OSError`."""
    import pyarrow

    broken = pyarrow.ArrowException  # Looked up now: a generator may be closed while the interpreter ends.
    try:
        yield
    except (broken, OSError) as error:
        if isinstance(error, OSError) and (error.errno or name.startswith(ADDRESS)):
            raise
        raise _Unreadable(Flaw(f"is no parquet: {_reason(error)}")) from error


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except UnicodeDecodeError as error:
        return Flaw(f"is no UTF-8: byte {line[error.start]:#04x} in column {error.start + 1}")
    except (ValueError, RecursionError) as error:
        return Flaw(f"is no JSON: {_reason(error)}")


def _is_list(head: bytes) -> bool:
    return head.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")


def _reason(error: BaseException) -> str:
    return shortened((str(error).splitlines() or [type(error).__name__])[0], MAX_REASON)


def _open(name: str) -> BinaryIO:
    return opened(name) if name.startswith(ADDRESS) else Path(name).open("rb")
