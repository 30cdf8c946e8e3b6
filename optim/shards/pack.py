"""Makes shards of documents with a tokenizer: the same bytes of the same input, on any computer.

Theory of operation. Documents come in the order of their source. A long one is cut into pieces, at the ends of lines where
it has some, so that it goes through the tokenizer in parallel; its end token follows its last piece alone. Every 20th piece
is held out, until a million tokens are. What follows another stands behind it, and the whole is cut into shards of equal
length: 8 Mi tokens, or fewer, so that there are 64 shards for peers to share. All is written into a draft of the folder,
which takes its name when it is whole.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import numpy as np

from ...peer.base.digest import digest
from ...peer.base.disk import disk_errors, folder_draft_of
from ...peer.base.errors import UsageError
from ..data.rows import Document, Skips
from ..data.streams import HELD_OUT_EVERY
from ..data.tokenizer import UNTAKEN, FileTokenizer, Tokenizer
from .cache import Tokens
from .chat import Rendered
from .index import (
    BYTES,
    HASH_PREFIX,
    INDEX,
    MAX_SHARD_BYTES,
    MAX_SHARDS,
    TOKENIZER,
    WIDTHS,
    ShardIndex,
    dtype_for,
    read_index,
    shard_name,
    write_index,
)
from .tokenizer_config import CONFIG_NAME

SHARD_TOKENS = 8 << 20
"""16 MiB where a vocabulary fits into 16 bits: three seconds of a line of 50 Mbit/s, minutes of a model's steps."""
LEAST_SHARD_TOKENS = 1 << 14
"""Far more than a sequence, since what is left at the end of a shard is dropped."""
ENOUGH_SHARDS = 64
"""For peers to share; where there are fewer of the usual length, they are shorter."""
HELD_OUT_TOKENS = 1 << 20
"""What an evaluation reads is less."""
PIECE = 1 << 16
"""Characters of a document that go through the tokenizer at once."""
CHATS = 64
"""Chats that go through the tokenizer together."""
TOGETHER = 1 << 20
"""Characters of the pieces that do so on its threads."""
READ_TOKENS = 1 << 20

Tell = Callable[[int, int], None]
"""Is told how many documents and tokens are done."""
_Piece = tuple[Document, str, bool]
"""A document, a text of it, and whether it is the last one."""


def pack(
    documents: Iterable[Document],
    tokenizer: Tokenizer,
    out: Path,
    *,
    skips: Skips,
    tokenizer_file: bytes = b"",
    tokenizer_config: bytes = b"",
    shard_tokens: int = 0,
    tell: Tell = lambda documents, tokens: None,
) -> ShardIndex:
    """Write packed data into the new folder `out`, and return their index. Raises `FlockstepError`.

    `tokenizer_file` is the file of the tokenizer, empty for bytes, and `tokenizer_config` what lies beside it
    (`tokenizer_config`); `shard_tokens` is the length of a shard, 0: as it suits; `skips` takes what the tokenizer does not.
    """
    writer = _Packing(tokenizer, (tokenizer_file, tokenizer_config), shard_tokens, tell, masked=False)
    return writer.write(_encoded(documents, tokenizer, skips), out)


def pack_chats(
    chats: Iterable[Rendered],
    tokenizer: FileTokenizer,
    out: Path,
    *,
    skips: Skips,
    tokenizer_file: bytes,
    tokenizer_config: bytes = b"",
    shard_tokens: int = 0,
    tell: Tell = lambda documents, tokens: None,
) -> ShardIndex:
    """Write rendered chats as packed data whose answers alone have a loss; see `pack`."""
    writer = _Packing(tokenizer, (tokenizer_file, tokenizer_config), shard_tokens, tell, masked=True)
    return writer.write(_encoded_chats(chats, tokenizer, writer.dtype, skips), out)


