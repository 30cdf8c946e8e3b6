"""Streams: files and local datasets, shared by pieces or blocks, packed, held out by hash."""

import json
from itertools import islice
from pathlib import Path

import pytest
import torch
from flockstep.optim.data.sources import heldout_batches, open_source
from flockstep.optim.data.streams import HELD_OUT_EVERY, TokenStream
from flockstep.peer.base.errors import UsageError

parquet = pytest.importorskip("pyarrow.parquet")
pyarrow = pytest.importorskip("pyarrow")

LENGTH = 16


def documents(count: int) -> list[str]:
    """Document i is the number i, several times: a sequence shows where it comes from."""
    return [f"{index:05d} " * 10 for index in range(count)]


def write_parquet(folder: Path, texts: list[str], *, files: int, rows: int = 10_000) -> None:
    folder.mkdir(exist_ok=True)
    for part in range(files):
        table = pyarrow.table({"text": texts[part::files], "id": list(range(len(texts[part::files])))})
        parquet.write_table(table, folder / f"part-{part:03d}.parquet", row_group_size=rows)


def stream_of(name: str) -> TokenStream:
    stream = open_source(name, sequence_length=LENGTH)
    assert isinstance(stream, TokenStream)
    return stream


def numbers(sequences: list[torch.Tensor]) -> list[str]:
    """Whole numbers that stand in these sequences, each once."""
    text = " ".join(bytes(sequence.tolist()).decode().replace("\0", " ") for sequence in sequences)
    return sorted({word for word in text.split() if len(word) == 5})


def everything(name: str, units: range) -> list[list[str]]:
    """What stands in each unit, for a peer that has read no other one."""
    return [numbers(list(stream_of(name).read(0, unit, 0))) for unit in units]


def test_files_are_units_that_have_nothing_in_common(tmp_path: Path) -> None:
    write_parquet(tmp_path / "many", documents(400), files=40)
    stream = stream_of(f"parquet:{tmp_path}/many")
    assert (stream.num_units, stream.forward) == (40, False)
    units = everything(stream.name, range(40))
    held_out = numbers(list(stream.held_out()))
    trained = [number for unit in units for number in unit]
    assert len(trained) == len(set(trained))
    assert set(trained) | set(held_out) == {f"{index:05d}" for index in range(400)}
    assert not set(trained) & set(held_out)
    assert 0.5 < len(held_out) * HELD_OUT_EVERY / 400 < 2


def test_row_groups_are_units_where_files_are_few(tmp_path: Path) -> None:
    write_parquet(tmp_path / "one", documents(400), files=1, rows=10)
    stream = stream_of(f"parquet:{tmp_path}/one/*.parquet")
    assert (stream.num_units, stream.forward) == (40, False)
    trained = [number for unit in everything(stream.name, range(40)) for number in unit]
    assert len(trained) == len(set(trained)) > 350


def test_of_few_pieces_blocks_of_documents_are_units_and_the_others_are_skipped(tmp_path: Path) -> None:
    lines = [json.dumps({"content": text}) for text in documents(600)]
    (tmp_path / "x.jsonl").write_text("\n".join(lines))
    stream = stream_of(f"json:{tmp_path}/x.jsonl?column=content")
    assert stream.forward
    first, second = everything(stream.name, range(2))
    assert "00250" < max(first) < "00256" <= min(second)
    (beyond,) = everything(stream.name, range(3, 4))  # Behind the end: 768 to 1023 are 168 to 423 again.
    assert "00168" <= min(beyond) < "00173"
    assert "00418" < max(beyond) <= "00423"
    assert everything(stream.name, range(1)) == [first]


def test_a_unit_goes_on_where_somebody_else_left_it(tmp_path: Path) -> None:
    write_parquet(tmp_path / "many", documents(400), files=40)
    stream = stream_of(f"parquet:{tmp_path}/many")
    whole = torch.stack(list(stream.read(2, 5, 0)))
    assert whole.dtype == torch.int64
    assert whole.shape[1] == LENGTH + 1
    assert torch.equal(torch.stack(list(stream.read(2, 5, 7))), whole[7:])
    assert list(stream.read(2, 5, 10**9)) == []


def test_neighbours_in_a_batch_come_from_different_documents(tmp_path: Path) -> None:
    write_parquet(tmp_path / "many", ["".join(documents(1)) * 20, *documents(400)] * 40, files=40)
    stream = stream_of(f"parquet:{tmp_path}/many")
    assert len(numbers(list(islice(stream.read(0, 0, 0), 8)))) > 6


def test_a_local_dataset_of_the_hub_form_is_read_with_its_splits(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    for split, texts in (("train", documents(300)), ("test", documents(50))):
        lines = [json.dumps({"text": text}) for text in texts]
        (tmp_path / "set" / f"{split}.jsonl").write_text("\n".join(lines))
    stream = stream_of(f"hf:{tmp_path}/set")
    assert max(numbers(list(stream.held_out()))) > "00050"
    test = stream_of(f"hf:{tmp_path}/set?split=test")
    assert max(everything(test.name, range(1))[0]) <= "00049"
    assert test.source != stream.source or test.name != stream.name


def test_held_out_batches_of_a_stream(tmp_path: Path) -> None:
    write_parquet(tmp_path / "many", documents(400), files=40)
    stream = stream_of(f"parquet:{tmp_path}/many")
    batches = list(heldout_batches(stream, batch_size=4, num_batches=3))
    assert [batch.shape for batch in batches] == [(4, LENGTH + 1)] * 3
    again = torch.cat(list(heldout_batches(stream, batch_size=4, num_batches=3)))
    assert torch.equal(torch.cat(batches), again)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("parquet:{tmp}/missing", "no such file"),
        ("parquet:{tmp}/empty", "no file below it"),
        ("json:{tmp}/x.jsonl", "no text in the column 'text' of \\['content'\\]"),
        ("json:{tmp}/x.jsonl?columns=content", "no option 'columns'"),
        ("json:{tmp}/broken.jsonl", "cannot open"),
        ("json:{tmp}/none.jsonl", "holds no documents|cannot open"),
        ("parquet:{tmp}/x.jsonl", "cannot open"),
        ("hf:nothing", "neither a folder here nor org/name"),
        ("hf:a/../d", "neither a folder here nor org/name"),
        ("hf:{tmp}/empty", "no parquet or JSON file"),
    ],
)
def test_what_cannot_be_streamed_is_a_usage_error_with_a_remedy(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "x.jsonl").write_text('{"content": "text"}\n' * 40)
    (tmp_path / "broken.jsonl").write_text('{"text": "a')
    (tmp_path / "none.jsonl").write_text("")
    with pytest.raises(UsageError, match=message) as caught:
        open_source(name.replace("{tmp}", str(tmp_path)), sequence_length=LENGTH)
    assert caught.value.remedy
