"""The members' lines, as their receivers measured them, and the parts and codecs that follow. Pure.

Theory of operation. A line that its owner states itself is free to lie about: who claims a fast one would own most of
the vector. So every Ready states at which rate its author has received from each member of the last certified roster,
one byte each. All connections of a sender share its line, and all of a receiver's its own, so a rate says what one
connection carries beside the others.

    rate     of a member: the greatest that voters with more than a third of the votes have received at, itself left
             out. Liars hold less: they can raise nobody's above what an honest voter has measured, nor lower it below
             what the honest ones agree on. Who has not been measured so counts by its own word, but for no more than
             the greatest rate that voters with more than a third of the votes claim; where so many claim none, for no
             more than half of all members do. A claim of 0 is an opt-out: a relayed peer owns nothing.
    limit    of its part: `INTAKE_GROWTH` times what it receives, by its own statement, in the time in which the slowest
             contributor sends its contribution. Who lies here gets a smaller part, or one that suits it badly.

All of it is stated in the Readys that a roster shows, and so everybody computes the same bounds and refuses
others. The convener's own part in them is whom it leaves out: an owner that lied about its output, or was silent.
"""

import math
import statistics
from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

from ..peer import wire
from ..peer.transport import PeerId
from .codec import Codec
from .partition import split

GRADES = 1 << 8
"""Rates that a byte can state; 0 is none."""
_STEPS = 8
"""Rates in an octave: each is 6 to 12.5 % above the one below, and a line varies by more between two rounds."""
_LEAST = 64
"""Bytes/s of the smallest step: rates from 576 bytes/s up to 2 · 10¹² bytes/s."""
_RATES = (0, *((_STEPS + grade % _STEPS << grade // _STEPS) * _LEAST for grade in range(1, GRADES)))
UNMEASURED = 1e6
"""Bytes/s assumed of a connection before the first measurement: a usual upload rate at home."""
INTAKE_GROWTH = 2
"""A receiver may be seen at less than its line carries, since others send slowly: its part doubles until it is."""

HEADROOM = 0.75
"""Of a line, for a codec of more bits than the one before: else a rate at the edge would change it in every round."""

Frontier = Callable[[Mapping[PeerId, int]], int | None]
"""Returns the greatest number that voters with more than a third of the votes have or exceed; None if too few are named."""


def grade_of(rate: float) -> int:
    """Return the greatest grade that is no more than a rate in bytes/s."""
    return bisect_right(_RATES, rate) - 1


def rate_of(grade: int) -> int:
    """Return the rate of a grade in bytes/s; whole numbers, so that everybody computes the same."""
    return _RATES[grade]


def stated(last: Sequence[PeerId], rate: Callable[[PeerId], float]) -> bytes:
    """Return my statement: a grade for each member of the last certified roster, by the rates that I have measured."""
    return bytes(grade_of(rate(peer)) for peer in last)


@dataclass(frozen=True, slots=True)
class StatedLines:
    """What the Readys of a roster state of its members' lines."""

    readies: Mapping[PeerId, wire.Ready]
    """By member, in the order of the roster."""
    last: Sequence[PeerId]
    """The members of the last certified roster: whom the statements are about."""
    frontier: Frontier

    def measured(self, peer: PeerId) -> int:
        """Return the rate in bytes/s at which voters have received from a member; 0 if too few have measured it."""
        if peer not in self.last:
            return 0
        place = self.last.index(peer)
        said = {other: it.rates[place] for other, it in self.readies.items() if self._is_about_last(it) and other != peer}
        return rate_of(self.frontier({other: grade for other, grade in said.items() if grade}) or 0)

    def bounds(self, cells: range, without: Collection[PeerId]) -> tuple[int, ...]:
        """Return the bounds of the members' parts; those `without` a part own nothing."""
        rates = self._rates()
        slowest = min((rate for rate, it in zip(rates, self.readies.values(), strict=True) if rate and it.tokens), default=0)
        limits = [self._limit(peer, slowest) for peer in self.readies]
        owned = [rate * (peer not in without) for peer, rate in zip(self.readies, rates, strict=True)]
        if not any(owned):
            owned = [int(peer not in without) for peer in self.readies]
        return split(cells, owned, limits)

    def proposal(self, cells: range, may_own: Callable[[PeerId], bool]) -> tuple[int, ...]:
        """Return the bounds that a convener proposes: without those that may not own, unless that leaves nobody.

        Whose share is less than a cell is without a part, too: so the bounds say who was left out, and others can check them.
        """
        without = {peer for peer in self.readies if not may_own(peer)}
        if all(peer in without or not grade_of(ready.upload) for peer, ready in self.readies.items()):
            without = set()
        while True:
            bounds = self.bounds(cells, without)
            if without == (empty := without | self.without(bounds)):
                return bounds
            without = empty

    def without(self, bounds: Sequence[int]) -> set[PeerId]:
        """Return the members whose part is empty."""
        return {peer for peer, (low, high) in zip(self.readies, pairwise(bounds), strict=True) if low == high}

    def _is_about_last(self, ready: wire.Ready) -> bool:
        """Return True if a statement is about the last roster: only then does it count."""
        return len(ready.rates) == len(self.last)

    def _rates(self) -> list[int]:
        claims = {peer: grade for peer, ready in self.readies.items() if (grade := grade_of(ready.upload))}
        usual = self.frontier(claims) or statistics.median_low(claims.values() or [0])
        owners = {peer: self.measured(peer) or rate_of(min(grade, usual)) for peer, grade in claims.items()}
        return [owners.get(peer, 0) for peer in self.readies]

    def _limit(self, peer: PeerId, slowest: int) -> Fraction | None:
        """Return the largest share that a member receives while the slowest sends; None if it has measured nothing.

        A line has a connection to each other member: the slowest sends its contribution over all of them meanwhile, and
        the member receives its part once over each, at the mean of those that it has measured.
        """
        ready = self.readies[peer]
        said = zip(self.last, ready.rates, strict=True) if self._is_about_last(ready) else ()
        seen = [rate_of(grade) for other, grade in said if grade and other != peer]
        others = len(self.readies) - 1
        return Fraction(INTAKE_GROWTH * sum(seen), len(seen) * slowest * others) if seen and slowest and others else None


class CodecChoice:
    """The codec of a peer's own contributions: the one of most bits that its line sends in time, else that of fewest."""

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        """What decodes the contributions of all."""
        self.mine = codec.codecs[0]

    @property
    def stated(self) -> str:
        """My codec as my commit states it."""
        return "" if self.mine is self.codec.codecs[0] else self.mine.name

    def choose(self, num_cells: int, rate: float, seconds: float) -> str:
        """Choose for a contribution of so many cells to others, that a line of `rate` bytes/s may send in `seconds`.

        Return why the codec changes; empty if it does not, as without a measurement, a limit, or anything to send.
        """
        if not num_cells or not rate or not 0 < seconds < math.inf:
            return ""
        before, room = self.mine, rate * seconds
        ordered = sorted(self.codec.codecs, key=lambda codec: codec.cell_bytes)
        fit = [codec for codec in ordered if codec.num_bytes(num_cells) <= room * self._share(codec)]
        self.mine = fit[-1] if fit else ordered[0]
        if self.mine is before:
            return ""
        need = before.num_bytes(num_cells) / rate
        return f"{self.mine.name} in place of {before.name}, which takes {need:.2g} s of the {seconds:.2g} s for it"

    def _share(self, codec: Codec) -> float:
        return HEADROOM if codec.cell_bytes > self.mine.cell_bytes else 1.0
