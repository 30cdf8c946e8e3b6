"""Parquet files that unpack to more than they are, and the headers of pages, byte by byte."""

import io
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from flockstep.optim.data import pages
from flockstep.optim.data.pages import page_header
from flockstep.optim.data.rows import MAX_DOCUMENT_BYTES, Flaw
from flockstep.optim.data.streams import open_stream
from flockstep.optim.data.tokenizer import BYTES
from flockstep.peer.base.errors import UsageError
from hypothesis import given
from hypothesis import strategies as st

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

HEADER = bytes([0x15, 4, 0x15, 200, 1, 0x15, 100, 0x4C, 0x15, 2, 0x18, 2, 65, 66, 0x21, 0, 0])
"""A page of kind 2 with 100 bytes, 50 packed, and in field 7 a struct with a number, a text and a truth."""
MIB = 1 << 20


def file_of(column: Any, **options: Any) -> bytes:
    out = io.BytesIO()
    parquet.write_table(pyarrow.table({"number": range(len(column)), "text": column}), out, **options)
    return out.getvalue()


def read(data: bytes, most: int = MAX_DOCUMENT_BYTES) -> list[str | Flaw | None]:
    return list(pages.texts(io.BytesIO(data), "text", None, most))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"row_group_size": 100, "compression": "zstd"},
        {"data_page_version": "2.0", "use_dictionary": False, "compression": "none"},
        {"use_dictionary": False, "column_encoding": {"text": "DELTA_BYTE_ARRAY", "number": "PLAIN"}},
        {"data_page_size": 100, "write_page_checksum": True, "write_page_index": True},
    ],
)
def test_what_is_written_is_read(options: dict[str, Any]) -> None:
    texts = [None if index % 7 == 3 else f"{index} öß " * (index % 50) for index in range(1000)]
    for kind in (pyarrow.string(), pyarrow.large_string(), pyarrow.string_view()):
        assert read(file_of(pyarrow.array(texts, kind), **options)) == texts
    if "column_encoding" not in options:
        assert read(file_of(pyarrow.array(texts).dictionary_encode(), **options)) == texts


def test_a_text_that_a_dictionary_repeats_is_unpacked_as_often_as_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    repeated = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 640), pyarrow.array(["a" * MIB]))
    data = file_of(repeated, compression="zstd", store_schema=False)
    assert len(data) < 10_000
    monkeypatch.setattr(pages, "MAX_PAGE_BYTES", 2 * MIB)
    before, pool = pyarrow.default_memory_pool(), pyarrow.proxy_memory_pool(pyarrow.default_memory_pool())
    pyarrow.set_memory_pool(pool)
    try:
        assert next(pages.texts(io.BytesIO(data), "text", None, MAX_DOCUMENT_BYTES)) == "a" * MIB
    finally:
        pyarrow.set_memory_pool(before)
    assert pool.max_memory() < 16 * MIB


def test_pages_and_texts_beyond_what_a_column_may_have_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    data = file_of(["a" * 3 * MIB] * 3, compression="zstd", use_dictionary=False)
    assert read(data, 2 * MIB) == [Flaw("has a text of 3 MiB, more than 2")] * 3
    monkeypatch.setattr(pages, "MAX_PAGE_BYTES", 2 * MIB)
    with pytest.raises(ValueError, match="more than its row group says"):
        read(data)
    monkeypatch.setattr(pages, "MAX_FOOTER_BYTES", 10)
    with pytest.raises(ValueError, match="its footer has more than"):
        read(data)


@pytest.mark.parametrize("column", [[1, 2], [["a"], ["b"]], [{"text": "a"}], [None, None]])
def test_a_column_of_another_kind_is_not_read(column: Any) -> None:
    with pytest.raises(pages.NotText, match="it has no text"):
        read(file_of(column))


def test_bytes_that_are_no_text_are_one_line(tmp_path: Path) -> None:
    data = pyarrow.array([b"a\xff" * 9] * 9, pyarrow.binary())
    text = pyarrow.StringArray.from_buffers(len(data), *data.buffers()[1:])
    (tmp_path / "train.parquet").write_bytes(file_of(text))
    with pytest.raises(UsageError, match=r"row 1 is no UTF-8: invalid start byte at byte 1"):
        open_stream("parquet", str(tmp_path), tokenizer=BYTES, sequence_length=8)


def test_a_footer_that_the_library_does_not_read_raises() -> None:
    """Where the footer's statistics of sizes are broken, asking the library for the column ends the process."""
    data = file_of(["a text"] * 300, data_page_size=200, store_schema=False)
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    for place in range(footer, len(data) - 8):
        broken = bytearray(data)
        broken[place] ^= 2  # Among them that which makes the column a required one.
        with suppress(ValueError, OSError):
            read(bytes(broken))


def test_a_header_is_read_to_its_end() -> None:
    assert page_header(HEADER + b"page") == (len(HEADER), 100, 50)
    for length in range(len(HEADER)):
        assert page_header(HEADER[:length]) is None


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (bytes([0x15, 4, 0]), "has no sizes"),
        (bytes([0x26, 4, 0x15, 4, 0]), "has no sizes"),  # A number of 64 bits is not the field.
        (bytes([0x25, 4, 0x15, 4, 0x05, 4, 8, 0]), "a field twice"),
        (bytes([0x25]) + b"\xff" * 11, "too many bits"),
        (bytes([0x1C] * 20), "nested too deeply"),
        (bytes([0x1B, 0]), "unknown kind"),
    ],
)
def test_a_header_that_two_readers_could_read_differently_is_refused(header: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        page_header(header)


def test_fields_overflow_as_in_the_library() -> None:
    """Field 2 again, after 65,536 of them."""
    again = bytes([0x15, 4, 0x15, 4, 0x15, 4]) + bytes([0xF1] * 4369) + bytes([0x05, 4, 8, 0])
    with pytest.raises(ValueError, match="twice"):
        page_header(again)


@given(st.binary(max_size=60))
def test_any_bytes_are_a_header_or_none_or_refused(data: bytes) -> None:
    try:
        header = page_header(data)
    except ValueError:
        return
    assert header is None or header[0] <= len(data)
