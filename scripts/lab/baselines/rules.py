"""Every rule by its name: those of a run, and the baselines."""

from ....collectives.robust import rules
from ....collectives.robust.rule import Rule
from .flag import Flag
from .gram import CenteredClip, GeometricMedian, Krum, MultiKrum
from .median import Median
from .trimmed import NnmTrimmedMean

_BASELINES = (Median(), Krum(), MultiKrum(), GeometricMedian(), CenteredClip(), NnmTrimmedMean(), Flag())
RULES = {**rules.RULES, **{rule.name: rule for rule in _BASELINES}}


def rule_named(name: str) -> Rule:
    """Return a rule of a run or a baseline. Raises `UsageError`."""
    return rules.rule_named(name, RULES)
