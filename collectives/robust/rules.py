"""The defence that a run's manifest names: rules from the literature beside `gramguard`, all from the Gram matrix.

Every rule here takes f = ⌊(n-1)/2⌋ of n contributions for possible lies, the most that any rule can bear, and leaves out
those without a mass first. The originals count contributions, not masses: where a set is chosen, masses weigh the mean of
it, and nothing else.
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
"""It converges linearly: these leave less than int8 rounds away."""
CLIPPING_STEPS = 3
"""From a robust centre on the third hardly moves it."""


class _Chosen(Rule):
    """One row of weights for all parts, from the Gram matrix of those that are valid."""

    def weights(self, gram: Floats64, parts: Floats64, masses: Floats64) -> Weighting:
        good = valid(gram, parts, masses)
        row = np.zeros(len(masses))
        flagged = {int(i): "not finite, or without a mass" for i in np.flatnonzero(~good)}
        if good.any():
            row[good] = self.choose(gram[np.ix_(good, good)], normalized(masses[good]))
        return Weighting(weights=np.tile(row, (len(parts), 1)), flagged=flagged)

    @abstractmethod
    def choose(self, gram: Floats64, masses: Floats64) -> Floats64:
        """[n] weights, with a sum of 1, of n ≥ 1 valid contributions with masses of sum 1.

        Who gets none is not flagged: a rule that takes few of many says nothing against the others.
        """


class Mean(_Chosen):
    """The weighted mean: what DiLoCo does, no defence."""

    name = "mean"
    blind = True

    def choose(self, gram: Floats64, masses: Floats64) -> Floats64:
        """The masses."""
        return masses


class GeometricMedian(_Chosen):
    """The vector with the least sum of distances to all (Pillutla, Kakade, Harchaoui, arXiv:1912.13445)."""

    name = "geometric_median"

    def choose(self, gram: Floats64, masses: Floats64) -> Floats64:
        """Weiszfeld's weights."""
        return geometric_median(gram, masses, GEOMEDIAN_STEPS)


class MultiKrum(_Chosen):
    """The mean of the n - f with the nearest neighbours (Blanchard et al., NeurIPS 2017).

    A score is the sum of squared distances to the n - f - 1 nearest others, as ByzFL counts; the paper's n - f - 2 would
    need n > 2f + 2.
    """

    name = "multikrum"

    def num_chosen(self, n: int) -> int:
        """How many enter the mean."""
        return n - (n - 1) // 2

    def choose(self, gram: Floats64, masses: Floats64) -> Floats64:
        """Masses of the chosen, to a sum of 1."""
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
        """One."""
        return 1


class CenteredClip(_Chosen):
    """Everyone as near to the centre as the median of all is (Karimireddy, He, Jaggi, arXiv:2012.10333).

    The paper begins at the last round's result with a radius of its own; here it is the geometric median and the median
    distance to it, so that neither the scale of a model nor the last round matters.
    """

    name = "centered_clip"

    def choose(self, gram: Floats64, masses: Floats64) -> Floats64:
        """v ← v + Σ pᵢ(xᵢ - v)·min(1, τ / ‖xᵢ - v‖), as weights."""
        weights = geometric_median(gram, masses, GEOMEDIAN_STEPS)
        radius = middle(distances_to(gram, weights), np.ones(len(gram), bool))
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
    """The rule of a manifest. Raises `UsageError`."""
    if name not in _RULES:
        raise UsageError(f"there is no defence {name!r}", remedy=f"choose one of {', '.join(_RULES)}")
    return _RULES[name]


MEAN = rule_named("mean")
