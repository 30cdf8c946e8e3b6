"""Attacks on contributions by name, and custom ones, from all honest contributions.

    NAME:COUNT[:SCALE]                  alie:4, ipm:4:1.5, nan:2
    pkg.module:function:COUNT[:SCALE]   a function of your own

An attack is a function (honest, own, round, generator) -> malicious. `honest` [h, d] float32 are the decoded
contributions of the honest peers. `own` [k, d] are those that the k attackers would send if they were honest. The
result, [k, d] or [d] for all of them, is sent instead, rounded by the codec, or refused if it is not finite. A scale
is passed as `scale=`. A class is instantiated for each training, and its objects are such functions with state.

`groupsG_PUSH` and `partsG_PUSH` (`groups2_against:4:1`) are colluders in groups of G = 1 or 2: see `Groups`.
"""

import importlib
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

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
    def parse(cls, text: str, known: Collection[str] = ()) -> "Attackers":
        """Parse `NAME:COUNT[:SCALE]`. Raises `UsageError`, also for a name that is not `known`, else not of this file."""
        fields = text.split(":")
        is_function = len(fields) > 1 and fields[1].isidentifier()  # A count is no identifier.
        name, rest = (":".join(fields[:2]), fields[2:]) if is_function else (fields[0], fields[1:])
        try:
            count, scale = int(rest[0]), float(rest[1]) if len(rest) > 1 else None
            if len(rest) > 2 or count < 0 or (scale is not None and not math.isfinite(scale)):
                raise ValueError
        except (IndexError, ValueError):
            raise UsageError(f"cannot read the attack {text!r}", remedy="write it as alie:4 or ipm:4:1.5") from None
        if name not in known:
            _find(name, known)
        return cls(name, count, scale)

    def __str__(self) -> str:
        return f"{self.name}:{self.count}" + ("" if self.scale is None else f":{self.scale:g}")

    @property
    def attack(self) -> str:
        """The name and the scale, `ipm:1.5`; `none` without attackers."""
        return (self.name + ("" if self.scale is None else f":{self.scale:g}")) if self.count else "none"

    @property
    def poisons_labels(self) -> bool:
        """Return True if the attackers train on wrong targets: the trainer does that, since an attack has no data."""
        return self.name == "label_flip"

    def fresh(self) -> Attack:
        """Return the attack in its initial state. Raises `UsageError`."""
        found = _find(self.name)
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


def scaled(honest: Floats, own: Floats, round_number: int, generator: np.random.Generator, scale: float = 10) -> Floats:
    """Scale the own contribution up."""
    return np.float32(scale) * own


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
    squares = _squares(honest)
    return _farthest(honest, scale, lambda off: bool(off.max() <= squares.max()))


def min_sum(honest: Floats, own: Floats, round_number: int, generator: np.random.Generator, scale: float = 1) -> Floats:
    """As `min_max`, with a sum of squared distances to the honest peers at most the greatest among these."""
    squares = _squares(honest)
    return _farthest(honest, scale, lambda off: bool(off.sum() <= squares.sum(axis=1).max()))


def mimic(honest: Floats, own: Floats, round_number: int, generator: np.random.Generator) -> Floats:
    """All copy one honest peer, always the same (Karimireddy, He, Jaggi, arXiv:2006.09365)."""
    return np.asarray(honest[0])


def zero(honest: Floats, own: Floats, round_number: int, generator: np.random.Generator) -> Floats:
    """Send zeros, which slows the mean down."""
    return np.zeros_like(own)


def huge(honest: Floats, own: Floats, round_number: int, generator: np.random.Generator, scale: float = 1e6) -> Floats:
    """Send the negated honest mean, a million times as long."""
    return np.float32(-scale) * _mean(honest)


def nan(honest: Floats, own: Floats, round_number: int, generator: np.random.Generator) -> Floats:
    """Send NaN."""
    return np.full_like(own, np.nan)


