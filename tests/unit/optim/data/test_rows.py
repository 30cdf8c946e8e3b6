"""Rows that are no data: skipped, counted and named, whatever is wrong with them; and what nothing can be read of."""

import bz2
import gzip
import json
import lzma
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from flockstep.optim.data import rows, streams
from flockstep.optim.data.rows import MAX_NAMED, Skip, Skips, wide_encoding
from flockstep.optim.data.sources import TokenSource, open_source, warning_of
from flockstep.optim.data.streams import TokenStream
from flockstep.optim.data.tokenizer import ByteTokenizer
from flockstep.peer.base.errors import LocalError, UsageError
from hypothesis import given
from hypothesis import strategies as st

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

LENGTH = 16
GOOD = [json.dumps({"text": f"{index:05d} a flock makes the outer step"}) for index in range(2000)]


class Seen:
    """A source, and what was skipped of it."""

    def __init__(self, name: str, length: int = LENGTH) -> None:
        self.skipped: list[Skip] = []
        self.skips = Skips(self.skipped.append)
        self.source = open_source(name, sequence_length=length, skips=self.skips)

    def lines(self) -> list[str]:
        """Read an epoch and what is held out; return what was skipped, without the folders of files."""
        assert isinstance(self.source, TokenStream)
        for unit in range(min(self.source.num_units, 64)):
            list(self.source.read(0, unit, 0))
        return [str(skip).rpartition("/")[2] for skip in self.skipped]


def file_of(folder: Path, content: str | bytes, name: str = "x.jsonl") -> str:
    data = content.encode() if isinstance(content, str) else content
    (folder / name).write_bytes(data)
    return f"json:{folder / name}"


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ('{"text": null}', "row 701 has null, no text, in the column 'text'"),
        ('{"id": 7}', "row 701 has no text in the column 'text' of ['id']"),
        ('{"text": 7}', "row 701 has a number, no text, in the column 'text'"),
        ('{"text": ["a"]}', "row 701 has a list, no text, in the column 'text'"),
        ('{"text": {"a": 1}}', "row 701 has an object, no text, in the column 'text'"),
        ('["a"]', "row 701 is a list, no object with a column 'text'"),
        ("null", "row 701 is null, no object with a column 'text'"),
        ('{"text": "a', "row 701 is no JSON: Invalid control character"),
        ('{"text": 1' + "0" * 5000 + "}", "row 701 is no JSON: Exceeds the limit"),
        ('{"text": ' + "[" * 50_000, "row 701 is no JSON: maximum recursion"),
    ],
)
def test_a_row_without_text_is_skipped_and_named_once(tmp_path: Path, row: str, reason: str) -> None:
    seen = Seen(file_of(tmp_path, "\n".join([*GOOD[:700], row, *GOOD[700:]]) + "\n"))
    lines = seen.lines()
    assert len(lines) == 1
    assert lines[0].startswith(f"x.jsonl: {reason}")
    assert seen.skips.warning == ""  # One in a thousand.


def test_a_line_of_another_encoding_or_beyond_all_length_costs_that_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "MAX_DOCUMENT_BYTES", 1 << 12)
    lines = [line.encode() for line in GOOD[:400]]
    lines[3:3] = [b'{"text": "caf\xe9"}', b'{"text": "' + b"x" * 10_000 + b'"}', b'{"text": "\\ud800"}']
    seen = Seen(file_of(tmp_path, b"\n".join(lines)))
    assert seen.lines() == ["x.jsonl: row 4 is no UTF-8: byte 0xe9 in column 14", "x.jsonl: row 5 is longer than 0 MiB"]


class StrictTokenizer(ByteTokenizer):
    """As those of the `tokenizers` package, it takes no lone surrogates."""

    def encode(self, documents: Sequence[str]) -> list[npt.NDArray[np.uint8]]:
        for text in documents:
            text.encode()
        return super().encode(documents)


def test_no_tokenizer_gets_what_is_no_text(tmp_path: Path) -> None:
    lines = [line.replace("flock", "\\ud800") for line in GOOD[:300]]
    source = open_source(file_of(tmp_path, "\n".join(lines)), sequence_length=LENGTH, tokenizer=StrictTokenizer())
    assert isinstance(source, TokenStream)
    assert b"a ? makes" in b"".join(bytes(sequence[1:].tolist()) for sequence in source.held_out())


