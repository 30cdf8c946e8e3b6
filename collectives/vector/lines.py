"""The members' lines, as their receivers measured them, and the parts and codecs that follow. Pure.

Theory of operation. A line that its owner states itself is free to lie about: who claims a fast one would own most of
the vector. So every Ready states at which rate its author has received from each member of the last certified roster,
one byte each. All connections of a sender share its line, and all of a receiver's its own, so a rate says what one
connection carries beside the others.

    rate     of a member: the greatest that voters with more than a third of the votes have received at, itself left
             out. Liars hold less: they can raise nobody's above what an honest voter has measured, nor lower it below
             what the honest ones agree on. Who has not been measured so counts by its own word, but for no more than
             the greatest rate that voters with more than a third of the votes claim (`UNMEASURED` where so many claim
             none), nor than the median of those that have been measured; and all such members together count beside
             these for `UNMEASURED_SHARE`, since keys are free. They own more only where the limits of these leave it.
             A claim of 0 is an opt-out: a relayed peer owns nothing.
    limit    of its part: `INTAKE_GROWTH` times what it receives, by its own statement, in the time in which the slowest
             contributor sends its contribution. Who lies here gets a smaller part, or one that suits it badly.

All of it is stated in the Readys that a roster shows, and so everybody computes the same bounds and refuses
others. The proposer's own part in them is whom it leaves out: an owner that lied about its output, or was silent.
How many that may be the voters check (`round/gather.py`).
"""

import math
import statistics
from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import pairwise

from ...peer import wire
from ...peer.base.transport import PeerId
from .codec import Codec
from .partition import num_parts, split

