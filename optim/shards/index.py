"""The index of packed data: its tokens' type, the tokenizer that made them, and the hash of each shard. Pure.

Theory of operation. Packed data are files of raw tokens, little-endian, and `index.json` beside them. A run pins the hash of
the index, and the index the hashes of all else, so it does not matter who serves a file. An index has no names of files:
they follow from numbers, since a stranger's name could lead anywhere. In *masked* data the highest bit of a token says that
it is context alone: no loss is computed for predicting it; and the next bit, that an example begins with it.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ...peer.base.digest import DIGEST_BYTES, digest
from ...peer.base.errors import UsageError
from .tokenizer_config import CONFIG_NAME, MAX_CONFIG_BYTES

INDEX, TOKENIZER = "index.json", "tokenizer.json"
"""The files beside the shards; the second, and a `tokenizer_config.json`, only where the tokens are no bytes."""
BYTES = "bytes"
"""The tokenizer of the shards that need no file."""
HASH_PREFIX = "blake3:"
VERSION = 1
MAX_SHARDS = 1 << 16
"""At 16 MiB each 1 TiB."""
MAX_SHARD_BYTES = 64 << 20
"""A reader holds one in memory, and a lost connection costs no more than one."""
MAX_INDEX_BYTES = 6 << 20
"""80 bytes a shard. What JSON makes of so many brackets is 200 MB for a moment."""
MAX_VOCABULARY = 1 << 24
MAX_TOKENIZER_BYTES = 64 << 20
"""The largest vocabularies in use, 256,000 tokens with their merges, take 35 MB."""
WIDTHS = {"uint8": 1, "uint16": 2, "uint32": 4}
MASK_BITS = 2
"""Of a token of masked data."""
_MAX_COUNT = 1 << 60


@dataclass(frozen=True, slots=True)
class Shard:
    """A file of tokens."""

    name: str
    num_tokens: int
    hash: bytes
    """BLAKE3 of the file."""
    num_bytes: int


@dataclass(frozen=True, slots=True)
class ShardIndex:
    """What `index.json` says."""

    dtype: str
    """`uint8`, `uint16` or `uint32`."""
    vocab_size: int
    tokenizer: str
    """`bytes`, or `blake3:` and the hash of `tokenizer.json` in hex."""
    tokenizer_bytes: int
    """The length of that file; 0 without."""
    tokenizer_config: tuple[int, bytes] | None
    """The length and the hash of `tokenizer_config.json`."""
    masked: bool
    num_documents: int
    shards: tuple[Shard, ...]
    held_out: Shard | None
    """Tokens that nobody trains on."""
    hash: bytes
    """BLAKE3 of the file itself."""

    @property
    def files(self) -> Iterator[tuple[str, bytes, int]]:
        """Yield the name, hash and length of every file beside the index."""
        for shard in (*self.shards, *(() if self.held_out is None else (self.held_out,))):
            yield shard.name, shard.hash, shard.num_bytes
        if self.tokenizer != BYTES:
            yield TOKENIZER, bytes.fromhex(self.tokenizer.removeprefix(HASH_PREFIX)), self.tokenizer_bytes
        if self.tokenizer_config is not None:
            yield CONFIG_NAME, self.tokenizer_config[1], self.tokenizer_config[0]

    @property
    def num_tokens(self) -> int:
        """Tokens to train on."""
        return sum(shard.num_tokens for shard in self.shards)

    def check_length(self, sequence_length: int, name: str) -> None:
        """Raise `UsageError`, which calls the data `name`, where no shard holds a sequence and the token after it."""
        longest = max(shard.num_tokens for shard in self.shards)
        if longest <= sequence_length:
            remedy = "lower sequence_length, or pack with a larger --shard-tokens"
            raise UsageError(f"{name}: no shard has {sequence_length + 1} tokens, the longest has {longest}", remedy=remedy)


def dtype_for(vocab_size: int, *, masked: bool) -> str:
    """Return the type of the tokens of a vocabulary."""
    return next(dtype for dtype, width in WIDTHS.items() if vocab_size <= 1 << (8 * width - MASK_BITS * masked))


def shard_name(number: int | None, dtype: str) -> str:
    """Return the name of a shard's file; None is the held-out one."""
    return f"{'held-out' if number is None else f'{number:05d}'}.u{8 * WIDTHS[dtype]}"


