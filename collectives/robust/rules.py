"""The aggregation rules that a run may name, and the form of one with the same weights for all parts. Pure."""

from abc import abstractmethod
from collections.abc import Mapping

import numpy as np

from ...peer.base.errors import UsageError
from .gramguard import GramGuard
from .rule import Floats64, Rule, Weighting, normalized, valid


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


RULES: Mapping[str, Rule] = {rule.name: rule for rule in (GramGuard(), Mean())}
"""The rules that a manifest may name."""


def rule_named(name: str, rules: Mapping[str, Rule] = RULES) -> Rule:
    """Return a rule by its name in `rules`. Raises `UsageError`."""
    if name not in rules:
        raise UsageError(f"there is no defence {name!r}", remedy=f"choose one of {', '.join(rules)}")
    return rules[name]


MEAN = rule_named("mean")
