"""Attacks on contributions by name, from all honest contributions: `alie:4`, `ipm:4:1.5`.

An attack is a function (honest, own, round, generator) -> malicious. `honest` [h, d] float32 are the decoded
contributions of the honest peers. `own` [k, d] are those that the k attackers would send if they were honest. The
result, [k, d] or [d] for all of them, is sent instead, rounded by the codec, or refused if it is not finite. A scale
is passed as `scale=`. A class is instantiated for each training, and its objects are such functions with state.
"""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, TypeAlias

import numpy as np

from ....collectives.vector.arrays import Floats
from ....peer.base.errors import UsageError, did_you_mean

Attack: TypeAlias = Callable[..., Floats]


@dataclass(frozen=True, slots=True)
class Attackers:
    """`count` peers that run one attack, as the command line spells it."""

    name: str
    count: int
    scale: float | None = None

    @classmethod
    def parse(cls, text: str, known: Collection[str]) -> "Attackers":
        """Parse `NAME:COUNT[:SCALE]`. Raises `UsageError`, also for a name that is not `known`."""
        name, *rest = text.split(":")
        try:
            count, scale = int(rest[0]), float(rest[1]) if len(rest) > 1 else None
            if len(rest) > 2 or count < 0 or (scale is not None and not math.isfinite(scale)):
                raise ValueError
        except (IndexError, ValueError):
            raise UsageError(f"cannot read the attack {text!r}", remedy="write it as alie:4 or ipm:4:1.5") from None
        if name not in known:
            remedy = f"choose one of {', '.join(known)}"
            raise UsageError(f"there is no attack {name!r}{did_you_mean(name, known)}", remedy=remedy)
        return cls(name, count, scale)

    def __str__(self) -> str:
        return f"{self.name}:{self.count}" + ("" if self.scale is None else f":{self.scale:g}")

    @property
    def poisons_labels(self) -> bool:
        """Return True if the attackers train on wrong targets: the trainer does that, since an attack has no data."""
        return self.name == "label_flip"

    def fresh(self) -> Attack:
        """Return the attack on contributions in its initial state."""
        found = ATTACKS[self.name]
        attack: Attack = found() if isinstance(found, type) else found
        if self.scale is None:
            return attack
        scale = self.scale
        return lambda honest, own, round_number, generator: attack(honest, own, round_number, generator, scale=scale)


def sign_flip(
    honest: Floats, own: Floats, round_number: int, generator: np.random.Generator, scale: float = 1
) -> Floats:
    """Negate the own contribution."""
    return np.float32(-scale) * own


def noise(honest: Floats, own: Floats, round_number: int, generator: np.random.Generator, scale: float = 1) -> Floats:
    """Send Gaussian noise as long as an honest contribution, times the scale."""
    drawn = generator.standard_normal(own.shape, np.float32)
    return drawn * np.float32(scale * _typical_norm(honest) / math.sqrt(own.shape[1]))


def ipm(honest: Floats, own: Floats, round_number: int, generator: np.random.Generator, scale: float = 0.5) -> Floats:
    """Inner product manipulation (Xie, Koyejo, Gupta, arXiv:1903.03936): the negated honest mean."""
    return np.float32(-scale) * _mean(honest)


def alie(
    honest: Floats, own: Floats, round_number: int, generator: np.random.Generator, scale: float | None = None
) -> Floats:
    """A little is enough (Baruch, Baruch, Goldberg, arXiv:1902.06156): z standard deviations off the honest mean.

    Without a scale z is the paper's: with the attackers, a majority is then farther from the mean than they are.
    """
    n, attackers = len(honest) + len(own), len(own)
    supporters = n // 2 + 1 - attackers
    share = min(max((len(honest) - supporters) / len(honest), 0.5 + 1e-3), 1 - 1e-3)
    z = NormalDist().inv_cdf(share) if scale is None else scale
    return np.asarray(_mean(honest) - np.float32(z) * honest.std(axis=0))


