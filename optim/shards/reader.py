"""The training sequences of packed data, in units of whole shards.

A unit is as many shards as make 1,024 units of an epoch, so whoever leases a unit needs these shards and no others. The
sequences of a shard come in an order that is drawn anew each epoch, alike on every peer; what is left at the end of a shard
is too short and dropped. Masked data come as `optim.step.examples` says.
"""

import contextlib
import random
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ...peer.base.digest import digest
from ...peer.base.disk import write_whole
from ...peer.base.errors import UsageError
from ..data.datasets import Units, source_of
from ..data.units import MAX_UNITS, drawn
from ..step.examples import BEGINS
from .cache import Shards, Tokens
from .index import TOKENIZER, Shard, ShardIndex
from .members import Members
from .places import Place, patiently
from .tokenizer_config import CONFIG_NAME


class TokenShards(Units):
    """Training sequences of packed data, int64 (sequence_length + 1,), and beside them some that nobody trains on.

    Raises `UsageError` where no shard holds one.
    """

    def __init__(self, index: ShardIndex, shards: Shards, place: Place, *, name: str, sequence_length: int) -> None:
        self.index = index
        self.name = name
        self.sequence_length = sequence_length
        self.vocab_size = index.vocab_size
        self.has_examples = index.masked
        """Whether its sequences hold examples that must not see each other (`optim.step.examples`)."""
        self.num_units = min(len(index.shards), MAX_UNITS)
        self.source = source_of("packed", index.hash, sequence_length)
        self._shards, self._place = shards, place
        self._expected: Sequence[int] = ()
        index.check_length(sequence_length, name)

    def read(self, epoch: int, unit: int, done: int) -> Iterator[Tensor]:
        """Sequences of a unit from number `done` on. Raises `LocalError` where a shard cannot be read."""
        for number in range(unit, len(self.index.shards), self.num_units):
            shard = self.index.shards[number]
            count = self._count(shard)
            if done >= count:
                done -= count
                continue
            key = drawn(count, "order of a shard", self.source, str((epoch, number)).encode())
            order = np.argsort(key, kind="stable")[done:]
            done, tokens = 0, self._shards.take(shard)
            yield from (self._sequence(tokens, int(at)) for at in order)

    def expect(self, units: Sequence[int]) -> None:
        """Fetch the shards of these units while I read another one."""
        if units != self._expected:
            self._expected = units
            numbers = [number for unit in units for number in range(unit, len(self.index.shards), self.num_units)]
            self._shards.expect([self.index.shards[number] for number in numbers])
            if isinstance(self._place, Members):
                others = [*self.index.shards, *([] if self.index.held_out is None else [self.index.held_out])]
                random.shuffle(others)  # Each member another part of the data, so that together they have all.
                self._shards.fill(others)

    def held_out(self) -> Iterator[Tensor]:
        """Sequences of the held-out shard, the same for everybody. Raises `LocalError` where it cannot be read."""
        if (shard := self.index.held_out) is not None and (count := self._count(shard)):
            tokens = self._shards.take(shard)
            yield from (self._sequence(tokens, at) for at in range(count))

    def tokenizer_files(self, cache: Path) -> dict[str, bytes]:
        """Return the files of the tokenizer that made the tokens by name, none for bytes; see `tokenizer_files`."""
        return tokenizer_files(self.index, self._place, cache)

    def _count(self, shard: Shard) -> int:
        return (shard.num_tokens - 1) // self.sequence_length

    def _sequence(self, tokens: Tokens, at: int) -> Tensor:
        start = at * self.sequence_length
        found = tokens[start : start + self.sequence_length + 1].astype(np.int64)
        if self.index.masked:
            context = 1 << (8 * tokens.itemsize - 1)
            begins = context >> 1
            ids = found & (begins - 1) | np.where(found & begins, BEGINS, 0)
            found = np.where(found & context, ~ids, ids)
        return torch.from_numpy(found)


def heldout_batches(source: TokenShards, *, batch_size: int, num_batches: int) -> Iterator[Tensor]:
    """At most `num_batches` full batches of held-out sequences, int64 (batch_size, sequence_length + 1), always the same.

    Where there is less than one batch, it comes as one smaller batch.
    """
    sequences = list(islice(source.held_out(), batch_size * num_batches))
    for start in range(0, len(sequences), batch_size):
        if start == 0 or start + batch_size <= len(sequences):
            yield torch.stack(sequences[start : start + batch_size])


def tokenizer_files(index: ShardIndex, place: Place, cache: Path) -> dict[str, bytes]:
    """Return the files of the tokenizer beside an index by name, none for bytes.

    What `cache` has by its hash is read there, all else is kept there. Raises `UsageError`, and `LocalError` for the disk.
    """
    found = {}
    for name, hash_, size in index.files:
        if name not in (TOKENIZER, CONFIG_NAME):
            continue
        path, where, remedy = cache / hash_.hex(), f"{name} of {place.name}", "check the disk or the network"
        with contextlib.suppress(OSError):
            found[name] = path.read_bytes()
        if name in found and digest(found[name]) == hash_:
            continue
        try:
            found[name] = patiently(partial(place.whole, name, size))
        except OSError as error:
            raise UsageError(f"cannot read {where}: {error}", remedy=remedy) from error
        if digest(found[name]) != hash_:
            raise UsageError(f"{where} is not the one of its shards", remedy=remedy)
        write_whole(path, found[name])
    return found
