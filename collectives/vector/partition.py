"""Fragments and parts: which cells of the flat vector a round averages, and which member reduces which of them. Pure.

In streaming mode (arXiv:2501.18512) a round averages one fragment of the vector, in turn; else all of it. Fragments are
runs of cells of equal length, so every peer knows them from two numbers, keepers without the model too, and each round
sends as many bytes as the next. A tensor may lie in two of them: the outer step works element by element.

Parts, for n members with rate u, download d and share s of the vector. A round has two transfers with the cut between
them, so its time is the sum of two maxima over the members:

    COLLECT   max of (1 - s) / u and (n - 1)·s / d      REDUCE   max of (n - 1)·s / u and (1 - s) / d

The second is least for s in proportion to u. The first is that of the slowest line, which sends nearly all of its
contribution, whatever it owns; so a part whose owner receives it within this time costs nothing, and none should be
larger. Hence water-filling: every part rises in proportion to u until it meets its limit. In eight swarms (docs/log.md)
that is within 3.3 % of the optimum. Shares (T·u - 1) / (n - 2), which would be best if nobody waited between the two
transfers, take up to 20 % longer.
"""

import math
from collections.abc import Sequence, Sized
from fractions import Fraction
from itertools import accumulate, pairwise

from ...peer import wire
from ...peer.base.errors import ProtocolViolation

LARGEST_SHARE = Fraction(1, 2)
"""What one owner may hold when three or more can own: a fast line must not make one peer the master."""

LEAST_FOR_PARTS = 64 << 20


def memory_for_parts(own: int) -> int:
    """Return the bytes of memory that an owner takes for contributions to its part, where a whole one has `own` bytes.

    An even share of all members has `own` bytes together. But a part may be half of the vector, of 64 members: 32 times
    as much, and all of it is held until the round is decided.
    """
    return max(2 * own, LEAST_FOR_PARTS)


def fragment_of(round_: int, num_cells: int, num_fragments: int) -> range:
    """Return the cells that a round averages, of a vector of `num_cells`; the first round is 1."""
    count = max(1, min(num_fragments, num_cells))
    index = (round_ - 1) % count
    return range(index * num_cells // count, (index + 1) * num_cells // count)


def split(
    cells: range, rates: Sequence[float], limits: Sequence[Fraction | None] = (), *, able: int = 0
) -> tuple[int, ...]:
    """Bounds of the members' parts: n + 1 cell indices, from first to last; member i owns `bounds[i]:bounds[i + 1]`.

    `rates` are bytes per second; what is not finite and positive owns nothing, and where that leaves nobody, all own
    alike. `limits` are the largest shares, None for no limit; where they do not suffice they are doubled, all alike.
    `able` members could own, if more than those that do: so leaving some out does not lift `LARGEST_SHARE`.
    Exact rational arithmetic, then largest remainders (ties: earlier in the roster): every peer gets the same.
    """
    speeds = [Fraction(rate) if math.isfinite(rate) and rate > 0 else Fraction(0) for rate in rates]
    if not any(speeds):
        speeds = [Fraction(1)] * len(rates)
    shares = _filled(speeds, _limits(speeds, limits or [None] * len(rates), able))
    quotas = [len(cells) * share for share in shares]
    sizes = [math.floor(quota) for quota in quotas]
    by_remainder = sorted(range(len(sizes)), key=lambda i: sizes[i] - quotas[i])
    for i in by_remainder[: len(cells) - sum(sizes)]:
        sizes[i] += 1
    return tuple(accumulate(sizes, initial=cells.start))


def num_parts(members: Sized) -> int:
    """Return the number of parts under a roster: one for each of its first members, which judge; empty ones, too."""
    return min(len(members), wire.MAX_PARTS)


def check_bounds(bounds: Sequence[int], parts: int, cells: range) -> None:
    """Raises `ProtocolViolation` unless `bounds` give every one of the cells to exactly one of so many parts."""
    if len(bounds) != parts + 1:
        raise ProtocolViolation(f"{len(bounds)} part bounds for {parts} parts")
    ends = bounds[0], bounds[-1]
    if ends != (cells.start, cells.stop) or any(low > high for low, high in pairwise(bounds)):
        raise ProtocolViolation(f"part bounds {list(bounds)} do not ascend from {cells.start} to {cells.stop}")


def _limits(speeds: Sequence[Fraction], limits: Sequence[Fraction | None], able: int) -> list[Fraction]:
    """The limit of each share, all of them together at least 1; that of who owns nothing is 0."""
    owners = sum(speed > 0 for speed in speeds)
    most = LARGEST_SHARE if owners > 1 and max(owners, able) >= 3 else Fraction(1)
    wanted = [most if limit is None or limit <= 0 else limit for limit in limits]
    while True:
        found = [min(most, limit) if speed else Fraction(0) for speed, limit in zip(speeds, wanted, strict=True)]
        if sum(found) >= 1:
            return found
        wanted = [2 * limit for limit in wanted]


def _filled(speeds: Sequence[Fraction], limits: Sequence[Fraction]) -> list[Fraction]:
    """Shares in proportion to the speeds, each within its limit, together 1: those with the least room fill first."""
    shares, left, speed = list(limits), Fraction(1), sum(speeds)
    flowing = sorted((i for i, its in enumerate(speeds) if its), key=lambda i: limits[i] / speeds[i])
    for place, i in enumerate(flowing):
        if limits[i] * speed >= left * speeds[i]:  # Neither it nor any that follows is full at this level.
            for rest in flowing[place:]:
                shares[rest] = left * speeds[rest] / speed
            break
        left, speed = left - limits[i], speed - speeds[i]
    return shares