def min_max(honest: Floats, own: Floats, round_number: int, generator: np.random.Generator, scale: float = 1) -> Floats:
    """Go against the mean as far as the two farthest honest peers are apart (Shejwalkar, Houmansadr, NDSS 2021)."""
    wide = honest.astype(np.float64)
    mean = wide.mean(axis=0)
    away, offsets = -mean / (np.linalg.norm(mean) + 1e-30), wide - mean
    squares, along = (offsets**2).sum(axis=1), offsets @ away
    farthest = max(float(((wide - row) ** 2).sum(axis=1).max()) for row in wide)
    # The greatest g with ‖offset - g·away‖² ≤ farthest for each of them.
    g = float((along + np.sqrt(np.maximum(along**2 + farthest - squares, 0.0))).min())
    return np.asarray(mean + scale * g * away, np.float32)


def mimic(honest: Floats, own: Floats, round_number: int, generator: np.random.Generator) -> Floats:
    """All copy one honest peer, always the same (Karimireddy, He, Jaggi, arXiv:2006.09365)."""
    return np.asarray(honest[0])


def nan(honest: Floats, own: Floats, round_number: int, generator: np.random.Generator) -> Floats:
    """Send NaN."""
    return np.full_like(own, np.nan)


class Stale:
    """Replay the own contribution of the first round."""

    def __init__(self) -> None:
        self._first: Floats | None = None

    def __call__(self, honest: Floats, own: Floats, round_number: int, generator: np.random.Generator) -> Floats:
        """Return the old contribution."""
        if self._first is None:
            self._first = own.copy()
        return self._first


class Freeload:
    """Train nothing: send the honest mean of the last round, with noise of one's own, as long as an honest contribution."""

    def __init__(self) -> None:
        self._last: Floats | None = None

    def __call__(
        self, honest: Floats, own: Floats, round_number: int, generator: np.random.Generator, scale: float = 0.6
    ) -> Floats:
        """Return [k, d]; the scale is the noise's length relative to the mean's. In the first round send own work."""
        last, self._last = self._last, _mean(honest)
        if last is None:
            return own
        drawn = generator.standard_normal(own.shape, np.float32)
        sent = last + scale * np.linalg.norm(last) * drawn / np.linalg.norm(drawn, axis=1, keepdims=True)
        return np.asarray(sent * (_typical_norm(honest) / (np.linalg.norm(sent, axis=1, keepdims=True) + 1e-30)), np.float32)


def one_part(
    honest: Floats, own: Floats, round_number: int, generator: np.random.Generator, scale: float = 3
) -> Floats:
    """Collude in one part, where all attackers send the negated honest mean, and be honest in the others."""
    part = slice(0, own.shape[1] // (len(honest) + len(own)))
    sent = own.copy()
    sent[:, part] = np.float32(-scale) * _mean(honest)[part]
    return sent


def pairs(honest: Floats, own: Floats, round_number: int, generator: np.random.Generator, scale: float = 1) -> Floats:
    """Push against the honest mean in pairs, each on coordinates of its own, and send the own contribution elsewhere.

    Deviations of two pairs are orthogonal, so the Gram matrix shows only as much agreement as one pair has inside.
    """
    sent, mean, count = own.copy(), _mean(honest), -(-len(own) // 2)
    for index, row in enumerate(sent):
        where = slice(index // 2, None, count)
        row[where] -= np.float32(scale) * mean[where]
    return sent


def label_flip(honest: Floats, own: Floats, round_number: int, generator: np.random.Generator) -> Floats:
    """Send honest work on wrong targets: the trainer inverts the target tokens."""
    return own


ATTACKS: Mapping[str, Callable[..., Any]] = {
    **{attack.__name__: attack for attack in (sign_flip, noise, ipm, alie, min_max, mimic, nan, one_part, pairs, label_flip)},
    "stale": Stale,
    "freeload": Freeload,
}


def _mean(honest: Floats) -> Floats:
    return np.asarray(honest.mean(axis=0))


def _typical_norm(honest: Floats) -> float:
    return float(np.median(np.linalg.norm(honest, axis=1)))