def test_lines_beyond_all_length_and_files_without_text_are_skipped_only_so_far(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "MAX_DOCUMENT_BYTES", 1 << 12)
    monkeypatch.setattr(rows, "MAX_SKIPPED_BYTES", 3 << 12)
    long = '{"text": "' + "x" * (2 << 12) + '"}'
    seen = Seen(file_of(tmp_path, "\n".join([*GOOD[:400], *[long] * 9, *GOOD[400:]])))
    assert [line.split(" ")[2] for line in seen.lines()] == ["401", "402", "403"]
    assert "and all behind it cannot be read: lines longer than" in str(seen.skipped[-1])
    monkeypatch.setattr(streams, "MAX_BARE_ROWS", 1000)
    for number in range(40):
        file_of(tmp_path, "\n".join([*GOOD[:20], *["0"] * 2000] if number < 9 else ["0"] * 2000), f"{number:02d}.jsonl")
    (tmp_path / "x.jsonl").unlink()
    source = Seen(f"json:{tmp_path}").source
    assert isinstance(source, TokenStream)
    with pytest.raises(UsageError, match=r"15\.jsonl: 1,001 rows after one another have no text, as in the files before"):
        list(sequences(source, 40))


def test_rows_of_a_list_and_of_parquet_are_named_by_their_number(tmp_path: Path) -> None:
    items = ["null", *GOOD[:50], '{"text": 3}', *GOOD[50:90]]
    seen = Seen(file_of(tmp_path, f"[{','.join(items)}]", "x.json"))
    assert [line.split(" ")[2] for line in seen.lines()] == ["1", "52"]
    texts = [None if index in (7, 333) else f"{index:05d} outer step" for index in range(400)]
    parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "x.parquet", row_group_size=10)
    seen = Seen(f"parquet:{tmp_path / 'x.parquet'}")
    assert seen.lines() == [f"x.parquet: row {row} has null in the column 'text'" for row in (8, 334)]


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("x.json", f"[{GOOD[0]}, {GOOD[1]}, broken, {GOOD[2]}]".encode(), "row 3 and all behind it cannot be read: is no"),
        ("x.json", f"[{GOOD[0]}, {GOOD[1]}".encode(), "row 3 and all behind it cannot be read: is missing: the list"),
        ("x.jsonl.gz", gzip.compress("\n".join(GOOD[:500]).encode(), mtime=0)[:-600], "all behind it cannot be read: Comp"),
        ("x.jsonl", "\n".join(GOOD[:9]).encode("utf-16"), "x.jsonl: is UTF-16, not UTF-8"),
        ("x.jsonl", "\n".join(GOOD[:9]).encode("utf-16-le"), "x.jsonl: is UTF-16LE, not UTF-8"),
        ("x.jsonl", "\n".join(GOOD[:9]).encode("utf-32"), "x.jsonl: is UTF-32, not UTF-8"),
        ("x.json", b'[{"text": "caf\xe9"}]', "x.json: is LATIN1, not UTF-8"),
        ("x.JSONL", b"\x28\xb5\x2f\xfd" + bytes(40), "x.JSONL: is packed by zstd: unpack it"),
        ("x.jsonl", bz2.compress(b"\n".join(line.encode() for line in GOOD)), "x.jsonl: is packed by bzip2: unpack it"),
        ("x.json", b"PK\x03\x04" + "\n".join(GOOD).encode(), "x.json: is a zip, as documents of an office are"),
        ("x.json", b"PAR1" + bytes(40), "x.json: is parquet: name it by parquet:PATH"),
    ],
)
def test_what_cannot_be_read_of_one_file_is_named_and_the_others_are_read(
    tmp_path: Path, name: str, content: bytes, reason: str
) -> None:
    file_of(tmp_path, content, name)
    file_of(tmp_path, "\n".join(GOOD[1000:1500]), "good.jsonl")
    file_of(tmp_path, "", "empty.jsonl")
    seen = Seen(f"json:{tmp_path}")
    (line,) = seen.lines()
    assert reason in line
    assert len(list(islice(seen.source.read(0, 0, 0), 40))) == 40  # type: ignore[union-attr]


