"""Texts of a parquet file of a stranger, in bounded memory.

Theory of operation. A few hundred bytes of such a file can state a page of 2 GB, or a word of 500 MB that a dictionary
repeats in each row. The library unpacks a page when it is asked for any row of it, and copies all rows that are asked for
together. So its file is read through one that sees each page's header pass by (`_Pages`), in the order in which the library
reads a column, and that raises before the library has a header of a page longer than its row group says to be. And what a row
group says decides how many rows are unpacked together: a row is no longer than a page. Whatever else the library may read
beside that column, or in another order, is refused.

A header is a Thrift struct in the compact protocol, of which two fields count; where this reader and the library could read
it differently (a field twice, a number of more bits than its type has) it is refused.
"""

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, BinaryIO

from .rows import Flaw

MAX_PAGE_BYTES = 512 << 20
"""The usual writers look at the length of a page every 1,024 rows: this is enough for rows of 500 kB, which books are."""
MAX_FOOTER_BYTES = 32 << 20
"""What may be read before a column: 1,000 row groups of 20 columns take some 5 MB, and ten times as much in memory."""
MAX_HEADER_BYTES = 1 << 20
"""Of a page: it may hold the least and the greatest text in it."""
MAX_DEPTH = 8
ROWS = 64
"""Rows that are decoded together, at most."""
READ_BYTES = 1 << 20
"""Of a column, read together: the whole would be as large as its row group."""
_STOP, _TRUE, _FALSE, _BYTE, _INT16, _INT32, _INT64, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = range(13)


class NotText(ValueError):
    """A parquet file whose column is no text, or is missing; it has the types of all columns by name."""

    def __init__(self, schema: Any) -> None:
        self.kinds = {field.name: str(field.type) for field in schema}
        super().__init__(f"it has no text, but columns {sorted(self.kinds)}")


@contextmanager
def _parsing() -> Iterator[None]:
    """Raise the library's own errors as `ValueError`."""
    import pyarrow

    broken = pyarrow.ArrowException  # Looked up now: a generator may be closed while the interpreter ends.
    try:
        yield
    except broken as error:
        raise ValueError(str(error)) from error


def group_starts(opened: BinaryIO) -> list[int]:
    """Return how many rows stand before each row group. Raises `OSError` and `ValueError`."""
    from pyarrow import parquet

    with _parsing():
        metadata = parquet.read_metadata(_Guarded(opened))
        sizes = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
    return list(accumulate(sizes[:-1], initial=0)) if sizes else []


def texts(opened: BinaryIO, column: str, group: int | None, most: int) -> Iterator[str | Flaw | None]:
    """Yield the texts of a row group, or of all of them: a `Flaw` for one of more than `most` bytes, None for a null.

    Raises `NotText`, and `OSError` and `ValueError` for a file that is not what it says.
    """
    with _parsing():
        yield from _texts(opened, column, group, most)