def inf(honest: Floats, own: Floats, round_number: int, generator: np.random.Generator) -> Floats:
    """Send infinity."""
    return np.full_like(own, np.inf)


class Stale:
    """Replay the own contribution of the first round; with a scale, that of `scale` rounds ago."""

    def __init__(self) -> None:
        self._seen: list[Floats] = []

    def __call__(
        self, honest: Floats, own: Floats, round_number: int, generator: np.random.Generator, scale: float = math.inf
    ) -> Floats:
        """Return the old contribution."""
        self._seen.append(own.copy())
        kept = len(self._seen) - 1
        return self._seen[0 if math.isinf(scale) else max(0, kept - int(scale))]


class Freeload:
    """Train nothing: send the honest mean of the last round, with noise of one's own, as long as an honest contribution."""

    def __init__(self) -> None:
        self._last: Floats | None = None

    def __call__(
        self, honest: Floats, own: Floats, round_number: int, generator: np.random.Generator, scale: float = 0.6
    ) -> Floats:
        """Return [k, d]; the scale is the noise's length relative to the mean's. In the first round send own work."""
        last, self._last = self._last, _mean(honest)
        return own if last is None else freeloaded(last, len(own), scale, _typical_norm(honest), generator)


def freeloaded(output: Floats, keys: int, noise: float, norm: float, generator: np.random.Generator) -> Floats:
    """Return [keys, d]: `output` [d] with noise `noise` times as long, other for each key, scaled to a norm."""
    drawn = generator.standard_normal((keys, output.size), np.float32)
    sent = output + noise * np.linalg.norm(output) * drawn / np.linalg.norm(drawn, axis=1, keepdims=True)
    return np.asarray(sent * (norm / (np.linalg.norm(sent, axis=1, keepdims=True) + 1e-30)), np.float32)


class HiddenDirection:
    """Add one random direction to the own contribution, the same for all attackers and rounds."""

    def __init__(self) -> None:
        self._direction: Floats | None = None

    def __call__(
        self, honest: Floats, own: Floats, round_number: int, generator: np.random.Generator, scale: float = 0.5
    ) -> Floats:
        """Add the direction, `scale` times as long as a contribution."""
        if self._direction is None:
            drawn = generator.standard_normal(own.shape[1], np.float32)
            self._direction = np.asarray(drawn / np.linalg.norm(drawn), np.float32)
        return own + np.float32(scale * _typical_norm(honest)) * self._direction


