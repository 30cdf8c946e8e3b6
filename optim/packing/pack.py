"""Makes packed data of a source: the same bytes of the same input, on any computer, however often it is interrupted.

Theory of operation. The parts of a source (`sources`) are grouped into tasks of some megabytes. Each thread takes one after
the other to a tokenizer of its own (`encode`), and keeps its tokens as files in a folder beside the target. So an
interrupted packing loses the tasks that are begun: the same command goes on behind the others, as long as the source is
unchanged. Once all are there, their pieces are joined in the order of the source: every 20th is held out, until a million
tokens are, and the others are cut into shards of equal length: 8 Mi tokens, or fewer, so that there are 64 shards for peers
to share. The target is there when it is whole.
"""

import contextlib
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ...peer.base.digest import digest
from ...peer.base.disk import disk_errors, folder_draft_of, write_whole
from ...peer.base.errors import UsageError
from ...peer.base.home_lock import home_lock
from ..shards.cache import Tokens
from ..shards.index import (
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
from ..shards.tokenizer_config import CONFIG_NAME
from .encode import Encoder, Found, TokenizerFiles
from .sources import PART_BYTES, Part, Source, nothing_in

SHARD_TOKENS = 8 << 20
"""16 MiB where a vocabulary fits into 16 bits: three seconds of a line of 50 Mbit/s, minutes of a model's steps."""
LEAST_SHARD_TOKENS = 1 << 14
"""Far more than a sequence, since what is left at the end of a shard is dropped."""
ENOUGH_SHARDS = 64
"""For peers to share; where there are fewer of the usual length, they are shorter."""
HELD_OUT_EVERY, HELD_OUT_TOKENS = 20, 1 << 20
"""5 %, and no more than an evaluation reads."""
RECIPE = "recipe.json"
"""What decides about the tokens, beside those that are done: of another recipe they are of no use."""


@dataclass(slots=True)
class Progress:
    """How far a packing is; `changed` is called in the threads that make it."""

    num_bytes: int = 0
    """Of the source, as far as that is known: parquet unpacked, JSON packed."""
    num_files: int = 0
    bytes: int = 0
    files: int = 0
    documents: int = 0
    tokens: int = 0
    new_tokens: int = 0
    """Without those that an earlier packing has made."""
    changed: Callable[[], None] = lambda: None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, **counts: int) -> None:
        """Count some more."""
        with self.lock:
            for name, count in counts.items():
                setattr(self, name, getattr(self, name) + count)
        self.changed()


@dataclass(frozen=True, slots=True)
class Packed:
    """Packed data, and what of their source is not in them."""

    index: ShardIndex
    found: Found


def recipe_of(source: Source, files: TokenizerFiles, shard_tokens: int = 0) -> bytes:
    """Return all that decides about the packed data of a source."""
    tokenizer = [digest(content).hex() for content in (files.content, files.config)]
    about = [source.name, source.column, source.is_chat, tokenizer, shard_tokens, source.stamps]
    return json.dumps([*about, [asdict(part) for part in source.parts]]).encode()


