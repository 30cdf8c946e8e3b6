"""`flag`: the mean in the subspace that explains most of most contributions (arXiv:2302.05865).

The paper's regularizer is left out. Every contribution is a line. The subspace Y of ⌈(n+1)/2⌉ dimensions with the least
Σᵢ √(1 - ‖Yᵀxᵢ‖²/‖xᵢ‖²) is the flag median (arXiv:2203.04437). It is found by reweighting: eigenvectors of the Gram
matrix of xᵢ/(‖xᵢ‖·√distanceᵢ), again and again. The result is the projection YYᵀ·mean, which is also a sum of
contributions; its weights may be negative.

LAPACK's eigenvectors differ in their last bits from processor to processor. Jacobi's rotations, all disjoint pairs of a
turn at once, use nothing that IEEE 754 leaves open.
"""

import numpy as np

from ....collectives.robust.rule import Floats64, Rule, Weighting, normalized, total, valid

REWEIGHTINGS = 4
"""Weights barely change after these, and each costs a set of eigenvectors."""
SWEEPS = 7
"""Quadratic convergence: 6 suffice for n = 16, 7 for n = 64."""
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
        values, vectors = eigen(gram * scales[:, None] * scales[None, :])
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


def eigen(matrix: Floats64) -> tuple[Floats64, Floats64]:
    """Return [n] eigenvalues and [n, n] eigenvectors (columns) of a symmetric matrix, unordered (Jacobi's method)."""
    n = len(matrix)
    size = n + n % 2
    work = np.zeros((size, size))
    work[:n, :n] = matrix
    vectors = np.eye(size)
    ring = list(range(size))
    for _ in range(SWEEPS * (size - 1)):
        # A round robin: every pair meets once a sweep, and the pairs of a turn are disjoint.
        left, right = np.asarray(ring[: size // 2]), np.asarray(ring[: size // 2 - 1 : -1])
        ring = [ring[0], ring[-1], *ring[1:-1]]
        cosine, sine = _rotation(work[left, left], work[right, right], work[left, right])
        for target in (work, vectors):
            first, second = target[:, left].copy(), target[:, right].copy()
            target[:, left] = cosine * first - sine * second
            target[:, right] = sine * first + cosine * second
        first, second = work[left].copy(), work[right].copy()
        work[left] = cosine[:, None] * first - sine[:, None] * second
        work[right] = sine[:, None] * first + cosine[:, None] * second
    return np.diagonal(work)[:n].copy(), vectors[:n, :n]


def _rotation(first: Floats64, second: Floats64, off: Floats64) -> tuple[Floats64, Floats64]:
    """Return cosine and sine of the smaller angle that makes `off` zero (Golub, Van Loan, §8.5.2)."""
    turns = np.abs(off) > 1e-20 * (np.abs(first) + np.abs(second))  # Below, a turn would change no bit.
    tau = np.divide(second - first, 2.0 * off, out=np.zeros_like(off), where=turns)
    sign = np.where(tau >= 0, 1.0, -1.0)
    tangent = np.where(turns, sign / (np.abs(tau) + np.sqrt(1.0 + tau * tau)), 0.0)
    cosine = 1.0 / np.sqrt(1.0 + tangent * tangent)
    return cosine, tangent * cosine
