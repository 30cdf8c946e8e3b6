"""Fragments and parts: which cells of the flat vector a round averages, and which member reduces which of them.

In streaming mode (arXiv:2501.18512) a round averages one fragment of the vector, in turn; else all of it. Fragments are
runs of cells of equal length, so every peer knows them from two numbers, keepers without the model too, and each round
sends as many bytes as the next. A tensor may lie in two of them: the outer step works element by element.

In a butterfly an owner receives and sends its part once per member, so a round lasts as long as the slowest
(part size / bandwidth); that is least when part sizes are proportional to bandwidth. Upload decides, since homes have
less of it than of download.
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate, pairwise

from ..peer.errors import ProtocolViolation

LARGEST_SHARE = Fraction(1, 2)
"""What one owner may hold when three or more can own: a claimed upload must not make one peer the master."""

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


def split(cells: range, uploads: Sequence[float]) -> tuple[int, ...]:
    """Bounds of the members' parts: n + 1 cell indices, from first to last; member i owns `bounds[i]:bounds[i + 1]`.

    `uploads` are bytes per second; what is not finite and positive owns nothing, and where that leaves nobody, all own
    alike. Exact rational arithmetic, then largest remainders (ties: earlier in the roster): every peer gets the same.
    """
    speeds = [Fraction(upload) if math.isfinite(upload) and upload > 0 else Fraction(0) for upload in uploads]
    if not any(speeds):
        speeds = [Fraction(1)] * len(uploads)
    shares = _capped([speed / sum(speeds) for speed in speeds])
    quotas = [len(cells) * share for share in shares]
    sizes = [math.floor(quota) for quota in quotas]
    by_remainder = sorted(range(len(sizes)), key=lambda i: sizes[i] - quotas[i])
    for i in by_remainder[: len(cells) - sum(sizes)]:
        sizes[i] += 1
    return tuple(accumulate(sizes, initial=cells.start))


def check_bounds(bounds: Sequence[int], num_members: int, cells: range) -> None:
    """Raises `ProtocolViolation` unless `bounds` give every one of the cells to exactly one of `num_members` members."""
    if len(bounds) != num_members + 1:
        raise ProtocolViolation(f"{len(bounds)} part bounds for {num_members} members")
    ends = bounds[0], bounds[-1]
    if ends != (cells.start, cells.stop) or any(low > high for low, high in pairwise(bounds)):
        raise ProtocolViolation(f"part bounds {list(bounds)} do not ascend from {cells.start} to {cells.stop}")


def _capped(shares: list[Fraction]) -> list[Fraction]:
    """The same shares with the largest cut to the cap. At most one can exceed a half, so one pass is enough."""
    largest = max(shares)
    if largest <= LARGEST_SHARE or sum(share > 0 for share in shares) < 3:
        return shares
    rest = (1 - LARGEST_SHARE) / (1 - largest)
    return [LARGEST_SHARE if share == largest else share * rest for share in shares]
