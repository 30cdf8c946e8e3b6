"""Data sources: what is read, what is refused, what is held out, and batches that resume where they stopped."""

from itertools import islice, product
from pathlib import Path

import numpy as np
import pytest
import torch
from flockstep.optim.data import Batches, TokenSource, heldout_batches, open_source, share_of
from flockstep.optim.shards import Shares
from flockstep.peer.errors import UsageError

LENGTH = 8


def counting(num_tokens: int = 8 * 1000 + 1) -> TokenSource:
    """Token i is i: a sequence shows its place."""
    return TokenSource(np.arange(num_tokens, dtype=np.uint32), LENGTH, name="counting")


def tokens_of(source: TokenSource) -> bytes:
    """All text of a source whose shards are single sequences, put together again."""
    sequences = [source.sequence(shard, 0) for shard in range(source.num_shards)]
    sequences += [source.held_out(index) for index in range(source.num_held_out)]
    return b"".join(bytes(sequence[:-1]) for sequence in sorted(sequences, key=lambda s: s.ctypes.data))


def batches(source: TokenSource, peer: str = "a", position: int = 0) -> Batches:
    return Batches(source, Shares(7, peer, source.num_shards), batch_size=4, position=position)


def test_every_sequence_is_either_trained_on_or_held_out() -> None:
    source = counting()
    places = product(range(source.num_shards), range(source.shard_sequences))
    training = {int(source.sequence(shard, index)[0]) for shard, index in places}
    held_out = {int(source.held_out(i)[0]) for i in range(source.num_held_out)}
    assert not training & held_out
    assert training | held_out == set(range(0, 8000, LENGTH))
    assert len(held_out) == 50


def test_sequences_are_contiguous_and_share_one_token() -> None:
    batch = next(batches(counting()))
    assert batch.dtype == torch.int64
    assert batch.shape == (4, LENGTH + 1)
    assert (batch.diff() == 1).all()
    assert (batch[:, 0] % LENGTH == 0).all()


