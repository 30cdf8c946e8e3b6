"""Sources: each row with its number, wherever files are cut; and what is left out is counted and named."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flockstep.optim.packing import sources
from flockstep.optim.packing.skips import Flaw
from flockstep.optim.packing.sources import Source, nothing_in, open_source, read, text_of
from flockstep.peer.base.errors import LocalError, UsageError

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

GOOD = [json.dumps({"text": f"{index:05d} a flock makes the outer step"}) for index in range(2000)]


def rows_of(source: Source) -> list[tuple[int, Any]]:
    """All rows, and in the source's skips what is left out."""
    found = []
    for part in source.parts:
        for number, row in read(part, [source.column], source.skips):
            text = row if part.kind == "text" else text_of(row, source.column)
            if isinstance(text, Flaw):
                source.skips.add(part.file, number, text)
            else:
                found.append((number, text))
    return found


def told(source: Source) -> str:
    """The first row that is left out, without the folder of its file."""
    rows_of(source)
    return str(source.skips.first).rpartition("/")[2]


def file_of(folder: Path, content: str | bytes, name: str = "x.jsonl") -> str:
    data = content.encode() if isinstance(content, str) else content
    (folder / name).write_bytes(data)
    return f"json:{folder / name}"


@pytest.mark.parametrize("size", [1 << 10, 1 << 13, 8 << 20])
@pytest.mark.parametrize("end", ["", "\n"])
def test_rows_have_their_numbers_wherever_a_file_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, end: str
) -> None:
    monkeypatch.setattr(sources, "PART_BYTES", size)
    lines = [*GOOD[:700], '{"text": null}', "", *GOOD[700:], "x" * 5000]
    source = open_source(file_of(tmp_path, "\n".join(lines) + end))
    assert len(source.parts) > 2 or size > 1 << 13
    assert [part.is_last for part in source.parts] == [False] * (len(source.parts) - 1) + [True]
    texts = [(number, json.loads(line)["text"]) for number, line in enumerate(lines, 1) if line.startswith('{"text": "')]
    assert rows_of(source) == texts
    assert source.skips.count == 2
    assert "row 701 has null, no text, in the column 'text'" in str(source.skips.first)


@pytest.mark.parametrize("text", ["".join(f"{number} über den Wäldern\n" for number in range(900)), "ü€𝄞" * 3000])
def test_the_parts_of_a_text_are_the_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sources, "PART_BYTES", 1001)
    (tmp_path / "x.txt").write_text(text)
    source = open_source(f"text:{tmp_path}/x.txt")
    assert len(source.parts) > 10
    assert "".join(row for _, row in rows_of(source)) == text
    broken = bytearray(text.encode())
    broken[5000] = 0xFF
    (tmp_path / "x.txt").write_bytes(broken)
    source = open_source(f"text:{tmp_path}/x.txt")
    rest = "".join(row for _, row in rows_of(source))
    assert len(text) - 1001 <= len(rest) < len(text)
    assert f"x.txt: row {broken[:5000].count(10) + 1} is no UTF-8: byte 0xff" in str(source.skips.first)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ('{"text": null}', "row 701 has null, no text, in the column 'text'"),
        ('{"id": 7}', "row 701 has no text in the column 'text' of ['id']"),
        ('{"text": 7}', "row 701 has a number, no text, in the column 'text'"),
        ('{"text": ["a"]}', "row 701 has a list, no text, in the column 'text'"),
        ('["a"]', "row 701 is a list, no object with a column 'text'"),
        ('{"text": "a', "row 701 is no JSON: Invalid control character"),
        ('{"text": 1' + "0" * 5000 + "}", "row 701 is no JSON: Exceeds the limit"),
        ('{"text": ' + "[" * 50_000, "row 701 is no JSON: maximum recursion"),
    ],
)
def test_a_row_without_text_is_left_out_and_named(tmp_path: Path, row: str, reason: str) -> None:
    source = open_source(file_of(tmp_path, "\n".join([*GOOD[:700], row, *GOOD[700:]]) + "\n"))
    assert len(rows_of(source)) == len(GOOD)
    assert f"x.jsonl: {reason}" in str(source.skips.first)
    assert source.skips.count == 1


