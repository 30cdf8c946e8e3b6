"""`flag`: the mean in the subspace that explains most of most contributions (arXiv:2302.05865).

The paper's regularizer is left out. Every contribution is a line. The subspace Y of ⌈(n+1)/2⌉ dimensions with the least
Σᵢ √(1 - ‖Yᵀxᵢ‖²/‖xᵢ‖²) is the flag median (arXiv:2203.04437). It is found by reweighting: eigenvectors of the Gram
matrix of xᵢ/(‖xᵢ‖·√distanceᵢ), again and again. The result is the projection YYᵀ·mean, which is also a sum of
contributions; its weights may be negative.
"""

import numpy as np

from ....collectives.robust.rule import Floats64, Rule, Weighting, normalized, total, valid

REWEIGHTINGS = 4
"""Weights barely change after these, and each costs a set of eigenvectors."""
LEAST = 1e-6
"""The distance of a line to the subspace below which its weight grows no more; lower eigenvalues count as zero."""


class Flag(Rule):
    """The flag median's projection of the mean."""

    name = "flag"

    def weights(self, gram: Floats64, parts: Floats64, masses: Floats64) -> Weighting:
        """Return one row of weights for all parts."""
        good = valid(gram, parts, masses) & (np.diagonal(gram) > 0)
        row = np.zeros(len(masses))
        if good.any():
            row[good] = projection(gram[np.ix_(good, good)], normalized(masses[good]))
        flagged = {int(i): "not finite, zero, or without a mass" for i in np.flatnonzero(~good)}
        return Weighting(weights=np.tile(row, (len(parts), 1)), flagged=flagged)


def projection(gram: Floats64, masses: Floats64) -> Floats64:
    """Return [n] weights of YYᵀ·Σ mᵢxᵢ."""
    n = len(gram)
    norms = np.sqrt(np.diagonal(gram))
    scales = 1.0 / norms
    result = masses
    for _ in range(REWEIGHTINGS):
        values, vectors = np.linalg.eigh(gram * scales[:, None] * scales[None, :])
        leading = np.argsort(-values, kind="stable")[: n // 2 + 1]
        leading = leading[values[leading] > LEAST * max(float(values.max()), 0.0)]
        # Columns of A express an orthonormal basis of Y in contributions: Y = X·A.
        basis = vectors[:, leading] * scales[:, None] / np.sqrt(values[leading])
        inside = np.asarray([total(gram * column) for column in basis.T]).reshape(-1, n)
        coordinates = total(inside * masses)
        result = total(basis * coordinates)
        explained = np.add.accumulate(inside**2, axis=0)[-1] / norms**2
        distances = np.sqrt(np.maximum(1.0 - explained, LEAST**2))
        scales = 1.0 / (norms * np.sqrt(distances))
    return result
