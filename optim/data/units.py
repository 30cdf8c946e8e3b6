"""Cuts a dataset into units, the pieces that peers lease (`shards`), and orders the items of a unit. Pure.

An epoch is one pass. Its order is drawn from the run's seed and its number, alike on every peer: the items lie in
shards of neighbours, the shards are shuffled, and a unit is some consecutive ones of them, read in turn, so that what
stands in one batch comes from many places while a disk still reads a few neighbours at a time.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from ...peer.base.digest import keyed

MAX_UNITS = 1024
"""Units of an epoch: fine enough to split among as many members, and 128 bytes as bits."""
SOURCE_BYTES = 16
"""Of the hash that names a dataset."""
UNIT_ITEMS = 512
"""Items of a unit, if there are that many for each: seconds of work on a small model, minutes on a large one."""
LEAST_UNITS = 32
"""So that a small dataset can still be split."""
SHARDS_PER_UNIT = 64
"""More than a batch usually holds, so that hardly two of its items are neighbours."""

Places = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class UnitPlan:
    """`num_items` items of a dataset that can be indexed, in the order that `seed` gives each epoch."""

    seed: int
    num_items: int

    @property
    def num_units(self) -> int:
        """Units of an epoch."""
        return min(MAX_UNITS, max(self.num_items // UNIT_ITEMS, min(self.num_items, LEAST_UNITS)))

    def items(self, epoch: int, unit: int) -> Places:
        """The items of a unit in the order in which they are trained. Units of an epoch have none in common."""
        shard_items = max(1, self.num_items // (self.num_units * SHARDS_PER_UNIT))
        num_shards = -(-self.num_items // shard_items)
        shards = _shuffled(self.seed, epoch, num_shards)
        mine = shards[unit * num_shards // self.num_units : (unit + 1) * num_shards // self.num_units]
        places = (mine[None, :] * shard_items + np.arange(shard_items)[:, None]).ravel()
        return places[places < self.num_items]


@lru_cache(maxsize=4)
def _shuffled(seed: int, epoch: int, count: int) -> Places:
    return np.argsort(drawn(count, "order of the data", str(seed).encode(), str(epoch).encode()), kind="stable")


def drawn(count: int, context: str, *key: bytes) -> npt.NDArray[np.uint64]:
    """`count` random numbers, the same for the same key on every computer and with every version of NumPy.

    Of NumPy's generators only the raw bits are promised to stay as they are (NEP 19), hence no `permutation`.
    """
    seed = int.from_bytes(keyed(context, *key))
    return np.random.PCG64(seed).random_raw(count)
