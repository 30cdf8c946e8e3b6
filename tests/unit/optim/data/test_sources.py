"""Token sources: what is read, what is refused, and what is held out."""

from pathlib import Path

import numpy as np
import pytest
import torch
from flockstep.optim.data.sources import TokenSource, heldout_batches, open_source
from flockstep.optim.data.text import MAX_TEXT_BYTES
from flockstep.optim.data.tokenizer import read_tokenizer
from flockstep.peer.base.disk import user_path
from flockstep.peer.base.errors import UsageError
from torch import Tensor

LENGTH = 8


def counting(num_tokens: int = 8 * 1000 + 1) -> TokenSource:
    """Token i is i: a sequence shows its place."""
    return TokenSource(np.arange(num_tokens, dtype=np.uint32), LENGTH, name="counting")


def opened(name: str, length: int = LENGTH) -> TokenSource:
    source = open_source(name, sequence_length=length)
    assert isinstance(source, TokenSource)
    return source


def tokens_of(source: TokenSource) -> bytes:
    """All text of a source whose every sequence says in its first two tokens where it stands."""
    sequences: list[Tensor] = [source[index] for index in range(len(source))]
    for index in range(source.num_held_out):
        sequences.insert(20 * index + 10, source.held_out(index))
    return b"".join(bytes(sequence[:-1].tolist()) for sequence in sequences)


def test_every_sequence_is_either_trained_on_or_held_out() -> None:
    source = counting()
    training = {int(source[index][0]) for index in range(len(source))}
    held_out = {int(source.held_out(index)[0]) for index in range(source.num_held_out)}
    assert not training & held_out
    assert training | held_out == set(range(0, 8000, LENGTH))
    assert len(held_out) == 50
    with pytest.raises(IndexError):
        source[len(source)]


def test_sequences_are_contiguous_and_share_one_token() -> None:
    source = counting()
    assert source[5].dtype == torch.int64
    assert source[5].tolist() == list(range(int(source[5][0]), int(source[5][0]) + LENGTH + 1))
    assert source[5][-1] == source[6][0]


def test_a_source_is_known_by_its_content_and_not_by_its_name() -> None:
    tokens = np.arange(8001, dtype=np.uint32)
    one, renamed = (TokenSource(tokens, LENGTH, name=name) for name in ("a", "b"))
    longer, changed = counting(8 * 1000 + 2), tokens.copy()
    changed[4000:4500] += 1
    assert one.source == renamed.source
    assert len({one.source, longer.source, TokenSource(changed, LENGTH, name="a").source}) == 3
    assert TokenSource(tokens, 7, name="a").source != one.source


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
    text = tokens_of(opened(f"text:{tmp_path}"))
    whole = b"a" * 80 + b"\0" + "é".encode() * 40 + b"\0" + b"c" * 11 + b"\0"
    assert text == whole[: len(text)]
    assert len(text) == 168


def test_a_file_and_a_glob_name_the_same_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(bytes(range(1, 128)) * 2)
    (tmp_path / "b.md").write_bytes(b"b" * 300)
    one = tokens_of(opened(f"text:{tmp_path}/a.txt"))
    assert (
        one
        == tokens_of(opened(f"text:{tmp_path}/*.txt"))
        == (bytes(range(1, 128)) * 2)[:248]
    )


def test_the_standard_library_is_at_hand_and_without_its_tests() -> None:
    first, second = (opened("text:{stdlib}", 256) for _ in range(2))
    assert first.source == second.source
    assert 5e6 < len(first) * 256 < 33e6


@pytest.mark.parametrize(("name", "dtype"), [("x.u16", "<u2"), ("x.u32", "<u4"), ("x.bin?dtype=uint32", "<u4")])
def test_token_files_are_mapped_by_their_width(tmp_path: Path, name: str, dtype: str) -> None:
    np.arange(60_000, 60_400).astype(dtype).tofile(tmp_path / name.partition("?")[0])
    source = opened(f"tokens:{tmp_path / name}")
    assert source[0].tolist() == list(range(60_000, 60_009))
    assert source.vocab_size is None


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


def test_settings_of_a_source_are_checked() -> None:
    with pytest.raises(UsageError, match="not positive"):
        open_source("text:{stdlib}", sequence_length=0)


@pytest.mark.parametrize("place", ["~nobody-of-this-name/file.u16", "x" * 300, "a\0b.u16"])
def test_a_path_that_no_file_can_have_is_a_usage_error(place: str) -> None:
    for kind in ("text", "tokens"):
        with pytest.raises(UsageError):
            open_source(f"{kind}:{place}", sequence_length=4)
    with pytest.raises(UsageError):
        read_tokenizer(Path("folder") / user_path(place))


def test_a_text_that_is_too_long_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "long.txt"
    with path.open("wb") as file:
        file.truncate(MAX_TEXT_BYTES + 1)  # A hole: it takes no space.
    with pytest.raises(UsageError, match="more than 2 GiB"):
        open_source(f"text:{path}", sequence_length=4)
