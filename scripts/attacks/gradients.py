"""Attacks on a round by name, and a user's own: what liars send when they know all that the honest send.

    NAME:COUNT[:SCALE]                  alie:4, ipm:4:1.5, nan:2
    pkg.module:function:COUNT[:SCALE]   a function of your own, or the name of an entry point of `flockstep.attacks`

An attack is a function (honest, own, round, generator) -> malicious. `honest` [h, d] float32 are the contributions of
the honest, decoded; `own` [k, d] those which the k attackers would send if they were honest; the answer, [k, d] or [d]
for all of them, is sent instead, rounded by the codec, or refused where it is not finite. Where a scale is written, it
is passed as `scale=`. A class is made anew for each training, and its objects are such functions: they may remember.
"""

import importlib
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from statistics import NormalDist
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ...optim.spelling import did_you_mean
from ...peer.errors import UsageError

GROUP = "flockstep.attacks"
"""The group of entry points in which others publish attacks."""

Floats: TypeAlias = npt.NDArray[np.float32]
Attack: TypeAlias = Callable[..., Floats]


@dataclass(frozen=True, slots=True)
class Attackers:
    """So many peers that make one attack, as the command line spells it."""

    name: str
    count: int
    scale: float | None = None

    @classmethod
    def parse(cls, text: str, others: Collection[str] = ()) -> "Attackers":
        """Read `NAME:COUNT[:SCALE]`. Raises `UsageError`, for an attack that there is not (nor in `others`), too."""
        words = text.split(":")
        is_function = len(words) > 1 and words[1].isidentifier()  # Of a module; a count is none.
        name, rest = (":".join(words[:2]), words[2:]) if is_function else (words[0], words[1:])
        try:
            count, scale = int(rest[0]), float(rest[1]) if len(rest) > 1 else None
            if len(rest) > 2 or count < 0 or (scale is not None and not math.isfinite(scale)):
                raise ValueError
        except (IndexError, ValueError):
            raise UsageError(f"cannot read the attack {text!r}", remedy="write it as alie:4 or ipm:4:1.5") from None
        if name not in others:
            _find(name, others)
        return cls(name, count, scale)

    def __str__(self) -> str:
        return f"{self.name}:{self.count}" + ("" if self.scale is None else f":{self.scale:g}")

    @property
    def attack(self) -> str:
        """Its name and its scale, `ipm:1.5`; `none` where nobody attacks."""
        return (self.name + ("" if self.scale is None else f":{self.scale:g}")) if self.count else "none"

    @property
    def poisons_labels(self) -> bool:
        """Whether the attackers train on wrong targets: the trainer's part, as a function has no data."""
        return self.name == "label_flip"

    def fresh(self) -> Attack:
        """The attack as at the start of a training. Raises `UsageError`."""
        found = _find(self.name)
        attack: Attack = found() if isinstance(found, type) else found
        if self.scale is None:
            return attack
        scale = self.scale
        return lambda honest, own, round_number, generator: attack(honest, own, round_number, generator, scale=scale)


def sign_flip(
    honest: Floats, own: Floats, round_number: int, generator: np.random.Generator, scale: float = 1
) -> Floats:
    """The own contribution, turned round."""
    return np.float32(-scale) * own


def scaled(honest: Floats, own: Floats, round_number: int, generator: np.random.Generator, scale: float = 10) -> Floats:
    """The own contribution, too long."""
    return np.float32(scale) * own


def noise(honest: Floats, own: Floats, round_number: int, generator: np.random.Generator, scale: float = 1) -> Floats:
    """Gaussian noise as long as an honest contribution, times the scale."""
    drawn = generator.standard_normal(own.shape, np.float32)
    return drawn * np.float32(scale * _typical_norm(honest) / math.sqrt(own.shape[1]))


def ipm(honest: Floats, own: Floats, round_number: int, generator: np.random.Generator, scale: float = 0.5) -> Floats:
    """Inner product manipulation (Xie, Koyejo, Gupta, arXiv:1903.03936): the honest mean, turned round."""
    return np.float32(-scale) * _mean(honest)


def alie(
    honest: Floats, own: Floats, round_number: int, generator: np.random.Generator, scale: float | None = None
) -> Floats:
    """A little is enough (Baruch, Baruch, Goldberg, arXiv:1902.06156): as many standard deviations off the mean as hide.

    Without a scale it is the paper's: that at which a majority, with the attackers, is farther off than they are.
    """
    n, attackers = len(honest) + len(own), len(own)
    supporters = n // 2 + 1 - attackers
    share = min(max((len(honest) - supporters) / len(honest), 0.5 + 1e-3), 1 - 1e-3)
    z = NormalDist().inv_cdf(share) if scale is None else scale
    return np.asarray(_mean(honest) - np.float32(z) * honest.std(axis=0))


def min_max(honest: Floats, own: Floats, round_number: int, generator: np.random.Generator, scale: float = 1) -> Floats:
    """As far against the mean as the two farthest honest are apart (Shejwalkar, Houmansadr, NDSS 2021)."""
    squares = _squares(honest)
    return _farthest(honest, scale, lambda off: bool(off.max() <= squares.max()))


def min_sum(honest: Floats, own: Floats, round_number: int, generator: np.random.Generator, scale: float = 1) -> Floats:
    """As `min_max`, no farther from all honest together than the farthest of these is."""
    squares = _squares(honest)
    return _farthest(honest, scale, lambda off: bool(off.sum() <= squares.sum(axis=1).max()))


