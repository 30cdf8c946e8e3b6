"""CountSketch: inner products of long vectors from 384 numbers, and false sums of them detected. Pure.

Theory of operation (Charikar, Chen, Farach-Colton 2002; Weinberger et al., arXiv:0902.2206). Element i is added, with a
random sign, to a random slot. ⟨Sx, Sy⟩ is then an unbiased estimate of ⟨x, y⟩ with a variance of at most
(‖x‖²‖y‖² + ⟨x, y⟩²) / slots, whatever x and y are, as long as they were fixed before the seed. S is linear.

Two stages, since a random slot for each of 10⁸ elements is slow and a random rotation of 16384 neighbours is not:

    1  a block of `SKETCH_BLOCK` elements gets random signs and is added to as many slots, rotated by a random number:
       two elements of one block never collide, two of different blocks do with a chance of 1 / BLOCK
    2  each of the `ROWS` rows adds every slot, with a random sign, to one of `columns`: the sketch itself

The second stage dominates the error: an inner product of one row has a standard deviation of at most
‖x‖‖y‖·√(2/columns). Inner products are the mean of the three rows (7 % of ‖x‖‖y‖ for one part at 128 columns, 2 % for
16 equal parts together, whose errors are independent), not their median: the mean of three true Gram matrices is itself
a Gram matrix, so a small distance between long vectors is as exact, relative to itself, as their lengths are, and a
rule that uses deviations from a centre needs that. The median of three would take entries from different rows.

The same numbers check a sum that another peer computed (`residual`).

All of it is exact or rounded element by element in one order (see `rule`), Philox's raw numbers never change (NEP 19),
and a slot gets one element of each block: so a sketch is the same bits on every machine, however the vector is cut into
chunks. The seed is unknown to every peer until contributions are committed; otherwise their authors could lie.
"""

from collections.abc import Iterator
from typing import Self

import numpy as np
import numpy.typing as npt

from ...peer.base.errors import LocalError
from ..vector.arrays import Floats
from ..vector.codec import CELL, CHUNK_CELLS, Codec, Encoded
from .rule import Floats64, total

SKETCH_BLOCK = 1 << 14
"""Elements of a block and slots of the first stage: 64 KiB of float32, half of a first-level cache."""
ROWS = 3
"""Rows, whose means are the estimates."""
SKETCH_COLUMNS = 128
"""Columns of a row: 1.5 kB a part, so 400 kB of sketches a peer and round at n = 16."""
SKETCH_SEED_BYTES = 32

_SIGN = np.uint32(1 << 31)
_SHIFTS = np.arange(32, dtype=np.uint32)[:, None]
_WORDS = SKETCH_BLOCK // 64
"""Random 64-bit words for the signs of a block; one more rotates it."""
_STRIDE = _WORDS // 4 + 1
"""Philox makes four words per count."""


class CountSketch:
    """Computes the sketch of a vector that arrives in chunks."""

    def __init__(self, seed: bytes, columns: int = SKETCH_COLUMNS) -> None:
        if len(seed) != SKETCH_SEED_BYTES:
            raise LocalError(f"a sketch's seed has {SKETCH_SEED_BYTES} bytes, not {len(seed)}")
        if columns & (columns - 1) or not 2 <= columns <= SKETCH_COLUMNS:
            raise LocalError(f"a sketch has 2 to {SKETCH_COLUMNS} columns, a power of two, not {columns}")
        self._seed = np.frombuffer(seed, "<u8")
        self._columns = columns
        self._slots: Floats = np.zeros(SKETCH_BLOCK, np.float32)
        self._signed = np.empty((32, SKETCH_BLOCK // 32), np.uint32)

    def add(self, values: Floats, offset: int) -> Self:
        """Add the elements from `offset` on, in ascending order; a value that is not finite spoils the sketch."""
        words = self._philox(offset // SKETCH_BLOCK * _STRIDE, 0)
        mask = self._signed.reshape(-1)
        with np.errstate(over="ignore", invalid="ignore"):
            start = -(offset % SKETCH_BLOCK)
            while start < values.size:
                raw = words.random_raw(4 * _STRIDE)
                first, last = max(start, 0), min(start + SKETCH_BLOCK, values.size)
                np.left_shift(raw[:_WORDS].astype("<u8", copy=False).view("<u4"), _SHIFTS, out=self._signed)
                np.bitwise_and(mask, _SIGN, out=mask)
                signed = mask[first - start : last - start]
                np.bitwise_xor(signed, values[first:last].view(np.uint32), out=signed)
                self._turn_in(signed.view(np.float32), (first - start + int(raw[_WORDS])) % SKETCH_BLOCK)
                start += SKETCH_BLOCK
        return self

    def table(self) -> Floats:
        """Return float32 [ROWS, columns]."""
        rows = np.empty((ROWS, self._columns), np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            for row in range(ROWS):
                drawn = self._philox(0, row + 1).random_raw(SKETCH_BLOCK // 8).astype("<u8", copy=False).view(np.uint8)
                # A bucket for each column and sign: no product is needed.
                sums = np.bincount(drawn & (2 * self._columns - 1), self._slots, 2 * self._columns)
                rows[row] = sums[: self._columns] - sums[self._columns :]
        return rows

    @classmethod
    def of(cls, vector: Floats, seed: bytes, offset: int = 0, columns: int = SKETCH_COLUMNS) -> Floats:
        """Return the sketch, float32 [ROWS, columns], of `vector` (flat float32), which begins at element `offset`."""
        return cls(seed, columns).add(vector, offset).table()

    @classmethod
    def of_part(
        cls, codec: Codec, data: Encoded, num_cells: int, seed: bytes, offset: int = 0, columns: int = SKETCH_COLUMNS
    ) -> Floats:
        """Return the sketch of Dec(`data`), an encoded part of `num_cells` cells, without decoding it as a whole."""
        sketch = cls(seed, columns)
        for at, chunk in decoded(codec, data, num_cells):
            sketch.add(chunk, offset + at)
        return sketch.table()

    def _philox(self, count: int, stage: int) -> np.random.Philox:
        low, high, third, fourth = (int(word) for word in self._seed)
        return np.random.Philox(key=low | high << 64, counter=count | stage << 64 | third << 128 | fourth << 192)

    def _turn_in(self, signed: Floats, slot: int) -> None:
        straight = min(signed.size, SKETCH_BLOCK - slot)
        self._slots[slot : slot + straight] += signed[:straight]
        self._slots[: signed.size - straight] += signed[straight:]


def decoded(codec: Codec, data: Encoded, num_cells: int) -> Iterator[tuple[int, Floats]]:
    """Yield Dec(`data`), an encoded part of `num_cells` cells, as the offset of each chunk and the chunk itself, flat.

    Each chunk is overwritten by the next.
    """
    buffer = np.empty(CHUNK_CELLS * CELL, np.float32)
    for first in range(0, num_cells, CHUNK_CELLS):
        last = min(first + CHUNK_CELLS, num_cells)
        chunk = buffer[: (last - first) * CELL]
        codec.decode_range(data, num_cells, first, last, chunk)
        yield first * CELL, chunk


def gram(tables: npt.NDArray[np.float32]) -> Floats64:
    """Return [n, n] estimates of the inner products of n vectors from their sketches, [n, ROWS, columns] of one seed."""
    wide = tables.astype(np.float64).reshape(len(tables), -1)
    result = np.empty((len(tables), len(tables)))
    with np.errstate(over="ignore", invalid="ignore"):
        for i, table in enumerate(wide):
            result[i] = total(table * wide) / ROWS
    return result