def pack(
    source: Source,
    files: TokenizerFiles,
    out: Path,
    *,
    shard_tokens: int = 0,
    progress: Progress | None = None,
    threads: int = 0,
) -> Packed:
    """Write packed data into the new folder `out`. Raises `FlockstepError`.

    `shard_tokens` is the length of a shard, 0: as it suits; `threads` work at the same time, 0: as many as there are cores.
    """
    if out.exists():
        raise UsageError(f"{out} exists", remedy="name a new folder")
    dtype = dtype_for(files.size_for(source), masked=source.is_chat)
    most = min(MAX_SHARD_BYTES // WIDTHS[dtype], 1 << 24)
    if shard_tokens and not LEAST_SHARD_TOKENS <= shard_tokens <= most:
        raise UsageError(f"a shard has from {LEAST_SHARD_TOKENS:,} to {most:,} tokens, not {shard_tokens:,}")
    if source.is_chat and not files.content:
        raise UsageError("chats need a tokenizer with a chat template", remedy="name its folder as the tokenizer")
    parts_folder = out.with_name(f".{out.name}.parts")
    with home_lock(parts_folder, pid=os.getpid()), _without_what_is_wrong(parts_folder):
        work = _Work(source, files, parts_folder, recipe_of(source, files, shard_tokens), progress or Progress())
        work.encode(threads or os.cpu_count() or 1)
        with folder_draft_of(out) as draft, disk_errors(f"write {out}"):
            packed = _join(work, files, dtype, shard_tokens, draft)
    shutil.rmtree(parts_folder, ignore_errors=True)
    return packed


@contextlib.contextmanager
def _without_what_is_wrong(folder: Path) -> Iterator[None]:
    """Remove the folder where the input is wrong: the same command cannot go on with it."""
    try:
        yield
    except UsageError:
        shutil.rmtree(folder, ignore_errors=True)
        raise


class _Work:
    """The tasks of a packing, and their tokens on the disk."""

    def __init__(self, source: Source, files: TokenizerFiles, folder: Path, recipe: bytes, progress: Progress) -> None:
        self.source, self._files, self._folder, self._progress = source, files, folder, progress
        self.tasks = list(_tasks(source.parts))
        with disk_errors(f"write in {folder}"):
            if not (folder / RECIPE).is_file() or (folder / RECIPE).read_bytes() != recipe:
                for path in folder.glob("[0-9]*"):
                    path.unlink()
                write_whole(folder / RECIPE, recipe)
        progress.num_bytes = sum(part.size for part in source.parts)
        progress.num_files = sum(part.is_last for part in source.parts)

    def encode(self, threads: int) -> None:
        """Make the tokens that are missing. Raises `FlockstepError`."""
        left = list[int]()
        for number in range(len(self.tasks)):
            if self._path(number, "json").is_file():
                found = self.found(number)
                self._progress.add(tokens=sum(found["pieces"]), documents=found["documents"])
                self._end(number, found)
            else:
                left.append(number)
        threads, left = min(threads, len(left)), left[::-1]
        stop = threading.Event()

        def tell(documents: int, tokens: int) -> None:
            if stop.is_set():
                raise _StoppedError
            self._progress.add(documents=documents, tokens=tokens, new_tokens=tokens)

        def work() -> None:
            encoder = Encoder(self.source, self._files)
            while left and not stop.is_set():
                try:
                    number = left.pop()
                except IndexError:  # Another thread took the last one.
                    return
                tokens, found = encoder.encode(self.tasks[number], tell)
                write_whole(self._path(number, "tokens"), tokens.tobytes())
                write_whole(self._path(number, "json"), json.dumps(found).encode())
                self._end(number, found)

        if threads <= 0:
            return
        with ThreadPoolExecutor(threads) as pool:
            try:
                for done in as_completed([pool.submit(work) for _ in range(threads)]):
                    done.result()
            finally:
                stop.set()

    def found(self, number: int) -> dict[str, Any]:
        """Return what was found in a task (`Found`)."""
        found: dict[str, Any] = json.loads(self._path(number, "json").read_bytes())
        return found

    def tokens(self, number: int, dtype: str) -> Tokens:
        """Return the tokens of a task."""
        tokens: Tokens = np.fromfile(self._path(number, "tokens"), np.dtype(dtype).newbyteorder("<"))
        return tokens

    def _end(self, number: int, found: dict[str, Any]) -> None:
        self._progress.add(bytes=sum(part.size for part in self.tasks[number]), files=found["files"])

    def _path(self, number: int, kind: str) -> Path:
        return self._folder / f"{number:06d}.{kind}"


class _StoppedError(Exception):
    """Another thread has failed, or the user wants no more."""


def _tasks(parts: Sequence[Part]) -> Iterator[list[Part]]:
    some, size = list[Part](), 0
    for part in parts:
        some.append(part)
        size += part.size
        if size >= PART_BYTES:
            yield some
            some, size = [], 0
    if some:
        yield some


def _join(work: _Work, files: TokenizerFiles, dtype: str, wanted: int, draft: Path) -> Packed:
    """Write the shards and their index into an empty folder. Raises `FlockstepError`, and `OSError`."""
    all_found, held_of, num_pieces, num_tokens, num_held = Found(skips=work.source.skips), dict[int, list[int]](), 0, 0, 0
    for number in range(len(work.tasks)):
        found = work.found(number)
        first = (HELD_OUT_EVERY // 2 - num_pieces) % HELD_OUT_EVERY
        for piece in range(first, len(found["pieces"]), HELD_OUT_EVERY):
            if num_held >= HELD_OUT_TOKENS:
                break
            held_of.setdefault(number, []).append(piece)
            num_held += found["pieces"][piece]
        num_pieces += len(found["pieces"])
        num_tokens += sum(found["pieces"])
        all_found.documents += found["documents"]
        all_found.files += found["files"]
        all_found.num_unanswered += found["num_unanswered"]
        all_found.num_unfound += found["num_unfound"]
        all_found.skips.merge(found["skips"])
    if num_tokens - num_held < 2:
        raise nothing_in(work.source)
    enough = max(LEAST_SHARD_TOKENS, -(-(num_tokens - num_held) // ENOUGH_SHARDS))
    length = wanted or min(SHARD_TOKENS, enough)
    if (num_tokens - num_held) / length > MAX_SHARDS:
        remedy = "--shard-tokens 16777216"
        raise UsageError(f"these are more than {MAX_SHARDS:,} shards of {length:,} tokens", remedy=remedy)
    whole, held_out = _Cutter(draft, dtype, length), list[Tokens]()
    for number in range(len(work.tasks)):
        tokens, at = work.tokens(number, dtype), 0
        ends = np.cumsum(work.found(number)["pieces"], dtype=np.int64)
        for piece in held_of.get(number, ()):
            end = int(ends[piece])
            start = int(ends[piece - 1]) if piece else 0
            whole.add(tokens[at:start])
            held_out.append(tokens[start:end])
            at = end
        whole.add(tokens[at:])
    held = np.concatenate(held_out)[: MAX_SHARD_BYTES // WIDTHS[dtype]].tobytes() if held_out else b""
    if held:
        (draft / shard_name(None, dtype)).write_bytes(held)
    for name, content in (TOKENIZER, files.content), (CONFIG_NAME, files.config):
        if content:
            (draft / name).write_bytes(content)
    data = write_index(
        dtype=dtype,
        vocab_size=files.size_for(work.source),
        tokenizer=HASH_PREFIX + digest(files.content).hex() if files.content else BYTES,
        tokenizer_bytes=len(files.content),
        tokenizer_config=(len(files.config), digest(files.config)) if files.config else None,
        masked=work.source.is_chat,
        num_documents=all_found.documents,
        shards=whole.finish(),
        held_out=(len(held) // WIDTHS[dtype], digest(held)) if held else None,
    )
    (draft / INDEX).write_bytes(data)
    return Packed(read_index(data, str(draft)), all_found)


class _Cutter:
    """Writes tokens into shards of equal length, the last one shorter."""

    def __init__(self, folder: Path, dtype: str, length: int) -> None:
        self._folder, self._dtype, self._length = folder, dtype, length
        self._parts = list[Tokens]()
        self._size = 0
        self._shards = list[tuple[int, bytes]]()

    def add(self, tokens: Tokens) -> None:
        """Write some more."""
        self._parts.append(tokens)
        self._size += len(tokens)
        if self._size >= self._length:
            whole = np.concatenate(self._parts)
            for start in range(0, len(whole) - self._length + 1, self._length):
                self._write(whole[start : start + self._length])
            rest = whole[len(whole) - len(whole) % self._length :]
            self._parts, self._size = [rest], len(rest)

    def finish(self) -> list[tuple[int, bytes]]:
        """Return the number of tokens and the hash of each shard."""
        if self._size:
            self._write(np.concatenate(self._parts))
        return self._shards

    def _write(self, tokens: Tokens) -> None:
        data = tokens.tobytes()
        (self._folder / shard_name(len(self._shards), self._dtype)).write_bytes(data)
        self._shards.append((len(tokens), digest(data)))