def mimic(honest: Floats, own: Floats, round_number: int, generator: np.random.Generator) -> Floats:
    """Everybody as one honest peer, always the same (Karimireddy, He, Jaggi, arXiv:2006.09365)."""
    return np.asarray(honest[0])


def zero(honest: Floats, own: Floats, round_number: int, generator: np.random.Generator) -> Floats:
    """Nothing: lazy, and a brake."""
    return np.zeros_like(own)


def huge(honest: Floats, own: Floats, round_number: int, generator: np.random.Generator, scale: float = 1e6) -> Floats:
    """The honest mean turned round, a million times."""
    return np.float32(-scale) * _mean(honest)


def nan(honest: Floats, own: Floats, round_number: int, generator: np.random.Generator) -> Floats:
    """Not a number."""
    return np.full_like(own, np.nan)


def inf(honest: Floats, own: Floats, round_number: int, generator: np.random.Generator) -> Floats:
    """Infinite."""
    return np.full_like(own, np.inf)


class Stale:
    """The own contribution of the first round, for ever; with a scale, that of so many rounds ago."""

    def __init__(self) -> None:
        self._seen: list[Floats] = []

    def __call__(
        self, honest: Floats, own: Floats, round_number: int, generator: np.random.Generator, scale: float = math.inf
    ) -> Floats:
        """Say it again."""
        self._seen.append(own.copy())
        kept = len(self._seen) - 1
        return self._seen[0 if math.isinf(scale) else max(0, kept - int(scale))]


class HiddenDirection:
    """The own contribution, and one random direction that is the same for all attackers and never changes."""

    def __init__(self) -> None:
        self._direction: Floats | None = None

    def __call__(
        self, honest: Floats, own: Floats, round_number: int, generator: np.random.Generator, scale: float = 0.5
    ) -> Floats:
        """Add it, `scale` times as long as a contribution."""
        if self._direction is None:
            drawn = generator.standard_normal(own.shape[1], np.float32)
            self._direction = np.asarray(drawn / np.linalg.norm(drawn), np.float32)
        return own + np.float32(scale * _typical_norm(honest)) * self._direction


def one_part(
    honest: Floats, own: Floats, round_number: int, generator: np.random.Generator, scale: float = 3
) -> Floats:
    """Honest but for one part, in which all attackers together turn the honest mean round."""
    part = slice(0, own.shape[1] // (len(honest) + len(own)))
    sent = own.copy()
    sent[:, part] = np.float32(-scale) * _mean(honest)[part]
    return sent


def label_flip(honest: Floats, own: Floats, round_number: int, generator: np.random.Generator) -> Floats:
    """Sincere work on wrong targets: the trainer turns the tokens that are to be predicted round."""
    return own


ATTACKS: Mapping[str, Callable[..., Any]] = {
    **{
        attack.__name__: attack
        for attack in (sign_flip, scaled, noise, ipm, alie, min_max, min_sum, mimic, zero, huge, nan, inf)
    },
    "stale": Stale,
    "hidden": HiddenDirection,
    "one_part": one_part,
    "label_flip": label_flip,
}


def _find(name: str, others: Collection[str] = ()) -> Callable[..., Any]:
    if name in ATTACKS:
        return ATTACKS[name]
    try:
        if ":" in name:
            module, _, function = name.partition(":")
            found = getattr(importlib.import_module(module), function)
        else:
            published = {point.name: point for point in entry_points(group=GROUP)}
            if name not in published:
                hint = did_you_mean(name, [*ATTACKS, *others, *published])
                choice = ", ".join([*ATTACKS, *others])
                raise UsageError(f"there is no attack {name!r}{hint}", remedy=f"choose one of {choice}")
            found = published[name].load()
    except (ImportError, AttributeError) as error:
        raise UsageError(f"cannot import the attack {name}: {error}", remedy="check the name and PYTHONPATH") from error
    if not callable(found):
        raise UsageError(f"the attack {name} is no function", remedy="see the head of scripts/attacks/gradients.py")
    return found  # type: ignore[no-any-return]  # whatever is callable


def _mean(honest: Floats) -> Floats:
    return np.asarray(honest.mean(axis=0))


def _typical_norm(honest: Floats) -> float:
    return float(np.median(np.linalg.norm(honest, axis=1)))


def _squares(honest: Floats) -> npt.NDArray[np.float64]:
    wide = honest.astype(np.float64)
    return np.asarray([((wide - row) ** 2).sum(axis=1) for row in wide])


def _farthest(honest: Floats, scale: float, hides: Callable[[npt.NDArray[np.float64]], bool]) -> Floats:
    """The honest mean minus g times its direction, g being the greatest, by bisection, that still hides."""
    mean = _mean(honest).astype(np.float64)
    away = -mean / (np.linalg.norm(mean) + 1e-30)
    offsets = honest - mean
    squares, along = (offsets**2).sum(axis=1), offsets @ away
    low, high = 0.0, 10.0 * float(np.sqrt(squares.max()))
    for _ in range(40):
        gamma = (low + high) / 2
        if hides(squares - 2 * gamma * along + gamma**2):
            low = gamma
        else:
            high = gamma
    return (mean + scale * low * away).astype(np.float32)
