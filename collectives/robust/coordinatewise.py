"""Coordinate-wise rules: the median, the trimmed mean, and the latter after nearest-neighbour mixing.

They need the contributions, not their inner products, so no sketch can check an owner's output: the owner must be
trusted, or a second one asked. f = ⌊(n-1)/2⌋ of n valid contributions may be lies; a mass need only be positive.
"""

from abc import abstractmethod
from collections.abc import Iterator, Sequence

import numpy as np

from ...peer.arrays import Floats
from ..codec import CELL, Codec, Encoded
from .rule import Floats64, Mask, Rule, Weighting, normalized, squared_distances, total, valid

RULE_CHUNK_CELLS = 64
"""The size of a chunk in elements: 2 MiB of float64 at n = 16."""


class _Coordinatewise(Rule):
    linear = False

    def weights(self, gram: Floats64, parts: Floats64, masses: Floats64) -> Weighting:
        """Return equal weights for all valid contributions: `chunks` combines those."""
        good = valid(gram, parts, masses)
        row = normalized(good.astype(np.float64))
        return Weighting(
            weights=np.tile(row, (len(parts), 1)),
            flagged={int(i): "not finite, or without a mass" for i in np.flatnonzero(~good)},
            mixing=self.mix(gram, good),
        )

    def mix(self, gram: Floats64, good: Mask) -> Floats64 | None:
        """Return `Weighting.mixing`; None for a rule without mixing."""
        return None

    def chunks(
        self, codec: Codec, parts: Sequence[Encoded], weighting: Weighting, part: int, num_cells: int
    ) -> Iterator[Floats]:
        """Implement `Rule.chunks`."""
        chosen = np.flatnonzero(weighting.weights[part]).tolist()
        buffer = np.empty(RULE_CHUNK_CELLS * CELL, np.float32)
        for first in range(0, num_cells, RULE_CHUNK_CELLS):
            last = min(first + RULE_CHUNK_CELLS, num_cells)
            chunk = buffer[: (last - first) * CELL]
            rows = np.empty((len(chosen), chunk.size))
            for row, i in zip(rows, chosen, strict=True):
                codec.decode_range(parts[i], num_cells, first, last, chunk)
                row[:] = chunk
            if weighting.mixing is not None:
                rows = mixed(rows, weighting.mixing[np.ix_(chosen, chosen)])
            chunk[:] = self.combine(rows) if len(chosen) else 0.0
            yield chunk

    @abstractmethod
    def combine(self, rows: Floats64) -> Floats64:
        """Combine [n, d] into [d], n ≥ 1."""


class TrimmedMean(_Coordinatewise):
    """The mean of each element without the f least and the f greatest (Yin et al., arXiv:1803.01498)."""

    name = "trimmed_mean"

    def most_square(self, squares: Floats64) -> float:
        """Return the sum of the shortest majority's: in each element one of these is at least as far from 0 as the result.

        So liars, fewer than half, make no result longer than the others together.
        """
        return float(total(np.sort(squares)[: len(squares) // 2 + 1]))

    def combine(self, rows: Floats64) -> Floats64:
        """Sort each element, and add the middle ones in order."""
        cut = (len(rows) - 1) // 2
        ascending = np.sort(rows, axis=0)[cut : len(rows) - cut]
        return np.asarray(np.add.accumulate(ascending, axis=0)[-1] / len(ascending))


class Median(TrimmedMean):
    """The median of each element (Yin et al., arXiv:1803.01498): trimming with the largest possible f."""

    name = "median"


class NnmTrimmedMean(TrimmedMean):
    """The trimmed mean after nearest-neighbour mixing (NNM): each row becomes the mean of its n - f nearest.

    Allouah et al., arXiv:2302.01772.
    """

    name = "nnm_trimmed_mean"

    def most_square(self, squares: Floats64) -> float:
        """Return the sum of all: a row that is mixed is as long as the longest of those that it is a mean of."""
        return float(total(squares))

    def mix(self, gram: Floats64, good: Mask) -> Floats64:
        """Return the weights of the mean of the nearest n - f, the row itself among them."""
        mixing = np.zeros_like(gram)
        members = np.flatnonzero(good)
        distances = squared_distances(gram[np.ix_(good, good)])
        count = len(members) - (len(members) - 1) // 2
        for i, row in zip(members, distances, strict=True):
            mixing[i, members[np.argsort(row, kind="stable")[:count]]] = 1.0 / count
        return mixing


def mixed(rows: Floats64, mixing: Floats64) -> Floats64:
    """Return [n, d]: row i is Σⱼ mixing[i, j]·rows[j], added in order."""
    result = np.zeros_like(rows)
    for j, row in enumerate(rows):
        result += mixing[:, j, None] * row
    return result