def test_a_parquet_file_without_the_column_or_that_is_none_costs_that_file(tmp_path: Path) -> None:
    parquet.write_table(pyarrow.table({"text": GOOD[:300]}), tmp_path / "a.parquet")
    parquet.write_table(pyarrow.table({"other": GOOD[:300]}), tmp_path / "b.parquet")
    (tmp_path / "c.parquet").write_bytes(b"no parquet at all")
    lines = Seen(f"parquet:{tmp_path}").lines()
    assert [line.partition(":")[0] for line in lines] == ["c.parquet", "b.parquet"]
    assert "has no text in the column 'text' of ['other']" in lines[1]


def test_columns_beside_the_text_may_differ_from_file_to_file(tmp_path: Path) -> None:
    others: list[dict[str, object]] = [{"id": 1}, {"id": "one"}, {"tags": [1, "a", None]}, {}]
    for number, other in enumerate(others):
        file_of(tmp_path, json.dumps({**other, "text": f"{number:05d} outer step " * 9}) + "\n", f"{number}.jsonl")
    seen = Seen(f"json:{tmp_path}")
    assert seen.lines() == []


def test_packed_files_are_read_by_what_they_are_and_not_by_their_names(tmp_path: Path) -> None:
    for number in range(4):
        packed = gzip.compress("\n".join(GOOD[number::4]).encode())
        file_of(tmp_path, packed, f"{number}.jsonl" if number % 2 else f"{number}.jsonl.gz")
    seen = Seen(f"json:{tmp_path}")
    assert seen.lines() == []


def test_more_than_one_percent_without_text_is_one_line_for_people(tmp_path: Path) -> None:
    every = ['{"text": null}' if index % 50 == 4 else line for index, line in enumerate(GOOD)]
    name = file_of(tmp_path, "\n".join(every))
    seen = Seen(name)
    assert seen.skips.warning == (
        f"{name}: of the first 1,000 rows 20 are skipped, such as {tmp_path}/x.jsonl: "
        "row 5 has null, no text, in the column 'text'"
    )
    assert warning_of(name) == seen.skips.warning
    assert warning_of(file_of(tmp_path, "\n".join(GOOD), "good.jsonl")) == ""


def test_rows_are_counted_once_and_no_more_are_named_than_a_log_may_hold() -> None:
    skipped: list[Skip] = []
    skips = Skips(skipped.append)
    for _ in range(2):
        for row in range(3 * MAX_NAMED):
            skips.add("file", row, "no text")
    assert (skips.count, len(skipped)) == (3 * MAX_NAMED, MAX_NAMED)
    assert skips.first == Skip("file", 0, "no text")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no row of its files has text"),
        (b"\n \n", "no row of its files has text"),
        (b'{"text": "a\n', r"x\.jsonl: row 1 is no JSON"),
        (b'\n\n{\n  "text": "a"\n}\n', r"x\.jsonl: row 3 is no JSON"),
        (b'{"texts": "a"}\n', r"x\.jsonl: row 1 has no text in the column 'text' of \['texts'\]"),
        ("\n".join(GOOD[:9]).encode("utf-16"), r"x\.jsonl: is UTF-16, not UTF-8"),
        (b'{"text": "caf\xe9"}\n', r"x\.jsonl: row 1 is no UTF-8: byte 0xe9 in column 14"),
        (b'{"text": "short"}\n' * 3, r"holds \d+ tokens to train on, too few for a sequence of 1000"),
    ],
)
def test_what_holds_nothing_is_refused_with_its_file_row_and_reason(tmp_path: Path, content: bytes, message: str) -> None:
    name = file_of(tmp_path, content)
    with pytest.raises(UsageError, match=message) as refused:
        open_source(name, sequence_length=1000)
    assert refused.value.remedy
    if content:
        assert str(tmp_path / "x.jsonl") in str(refused.value)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "latin1"])
def test_a_text_of_another_encoding_is_named_and_its_remedy_works(tmp_path: Path, encoding: str) -> None:
    text = "Die Schwärme fliegen über den Wäldern.\n" * 40
    (tmp_path / "wide name.txt").write_bytes(text.encode(encoding))
    with pytest.raises(UsageError, match=r"holds no text: .*wide name\.txt: (row 1 )?is") as refused:
        open_source(f"text:{tmp_path / 'wide name.txt'}", sequence_length=LENGTH)
    command = refused.value.remedy.partition("iconv")[2].partition(", and name")[0].replace("NEW", str(tmp_path / "new.txt"))
    subprocess.run(f"iconv{command}", shell=True, check=True)
    assert (tmp_path / "new.txt").read_text("utf-8").lstrip("\ufeff") == text
    seen = Seen(f"text:{tmp_path}")  # Beside another file it is skipped, and said.
    assert [Path(skip.file).name for skip in seen.skipped] == ["wide name.txt"]
    assert "a file is skipped, such as" in seen.skips.warning
    assert warning_of(f"text:{tmp_path}") == seen.skips.warning


