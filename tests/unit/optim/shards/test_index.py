"""The index of packed data: what one writes is read again, and nothing else is."""

import json
from typing import Any

import pytest
from flockstep.optim.shards.index import (
    MAX_INDEX_BYTES,
    MAX_SHARD_BYTES,
    MAX_SHARDS,
    dtype_for,
    read_index,
    shard_name,
    write_index,
)
from flockstep.optim.shards.tokenizer_config import MAX_CONFIG_BYTES
from flockstep.peer.base.digest import digest
from flockstep.peer.base.errors import UsageError
from hypothesis import given
from hypothesis import strategies as st

HASHES = st.binary(min_size=32, max_size=32)
ROWS = st.tuples(st.integers(1, MAX_SHARD_BYTES // 4), HASHES)


@given(
    st.sampled_from(["uint16", "uint32"]), st.integers(1, 1 << 14), st.one_of(st.just("bytes"), HASHES), st.booleans(),
    st.lists(ROWS, min_size=1, max_size=9), st.none() | ROWS, st.integers(0, 1 << 60),
    st.none() | st.tuples(st.integers(1, MAX_CONFIG_BYTES), HASHES),
)
def test_what_is_written_is_read(
    dtype: str, vocab: int, tokenizer: str | bytes, masked: bool, rows: list[Any], held: Any, documents: int, config: Any
) -> None:
    name = tokenizer if isinstance(tokenizer, str) else f"blake3:{tokenizer.hex()}"
    data = write_index(
        dtype=dtype, vocab_size=vocab, tokenizer=name, tokenizer_bytes=7, tokenizer_config=config, masked=masked,
        num_documents=documents, shards=rows, held_out=held,
    )
    index = read_index(data, "x")
    assert [(shard.num_tokens, shard.hash) for shard in index.shards] == rows
    assert (index.held_out and (index.held_out.num_tokens, index.held_out.hash)) == held
    assert (index.dtype, index.vocab_size, index.tokenizer, index.masked) == (dtype, vocab, name, masked)
    assert (index.num_documents, index.tokenizer_config) == (documents, config)
    files = [(name, size) for name, _, size in index.files if name == "tokenizer_config.json"]
    assert files == ([] if config is None else [("tokenizer_config.json", config[0])])
    assert index.hash == digest(data)
    assert index.num_tokens == sum(count for count, _ in rows)


GOOD: dict[str, Any] = {
    "version": 1, "dtype": "uint16", "vocab_size": 9, "tokenizer": "bytes", "tokenizer_bytes": 0, "masked": False,
    "documents": 1, "held_out": None, "shards": [[5, "00" * 32]],
}  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2}, {"dtype": "float32"}, {"dtype": ["uint16"]}, {"vocab_size": 0}, {"vocab_size": 65_537},
        {"vocab_size": True}, {"vocab_size": 16_385, "masked": True}, {"masked": 1}, {"tokenizer": "../x"},
        {"tokenizer": "blake3:00"}, {"tokenizer": 3}, {"tokenizer": "blake3:" + "é" * 64}, {"documents": -1},
        {"documents": 1.0}, {"tokenizer_bytes": 1 << 27}, {"held_out": []}, {"held_out": [0, "00" * 32]},
        {"tokenizer_config": 3}, {"tokenizer_config": [5]}, {"tokenizer_config": [MAX_CONFIG_BYTES + 1, "00" * 32]},
        {"shards": []}, {"shards": {}},
        {"shards": [[5]]}, {"shards": [[0, "00" * 32]]}, {"shards": [["5", "00" * 32]]},
        {"shards": [[5, "0x" * 32]]}, {"shards": [[5, 7]]}, {"shards": [[MAX_SHARD_BYTES // 2 + 1, "00" * 32]]},
        {"shards": [[5, "00" * 32]] * (MAX_SHARDS + 1)},
    ],
)  # fmt: skip
def test_what_is_beyond_its_bounds_is_one_line(change: dict[str, Any]) -> None:
    read_index(json.dumps(GOOD).encode(), "here")
    with pytest.raises(UsageError, match="here has no index of packed data") as refused:
        read_index(json.dumps(GOOD | change).encode(), "here")
    assert refused.value.remedy
    assert "\n" not in str(refused.value)


@given(st.binary(max_size=200) | st.recursive(st.none() | st.integers(), st.lists).map(json.dumps).map(str.encode))
def test_junk_is_one_line(data: bytes) -> None:
    with pytest.raises(UsageError, match="no index"):
        read_index(data, "x")


def test_long_and_deep_ones_are_not_parsed() -> None:
    for data in (b"[" * 1_000_000, json.dumps(GOOD).encode() + b" " * MAX_INDEX_BYTES):
        with pytest.raises(UsageError, match="no index"):
            read_index(data, "x")


def test_the_largest_index_fits() -> None:
    rows = [(MAX_SHARD_BYTES // 2, b"\xff" * 32)] * MAX_SHARDS
    data = write_index(
        dtype="uint16", vocab_size=9, tokenizer="bytes", tokenizer_bytes=0, tokenizer_config=None, masked=False,
        num_documents=1, shards=rows, held_out=None,
    )
    assert len(read_index(data, "x").shards) == MAX_SHARDS


def test_a_mask_takes_two_bits_of_the_token() -> None:
    assert [dtype_for(size, masked=False) for size in (65_536, 65_537)] == ["uint16", "uint32"]
    assert [dtype_for(size, masked=True) for size in (16_384, 16_385)] == ["uint16", "uint32"]
    assert [shard_name(7, "uint16"), shard_name(None, "uint32")] == ["00007.u16", "held-out.u32"]
