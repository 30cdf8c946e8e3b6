"""The state (θ, m) of one peer: makes the outer step of a certified round, and computes the root that it leads to.

Pure NumPy, for the network process, which does not import torch.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TypeAlias

import numpy as np

from ...collectives.state import merkle
from ...collectives.vector.arrays import Floats
from ...collectives.vector.codec import CELL, Codec, Encoded, FlatSum, FlatVector, feedback_chunks
from ...peer.base.digest import digest
from ..step.outer import OuterSettings, outer_step

LeafHashes: TypeAlias = tuple[list[bytes], list[bytes]]
"""The hashes of θ's leaves, and of m's."""


def decode_outputs(codec: Codec, bounds: Sequence[int], outputs: Sequence[Encoded], span: slice, out: Floats) -> None:
    """Decode g of the elements `span` (whole cells of the flat vector) into `out`, from the encoded outputs by part."""
    first, last = span.start // CELL, span.stop // CELL
    for (low, high), data in zip(pairwise(bounds), outputs, strict=True):
        start, stop = max(low, first), min(high, last)
        if start < stop:
            piece = out[(start - first) * CELL : (stop - first) * CELL]
            codec.decode_range(data, high - low, start - low, stop - low, piece)


class OuterState:
    """θ and m, what outer steps do to them, and the hashes of their leaves.

    `theta` and `momentum` are flat float32 vectors of whole cells, changed in place. A round changes only the leaves of the
    cells that it averages: those alone are decoded, stepped and hashed. For use from any thread, one at a time.
    """

    def __init__(self, theta: Floats, momentum: Floats, settings: OuterSettings, codec: Codec) -> None:
        self.theta = theta
        self.momentum = momentum
        self._settings = settings
        self._codec = codec
        self._leaves: LeafHashes | None = None

    @property
    def root(self) -> bytes:
        """The state root."""
        return merkle.root([leaf for leaves in self.leaves for leaf in leaves])

    @property
    def leaves(self) -> LeafHashes:
        """The hashes of θ's leaves and of m's, as of the last step, or of the first look since `forget`."""
        if self._leaves is None:
            self._leaves = merkle.leaves(self.theta), merkle.leaves(self.momentum)
        return self._leaves

    def use(self, settings: OuterSettings, codec: Codec) -> None:
        """Make the outer steps from now on by these, of the next round (`OuterSettings.at`)."""
        self._settings, self._codec = settings, codec

    def forget(self) -> None:
        """The vectors were changed from outside: hash them anew when their hashes are needed."""
        self._leaves = None

    def next_root(self, bounds: Sequence[int], outputs: Sequence[Encoded]) -> bytes:
        """Compute the state root after the outer step with these outputs. Nothing changes: leaf by leaf is copied."""
        before = self.leaves
        after = [*before[0]], [*before[1]]
        for index, leaf, span, g in self._touched(bounds, outputs):
            vectors = self.theta[leaf].copy(), self.momentum[leaf].copy()
            inner = slice(span.start - leaf.start, span.stop - leaf.start)
            outer_step(vectors[0][inner], vectors[1][inner], g, self._settings)
            for vector, hashes in zip(vectors, after, strict=True):
                hashes[index] = _hash(vector)
        return merkle.root(after[0] + after[1])

    def apply(self, bounds: Sequence[int], outputs: Sequence[Encoded]) -> None:
        """Make the outer step with these outputs in place."""
        leaves = self.leaves
        for index, leaf, span, g in self._touched(bounds, outputs):
            outer_step(self.theta[span], self.momentum[span], g, self._settings)
            leaves[0][index], leaves[1][index] = _hash(self.theta[leaf]), _hash(self.momentum[leaf])

    def _touched(self, bounds: Sequence[int], outputs: Sequence[Encoded]) -> Iterator[tuple[int, slice, slice, Floats]]:
        """Yield each leaf that a round changes: its index, its elements, those that are changed, and g of these.

        g lies in a buffer that the next leaf overwrites.
        """
        first, last = bounds[0] * CELL, bounds[-1] * CELL
        buffer = np.empty(min(merkle.LEAF_ELEMENTS, last - first), np.float32)
        for index, (start, stop) in enumerate(merkle.leaf_spans(self.theta.size)):
            span = slice(max(start, first), min(stop, last))
            if span.start < span.stop:
                g = buffer[: span.stop - span.start]
                decode_outputs(self._codec, bounds, outputs, span, g)
                yield index, slice(start, stop), span, g


def keep_rest(x: FlatSum, codec: Codec, bounds: Sequence[int], parts: Sequence[Encoded], residual: FlatVector) -> None:
    """Compute the error feedback of all parts of a contribution: `residual` = x − Dec(parts), of the cells averaged.

    `x` may be made from `residual`.
    """
    first = bounds[0]
    for (low, high), data in zip(pairwise(bounds), parts, strict=True):
        if low < high:
            feedback_chunks(x.chunks(low, high), codec, data, residual[elements_of(range(low - first, high - first))])


def spans(bounds: Sequence[int]) -> Iterator[slice]:
    """Yield the elements of each part."""
    for low, high in pairwise(bounds):
        yield elements_of(range(low, high))


def elements_of(cells: range) -> slice:
    """Return the elements of consecutive cells."""
    return slice(cells.start * CELL, cells.stop * CELL)


def _hash(leaf: Floats) -> bytes:
    return digest(merkle.leaf_bytes(leaf, 0, leaf.size))