def test_files_that_are_no_text_are_passed_over_in_silence(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a flock makes the outer step " * 40)
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + bytes(range(256)) * 9)
    np.arange(4000, dtype="<u2").tofile(tmp_path / "tokens.u16")
    (np.arange(4000, dtype="<u2") % 32).tofile(tmp_path / "small.u16")
    (tmp_path / "zero").write_bytes(b"\0")
    assert Seen(f"text:{tmp_path}").skipped == []


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (gzip.compress(b"a", mtime=0), "is packed by gzip: unpack it"),
        (lzma.compress(b"a"), "is packed by xz: unpack it"),
        (b"%PDF-1.7\n\xe2\xe3", "is a PDF: save it as text"),
        (b"a flock\nmakes the outer step " * 50 + b"\0", "row 51 holds a zero byte, which ends a document: remove it"),
    ],
)
def test_text_in_another_form_is_named(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "other").write_bytes(content)
    with pytest.raises(UsageError, match=f"holds no text: .*other: {reason}") as refused:
        open_source(f"text:{tmp_path}", sequence_length=LENGTH)
    assert refused.value.remedy
    (tmp_path / "a.txt").write_text("a flock makes the outer step " * 40)
    seen = Seen(f"text:{tmp_path}")
    assert seen.skips.warning == f"text:{tmp_path}: a file is skipped, such as {tmp_path}/other: {reason}"


def test_what_save_to_disk_has_written_is_refused_with_a_command_that_converts_it(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text("{}")
    with pytest.raises(UsageError, match="save_to_disk") as refused:
        open_source(f"hf:{tmp_path}", sequence_length=LENGTH)
    assert f"{tmp_path} NEW.parquet" in str(refused.value.remedy)


@pytest.mark.parametrize("source", ["https://x.example/y.jsonl", "s3://bucket/y"])
def test_an_address_is_no_source(source: str) -> None:
    with pytest.raises(UsageError, match="there is no data source") as refused:
        open_source(source, sequence_length=LENGTH)
    assert "download it" in str(refused.value.remedy)


def test_a_column_of_bytes_is_read_as_text_and_one_of_another_type_is_named(tmp_path: Path) -> None:
    texts = [f"{index:05d} outer step" for index in range(400)]
    for name, made in ("a", str.encode), ("b", lambda text: [text]), ("c", lambda text: {"text": text}):
        parquet.write_table(pyarrow.table({"text": list(map(made, texts))}), tmp_path / f"{name}.parquet")
    lines = Seen(f"parquet:{tmp_path}").lines()
    assert [line.partition("<")[0] for line in lines] == ["b.parquet: has list", "c.parquet: has struct"]
    assert all(line.endswith(", no text, in the column 'text'") for line in lines)


@given(st.text(min_size=40, alphabet=st.characters(exclude_categories=["Cs"], exclude_characters="\0")))
def test_no_text_in_utf8_is_taken_for_another_encoding(text: str) -> None:
    assert wide_encoding(text.encode()) == ""


@pytest.mark.parametrize("kind", ["csv", "tsv"])
def test_a_table_is_refused_with_a_command_that_converts_it(tmp_path: Path, kind: str) -> None:
    mark = "," if kind == "csv" else "\t"
    path = tmp_path / f"my table.{kind}"
    path.write_text(f"id{mark}text\n" + "".join(f"{index}{mark}{index:05d} the outer step\n" for index in range(400)))
    with pytest.raises(UsageError, match="no data source") as refused:
        open_source(f"{kind}:{path}", sequence_length=LENGTH)
    command, _, source = refused.value.remedy.removeprefix("convert it: ").partition(", and write ")
    subprocess.run([sys.executable, *shlex.split(command)[1:]], cwd=tmp_path, check=True)
    written = source.replace("NEW", str(tmp_path / "NEW")).replace("COLUMN", "text")
    assert next(iter(Seen(written).source.read(0, 0, 0))).shape == (LENGTH + 1,)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("/data/x.jsonl", "write json:/data/x.jsonl"),
        ("jsonl:x.jsonl.gz", "write json:x.jsonl.gz"),
        ("x.parquet", "write parquet:x.parquet"),
        ("txt:x.txt", "write text:x.txt"),
        ("x.u16", "write tokens:x.u16"),
    ],
)
def test_a_source_of_no_kind_gets_that_of_its_file(name: str, remedy: str) -> None:
    with pytest.raises(UsageError, match="no data source") as refused:
        open_source(name, sequence_length=LENGTH)
    assert refused.value.remedy == remedy