def write_index(
    *,
    dtype: str,
    vocab_size: int,
    tokenizer: str,
    tokenizer_bytes: int,
    tokenizer_config: tuple[int, bytes] | None,
    masked: bool,
    num_documents: int,
    shards: Sequence[tuple[int, bytes]],
    held_out: tuple[int, bytes] | None,
) -> bytes:
    """Return the bytes of an index; each shard is its number of tokens and its hash."""
    about = {
        "version": VERSION,
        "dtype": dtype,
        "vocab_size": vocab_size,
        "tokenizer": tokenizer,
        "tokenizer_bytes": tokenizer_bytes,
        "tokenizer_config": None if tokenizer_config is None else [tokenizer_config[0], tokenizer_config[1].hex()],
        "masked": masked,
        "documents": num_documents,
        "held_out": None if held_out is None else [held_out[0], held_out[1].hex()],
    }
    lines = ",\n".join(f'[{count}, "{hash_.hex()}"]' for count, hash_ in shards)  # One a line, for people.
    return f'{json.dumps(about)[:-1]}, "shards": [\n{lines}\n]}}\n'.encode()


def read_index(data: bytes, what: str) -> ShardIndex:
    """Return the index in these bytes, every number within its bounds. Raises `UsageError`, which says of `what` it is."""
    try:
        if len(data) > MAX_INDEX_BYTES:
            raise ValueError(f"it is longer than {MAX_INDEX_BYTES >> 20} MiB")
        about = json.loads(data)
        if not isinstance(about, dict) or about.get("version") != VERSION:
            raise ValueError(f"it is of no version that this one reads, which is {VERSION}")
        return _index(about, digest(data))
    except (ValueError, RecursionError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f"{what} has no index of packed data: {reason}", remedy="`flockstep data pack` makes one") from error


def _index(about: dict[str, Any], hash_: bytes) -> ShardIndex:
    dtype, masked, rows = about.get("dtype"), about.get("masked"), about.get("shards")
    if not isinstance(dtype, str) or dtype not in WIDTHS or not isinstance(masked, bool):
        raise ValueError(f"its dtype {str(dtype)[:40]!r} is none of {', '.join(WIDTHS)}, or masked is no boolean")
    most = min(MAX_VOCABULARY, 1 << (8 * WIDTHS[dtype] - MASK_BITS * masked))
    vocab_size = _count(about.get("vocab_size"), "vocab_size", 1, most)
    tokenizer = about.get("tokenizer")
    if tokenizer != BYTES:
        if not isinstance(tokenizer, str) or not tokenizer.startswith(HASH_PREFIX):
            raise ValueError("its tokenizer is neither bytes nor blake3: and a hash")
        _hash(tokenizer.removeprefix(HASH_PREFIX))
    if not isinstance(rows, list) or not 1 <= len(rows) <= MAX_SHARDS:
        raise ValueError(f"it has not from 1 to {MAX_SHARDS:,} shards")
    held_out, config = about.get("held_out"), about.get("tokenizer_config")
    if config is not None and (not isinstance(config, list) or len(config) != 2):
        raise ValueError(f"its {CONFIG_NAME} is not a length and a hash")
    return ShardIndex(
        dtype=dtype,
        vocab_size=vocab_size,
        tokenizer=tokenizer,
        tokenizer_bytes=_count(about.get("tokenizer_bytes"), "tokenizer_bytes", 0, MAX_TOKENIZER_BYTES),
        tokenizer_config=None if config is None else (_count(config[0], CONFIG_NAME, 1, MAX_CONFIG_BYTES), _hash(config[1])),
        masked=masked,
        num_documents=_count(about.get("documents"), "documents", 0, _MAX_COUNT),
        shards=tuple(_shard(number, row, dtype) for number, row in enumerate(rows)),
        held_out=None if held_out is None else _shard(None, held_out, dtype),
        hash=hash_,
    )


def _shard(number: int | None, row: object, dtype: str) -> Shard:
    name, width = shard_name(number, dtype), WIDTHS[dtype]
    if not isinstance(row, list) or len(row) != 2:
        raise ValueError(f"{name} is not a number of tokens and a hash")
    tokens = _count(row[0], f"the tokens of {name}", 1, MAX_SHARD_BYTES // width)
    return Shard(name, tokens, _hash(row[1]), tokens * width)


def _count(value: object, what: str, least: int, most: int) -> int:
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{what} is no number from {least:,} to {most:,}")
    return value


def _hash(text: object) -> bytes:
    if not isinstance(text, str) or len(text) != 2 * DIGEST_BYTES or not text.isascii() or not text.isalnum():
        raise ValueError("a hash is not 64 hex digits")
    return bytes.fromhex(text)
