"""The aggregation rules that a run may name. Pure."""

from collections.abc import Mapping

import numpy as np

from ...peer.base.errors import UsageError
from .gramguard import GramGuard
from .rule import Floats64, Rule, Weighting, normalized, valid


class Mean(Rule):
    """The weighted mean, as in DiLoCo; no defence."""

    name = "mean"
    blind = True

    def weights(self, gram: Floats64, parts: Floats64, masses: Floats64) -> Weighting:
        """Leave out what is not finite or has no mass, and return the masses of the others, the same for all parts."""
        good = valid(gram, parts, masses)
        row = normalized(np.where(good, masses, 0.0))
        flagged = {int(i): "not finite, or without a mass" for i in np.flatnonzero(~good)}
        return Weighting(weights=np.tile(row, (len(parts), 1)), flagged=flagged)


RULES: Mapping[str, Rule] = {rule.name: rule for rule in (GramGuard(), Mean())}
"""The rules that a manifest may name."""


def rule_named(name: str) -> Rule:
    """Return a rule by its name. Raises `UsageError`."""
    if name not in RULES:
        raise UsageError(f"there is no defence {name!r}", remedy=f"choose one of {', '.join(RULES)}")
    return RULES[name]


MEAN = rule_named("mean")