def _texts(opened: BinaryIO, column: str, group: int | None, most: int) -> Iterator[str | Flaw | None]:
    from pyarrow import parquet

    file = _Guarded(opened)
    source = parquet.ParquetFile(file, buffer_size=READ_BYTES, pre_buffer=False)
    schema, metadata = source.schema_arrow, source.metadata
    found = schema.get_field_index(column)
    leaves = [leaf for leaf in range(metadata.num_columns) if metadata.schema.column(leaf).path == column]
    if found < 0 or not _is_text(schema.field(found).type) or len(leaves) != 1:
        raise NotText(schema)
    for number in range(metadata.num_row_groups) if group is None else [group]:
        # Of the whole row group: to ask for a broken column itself aborts the process (pyarrow 26).
        stated = min(max(metadata.row_group(number).total_byte_size, MAX_PAGE_BYTES // ROWS), MAX_PAGE_BYTES)
        file.enter(stated)
        rows = max(1, min(ROWS, MAX_PAGE_BYTES // stated))
        for batch in source.iter_batches(rows, row_groups=[number], columns=[column]):
            for scalar in batch.column(0):
                text = scalar.value if hasattr(scalar, "dictionary") else scalar
                data = text.as_buffer() if text is not None and text.is_valid else None
                if data is not None and data.size > most:
                    yield Flaw(f"has a text of {data.size >> 20} MiB, more than {most >> 20}")
                    continue
                try:
                    yield None if data is None else str(memoryview(data), "utf-8")
                except UnicodeDecodeError as error:
                    yield Flaw(f"is no UTF-8: {error.reason} at byte {error.start}")


def objects(opened: BinaryIO, columns: Sequence[str], group: int | None) -> Iterator[dict[str, Any]]:
    """Yield the rows of a row group, or of all of them, with those of some columns that there are, whatever they hold.

    Without the bounds of `texts`: for a file that the user of this computer has named. Raises as `texts`.
    """
    from pyarrow import parquet

    with _parsing():
        source = parquet.ParquetFile(opened)
        found = [name for name in columns if name in source.schema_arrow.names]
        if not found:
            raise NotText(source.schema_arrow)
        for batch in source.iter_batches(ROWS, row_groups=None if group is None else [group], columns=found):
            yield from batch.to_pylist()


def _is_text(kind: Any) -> bool:
    from pyarrow import types

    kind = kind.value_type if types.is_dictionary(kind) else kind
    kinds = types.is_string, types.is_large_string, types.is_string_view, types.is_binary, types.is_large_binary
    return any(is_kind(kind) for is_kind in kinds)  # Some writers do not say that their bytes are UTF-8.


class _Guarded(io.RawIOBase):
    """A file of which the library reads a short footer, and then the checked pages of one column after the other."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._left = MAX_FOOTER_BYTES
        self._pages: _Pages | None = None

    def enter(self, most: int) -> None:
        """Let a column of a row group be read, whose pages have at most so many bytes."""
        self._pages = _Pages(most)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def read(self, size: int = -1) -> bytes:
        if self._pages is None:
            if not 0 <= size <= self._left:
                raise ValueError(f"its footer has more than {MAX_FOOTER_BYTES >> 20} MiB")
            self._left -= size
            return self._file.read(size)
        place = self._file.tell()
        self._pages.check_place(place)
        data = self._file.read(size)
        self._pages.see(place, data)
        return data


class _Pages:
    """The pages of a column of a row group, whose headers are checked as they pass by."""

    def __init__(self, most: int) -> None:
        self._start = self._next = -1
        """Where the first header begins, which is read first, and the next one."""
        self._most = most
        self._known = b""
        """What has been read from there on."""

    def check_place(self, place: int) -> None:
        """Raise `ValueError` for what stands before the column, or behind a header that was not seen."""
        if self._start < 0:
            self._start = self._next = place
        if not self._start <= place <= self._next + len(self._known):
            raise ValueError("its pages do not follow one another")

    def see(self, place: int, data: bytes) -> None:
        """Check the headers in these bytes. Raises `ValueError`."""
        self._known += data[max(0, self._next + len(self._known) - place) :]
        while self._known:
            header = page_header(self._known)
            if header is None:
                if len(self._known) > MAX_HEADER_BYTES:
                    raise ValueError("the header of a page does not end")
                return
            length, unpacked, packed = header
            if not (0 <= unpacked <= self._most and 0 <= packed <= MAX_PAGE_BYTES):
                raise ValueError(f"a page of it has {packed} bytes, and unpacked {unpacked}, more than its row group says")
            self._known = self._known[length + packed :]
            self._next += length + packed


def page_header(data: bytes) -> tuple[int, int, int] | None:
    """Return the length of a page's header, and its bytes unpacked and packed; None if it goes on. Raises `ValueError`."""
    found: dict[int, int] = {}
    try:
        length = _struct(data, 0, 0, found)
    except IndexError:
        return None
    if 2 not in found or 3 not in found:
        raise ValueError("the header of a page has no sizes")
    return length, found[2], found[3]


def _struct(data: bytes, at: int, depth: int, found: dict[int, int] | None = None) -> int:
    """Return where a struct ends; take its numbers of 32 bits into `found`."""
    field = 0
    while (kind := data[at] & 15) != _STOP:
        delta, at = data[at] >> 4, at + 1
        if not delta:
            number, at = _varint(data, at)
            field, delta = 0, _signed(number)
        field = (field + delta + 2**15) % 2**16 - 2**15  # As the library's 16 bits overflow.
        if kind == _INT32 and found is not None:
            if field in found:
                raise ValueError("the header of a page has a field twice")
            number, at = _varint(data, at)
            found[field] = _signed(number)
        elif kind not in (_TRUE, _FALSE):
            at = _skip(data, at, kind, depth + 1)
    return at + 1


def _skip(data: bytes, at: int, kind: int, depth: int) -> int:
    """Return where a value ends."""
    if depth > MAX_DEPTH:
        raise ValueError("the header of a page is nested too deeply")
    if kind in (_TRUE, _FALSE, _BYTE):
        at += 1
    elif kind in (_INT16, _INT32, _INT64):
        at = _varint(data, at)[1]
    elif kind == _DOUBLE:
        at += 8
    elif kind == _BINARY:
        length, at = _varint(data, at)
        at += length
    elif kind in (_LIST, _SET):
        head, at = data[at], at + 1
        count = head >> 4
        if count == 15:
            count, at = _varint(data, at)
        for _ in range(count):
            at = _skip(data, at, head & 15, depth + 1)
    elif kind == _STRUCT:
        return _struct(data, at, depth)
    else:  # Maps, which no header has.
        raise ValueError("the header of a page has a field of an unknown kind")
    if at > len(data):
        raise IndexError
    return at


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte, at = data[at], at + 1
        value |= (byte & 127) << shift
        if byte < 128:
            if value >= 2**63:
                break
            return value, at
    raise ValueError("the header of a page has a number of too many bits")


def _signed(number: int) -> int:
    return number >> 1 ^ -(number & 1)