class _Packing:
    """Writes tokens, which come piece by piece, as packed data."""

    def __init__(
        self, tokenizer: Tokenizer, files: tuple[bytes, bytes], shard_tokens: int, tell: Tell, *, masked: bool
    ) -> None:
        self.dtype = dtype_for(tokenizer.vocab_size, masked=masked)
        most = min(MAX_SHARD_BYTES // WIDTHS[self.dtype], 1 << 24)
        if shard_tokens and not LEAST_SHARD_TOKENS <= shard_tokens <= most:
            raise UsageError(f"a shard has from {LEAST_SHARD_TOKENS:,} to {most:,} tokens, not {shard_tokens:,}")
        self._vocab_size, self._files, self._masked = tokenizer.vocab_size, files, masked
        self._shard_tokens, self._tell = shard_tokens, tell

    def write(self, encoded: Iterable[tuple[Tokens, bool]], out: Path) -> ShardIndex:
        """Write them into the new folder `out`. Raises `FlockstepError`."""
        if out.exists():
            raise UsageError(f"{out} exists", remedy="name a new folder")
        with folder_draft_of(out) as draft, disk_errors(f"write {out}"):
            data = self._write(encoded, draft)
        return read_index(data, str(out))

    def _write(self, encoded: Iterable[tuple[Tokens, bool]], draft: Path) -> bytes:
        dtype, wanted = self.dtype, self._shard_tokens
        whole = _Cutter(draft, "whole", dtype, wanted or SHARD_TOKENS)
        held_out = _Cutter(draft, "held-out", dtype, MAX_SHARD_BYTES // WIDTHS[dtype])
        num_documents = 0
        for number, (tokens, is_last) in enumerate(encoded):
            is_held_out = number % HELD_OUT_EVERY == HELD_OUT_EVERY // 2 and held_out.num_tokens < HELD_OUT_TOKENS
            (held_out if is_held_out else whole).add(tokens)
            num_documents += is_last
            self._tell(num_documents, whole.num_tokens + held_out.num_tokens)
        shards = whole.finish()
        if whole.num_tokens < 2:
            raise UsageError("there is no text to pack", remedy="check the source, and its column of text")
        if not wanted and len(shards) < ENOUGH_SHARDS:
            shards = _cut_anew(draft, shards, dtype, max(LEAST_SHARD_TOKENS, -(-whole.num_tokens // ENOUGH_SHARDS)))
        if len(shards) > MAX_SHARDS:
            raise UsageError(f"these are {len(shards):,} shards, {MAX_SHARDS:,} at most", remedy="--shard-tokens 16777216")
        held = held_out.finish()[:1]
        for number, (name, _, _) in enumerate(shards):
            (draft / name).rename(draft / shard_name(number, dtype))
        for name, _, _ in held:
            (draft / name).rename(draft / shard_name(None, dtype))
        file, config = self._files
        for name, content in (TOKENIZER, file), (CONFIG_NAME, config):
            if content:
                (draft / name).write_bytes(content)
        data = write_index(
            dtype=dtype,
            vocab_size=self._vocab_size,
            tokenizer=HASH_PREFIX + digest(file).hex() if file else BYTES,
            tokenizer_bytes=len(file),
            tokenizer_config=(len(config), digest(config)) if config else None,
            masked=self._masked,
            num_documents=num_documents,
            shards=[(count, hash_) for _, count, hash_ in shards],
            held_out=next(((count, hash_) for _, count, hash_ in held), None),
        )
        (draft / INDEX).write_bytes(data)
        return data


def _encoded_chats(
    chats: Iterable[Rendered], tokenizer: FileTokenizer, dtype: str, skips: Skips
) -> Iterator[tuple[Tokens, bool]]:
    """Yield the tokens of every chat with the bits of masked data: what is outside of answers, its end too, is context."""
    context = np.uint32(1 << (8 * WIDTHS[dtype] - 1))
    chats = iter(chats)
    while some := list(islice(chats, CHATS)):
        for (tokens, begins), chat in zip(tokenizer.encode_at([chat.text for chat in some]), some, strict=True):
            if not len(tokens):
                skips.add(chat.file, chat.row, UNTAKEN)
                continue
            is_answer = np.zeros(len(tokens), np.bool_)
            for start, stop in chat.answers:
                is_answer |= (begins >= start) & (begins < stop)
            masked = np.where(is_answer, tokens, tokens | context)
            if tokenizer.end is not None and int(tokens[-1]) != tokenizer.end:
                masked = np.append(masked, np.uint32(tokenizer.end) | context)
            masked[:1] |= context | context >> np.uint32(1)  # Nothing comes before it that could predict it.
            yield masked, True


def _encoded(documents: Iterable[Document], tokenizer: Tokenizer, skips: Skips) -> Iterator[tuple[Tokens, bool]]:
    """Yield the tokens of every piece in order, and whether a document ends with it; `skips` takes those without tokens."""
    ends = np.array([] if tokenizer.end is None else [tokenizer.end], np.uint32)

    def encode(pieces: list[_Piece]) -> list[tuple[Tokens, _Piece]]:
        return list(zip(tokenizer.encode([text for _, text, _ in pieces]), pieces, strict=True))

    def encoded() -> Iterator[tuple[Tokens, _Piece]]:
        threads = os.cpu_count() or 1
        with ThreadPoolExecutor(threads) as pool:  # Beside the tokenizer's own threads: making arrays takes as long.
            waiting = deque[Future[list[tuple[Tokens, _Piece]]]]()
            for pieces in _together(documents):
                waiting.append(pool.submit(encode, pieces))
                if len(waiting) > threads:
                    yield from waiting.popleft().result()
            while waiting:
                yield from waiting.popleft().result()

    is_open = False
    for tokens, (document, _, is_last) in encoded():
        if not len(tokens):
            skips.add(document.file, document.row, UNTAKEN)
            tokens = ends if is_open and is_last else ends[:0]
        elif not is_last:
            tokens = tokens[: len(tokens) - len(ends)]
        if len(tokens):
            yield tokens, is_last
        is_open = not is_last and (is_open or len(tokens) > 0)


def _together(documents: Iterable[Document]) -> Iterator[list[_Piece]]:
    pieces, size = list[_Piece](), 0
    for document in documents:
        for piece in _pieces(document):
            pieces.append(piece)
            size += len(piece[1])
            if size >= TOGETHER:
                yield pieces
                pieces, size = [], 0
    if pieces:
        yield pieces


def _pieces(document: Document) -> Iterator[_Piece]:
    """Yield a document in pieces that end with a line where they can, each with whether it is the last one."""
    text, start = document.text, 0
    while start < len(text):
        end = start + PIECE
        if end < len(text):
            end = text.rfind("\n", start, end) + 1 or end
        yield document, text[start:end], end >= len(text)
        start = end


class _Cutter:
    """Writes tokens into files of equal length, the last one shorter."""

    def __init__(self, folder: Path, name: str, dtype: str, length: int) -> None:
        self.num_tokens = 0
        self._folder, self._name, self._length = folder, name, length
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._parts = list[Tokens]()
        self._size = 0
        self._files = list[tuple[str, int, bytes]]()

    def add(self, tokens: Tokens) -> None:
        """Write some more."""
        self._parts.append(tokens.astype(self._dtype))
        self._size += len(tokens)
        self.num_tokens += len(tokens)
        if self._size >= self._length:
            whole = np.concatenate(self._parts)
            for start in range(0, len(whole) - self._length + 1, self._length):
                self._write(whole[start : start + self._length])
            rest = whole[len(whole) - len(whole) % self._length :]
            self._parts, self._size = [rest], len(rest)

    def finish(self) -> list[tuple[str, int, bytes]]:
        """Return the name, the number of tokens and the hash of each file."""
        if self._size:
            self._write(np.concatenate(self._parts))
        return self._files

    def _write(self, tokens: Tokens) -> None:
        name, data = f"{self._name}-{len(self._files)}", tokens.tobytes()
        (self._folder / name).write_bytes(data)
        self._files.append((name, len(tokens), digest(data)))


def _cut_anew(
    folder: Path, files: list[tuple[str, int, bytes]], dtype: str, length: int
) -> list[tuple[str, int, bytes]]:
    """Cut files of tokens into shorter ones; returns these."""
    anew = _Cutter(folder, "shorter", dtype, length)
    for name, _, _ in files:
        path = folder / name
        with path.open("rb") as file:
            while data := file.read(READ_TOKENS * WIDTHS[dtype]):
                anew.add(np.frombuffer(data, np.dtype(dtype).newbyteorder("<")))
        path.unlink()
    return anew.finish()
