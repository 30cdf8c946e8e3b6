"""The registry of aggregation rules, and those from the literature that need only the Gram matrix.

Every rule here assumes that f = ⌊(n-1)/2⌋ of n contributions may be lies, the most that any rule can bear, and first
leaves out those without a mass. The originals count contributions, not masses: if a rule chooses a set, masses weigh
the mean of it, and nothing else.
"""

from abc import abstractmethod
from collections.abc import Mapping

import numpy as np

from ...peer.base.errors import UsageError
from .gramguard import GramGuard
from .median import Median
from .rule import Floats64, Rule, Weighting, normalized, squared_distances, total, valid


class Chosen(Rule):
    """A rule with one row of weights for all parts, from the Gram matrix of the valid contributions."""

    def weights(self, gram: Floats64, parts: Floats64, masses: Floats64) -> Weighting:
        """Leave out what is not finite or has no mass, and weigh the others by `choose`."""
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


class Mean(Chosen):
    """The weighted mean, as in DiLoCo; no defence."""

    name = "mean"
    blind = True

    def choose(self, gram: Floats64, masses: Floats64) -> Floats64:
        """Return the masses."""
        return masses


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


RULES: Mapping[str, Rule] = {rule.name: rule for rule in (GramGuard(), Mean(), Median(), Krum())}
"""The rules that a manifest may name."""


def rule_named(name: str, rules: Mapping[str, Rule] = RULES) -> Rule:
    """Return a rule by its name in `rules`. Raises `UsageError`."""
    if name not in rules:
        raise UsageError(f"there is no defence {name!r}", remedy=f"choose one of {', '.join(rules)}")
    return rules[name]


MEAN = rule_named("mean")
