"""The interface of an aggregation rule, and arithmetic that gives all peers the same bits. Pure.

A rule that does not depend on the choice of axes is a function of the n×n Gram matrix of the contributions alone, and
its result is Σ wᵢxᵢ: peers agree on the weights from small messages, owners only compute a weighted sum, which a sketch
checks. No run has another kind: the output of a coordinate-wise rule needs the contributions themselves.

Same bits everywhere. All peers must agree on every weight, so nothing here may depend on a processor or on a build of
NumPy. IEEE 754 fixes the result of one +, -, ×, ÷, square root and comparison, and element-wise ufuncs round each of
them on its own. It does not fix the order of a sum, so BLAS, LAPACK, einsum, `sum` and `mean` are not used: `total`
adds one after the other, as `add.accumulate` does by its definition. Nor are exp, log and powers used.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ..vector.arrays import Floats
from ..vector.codec import CELL, CHUNK_CELLS, Codec, Encoded

_TINY = 2.0**-1000
"""Divides without overflow, and is less than the square of any contribution that is not zero."""

SAME_MASS = 1e-9
"""Relative to the sum: sums of equal masses differ by less when they are added in another order."""

Floats64 = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighting:
    """The result of a rule: the weight of each contribution, and why some weigh less."""

    weights: Floats64
    """[p, n], for each part; a row's sum is 1, or the row is 0 if no contribution is valid. `gramguard` gives rows with
    other sums, since it changes lengths."""
    flagged: Mapping[int, str]
    """The reason for each peer that was dropped or clipped, by its index in the roster."""
    short: Mapping[int, float] = field(default_factory=dict)
    """The norm, relative to the median, of each contribution that is too short to weigh; none of them is flagged."""


class Rule(ABC):
    """An aggregation rule. Stateless and pure: every peer calls it with the same numbers."""

    name: str
    blind: bool = False
    """True if the rule uses masses alone: then no sketches are needed."""

    @abstractmethod
    def weights(self, gram: Floats64, parts: Floats64, masses: Floats64) -> Weighting:
        """Weigh contributions by their inner products.

        `gram` [n, n] is of whole contributions, `parts` [p, n, n] of each part; `masses` [n] are trust, since tokens are only
        claimed (`checks.weighed`).
        A contribution without a mass, or with numbers that are not finite, has no weight. Any n ≥ 1 is accepted.
        """

    def chunks(
        self, codec: Codec, parts: Sequence[Encoded], weighting: Weighting, part: int, num_cells: int
    ) -> Iterator[Floats]:
        """Yield the output of one part before it is encoded, as `codec.mean_chunks` does: each overwritten by the next.

        `parts` [n] are the encoded contributions to part number `part`, those without weight too.
        """
        weights = weighting.weights[part].tolist()
        result, terms = np.empty((2, CHUNK_CELLS * CELL), np.float32)
        for first in range(0, num_cells, CHUNK_CELLS):
            last = min(first + CHUNK_CELLS, num_cells)
            sums, term = result[: (last - first) * CELL], terms[: (last - first) * CELL]
            sums.fill(0)
            for data, weight in zip(parts, weights, strict=True):
                if weight:
                    codec.decode_range(data, num_cells, first, last, term, gain=weight)
                    sums += term
            yield sums


def total(values: Floats64) -> Floats64:
    """Return the sum over the last axis, added in order."""
    if values.shape[-1] == 0:
        return np.zeros(values.shape[:-1])
    return np.asarray(np.add.accumulate(values, axis=-1)[..., -1])


def quantile(values: Floats64, masses: Floats64, share: float = 0.5, *, low: bool = False) -> Floats64:
    """Return [..., 1] the first value in ascending order at which more than `share` of all mass is reached.

    `low` asks for the first at which at least `share` is reached. Values without a mass do not count; 0 if there are none.
    """
    masses = np.broadcast_to(masses, values.shape)
    ascending = np.argsort(np.where(masses > 0, values, np.inf), axis=-1, kind="stable")
    reached = np.add.accumulate(np.take_along_axis(masses, ascending, -1), axis=-1)
    wanted = share * reached[..., -1:]
    enough = reached >= wanted * (1 - SAME_MASS) if low else reached > wanted * (1 + SAME_MASS)
    at = np.take_along_axis(ascending, np.argmax(enough, axis=-1)[..., None], -1)
    return np.where(reached[..., -1:] > 0, np.take_along_axis(values, at, -1), 0.0)


def middle(values: Floats64, masses: Floats64) -> Floats64:
    """Return [..., 1] the median over the last axis by mass; 0 if there is no mass.

    Where half of the mass ends between two values it is their mean: of an even number of equal masses the middle two.
    """
    return quantile(values, masses, low=True) / 2 + quantile(values, masses) / 2


def quotient(above: Floats64, below: Floats64, otherwise: float = 0.0) -> Floats64:
    """Return above / below where that is finite, `otherwise` where below is 0 or less."""
    above, below = np.broadcast_arrays(above, below)
    return np.asarray(np.divide(above, below, out=np.full(above.shape, otherwise), where=below > 0))


def lengths_of(gram: Floats64) -> Floats64:
    """Return [..., n] norms of the contributions."""
    return np.sqrt(np.maximum(np.diagonal(gram, axis1=-2, axis2=-1), 0.0))


def squared_distances(gram: Floats64) -> Floats64:
    """Return [..., n, n] ‖xᵢ - xⱼ‖², none negative: a Gram matrix from sketches need not be positive."""
    squares = np.diagonal(gram, axis1=-2, axis2=-1)
    return np.maximum(squares[..., :, None] + squares[..., None, :] - 2 * gram, 0.0)


def deviations(gram: Floats64, weights: Floats64) -> Floats64:
    """Return [..., n, n] inner products of the deviations xᵢ - Σ wⱼxⱼ."""
    products = total(gram * weights[..., None, :])
    square = total(products * weights)
    return gram - products[..., :, None] - products[..., None, :] + square[..., None, None]


def geometric_median(gram: Floats64, masses: Floats64, steps: int) -> Floats64:
    """Return [..., n] weights of the geometric median by Weiszfeld's iteration from the mean; no mass, no weight."""
    weights = normalized(masses)
    norms = np.diagonal(gram, axis1=-2, axis2=-1)
    # A millionth of the longest: a contribution exactly at the centre must not take all the weight.
    least = np.maximum(1e-12 * norms.max(axis=-1, keepdims=True), _TINY)
    for _ in range(steps):
        products = total(gram * weights[..., None, :])
        square = norms - 2 * products + total(products * weights)[..., None]
        weights = normalized(masses / np.sqrt(np.maximum(square, least)))
    return weights


def valid(gram: Floats64, parts: Floats64, masses: Floats64) -> Mask:
    """Return [n] True for contributions with a mass, and finite inner products with themselves and all others of these."""
    own = np.isfinite(np.diagonal(gram)) & np.isfinite(np.diagonal(parts, axis1=1, axis2=2)).all(0)
    good = own & np.isfinite(masses) & (masses > 0)
    # Finite norms imply finite inner products, unless they come from sketches that overflow: then both are left out.
    pairs = ~(np.isfinite(gram) & np.isfinite(parts).all(0)) & good[:, None] & good[None, :]
    return good & ~pairs.any(1)


def normalized(weights: Floats64) -> Floats64:
    """Scale to a sum of 1 over the last axis; zeros if all is zero."""
    return quotient(weights, total(weights)[..., None])
