"""Data sources by name, cut into sequences, and a held-out twentieth that nobody trains on.

    text:PATH         a file, a folder (every text file below it) or a glob
    text:{stdlib}     the sources of Python's standard library: text that every computer has at hand
    tokens:PATH       a file of uint16 or uint32, little-endian: `x.u16`, `x.u32`, or `x.bin?dtype=uint16`
    parquet:PATH, json:PATH, hf:NAME    documents that are streamed (`data_stream`)

Sequence i is `tokens[i·L : i·L + L + 1]`: L inputs and, shifted by one, L targets. Every 20th block of neighbouring
sequences is held out: spread over the whole text, and the same on every peer with the same data.
"""

import shlex
from collections import deque
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...dht.run.manifest import Data
from ...peer.base.config import PeerConfig, default_home
from ...peer.base.digest import RunningDigest, keyed
from ...peer.base.disk import disk_errors, draft_of, user_path
from ...peer.base.errors import UsageError
from ..consent import hide_secrets, trusts_data
from .datasets import SequenceUnits
from .hub import ENDINGS
from .rows import Skips
from .streams import HELD_OUT_EVERY, STREAMS, TokenStream, open_stream
from .text import MAX_TEXT_BYTES, texts
from .tokenizer import BYTES, Tokenizer, find_tokenizer
from .units import SOURCE_BYTES

BLOCK_SEQUENCES = 64
"""Sequences of a block of a large source; a small one has shorter blocks, so that some are held out."""

TEXT_PIECE_BYTES = 1 << 20
"""Text that is tokenized at once: a tokenizer takes some twenty times as much memory."""

PIECES = 8
"""Of which so many go to its threads together."""

PROBES = 64
"""Sequences that are hashed to know a source by: enough to tell a text from another one of the same length."""

Tokens: TypeAlias = npt.NDArray[np.uint8] | npt.NDArray[np.uint16] | npt.NDArray[np.uint32]