def test_a_line_of_another_encoding_or_beyond_all_length_costs_that_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "MAX_DOCUMENT_BYTES", 1 << 12)
    monkeypatch.setattr(sources, "PART_BYTES", 1 << 11)
    lines = [line.encode() for line in GOOD[:400]]
    lines[3:3] = [b'{"text": "caf\xe9"}', b'{"text": "' + b"x" * 10_000 + b'"}', b'{"text": "\\ud800"}']
    source = open_source(file_of(tmp_path, b"\n".join(lines)))
    found = rows_of(source)
    assert (len(found), found[3]) == (401, (6, "?"))  # No tokenizer takes a lone surrogate.
    assert str(source.skips.first).endswith("x.jsonl: row 4 is no UTF-8: byte 0xe9 in column 14")
    assert source.skips.count == 2


def test_rows_of_a_list_and_of_parquet_are_named_by_their_number(tmp_path: Path) -> None:
    items = [*GOOD[:50], '{"text": 3}', *GOOD[50:90]]
    source = open_source(file_of(tmp_path, f"\ufeff [{','.join(items)}]", "x.json"))
    assert [number for number, _ in rows_of(source)] == [number for number in range(1, 92) if number != 51]
    assert "x.json: row 51 has a number" in str(source.skips.first)
    texts = [None if index == 333 else f"{index:05d} outer step" for index in range(400)]
    table = pyarrow.table({"text": texts, "id": list(range(400))})
    parquet.write_table(table, tmp_path / "x.parquet", row_group_size=10)
    source = open_source(f"parquet:{tmp_path / 'x.parquet'}")
    assert len(source.parts) == 40
    assert rows_of(source)[332:334] == [(333, "00332 outer step"), (335, "00334 outer step")]
    assert "x.parquet: row 334 has null, no text, in the column 'text'" in str(source.skips.first)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("x.json", f"[{GOOD[0]}, {GOOD[1]}, broken, {GOOD[2]}]".encode(), "x.json: is no JSON: Expecting value"),
        ("x.json", f"[{GOOD[0]}, {GOOD[1]}".encode(), "x.json: is no JSON: Expecting"),
        ("x.jsonl.gz", gzip.compress("\n".join(GOOD[:500]).encode(), mtime=0)[:-600], "and all behind it cannot be unpacked"),
        ("x.jsonl.gz", b"\x1f\x8b\x08 broken", "and all behind it cannot be unpacked"),
        ("x.jsonl", "\n".join(GOOD[:9]).encode("utf-16").replace(b"\n", b""), "x.jsonl: row 1 is no"),
        ("x.json", b"PK\x03\x04" + bytes(9), "x.json: row 1 is no"),
    ],
)
def test_what_cannot_be_read_of_one_file_is_named_and_the_others_are_read(
    tmp_path: Path, name: str, content: bytes, reason: str
) -> None:
    file_of(tmp_path, content, name)
    file_of(tmp_path, "\n".join(GOOD[1000:1500]), "good.jsonl")
    file_of(tmp_path, "", "empty.jsonl")
    source = open_source(f"json:{tmp_path}")
    assert len(rows_of(source)) >= 500
    assert reason in str(source.skips.first)
    assert source.skips.count == 1


def test_a_parquet_file_without_the_column_or_that_is_none_costs_that_file(tmp_path: Path) -> None:
    parquet.write_table(pyarrow.table({"text": GOOD[:300]}), tmp_path / "a.parquet")
    parquet.write_table(pyarrow.table({"other": GOOD[:300]}), tmp_path / "b.parquet")
    (tmp_path / "c.parquet").write_bytes(b"no parquet at all")
    parquet.write_table(pyarrow.table({"text": GOOD}), tmp_path / "d.parquet")
    whole = (tmp_path / "d.parquet").read_bytes()
    (tmp_path / "d.parquet").write_bytes(whole[:9] + bytes(200) + whole[209:])  # A damaged page.
    source = open_source(f"parquet:{tmp_path}")
    assert "c.parquet: is no parquet" in str(source.skips.first)
    assert len(rows_of(source)) == 300
    assert source.skips.count == 3
    with pytest.raises(UsageError, match=r"has no text in the column 'text' of \['other'\]") as refused:
        raise nothing_in_parts(open_source(f"parquet:{tmp_path}/b.parquet"))
    assert "name its column of text" in str(refused.value.remedy)


