"""`median`, element by element (Yin et al., arXiv:1803.01498).

It needs the contributions, not their inner products, so no sketch can check an owner's output. A contribution without a mass
is left out; otherwise all count alike.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from ....collectives.robust.rule import Floats64, Rule, Weighting, normalized, valid
from ....collectives.vector.arrays import Floats
from ....collectives.vector.codec import CELL, Codec, Encoded

RULE_CHUNK_CELLS = 64
"""The size of a chunk in elements: 2 MiB of float64 at n = 16."""


class Median(Rule):
    """The median of each element; of an even number, the mean of the middle two."""

    name = "median"

    def weights(self, gram: Floats64, parts: Floats64, masses: Floats64) -> Weighting:
        """Return equal weights for all valid contributions: `chunks` combines those."""
        good = valid(gram, parts, masses)
        return Weighting(
            weights=np.tile(normalized(good.astype(np.float64)), (len(parts), 1)),
            flagged={int(i): "not finite, or without a mass" for i in np.flatnonzero(~good)},
        )

    def chunks(
        self, codec: Codec, parts: Sequence[Encoded], weighting: Weighting, part: int, num_cells: int
    ) -> Iterator[Floats]:
        """Implement `Rule.chunks`."""
        for rows in decoded_rows(codec, parts, weighting.weights[part], num_cells):
            yield self.combine(rows).astype(np.float32)

    def combine(self, rows: Floats64) -> Floats64:
        """Combine [n, d] into [d]: sort each element, and add the middle ones in order. Zeros for n = 0."""
        if not len(rows):
            return np.zeros(rows.shape[1])
        cut = (len(rows) - 1) // 2
        ascending = np.sort(rows, axis=0)[cut : len(rows) - cut]
        return np.asarray(np.add.accumulate(ascending, axis=0)[-1] / len(ascending))


def decoded_rows(codec: Codec, parts: Sequence[Encoded], weights: Floats64, num_cells: int) -> Iterator[Floats64]:
    """Yield [n, d] elements of the n contributions with a weight, d at a time."""
    chosen = np.flatnonzero(weights).tolist()
    buffer = np.empty(RULE_CHUNK_CELLS * CELL, np.float32)
    for first in range(0, num_cells, RULE_CHUNK_CELLS):
        last = min(first + RULE_CHUNK_CELLS, num_cells)
        chunk = buffer[: (last - first) * CELL]
        rows = np.empty((len(chosen), chunk.size))
        for row, i in zip(rows, chosen, strict=True):
            codec.decode_range(parts[i], num_cells, first, last, chunk)
            row[:] = chunk
        yield rows