class TokenSource:
    """A map-style dataset of training sequences, each int64 (sequence_length + 1,), and beside it the held-out ones."""

    def __init__(
        self,
        tokens: Tokens,
        sequence_length: int,
        *,
        name: str,
        vocab_size: int | None = None,
        skips: Skips | None = None,
    ) -> None:
        num_sequences = (len(tokens) - 1) // sequence_length
        if num_sequences < HELD_OUT_EVERY:
            raise UsageError(
                f"{name} has {len(tokens)} tokens, too few for {HELD_OUT_EVERY} sequences of {sequence_length}",
                remedy="use more data or a shorter sequence length",
            )
        self.name = name
        self.sequence_length = sequence_length
        self.vocab_size = vocab_size
        """How many tokens its tokenizer knows; None if nobody says."""
        self._block = min(BLOCK_SEQUENCES, max(1, num_sequences // (5 * HELD_OUT_EVERY)))
        blocks = np.arange(num_sequences // self._block)
        self._tokens = tokens
        self._skips = skips or Skips()
        self._limit = 1 << 32
        self._held_out = blocks[HELD_OUT_EVERY // 2 :: HELD_OUT_EVERY]
        self._training = np.setdiff1d(blocks, self._held_out)

    def __len__(self) -> int:
        """Training sequences."""
        return len(self._training) * self._block

    def __getitem__(self, index: int) -> Tensor:
        """Training sequence `index`."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self._sequence(self._training, index)

    @property
    def num_held_out(self) -> int:
        """Held-out sequences."""
        return len(self._held_out) * self._block

    def held_out(self, index: int) -> Tensor:
        """Held-out sequence `index`."""
        return self._sequence(self._held_out, index)

    @property
    def source(self) -> bytes:
        """By what peers know that they have the same data, whatever its name is on their computers."""
        probes = [self[i * len(self) // PROBES].numpy().tobytes() for i in range(PROBES)]
        about = (len(self._tokens), self.sequence_length)
        return keyed("token source", repr(about).encode(), *probes)[:SOURCE_BYTES]

    def limit_tokens(self, size: int) -> None:
        """Put the nearest sequence of tokens below `size` in the place of each other one, from now on.

        Raises `UsageError` where one of some that are spread over all data has others: that is no damage.
        """
        for index in range(PROBES):
            largest = int(self[index * len(self) // PROBES].max())
            if largest >= size:
                raise UsageError(
                    f"{self.name} holds token {largest}, the model knows {size}",
                    remedy="check the dtype and the tokenizer of the data",
                )
        self._limit = size

    def _sequence(self, blocks: npt.NDArray[np.int64], index: int) -> Tensor:
        for place in (*range(index, min(index + PROBES, len(blocks) * self._block)), 0):
            block, offset = divmod(place, self._block)
            start = (int(blocks[block]) * self._block + offset) * self.sequence_length
            tokens = self._tokens[start : start + self.sequence_length + 1].astype(np.int64)
            if (largest := int(tokens.max())) < self._limit:
                break
            self._skips.add(self.name, start // self.sequence_length + 1, f"holds token {largest}, of {self._limit}")
        return torch.from_numpy(np.minimum(tokens, self._limit - 1))


def heldout_batches(source: TokenSource | SequenceUnits, *, batch_size: int, num_batches: int) -> Iterator[Tensor]:
    """At most `num_batches` full batches of held-out sequences, int64 (batch_size, sequence_length + 1), always the same.

    They are spread evenly over all that is held out; of a stream they are the first ones. Where there is less than one
    batch, it comes as one smaller batch.
    """
    if not isinstance(source, TokenSource):
        sequences = list(islice(source.held_out(), batch_size * num_batches))
    else:
        used = min(batch_size * num_batches, source.num_held_out)
        used -= used % min(batch_size, used)
        sequences = [source.held_out(i * source.num_held_out // used) for i in range(used)]
    for start in range(0, len(sequences), batch_size):
        if start == 0 or start + batch_size <= len(sequences):
            yield torch.stack(sequences[start : start + batch_size])


def open_data(
    data: Data, config: PeerConfig, *, mine: bool = False, skips: Skips | None = None
) -> TokenSource | TokenStream:
    """What a volunteer trains on: the manifest's data, if they may be opened (`consent`), or their own. Raises `UsageError`.

    `mine` is whether this peer has signed the manifest; `skips` takes what of the data is skipped.
    """
    trusted = bool(config.data) or trusts_data(data.source, config, mine=mine)
    if not trusted:
        hide_secrets()
    return open_source(
        config.data or data.source,
        trusted=trusted,
        sequence_length=data.sequence_length,
        tokenizer=find_tokenizer(data, config),
        cache=config.home / "cache",
        skips=skips,
    )


def warning_of(source: str) -> str:
    """Return what is wrong with a source that its run's owner names, in a line; empty if nothing is, or it is not here."""
    kind, _, place = source.partition(":")
    skips = Skips()
    try:
        if kind in STREAMS:
            open_stream(kind, place, tokenizer=BYTES, sequence_length=1, skips=skips)
        elif kind == "text":
            deque(texts(place, skips), maxlen=0)
            _warn(source, skips)
        else:
            raise _unknown(source)
    except UsageError as error:
        return f"{error}; {error.remedy}" if error.remedy else str(error)
    return skips.warning


def open_source(
    source: str,
    *,
    sequence_length: int,
    tokenizer: Tokenizer = BYTES,
    cache: Path | None = None,
    trusted: bool = True,
    skips: Skips | None = None,
) -> TokenSource | TokenStream:
    """The source of that name. Raises `UsageError` where it is missing, empty or no text.

    Unless it is `trusted`, it must be public (`consent`), and may lead nowhere else. What a tokenizer made of text is kept
    in the folder `cache` (that of the home folder), so that it is made once.
    """
    if sequence_length < 1:
        raise UsageError(f"sequence length {sequence_length} is not positive")
    kind, _, place = source.partition(":")
    skips = skips or Skips()
    if kind in STREAMS:
        return open_stream(
            kind, place, tokenizer=tokenizer, sequence_length=sequence_length, trusted=trusted, skips=skips
        )
    if kind == "tokens":
        return TokenSource(_map_tokens(place), sequence_length, name=source, skips=skips)
    if kind != "text":
        raise _unknown(source)
    if tokenizer is BYTES:
        tokens = _text_bytes(source, place, skips)
    else:
        tokens = _text_tokens(source, place, tokenizer, cache or default_home() / "cache", skips)
    _warn(source, skips)
    return TokenSource(tokens, sequence_length, name=source, vocab_size=tokenizer.num_in_texts)


def _text_bytes(source: str, place: str, skips: Skips) -> Tokens:
    """All text, each file closed by a zero byte, which no text contains."""
    text = bytearray()
    for content in texts(place, skips):
        text += content + b"\0"
        if len(text) > MAX_TEXT_BYTES:
            raise UsageError(
                f"{source} holds more than 2 GiB of text", remedy="use a tokens: file, which is not loaded"
            )
    if not text:
        raise _no_text(source, skips)
    return np.frombuffer(text, np.uint8)


def _text_tokens(source: str, place: str, tokenizer: Tokenizer, cache: Path, skips: Skips) -> Tokens:
    """The tokens of all text, mapped from a file in `cache` that is written if it is not there yet."""
    hasher = RunningDigest()
    for content in texts(place, skips):
        hasher.add(len(content).to_bytes(8, "little") + content)
    path = cache / f"{keyed('token cache', hasher.value(), tokenizer.digest).hex()}.u32"
    with disk_errors(f"keep the tokens of {source} in {cache}"):
        if not path.is_file():
            # Peers that share a home may come here at once.
            with draft_of(path, replace=False) as draft, draft.open("wb") as file:
                pieces = _pieces(place)
                while some := list(islice(pieces, PIECES)):
                    file.writelines(tokens.astype("<u4").tobytes() for tokens in tokenizer.encode(some))
        if not path.stat().st_size:
            raise _no_text(source, skips)
        tokens: Tokens = np.memmap(path, "<u4", mode="r")
    return tokens


def _pieces(place: str) -> Iterator[str]:
    """All text in pieces that end with a line where they can."""
    for content in texts(place):
        text, start = content.decode(), 0
        while start < len(text):
            end = start + TEXT_PIECE_BYTES
            if end < len(text):
                end = text.rfind("\n", start, end) + 1 or end
            yield text[start:end]
            start = end


def _no_text(source: str, skips: Skips) -> UsageError:
    place, why = source.partition(":")[2], f": {skips.first}" if skips.first else ""
    found = _kind_by_name(place) or next(filter(None, map(_kind_by_name, _names_in(place))), "")
    remedy = f"write {found}:{place}" if found else "name a file of UTF-8 text, or a folder that has some"
    return UsageError(f"{source} holds no text{why}", remedy=(skips.first and skips.first.remedy) or remedy)


def _warn(source: str, skips: Skips) -> None:
    """Warn of text that is skipped for its encoding: nobody means to leave it out."""
    if skips.first is not None:
        remedy = skips.first.remedy
        num_files = f"{skips.count} files are" if skips.count > 1 else "a file is"
        skips.warning = f"{source}: {num_files} skipped, such as {skips.first}" + (remedy and f"; {remedy}")


def _unknown(source: str) -> UsageError:
    """Return the error for a source of no known kind, with a remedy that works for its file."""
    kind, _, place = source.rpartition(":")
    path = shlex.quote(place)
    if kind in ("csv", "tsv") or place.endswith((".csv", ".tsv")):
        tabs = ", parse_options=c.ParseOptions(delimiter=chr(9))" if "tsv" in (kind, place[-3:]) else ""
        code = f"p.write_table(c.read_csv(sys.argv[1]{tabs}), sys.argv[2])"
        code = f"import sys, pyarrow.csv as c, pyarrow.parquet as p; {code}"
        remedy = f'convert it: python -c "{code}" {path} NEW.parquet, and write parquet:NEW.parquet?column=COLUMN'
    elif place.startswith("//"):
        remedy = "download it and name the file, or pack it by `flockstep data pack` and name where the shards are"
    else:
        remedy = f"write {_kind_by_name(place) or 'text'}:{place}"
    return UsageError(f"there is no data source {source!r}", remedy=remedy)


def _kind_by_name(name: str) -> str:
    """Return the kind of source that reads a file, by how its name ends; empty if none does by its name alone."""
    kinds = {**ENDINGS, "tokens": (".u16", ".u32")}
    return next((kind for kind, endings in kinds.items() if name.lower().endswith(endings)), "")


def _names_in(place: str) -> list[str]:
    folder = user_path(place)
    return sorted(file.name for file in folder.iterdir()) if folder.is_dir() else []


def _map_tokens(place: str) -> Tokens:
    name, _, query = place.partition("?")
    path = user_path(name)
    kind = {"dtype=uint16": "<u2", "dtype=uint32": "<u4", ".u16": "<u2", ".u32": "<u4"}.get(query or path.suffix)
    if kind is None:
        raise UsageError(
            f"tokens:{place} does not say how wide its tokens are",
            remedy=f"write tokens:{name}?dtype=uint16 or =uint32",
        )
    try:
        size = path.stat().st_size
        if size % np.dtype(kind).itemsize or not size:
            raise UsageError(f"{path}: {size} bytes are no whole number of tokens", remedy="check its dtype")
        tokens: Tokens = np.memmap(path, kind, mode="r")
    except OSError as error:
        raise UsageError(
            f"cannot read {path}: {error.strerror}", remedy="check the path and its permissions"
        ) from error
    return tokens
