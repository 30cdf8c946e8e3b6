"""Baselines that need only the Gram matrix: Krum, Multi-Krum, geometric median, centered clipping.

Each assumes that f = ⌊(n-1)/2⌋ of n contributions may be lies, the most that any rule can bear, and first leaves out those
without a mass. The originals count contributions, not masses: if a rule chooses a set, masses weigh the mean of it, and
nothing else.
"""

import numpy as np

from ....collectives.robust.rule import (
    Floats64,
    distances_to,
    geometric_median,
    middle,
    normalized,
    quotient,
    squared_distances,
    total,
)
from ....collectives.robust.rules import Chosen

GEOMEDIAN_STEPS = 60
"""It converges linearly: the remaining error is less than int8's rounding."""
CLIPPING_STEPS = 3
"""From a robust centre the third step hardly moves it."""


class GeometricMedian(Chosen):
    """The vector with the least sum of distances to all (Pillutla, Kakade, Harchaoui, arXiv:1912.13445)."""

    name = "geometric_median"

    def choose(self, gram: Floats64, masses: Floats64) -> Floats64:
        """Return Weiszfeld's weights."""
        return geometric_median(gram, masses, GEOMEDIAN_STEPS)


class Krum(Chosen):
    """The one contribution with the nearest neighbours (Blanchard et al., NeurIPS 2017).

    A score is the sum of squared distances to the n - f - 1 nearest others, as ByzFL counts; the paper's n - f - 2 would
    need n > 2f + 2.
    """

    name = "krum"

    def num_chosen(self, n: int) -> int:
        """Return the number of contributions that enter the mean."""
        return 1

    def choose(self, gram: Floats64, masses: Floats64) -> Floats64:
        """Return the masses of the chosen, scaled to a sum of 1."""
        n = len(gram)
        near = np.sort(squared_distances(gram), axis=1)[:, 1 : n - (n - 1) // 2]
        chosen = np.argsort(total(near), kind="stable")[: self.num_chosen(n)]
        weights = np.zeros(n)
        weights[chosen] = masses[chosen]
        return normalized(weights)


class MultiKrum(Krum):
    """The mean of the n - f with the nearest neighbours (Blanchard et al., NeurIPS 2017)."""

    name = "multikrum"

    def num_chosen(self, n: int) -> int:
        """Return n - f."""
        return n - (n - 1) // 2


class CenteredClip(Chosen):
    """Centered clipping with the median distance as radius (Karimireddy, He, Jaggi, arXiv:2012.10333).

    The paper starts from the last round's result with a radius of its own. Here the start is the geometric median and
    the radius the median distance to it, so that neither the scale of a model nor the last round matters.
    """

    name = "centered_clip"

    def choose(self, gram: Floats64, masses: Floats64) -> Floats64:
        """Iterate v ← v + Σ pᵢ(xᵢ - v)·min(1, τ / ‖xᵢ - v‖), as weights."""
        weights = geometric_median(gram, masses, GEOMEDIAN_STEPS)
        radius = middle(distances_to(gram, weights), np.ones(len(gram)))
        for _ in range(CLIPPING_STEPS):
            away = distances_to(gram, weights)
            pull = masses * np.minimum(quotient(radius, away, 1.0), 1.0)
            weights = weights * (1.0 - float(total(pull))) + pull
        return normalized(weights)