def test_a_folder_of_json_is_no_text_but_its_remedy_names_its_kind(tmp_path: Path) -> None:
    file_of(tmp_path, gzip.compress(b"a"), "x.jsonl.gz")
    with pytest.raises(UsageError, match="holds no text") as refused:
        open_source(f"text:{tmp_path}", sequence_length=LENGTH)
    assert refused.value.remedy == f"write json:{tmp_path}"


def sequences(stream: TokenStream, num_units: int) -> Iterator[torch.Tensor]:
    for number in range(num_units):
        yield from stream.read(number // stream.num_units, number % stream.num_units, 0)


def test_documents_shorter_than_a_sequence_are_packed_across_the_ends_of_units(tmp_path: Path) -> None:
    texts = [f"{index:05d}" for index in range(400)]
    parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "x.parquet", row_group_size=5)
    source = Seen(f"parquet:{tmp_path / 'x.parquet'}", 100).source
    assert isinstance(source, TokenStream)
    assert source.num_units == 80
    trained = b"".join(bytes(sequence[1:].tolist()) for sequence in sequences(source, 80))
    numbers = [number for number in trained.split(b"\0") if len(number) == 5]
    assert len(numbers) == len(set(numbers)) > 350
    assert {int(number) for number in numbers} <= set(range(400))


def test_few_short_documents_fill_a_sequence_in_several_passes(tmp_path: Path) -> None:
    source = Seen(file_of(tmp_path, "".join(json.dumps({"text": f"{i:02d}"}) + "\n" for i in range(40))), 100).source
    assert isinstance(source, TokenStream)
    assert len(list(islice(sequences(source, 64), 20))) == 20


def test_what_another_peer_has_trained_of_a_unit_adds_no_end_of_it(tmp_path: Path) -> None:
    name = file_of(tmp_path, "\n".join(GOOD[:300]))
    source = Seen(name).source
    assert isinstance(source, TokenStream)
    for _ in range(40):
        assert list(source.read(0, 0, 10**9)) == []


def test_files_that_are_away_are_waited_for_and_one_that_is_gone_is_skipped(tmp_path: Path) -> None:
    for number in range(3):
        file_of(tmp_path, "\n".join(GOOD[number::3]), f"{number}.jsonl")
    seen = Seen(f"json:{tmp_path}")
    (tmp_path / "1.jsonl").unlink()
    assert seen.lines() == ["1.jsonl"] or "1.jsonl: row 1 and all behind it cannot be read" in str(seen.skipped[0])
    (tmp_path / "0.jsonl").unlink()
    (tmp_path / "2.jsonl").unlink()
    assert isinstance(seen.source, TokenStream)
    with pytest.raises(LocalError, match="cannot read"):
        list(sequences(seen.source, 9))
    file_of(tmp_path, "\n".join(GOOD), "0.jsonl")
    assert len(list(seen.source.read(1, 0, 0))) > 100


def test_a_token_that_the_model_does_not_know_costs_its_sequence(tmp_path: Path) -> None:
    tokens = np.arange(40 * LENGTH * 200 + 1, dtype=np.uint32) % 100
    tokens[LENGTH * 205 + 3] = 4000
    skipped: list[Skip] = []
    source = TokenSource(tokens, LENGTH, name="tokens:x", skips=Skips(skipped.append))
    source.limit_tokens(100)
    assert all(int(source[index].max()) < 100 for index in range(len(source)))
    assert [(skip.row, skip.reason) for skip in skipped] == [(206, "holds token 4000, of 100")]
    with pytest.raises(UsageError, match=r"holds token \d+, the model knows 50"):
        source.limit_tokens(50)