def test_an_epoch_gives_every_training_sequence_once_and_never_a_held_out_one() -> None:
    source = counting()
    stream = batches(source)
    size = source.num_shards * source.shard_sequences
    starts = torch.cat([next(stream)[:, 0] for _ in range(2 * size // 4)])
    epochs = starts.view(2, size).tolist()
    held_out = {int(source.held_out(i)[0]) for i in range(source.num_held_out)}
    for epoch in epochs:
        assert len(set(epoch)) == size
        assert not set(epoch) & held_out
    assert epochs[0] != epochs[1]


def test_batches_resume_by_position() -> None:
    source = counting()
    stream = batches(source)
    for _ in range(240):  # Into the second epoch.
        next(stream)
    resumed = batches(source, position=stream.position)
    assert torch.equal(next(stream), next(resumed))


def test_neighbours_in_a_batch_come_from_different_shards() -> None:
    first = next(batches(counting()))[:, 0] // LENGTH // counting().shard_sequences
    assert len(set(first.tolist())) == 4


def test_peers_walk_in_different_orders_and_each_in_its_own_again() -> None:
    source = counting()
    assert torch.equal(next(batches(source, "a")), next(batches(source, "a")))
    assert not torch.equal(next(batches(source, "a")), next(batches(source, "b")))


def test_any_map_style_dataset_can_be_shared() -> None:
    dataset = [(torch.full((3,), i), i) for i in range(10)]
    stream = list(islice(share_of(dataset, Shares(7, "a", 10), batch_size=4), 5))
    assert all(inputs.shape == (4, 3) and torch.equal(inputs[:, 0], labels) for inputs, labels in stream)
    labels = torch.cat([labels for _, labels in stream])
    assert sorted(labels[:10].tolist()) == sorted(labels[10:].tolist()) == list(range(10))
    with pytest.raises(UsageError, match="empty"):
        next(share_of([], Shares(7, "a", 0), batch_size=4))


def test_heldout_batches_are_full_distinct_and_always_the_same() -> None:
    source = counting()
    first, again = (torch.cat(list(heldout_batches(source, batch_size=8, num_batches=99))) for _ in range(2))
    assert torch.equal(first, again)
    assert len(set(first[:, 0].tolist())) == len(first) == 48
    few = torch.cat(list(heldout_batches(source, batch_size=4, num_batches=2)))[:, 0]
    assert few.shape == (8,)
    assert few[-1] - few[0] > 6000  # Eight sequences sample the whole source, not its beginning.
    assert [b.shape[0] for b in heldout_batches(source, batch_size=64, num_batches=2)] == [50]


def test_a_folder_is_read_in_order_without_binary_and_hidden_files(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    for name, content in {
        "b/one.md": "é".encode() * 40,
        "a.txt": b"a" * 80,
        "c.html": b"c" * 11,
        "binary": b"\0" * 100,
        "latin.txt": b"\xe9" * 100,
        "empty.txt": b"",
        ".git/config": b"x" * 100,
    }.items():
        (tmp_path / name).write_bytes(content)
    text = tokens_of(open_source(f"text:{tmp_path}", sequence_length=LENGTH))
    whole = b"a" * 80 + b"\0" + "é".encode() * 40 + b"\0" + b"c" * 11 + b"\0"
    assert text == whole[: len(text)]
    assert len(text) == 168


def test_a_file_and_a_glob_name_the_same_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(bytes(range(1, 128)) * 2)
    (tmp_path / "b.md").write_bytes(b"b" * 300)
    one = tokens_of(open_source(f"text:{tmp_path}/a.txt", sequence_length=LENGTH))
    assert (
        one
        == tokens_of(open_source(f"text:{tmp_path}/*.txt", sequence_length=LENGTH))
        == (bytes(range(1, 128)) * 2)[:248]
    )


def test_the_standard_library_is_at_hand_and_without_its_tests() -> None:
    first, second = (open_source("text:{stdlib}", sequence_length=256) for _ in range(2))
    assert torch.equal(next(batches(first)), next(batches(second)))
    assert 5e6 < first.num_shards * first.shard_sequences * 256 < 33e6


@pytest.mark.parametrize(("name", "dtype"), [("x.u16", "<u2"), ("x.u32", "<u4"), ("x.bin?dtype=uint32", "<u4")])
def test_token_files_are_mapped_by_their_width(tmp_path: Path, name: str, dtype: str) -> None:
    np.arange(60_000, 60_400).astype(dtype).tofile(tmp_path / name.partition("?")[0])
    source = open_source(f"tokens:{tmp_path / name}", sequence_length=LENGTH)
    assert source.sequence(0, 0).tolist() == list(range(60_000, 60_009))
    assert next(batches(source)).min() >= 60_000


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{tmp}/missing", "no data source"),
        ("text:{tmp}/missing", "no such file or folder"),
        ("text:{tmp}/*.rst", "no such file or folder"),
        ("text:{tmp}/binary", "holds no text"),
        ("text:{tmp}/empty.txt", "holds no text"),
        ("text:{tmp}/short.txt", "too few"),
        ("tokens:{tmp}/missing.u16", "cannot read"),
        ("tokens:{tmp}/short.txt", "how wide"),
        ("tokens:{tmp}/short.txt?dtype=int8", "how wide"),
        ("tokens:{tmp}/short.txt?dtype=uint32", "whole number"),
        ("tokens:{tmp}/empty.txt?dtype=uint16", "whole number"),
    ],
)
def test_what_cannot_be_read_is_a_usage_error_with_a_remedy(tmp_path: Path, source: str, message: str) -> None:
    (tmp_path / "binary").write_bytes(b"\0\xff" * 500)
    (tmp_path / "empty.txt").touch()
    (tmp_path / "short.txt").write_text("short")
    with pytest.raises(UsageError, match=message) as refused:
        open_source(source.replace("{tmp}", str(tmp_path)), sequence_length=LENGTH)
    assert refused.value.remedy


def test_settings_of_a_source_are_checked(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="tokenizer 'bpe'"):
        open_source("text:{stdlib}", tokenizer="bpe", sequence_length=LENGTH)
    with pytest.raises(UsageError, match="not positive"):
        open_source("text:{stdlib}", sequence_length=0)
