"""The aggregation rules of a run by name: from a Gram matrix to weights."""

import numpy as np

from ..peer.errors import UsageError
from .gramguard import GramGuard
from .verdict import Floats64, History, Rule, Verdict, normalized, valid


class Mean(Rule):
    """The weighted mean of DiLoCo: no defence."""

    name = "mean"

    def weights(self, gram: Floats64, parts: Floats64, masses: Floats64, history: History | None = None) -> Verdict:
        """Masses, scaled to a sum of 1."""
        good = valid(gram, parts, masses)
        row = normalized(np.where(good, masses, 0.0))
        flagged = {int(i): "not finite, or without a mass" for i in np.flatnonzero(~good)}
        return Verdict(weights=np.tile(row, (len(parts), 1)), flagged=flagged, suspicion=np.zeros(len(masses)))


_RULES: dict[str, Rule] = {rule.name: rule for rule in (GramGuard(), Mean())}


def rule_named(name: str) -> Rule:
    """The rule of a manifest. Raises `UsageError`."""
    if name not in _RULES:
        raise UsageError(f"there is no defence {name!r}", remedy=f"choose one of {', '.join(_RULES)}")
    return _RULES[name]
