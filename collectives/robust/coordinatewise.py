"""Rules that look at each element alone: the median, the trimmed mean, and the latter among nearest neighbours.

They need the contributions, not their inner products, so an owner has to be trusted or asked twice: no sketch can check
what it sends. f = ⌊(n-1)/2⌋ of n valid contributions may be lies; masses do not count beyond being positive.
"""

from abc import abstractmethod
from collections.abc import Iterator, Sequence

import numpy as np

from ...peer.arrays import Floats
from ..codec import CELL, Codec, Encoded
from .rule import Floats64, Mask, Rule, Weighting, normalized, squared_distances, valid

RULE_CHUNK_CELLS = 64
"""16k elements at a time: 2 MiB of float64 at n = 16."""


class _Coordinatewise(Rule):
    linear = False

    def weights(self, gram: Floats64, parts: Floats64, masses: Floats64) -> Weighting:
        """Equal weights for all that are valid: `chunks` combines those."""
        good = valid(gram, parts, masses)
        row = normalized(good.astype(np.float64))
        return Weighting(
            weights=np.tile(row, (len(parts), 1)),
            flagged={int(i): "not finite, or without a mass" for i in np.flatnonzero(~good)},
            mixing=self.mix(gram, good),
        )

    def mix(self, gram: Floats64, good: Mask) -> Floats64 | None:
        """See `Verdict.mixing`."""
        return None

    def chunks(
        self, codec: Codec, parts: Sequence[Encoded], verdict: Weighting, part: int, num_cells: int
    ) -> Iterator[Floats]:
        """As `Rule.chunks`."""
        chosen = np.flatnonzero(verdict.weights[part]).tolist()
        buffer = np.empty(RULE_CHUNK_CELLS * CELL, np.float32)
        for first in range(0, num_cells, RULE_CHUNK_CELLS):
            last = min(first + RULE_CHUNK_CELLS, num_cells)
            chunk = buffer[: (last - first) * CELL]
            rows = np.empty((len(chosen), chunk.size))
            for row, i in zip(rows, chosen, strict=True):
                codec.decode_range(parts[i], num_cells, first, last, chunk)
                row[:] = chunk
            if verdict.mixing is not None:
                rows = mixed(rows, verdict.mixing[np.ix_(chosen, chosen)])
            chunk[:] = self.combine(rows) if len(chosen) else 0.0
            yield chunk

    @abstractmethod
    def combine(self, rows: Floats64) -> Floats64:
        """[d] of [n, d], n ≥ 1."""


class TrimmedMean(_Coordinatewise):
    """The mean of each element without the f least and the f greatest (Yin et al., arXiv:1803.01498)."""

    name = "trimmed_mean"

    def combine(self, rows: Floats64) -> Floats64:
        """Sorted by element, added in order."""
        cut = (len(rows) - 1) // 2
        ascending = np.sort(rows, axis=0)[cut : len(rows) - cut]
        return np.asarray(np.add.accumulate(ascending, axis=0)[-1] / len(ascending))


class Median(TrimmedMean):
    """The median of each element (Yin et al., arXiv:1803.01498): what trimming leaves when f is all it can be."""

    name = "median"


class NnmTrimmedMean(TrimmedMean):
    """The trimmed mean after each is replaced with the mean of its n - f nearest (Allouah et al., arXiv:2302.01772)."""

    name = "nnm_trimmed_mean"

    def mix(self, gram: Floats64, good: Mask) -> Floats64:
        """The mean of the nearest n - f, itself among them."""
        mixing = np.zeros_like(gram)
        members = np.flatnonzero(good)
        distances = squared_distances(gram[np.ix_(good, good)])
        count = len(members) - (len(members) - 1) // 2
        for i, row in zip(members, distances, strict=True):
            mixing[i, members[np.argsort(row, kind="stable")[:count]]] = 1.0 / count
        return mixing


def mixed(rows: Floats64, mixing: Floats64) -> Floats64:
    """[n, d]: row i is Σⱼ mixing[i, j]·rows[j], added in order."""
    result = np.zeros_like(rows)
    for j, row in enumerate(rows):
        result += mixing[:, j, None] * row
    return result
