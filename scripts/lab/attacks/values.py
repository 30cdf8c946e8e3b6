"""What liars put into a round with the codec in hand: numbers for a search to move.

Theory of operation. All liars of a round tell the same `Lie`: what they contribute and claim, how they sketch it, what
they write into the parts that they own, and whom they leave out there. Its fields are knobs with limits, so that a search
draws one at random (`drawn`) and then moves some of its knobs (`moved`). `training.lying` plays it through a round.

Liars know everything: the honest contributions, and a direction of their own that stays the same in all rounds.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Self

import numpy as np

from ....collectives.vector.arrays import Floats
from ....peer.base.errors import UsageError

SHRUNK, FLIPPED, SPIKES, PUSHED = range(4)
"""How an output is false: shorter, some signs turned, two long elements, or along the liars' own direction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """The limits of one number of a lie."""

    low: float
    high: float
    is_whole: bool = False

    def held(self, value: float) -> float:
        """Return the value within the limits, rounded where only whole numbers count."""
        value = min(max(value, self.low), self.high)
        return float(round(value)) if self.is_whole else round(value, 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lie:
    """What each of the liars does in one round; the defaults are an honest member's. Raises `UsageError`."""

    own: float = 1.0
    """Of the own honest work, this multiple is contributed."""
    against: float = 0.0
    """Less this multiple of the honest mean."""
    hidden: float = 0.0
    """And the liars' own direction, relative to the length of the honest mean."""
    groups: float = 1.0
    """The liars take turns in so many groups, each of which lies on elements of its own."""
    reach: float = 1.0
    """The share of parts in which they lie; in the others they contribute their own work."""
    spikes: float = 0.0
    """Of each 256 elements 2⁻ˢ are kept, and the others are zero."""
    length: float = 0.0
    """Decimal logarithm of a factor on the whole contribution."""
    at_home: float = 1.0
    """A factor on what they contribute to parts that they own."""
    tokens: float = 1.0
    """The claim, relative to an honest one's."""
    fudge: float = 0.0
    """How far the first sketches are false, as a share of what the comparison with the bytes lets pass."""
    turned: float = 1.0
    """What they contribute to each other's parts is this multiple, after the outputs, of what they sketched after the cut."""
    shift: float = 0.0
    """The length of the error of the outputs that they own, relative to the output."""
    form: float = SHRUNK
    tries: float = 0.0
    """Binary logarithm of the outputs that each owner tries, of which the first one that passes the checks is sent."""
    denies: float = 0.0
    """How many honest contributors each owner leaves out in its part."""
    choice: float = 0.0
    """The place of the codec that they choose among those that the run offers."""

    def __post_init__(self) -> None:
        for name, knob in KNOBS.items():
            if not knob.low <= getattr(self, name) <= knob.high:
                raise UsageError(f"the {name} of a lie is not in [{knob.low:g}, {knob.high:g}]: {getattr(self, name)}")

    @classmethod
    def drawn(cls, draw: np.random.Generator) -> Self:
        """Return a lie of which some numbers, at least one, are drawn at random."""
        chosen = draw.choice([*KNOBS], int(draw.integers(1, len(KNOBS))), replace=False)
        return cls(**{name: KNOBS[name].held(draw.uniform(KNOBS[name].low, KNOBS[name].high)) for name in chosen})

    def moved(self, draw: np.random.Generator) -> Self:
        """Return a neighbour: one to three numbers moved by a fifth of their range, or as an honest member has them."""
        honest, changes = type(self)(), dict[str, float]()
        for name in draw.choice([*KNOBS], int(draw.integers(1, 4)), replace=False):
            knob = KNOBS[name]
            step = draw.normal(0.0, 0.2 * (knob.high - knob.low))
            is_reset = draw.random() < 0.2
            changes[str(name)] = getattr(honest, name) if is_reset else knob.held(getattr(self, name) + step)
        return replace(self, **changes)

    def told(self) -> dict[str, float]:
        """Return the numbers that are not an honest member's."""
        honest = type(self)()
        return {
            each.name: getattr(self, each.name)
            for each in fields(self)
            if getattr(self, each.name) != getattr(honest, each.name)
        }

    def contributed(self, honest: Floats, own: Floats, hidden: Floats, home: Floats) -> Floats:
        """Return what the liars contribute, [k, d], from honest contributions [h, d] and their own work [k, d].

        `hidden` [d] has a length of 1; `home` [d] is True where an element lies in a part of theirs.
        """
        mean = honest.mean(axis=0)
        size, groups = mean.size, int(self.groups)
        lie = np.float32(self.hidden * np.linalg.norm(mean)) * hidden - np.float32(self.against) * mean
        kept = np.arange(size) % 256 * 2.0**self.spikes < 256
        reached = np.arange(size) < self.reach * size
        sent = np.float32(self.own) * own
        for index, row in enumerate(sent):
            of_group = np.arange(size) % groups == index % groups
            row[reached & of_group] += lie[reached & of_group]
            row[reached & ~kept] = 0
            row[~reached] = own[index][~reached]
        sent[:, home] *= np.float32(self.at_home)
        with np.errstate(over="ignore"):
            return np.asarray(sent * np.float32(10.0**self.length), np.float32)

    def output(self, true: Floats, hidden: Floats, draw: np.random.Generator) -> Floats:
        """Return one try of a false output [d], from the true one and the liars' direction there."""
        length = np.linalg.norm(true)
        if self.form == SHRUNK:
            return np.asarray(true * np.float32(1 - self.shift * draw.uniform(0.9, 1.0)), np.float32)
        if self.form == FLIPPED:
            turned = draw.random(true.size) < self.shift**2 / 4
            return np.where(turned, -true, true)
        false = true.copy()
        if self.form == SPIKES:
            places = draw.choice(true.size, 2, replace=False)
            false[places] += np.float32(self.shift * length / 2**0.5) * draw.choice([-1, 1], 2).astype(np.float32)
            return false
        noise = draw.standard_normal(true.size, np.float32) * np.float32(0.01 / true.size**0.5)
        along = hidden / (np.linalg.norm(hidden) + np.float32(1e-30)) + noise
        return np.asarray(false + np.float32(self.shift * length) * along, np.float32)


KNOBS: Mapping[str, Knob] = {
    "own": Knob(low=-2, high=2),
    "against": Knob(low=-2, high=3),
    "hidden": Knob(low=0, high=2),
    "groups": Knob(low=1, high=4, is_whole=True),
    "reach": Knob(low=0.1, high=1),
    "spikes": Knob(low=0, high=8, is_whole=True),
    "length": Knob(low=-24, high=13),
    "at_home": Knob(low=-2, high=3),
    "tokens": Knob(low=0.01, high=4),
    "fudge": Knob(low=0, high=0.99),
    "turned": Knob(low=-2.5, high=2.5),
    "shift": Knob(low=0, high=3),
    "form": Knob(low=0, high=3, is_whole=True),
    "tries": Knob(low=0, high=6, is_whole=True),
    "denies": Knob(low=0, high=4, is_whole=True),
    "choice": Knob(low=0, high=4, is_whole=True),
}
"""The limits of each number."""