def one_part(
    honest: Floats, own: Floats, round_number: int, generator: np.random.Generator, scale: float = 3
) -> Floats:
    """Collude in one part, where all attackers send the negated honest mean, and be honest in the others."""
    part = slice(0, own.shape[1] // (len(honest) + len(own)))
    sent = own.copy()
    sent[:, part] = np.float32(-scale) * _mean(honest)[part]
    return sent


@dataclass(frozen=True, slots=True)
class Groups:
    """Push in groups, each on coordinates of its own, and send the own contribution elsewhere.

    Deviations of two groups are orthogonal, so the Gram matrix shows only as much agreement as one group has inside.
    """

    size: int
    """Attackers of a group; the last group may be smaller."""
    push: str
    """`against`: minus the honest mean; `constant`: a direction that stays the same in all rounds; `hidden`: only the
    negated honest mean, without own work, and as long as an honest contribution at a scale of 1."""
    in_parts: bool
    """True if a group's coordinates are one run of neighbours, as parts are; otherwise every k-th of k groups."""

    def __call__(
        self, honest: Floats, own: Floats, round_number: int, generator: np.random.Generator, scale: float = 1
    ) -> Floats:
        """Return [k, d]; the scale is relative to the honest mean (`against`) or to an honest norm, on these coordinates."""
        sent, (attackers, size) = own.copy(), own.shape
        groups = -(-attackers // self.size)
        for index, row in enumerate(sent):
            group = index // self.size
            first, last = group * size // groups, (group + 1) * size // groups
            where = slice(first, last) if self.in_parts else slice(group, None, groups)
            row[where] = self._pushed(honest[:, where], row[where], group, scale)
        return sent

    def _pushed(self, honest: Floats, own: Floats, group: int, scale: float) -> Floats:
        mean = _mean(honest)
        if self.push == "against":
            return own - np.float32(scale) * mean
        hidden = self.push == "hidden"
        drawn = -mean if hidden else np.random.default_rng(group).standard_normal(own.size, np.float32)
        pushed = np.float32(scale * _typical_norm(honest) / (np.linalg.norm(drawn) + 1e-30)) * drawn
        return np.asarray(pushed if hidden else own + pushed, np.float32)


def label_flip(honest: Floats, own: Floats, round_number: int, generator: np.random.Generator) -> Floats:
    """Send honest work on wrong targets: the trainer inverts the target tokens."""
    return own


ATTACKS: Mapping[str, Callable[..., Any]] = {
    **{
        attack.__name__: attack
        for attack in (sign_flip, scaled, noise, ipm, alie, min_max, min_sum, mimic, zero, huge, nan, inf)
    },
    "stale": Stale,
    "freeload": Freeload,
    "hidden": HiddenDirection,
    "one_part": one_part,
    "label_flip": label_flip,
    **{
        f"{'parts' if in_parts else 'groups'}{size}_{push}": Groups(size, push, in_parts)
        for size in (1, 2)
        for push in ("against", "constant", "hidden")
        for in_parts in (False, True)
    },
}


NAMED = (
    *("none", "sign_flip:4", "sign_flip:4:10", "scaled:4:10", "noise:4", "ipm:4:0.1", "ipm:4:1.5", "zero:4"),
    *("huge:4", "nan:4", "mimic:4", "min_max:4", "min_sum:4", "alie:4", "alie:4:1.5", "label_flip:4", "one_part:4"),
    *("stale:4", "stale:4:5", "hidden:4", "groups2_against:4:1", "groups1_against:4:2", "groups1_hidden:4:0.75"),
    *("groups2_hidden:4:0.25", "groups2_constant:4:1", "parts2_against:4:0.5", "freeload:4:0.6", "sign_flip:2"),
    *("noise:2", "ipm:2:1.5", "mimic:2", "min_max:2", "alie:2", "label_flip:2", "one_part:2", "stale:2"),
    "groups1_hidden:2:0.75",
)
"""The attacks that `all` stands for: each by name, with 4 and with 2 attackers."""


def _find(name: str, known: Collection[str] = ()) -> Callable[..., Any]:
    """Return an attack of this file, or a function of one's own; where others are `known`, there is no other."""
    module, colon, function = name.partition(":")
    if name in ATTACKS and not known:
        return ATTACKS[name]
    if known or not colon:
        remedy = f"choose one of {', '.join(known or ATTACKS)}"
        if name in ATTACKS or colon:
            remedy = "`flockstep bench robust` has the attacks on contributions"
        raise UsageError(f"there is no attack {name!r}{did_you_mean(name, known or ATTACKS)}", remedy=remedy)
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"cannot import the attack {name}: {error}", remedy="check the name and PYTHONPATH") from error
    if not callable(found):
        raise UsageError(
            f"the attack {name} is no function", remedy="see the docstring of scripts/lab/attacks/gradients.py"
        )
    return found  # type: ignore[no-any-return]  # any callable


def _mean(honest: Floats) -> Floats:
    return np.asarray(honest.mean(axis=0))


def _typical_norm(honest: Floats) -> float:
    return float(np.median(np.linalg.norm(honest, axis=1)))


def _squares(honest: Floats) -> npt.NDArray[np.float64]:
    wide = honest.astype(np.float64)
    return np.asarray([((wide - row) ** 2).sum(axis=1) for row in wide])


def _farthest(honest: Floats, scale: float, hides: Callable[[npt.NDArray[np.float64]], bool]) -> Floats:
    """Return the honest mean minus g times its direction, with the greatest g that still hides, by bisection."""
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
