"""Rows of JSON files of a stranger, in bounded memory; and a count of the rows that are skipped.

A file is one object a line, or one list of objects, in UTF-8, packed by gzip or not, whatever its name is. A line that is
no JSON costs that line. Of a list that breaks off, or of a packed file that is damaged, nothing more can be read.
"""

import gzip
import io
import json
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

from ...peer.base.plain import plain_text, shortened

MAX_DOCUMENT_BYTES = 16 << 20
"""The longest text, line of JSON, or item of a list: of empty objects, Python makes thirty times as many bytes."""

MAX_SKIPPED_BYTES = 1 << 30
"""Of lines of a file that are too long: a line of blanks is packed a thousandfold."""

MARK = (b"\xef", b"\xbb", b"\xbf")
"""What some editors begin a file with."""

GZIP = b"\x1f\x8b"
"""What a packed file begins with (RFC 1952)."""

FORMS = {
    GZIP: "packed by gzip: unpack it",
    b"BZh": "packed by bzip2: unpack it",
    b"\xfd7zXZ\0": "packed by xz: unpack it",
    b"\x28\xb5\x2f\xfd": "packed by zstd: unpack it",
    b"PK\x03\x04": "a zip, as documents of an office are: unpack it, or save it as text",
    b"%PDF": "a PDF: save it as text",
    b"PAR1": "parquet: name it by parquet:PATH",
    b"ARROW1": "Arrow: write it as parquet",
}
"""What files begin with that may hold text, but not as their bytes, and what to do with them."""

MAX_GAP = 1 << 12
"""Spaces before the first row."""

GAP = " \t\r\n,"
"""What may stand between two items of a list."""

BUFFER = 1 << 20
"""Characters of a list of JSON that are read together."""

MAX_REASON = 500
"""Characters of what is wrong: a file may have a million columns."""

MAX_NAMED = 100
"""Skipped rows that are reported one by one; further ones are only counted."""

MAX_LEFT = 5
"""Files that are left out and named in a line."""

MAX_KNOWN = 1 << 16
"""Skipped rows that are counted once, however often an epoch comes to them: 8 MB."""


BLANK = object()
"""Stands for a line without a row."""


@dataclass(frozen=True, slots=True)
class Document:
    """A text, and the row of a file where it stands; row 0 is the whole file."""

    text: str
    file: str = ""
    row: int = 0


@dataclass(frozen=True, slots=True)
class Flaw:
    """Stands for a row that cannot be read, and says why."""

    reason: str
    encoding: str = ""
    """Of a text that is no UTF-8: what it may be."""


class OtherForm(ValueError):
    """A file of another form; of a text that is no UTF-8 its encoding."""

    def __init__(self, reason: str, encoding: str = "") -> None:
        super().__init__(reason)
        self.encoding = encoding


class OtherEncoding(OtherForm):
    """A text that is no UTF-8, but of this encoding."""

    def __init__(self, encoding: str) -> None:
        super().__init__(f"is {encoding}, not UTF-8", encoding)


@dataclass(frozen=True, slots=True)
class Skip:
    """A row that nobody trains on. With row 0 it is a whole file."""

    file: str
    row: int
    reason: str
    encoding: str = ""
    """Of a text that is no UTF-8: what it may be."""

    @property
    def remedy(self) -> str:
        """What makes a text of another encoding readable; empty for any other row."""
        if not self.encoding:
            return ""
        file = shlex.quote(self.file)
        return f"convert it: iconv -f {self.encoding} -t UTF-8 {file} > NEW, and name NEW"

    def __str__(self) -> str:
        place = f"row {self.row:,} " if self.row else ""
        return plain_text(shortened(f"{self.file}: {place}{self.reason}", MAX_REASON))


class Skips:
    """What of the data is skipped; `report` is called with each of the first, however often an epoch comes to them."""

    def __init__(self, report: Callable[[Skip], None] = lambda skip: None) -> None:
        self._report = report
        self._places: set[tuple[str, int]] = set()
        self.count = 0
        """Different rows that were skipped; of more than `MAX_KNOWN` those that come again count again."""
        self.first: Skip | None = None
        self.num_left, self.left = 0, list[str]()
        """Files of a folder that are left out for their names, which is mostly meant; and the first of them, and why."""
        self.warning = ""
        """A line for people, if more than 1 % of the rows that were looked at are skipped, or a file with text."""

    def add(self, file: str, row: int, reason: str, encoding: str = "") -> None:
        """Count a row, and report it if it is one of the first."""
        if (file, row) in self._places:
            return
        self.count += 1
        if self.count > MAX_KNOWN:
            return
        self._places.add((file, row))
        skip = Skip(file, row, shortened(reason, MAX_REASON), encoding)
        self.first = self.first or skip
        if self.count <= MAX_NAMED:
            self._report(skip)

    def leave(self, file: str, reason: str) -> None:
        """Count a file of a folder that is left out for its name, or as no text."""
        self.num_left += 1
        self.left += [str(Skip(file, 0, reason))] if self.num_left <= MAX_LEFT else []


