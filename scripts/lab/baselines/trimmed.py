"""The trimmed mean after nearest-neighbour mixing; without that it is the median, since f is the largest.

Like the median it goes element by element. f = ⌊(n-1)/2⌋ of n valid contributions may be lies; a mass need only be positive.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ....collectives.robust.rule import Floats64, Mask, Weighting, squared_distances, valid
from ....collectives.vector.arrays import Floats
from ....collectives.vector.codec import Codec, Encoded
from .median import Median, decoded_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixed(Weighting):
    """A weighting with the means that replace contributions."""

    mixing: Floats64
    """[n, n]: row i holds the weights of the mean that replaces contribution i."""


class NnmTrimmedMean(Median):
    """The trimmed mean after nearest-neighbour mixing (NNM): each row becomes the mean of its n - f nearest.

    Allouah et al., arXiv:2302.01772.
    """

    name = "nnm_trimmed_mean"

    def weights(self, gram: Floats64, parts: Floats64, masses: Floats64) -> Mixed:
        """Return equal weights for all valid contributions, and their mixing."""
        equal = super().weights(gram, parts, masses)
        mixing = mixing_of(gram, valid(gram, parts, masses))
        return Mixed(weights=equal.weights, flagged=equal.flagged, mixing=mixing)

    def chunks(
        self, codec: Codec, parts: Sequence[Encoded], weighting: Weighting, part: int, num_cells: int
    ) -> Iterator[Floats]:
        """Implement `Rule.chunks`."""
        assert isinstance(weighting, Mixed)
        weights = weighting.weights[part]
        chosen = np.flatnonzero(weights)
        mixing = weighting.mixing[np.ix_(chosen, chosen)]
        for rows in decoded_rows(codec, parts, weights, num_cells):
            yield self.combine(mixed(rows, mixing)).astype(np.float32)


def mixing_of(gram: Floats64, good: Mask) -> Floats64:
    """Return `Mixed.mixing`: each row the mean of the nearest n - f valid ones, itself among them."""
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