GRADES = 1 << 8
"""Rates that a byte can state; 0 is none."""
_STEPS = 8
"""Rates in an octave: each is 6 to 12.5 % above the one below, and a line varies by more between two rounds."""
_LEAST = 64
"""Bytes/s of the smallest step: rates from 576 bytes/s up to 2 · 10¹² bytes/s."""
_RATES = (0, *((_STEPS + grade % _STEPS << grade // _STEPS) * _LEAST for grade in range(1, GRADES)))
UNMEASURED = 1e6
"""Bytes/s assumed of a connection before the first measurement: a usual upload rate at home."""
UNMEASURED_SHARE = Fraction(1, 3)
"""Of all rates, for all members without a measured one while others have one: a round later they are measured, too."""
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


def measured_in(before: wire.Value | None) -> tuple[PeerId, ...]:
    """Return the members whose lines the Readys of a round state, by the value before; nobody in the first round."""
    return () if before is None else before.members[: num_parts(before.members)]


def stated(last: Sequence[PeerId], rate: Callable[[PeerId], float]) -> bytes:
    """Return my statement: a grade for each member of the last certified roster, by the rates that I have measured."""
    return bytes(grade_of(rate(peer)) for peer in last)


@dataclass(frozen=True)
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
        said = {other: rates[place] for other, rates in self._about_last if rates[place] and other != peer}
        return rate_of(self.frontier(said) or 0) if said else 0

    @cached_property
    def _about_last(self) -> Sequence[tuple[PeerId, bytes]]:
        """The statements about the last roster: only these count."""
        return [(peer, ready.rates) for peer, ready in self.readies.items() if len(ready.rates) == len(self.last)]

    @cached_property
    def _measured(self) -> Mapping[PeerId, int]:
        return {peer: self.measured(peer) for peer in self.readies}

    def bounds(self, cells: range, without: Collection[PeerId]) -> tuple[int, ...]:
        """Return the bounds of the members' parts; those `without` a part own nothing."""
        rates = self._rates
        slowest = min((rate for rate, it in zip(rates, self.readies.values(), strict=True) if rate and it.tokens), default=0)
        limits = [self._limit(peer, slowest) for peer in self.readies]
        fair = self._beside_measured(rates) if any(rates) else [1] * len(rates)
        owned = [rate * (peer not in without) for peer, rate in zip(self.readies, fair, strict=True)]
        return split(cells, owned if any(owned) else fair, limits, able=sum(rate > 0 for rate in fair))

    def proposal(
        self, cells: range, may_own: Callable[[PeerId], bool], are_too_many: Callable[[Collection[PeerId]], bool]
    ) -> tuple[int, ...]:
        """Return the bounds that a proposer proposes: without those that may not own, as far as these are not too many.

        `are_too_many` is asked about members without a part. Then they are left out one by one, in the roster's order.
        """
        unwanted = [peer for peer in self.readies if not may_own(peer)]
        if not are_too_many({*unwanted, *self.without(bounds := self._settled(cells, unwanted))}):
            return bounds
        bounds = self._settled(cells, ())
        for peer in unwanted:
            without = self.without(bounds) | {peer}
            if not are_too_many(without | self.without(fewer := self._settled(cells, without))):
                bounds = fewer
        return bounds

    def able(self, cells: range) -> set[PeerId]:
        """Return the members that own a part if the proposer leaves nobody out."""
        return set(self.readies) - self.without(self._settled(cells, ()))

    def _settled(self, cells: range, left_out: Collection[PeerId]) -> tuple[int, ...]:
        """Return bounds that follow from who has no part in them, so that others can check them.

        Whose share is less than a cell is without a part, as who is left out.
        """
        without = set(left_out)
        while True:
            bounds = self.bounds(cells, without)
            if without == (empty := without | self.without(bounds)):
                return bounds
            without = empty

    def without(self, bounds: Sequence[int]) -> set[PeerId]:
        """Return the members whose part is empty."""
        return {peer for peer, (low, high) in zip(self.readies, pairwise(bounds), strict=True) if low == high}

    @cached_property
    def _rates(self) -> Sequence[int]:
        """The rates of the members in bytes/s, in the order of the roster; 0 of those that opted out."""
        claims = {peer: grade for peer, ready in self.readies.items() if (grade := grade_of(ready.upload))}
        measured = {peer: self._measured[peer] for peer in claims}
        usual = rate_of(self.frontier(claims) or grade_of(UNMEASURED))
        if known := [rate for rate in measured.values() if rate]:
            usual = min(usual, statistics.median_low(known))
        owners = {peer: measured[peer] or min(rate_of(grade), usual) for peer, grade in claims.items()}
        return [owners.get(peer, 0) for peer in self.readies]

    def _beside_measured(self, rates: Sequence[int]) -> list[int]:
        """Return these rates, those of all members that nobody has measured cut to `UNMEASURED_SHARE` of the sum."""
        known = [rate > 0 and self._measured[peer] > 0 for peer, rate in zip(self.readies, rates, strict=True)]
        proven = sum(rate for rate, is_known in zip(rates, known, strict=True) if is_known)
        most, others = proven * UNMEASURED_SHARE / (1 - UNMEASURED_SHARE), sum(rates) - proven
        if not proven or others <= most:
            return list(rates)
        cut = [max(1, math.floor(rate * most / others)) if rate else 0 for rate in rates]
        return [rate if is_known else less for rate, is_known, less in zip(rates, known, cut, strict=True)]

    def _limit(self, peer: PeerId, slowest: int) -> Fraction | None:
        """Return the largest share that a member receives while the slowest sends; None if it has measured nothing.

        A line has a connection to each other member: the slowest sends its contribution over all of them meanwhile, and
        the member receives its part once over each, at the mean of those that it has measured.
        """
        ready = self.readies[peer]
        said = zip(self.last, ready.rates, strict=True) if len(ready.rates) == len(self.last) else ()
        seen = [rate_of(grade) for other, grade in said if grade and other != peer]
        others = len(self.readies) - 1
        return Fraction(INTAKE_GROWTH * sum(seen), len(seen) * slowest * others) if seen and slowest and others else None


class CodecChoice:
    """The codec of a peer's own contributions: the one of most bits that its line sends in time, else that of fewest."""

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        """What decodes the contributions of all."""
        self.mine = codec.codecs[0]

    def among(self, codec: Codec) -> "CodecChoice":
        """Return the choice among the codecs of the next round: this one, unless the run's settings were revised."""
        return self if codec.name == self.codec.name else CodecChoice(codec)

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