def nothing_in_parts(source: Source) -> UsageError:
    rows_of(source)
    return nothing_in(source)


def test_packed_files_are_read_by_what_they_are_and_not_by_their_names(tmp_path: Path) -> None:
    for number in range(4):
        packed = gzip.compress("\n".join(GOOD[number::4]).encode())
        file_of(tmp_path, packed, f"{number}.jsonl" if number % 2 else f"{number}.jsonl.gz")
    source = open_source(f"json:{tmp_path}")
    assert len(rows_of(source)) == len(GOOD)
    assert source.skips.count == 0


def test_a_column_of_bytes_is_text_and_one_of_another_type_is_named(tmp_path: Path) -> None:
    texts = [f"{index:05d} outer step" for index in range(400)]
    for name, made in ("a", str.encode), ("b", lambda text: [text]):
        parquet.write_table(pyarrow.table({"text": list(map(made, texts))}), tmp_path / f"{name}.parquet")
    source = open_source(f"parquet:{tmp_path}")
    assert [text for _, text in rows_of(source)] == texts
    assert "b.parquet: row 1 has a list, no text, in the column 'text'" in str(source.skips.first)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("parquet:{tmp}/missing", "no such file"),
        ("parquet:{tmp}/empty", "no file below it"),
        ("text:{tmp}/*.rst", "no such file or folder"),
        ("text:{tmp}/binary", "holds no text"),
        ("text:{tmp}/none.jsonl", "holds no text"),
        ("json:{tmp}/x.jsonl?columns=content", "no option 'columns'"),
        ("text:{tmp}/x.jsonl?column=content", "no such file"),
        ("parquet:{tmp}/x.jsonl", "is no parquet"),
        ("hf:nothing", "neither a folder here nor org/name"),
        ("hf:a/../d", "neither a folder here nor org/name"),
        ("hf:{tmp}/empty", "no parquet or JSON file"),
        ("text:~nobody-of-this-name/file", "no such file"),
        ("text:a\0b", "zero byte"),
        ("text:" + "x" * 300, "no file is called"),
        ("tokens:{tmp}/x.u16", "there is no data source"),
        ("https://x.example/y.jsonl", "there is no data source"),
        ("s3://bucket/y", "there is no data source"),
        ("txt:x.txt", "there is no data source"),
    ],
)
def test_what_is_no_source_is_one_line_with_a_remedy(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "x.jsonl").write_text('{"content": "text"}\n' * 40)
    (tmp_path / "none.jsonl").write_text("")
    (tmp_path / "binary").write_bytes(b"\0\xff" * 500)
    with pytest.raises(UsageError, match=message) as caught:
        open_source(name.replace("{tmp}", str(tmp_path)))
    assert caught.value.remedy


def test_files_that_are_no_text_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a flock makes the outer step " * 40)
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + bytes(range(256)) * 9)
    np.arange(4000, dtype="<u2").tofile(tmp_path / "tokens.u16")
    (tmp_path / "zero").write_bytes(b"\0")
    source = open_source(f"text:{tmp_path}")
    assert (source.skips.count, source.skips.num_left, len(rows_of(source))) == (0, 3, 1)


def test_a_local_dataset_of_the_hub_form_is_read_with_its_splits(tmp_path: Path) -> None:
    for split, lines in (("train", GOOD[:30]), ("test", GOOD[:5])):
        (tmp_path / f"{split}.jsonl").write_text("\n".join(lines))
    assert len(rows_of(open_source(f"hf:{tmp_path}"))) == 30
    assert len(rows_of(open_source(f"hf:{tmp_path}?split=test"))) == 5


def test_a_file_that_is_gone_meanwhile_ends_the_packing_with_one_line(tmp_path: Path) -> None:
    source = open_source(file_of(tmp_path, "\n".join(GOOD)))
    (tmp_path / "x.jsonl").unlink()
    with pytest.raises(LocalError, match=r"cannot read .*x\.jsonl") as refused:
        rows_of(source)
    assert "goes on" in str(refused.value.remedy)


def test_the_standard_library_is_at_hand_and_without_its_tests() -> None:
    source = open_source("text:{stdlib}")
    assert 5e6 < sum(part.size for part in source.parts) < 33e6
    assert not [part for part in source.parts if "/test/" in part.file or "site-packages" in part.file]