def json_rows(opened: BinaryIO) -> Iterator[tuple[int, Any]]:
    """Yield each row with its number: that of its line, or of its item in the list; a `Flaw` for one that is no JSON.

    A blank line is `BLANK`. Raises `ValueError`, `EOFError`, `zlib.error` and `OSError` where nothing more can be read.
    """
    data = _unpacked(opened)
    start = data.read(8)
    if form := form_of(start):
        raise OtherForm(form)
    if encoding := wide_encoding(start[:4]):
        raise OtherEncoding(encoding)
    data.seek(0)
    number, first = 1, data.read(1)
    for _ in range(MAX_GAP):
        if not first.isspace() and first not in MARK:
            break
        number += first == b"\n"
        first = data.read(1)
    yield from _items(data) if first == b"[" else _lines(number, first, data)


def form_of(start: bytes) -> str:
    """Return what a file is by its first bytes, where it holds text in another form; empty for all else."""
    return next((f"is {form}" for mark, form in FORMS.items() if start.startswith(mark)), "")


def wide_encoding(start: bytes) -> str:
    """Return the name of an encoding of two or four bytes a character, by the first bytes of a text; empty for others."""
    if start[:4] in (b"\xff\xfe\0\0", b"\0\0\xfe\xff"):
        return "UTF-32"
    if start[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return "UTF-16"
    start = start[: len(start) & ~1]
    zeros = [start[half::2].count(0) * 2 / max(len(start), 4) for half in (0, 1)]
    if max(zeros) < 0.5 or min(zeros) > 0.1:  # Where a text is of Latin letters; what is no text has zeros anywhere.
        return ""
    encoding = "UTF-16BE" if zeros[0] > zeros[1] else "UTF-16LE"
    text = start.decode(encoding, "replace")
    return encoding if sum(char.isprintable() or char.isspace() for char in text) > 0.95 * len(text) else ""


def _unpacked(opened: BinaryIO) -> BinaryIO:
    packed = opened.read(2) == GZIP
    opened.seek(0)
    return cast(BinaryIO, gzip.GzipFile(fileobj=opened)) if packed else opened


def _lines(number: int, first: bytes, data: BinaryIO) -> Iterator[tuple[int, Any]]:
    """The objects of a file that has one a line, behind the first byte."""
    skipped = 0
    while line := first + data.readline(MAX_DOCUMENT_BYTES + 1):
        first = b""
        if len(line) > MAX_DOCUMENT_BYTES:
            while line and not line.endswith(b"\n"):
                line = data.readline(BUFFER)
                skipped += len(line)
                if skipped > MAX_SKIPPED_BYTES:
                    raise ValueError(f"lines longer than {MAX_DOCUMENT_BYTES >> 20} MiB are more than {skipped >> 20} MiB")
            yield number, Flaw(f"is longer than {MAX_DOCUMENT_BYTES >> 20} MiB")
        else:
            yield number, BLANK if line.isspace() else _parsed(line)
        number += 1


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line.decode())
    except UnicodeDecodeError as error:
        return Flaw(f"is no UTF-8: byte {line[error.start]:#04x} in column {error.start + 1}", "LATIN1")
    except (ValueError, RecursionError) as error:
        return Flaw(f"is no JSON: {_reason(error)}")


def _items(data: BinaryIO) -> Iterator[tuple[int, Any]]:
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
                yield number, item
                number, place = number + 1, end
            else:
                if len(text) >= BUFFER and not text.strip(GAP):
                    raise ValueError(f"nothing stands in {len(text):,} characters")
    except UnicodeDecodeError as error:
        raise OtherEncoding("LATIN1") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is no JSON: {_reason(error)}") from error
    finally:
        pieces.detach()  # Whoever has opened the file closes it.
    raise ValueError("is missing: the list has no end")


def _after_gap(text: str, place: int) -> int:
    while place < len(text) and text[place] in GAP:
        place += 1
    return place


def _reason(error: BaseException) -> str:
    return shortened((str(error).splitlines() or [type(error).__name__])[0], MAX_REASON)
