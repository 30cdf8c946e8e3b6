"""The registry of aggregation rules, and those from the literature that need only the Gram matrix.

Every rule here assumes that f = ⌊(n-1)/2⌋ of n contributions may be lies, the most that any rule can bear, and first
leaves out those without a mass. The originals count contributions, not masses: if a rule chooses a set, masses weigh
the mean of it, and nothing else.
"""

from abc import abstractmethod

import numpy as np

from ...peer.errors import UsageError
from .coordinatewise import Median, NnmTrimmedMean, TrimmedMean
from .flag import Flag
from .gramguard import GramGuard
from .rule import (
    Floats64,
    Rule,
    Weighting,
    distances_to,
    geometric_median,
    middle,
    normalized,
    quotient,
    squared_distances,
    total,
    valid,
)

GEOMEDIAN_STEPS = 60
"""It converges linearly: the remaining error is less than int8's rounding."""
CLIPPING_STEPS = 3
"""From a robust centre the third step hardly moves it."""


class _Chosen(Rule):
    """A rule with one row of weights for all parts, from the Gram matrix of the valid contributions."""

    def weights(self, gram: Floats64, parts: Floats64, masses: Floats64) -> Weighting:
        good = valid(gram, parts, masses)
        row = np.zeros(len(masses))
        flagged = {int(i): "not finite, or without a mass" for i in np.flatnonzero(~good)}
        if good.any():
            row[good] = self.choose(gram[np.ix_(good, good)], normalized(masses[good]))
        return Weighting(weights=np.tile(row, (len(parts), 1)), flagged=flagged)

    @abstractmethod
    def choose(self, gram: Floats64, masses: Floats64) -> Floats64:
        """Return [n] weights, with a sum of 1, of n ≥ 1 valid contributions with masses of sum 1.

        A contribution without weight is not flagged: a rule that takes few of many accuses none of the others.
        """


class Mean(_Chosen):
    """The weighted mean, as in DiLoCo; no defence."""

    name = "mean"
    blind = True

    def choose(self, gram: Floats64, masses: Floats64) -> Floats64:
        """Return the masses."""
        return masses


class GeometricMedian(_Chosen):
    """The vector with the least sum of distances to all (Pillutla, Kakade, Harchaoui, arXiv:1912.13445)."""

    name = "geometric_median"

    def choose(self, gram: Floats64, masses: Floats64) -> Floats64:
        """Return Weiszfeld's weights."""
        return geometric_median(gram, masses, GEOMEDIAN_STEPS)


class MultiKrum(_Chosen):
    """The mean of the n - f with the nearest neighbours (Blanchard et al., NeurIPS 2017).

    A score is the sum of squared distances to the n - f - 1 nearest others, as ByzFL counts; the paper's n - f - 2 would
    need n > 2f + 2.
    """

    name = "multikrum"

    def num_chosen(self, n: int) -> int:
        """Return the number of contributions that enter the mean."""
        return n - (n - 1) // 2

    def choose(self, gram: Floats64, masses: Floats64) -> Floats64:
        """Return the masses of the chosen, scaled to a sum of 1."""
        n = len(gram)
        near = np.sort(squared_distances(gram), axis=1)[:, 1 : n - (n - 1) // 2]
        chosen = np.argsort(total(near), kind="stable")[: self.num_chosen(n)]
        weights = np.zeros(n)
        weights[chosen] = masses[chosen]
        return normalized(weights)


class Krum(MultiKrum):
    """The one contribution with the nearest neighbours (Blanchard et al., NeurIPS 2017)."""

    name = "krum"

    def num_chosen(self, n: int) -> int:
        """Return 1."""
        return 1


class CenteredClip(_Chosen):
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


_RULES: dict[str, Rule] = {
    rule.name: rule
    for rule in (
        GramGuard(),
        Mean(),
        Median(),
        TrimmedMean(),
        Krum(),
        MultiKrum(),
        GeometricMedian(),
        CenteredClip(),
        NnmTrimmedMean(),
        Flag(),
    )
}


def rule_named(name: str) -> Rule:
    """Return the rule that a manifest names. Raises `UsageError`."""
    if name not in _RULES:
        raise UsageError(f"there is no defence {name!r}", remedy=f"choose one of {', '.join(_RULES)}")
    return _RULES[name]


MEAN = rule_named("mean")
