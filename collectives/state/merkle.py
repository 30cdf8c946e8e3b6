"""The state root: a Merkle tree over 4 MiB leaves of θ and then of m.

A state can be fetched leaf by leaf, each one verified. Leaves and inner nodes are hashed under different contexts
(domain separation, as in RFC 6962), so that neither passes for the other.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from ...peer.base.digest import digest, keyed
from ..vector.arrays import Floats

LEAF_ELEMENTS = 1 << 20
"""4 MiB of float32: small enough to fetch anew when wrong, large enough that a billion parameters have 1,908."""


def leaf_spans(size: int) -> Iterator[tuple[int, int]]:
    """Yield the start and stop of each leaf of a vector of `size` elements, in elements."""
    for start in range(0, size, LEAF_ELEMENTS):
        yield start, min(start + LEAF_ELEMENTS, size)


def leaf_bytes(vector: Floats, start: int, stop: int) -> memoryview:
    """Return the bytes of one leaf (little-endian float32), without copying."""
    return vector[start:stop].view(np.uint8).data


def leaves(vector: Floats) -> list[bytes]:
    """Return the hashes of a vector's leaves."""
    return [digest(leaf_bytes(vector, start, stop)) for start, stop in leaf_spans(vector.size)]


def root(hashes: Sequence[bytes]) -> bytes:
    """Return the Merkle root over leaf hashes, 32 bytes; an odd node at the end of a level moves up unchanged."""
    level = [keyed("leaf of a state", leaf) for leaf in hashes]
    while len(level) > 1:
        pairs = [keyed("node of a state", level[i], level[i + 1]) for i in range(0, len(level) - 1, 2)]
        level = pairs + level[2 * len(pairs) :]
    return level[0] if level else keyed("empty state")


def state_root(theta: Floats, momentum: Floats) -> bytes:
    """Return the root of a whole state."""
    return root(leaves(theta) + leaves(momentum))
