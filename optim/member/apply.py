"""Applies a certified round: decodes its outputs, makes the outer step, and computes the next state root.

Pure NumPy, for the network process, which does not import torch.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from ...collectives.codec import CELL, Codec, Encoded, feedback
from ...collectives.state import merkle
from ...peer.arrays import Floats
from ...peer.digest import digest
from ..outer import OuterSettings, outer_step


def decode_outputs(codec: Codec, bounds: Sequence[int], outputs: Sequence[Encoded], span: slice, out: Floats) -> None:
    """Decode g of the elements `span` (whole cells of the flat vector) into `out`, from the encoded outputs by part."""
    first, last = span.start // CELL, span.stop // CELL
    for (low, high), data in zip(pairwise(bounds), outputs, strict=True):
        start, stop = max(low, first), min(high, last)
        if start < stop:
            piece = out[(start - first) * CELL : (stop - first) * CELL]
            codec.decode_range(data, high - low, start - low, stop - low, piece)


def next_root(
    theta: Floats,
    momentum: Floats,
    settings: OuterSettings,
    codec: Codec,
    bounds: Sequence[int],
    outputs: Sequence[Encoded],
) -> bytes:
    """Compute the state root after the outer step with these outputs. θ and m stay as they are: leaf by leaf is copied."""
    hashes: tuple[list[bytes], list[bytes]] = ([], [])
    for span, g in _by_leaf(theta.size, codec, bounds, outputs):
        leaf = theta[span].copy(), momentum[span].copy()
        outer_step(*leaf, g, settings)
        for vector, leaves in zip(leaf, hashes, strict=True):
            leaves.append(digest(merkle.leaf_bytes(vector, 0, vector.size)))
    return merkle.root(hashes[0] + hashes[1])


def apply_outputs(
    theta: Floats,
    momentum: Floats,
    settings: OuterSettings,
    codec: Codec,
    bounds: Sequence[int],
    outputs: Sequence[Encoded],
) -> None:
    """Make the outer step with these outputs in place, one leaf's g at a time."""
    for span, g in _by_leaf(theta.size, codec, bounds, outputs):
        outer_step(theta[span], momentum[span], g, settings)


def keep_rest(x: Floats, codec: Codec, bounds: Sequence[int], parts: Sequence[Encoded], residual: Floats) -> None:
    """Compute the error feedback of all parts of a contribution: `residual` = x − Dec(parts)."""
    for span, data in zip(spans(bounds), parts, strict=True):
        if span.start < span.stop:
            feedback(x[span], codec, data, residual[span])


def spans(bounds: Sequence[int]) -> Iterator[slice]:
    """Yield the elements of each part."""
    for low, high in pairwise(bounds):
        yield slice(low * CELL, high * CELL)


def _by_leaf(
    size: int, codec: Codec, bounds: Sequence[int], outputs: Sequence[Encoded]
) -> Iterator[tuple[slice, Floats]]:
    """Yield each leaf's elements and its g, in a buffer that the next leaf overwrites."""
    g = np.empty(min(merkle.LEAF_ELEMENTS, size), np.float32)
    for start, stop in merkle.leaf_spans(size):
        span, piece = slice(start, stop), g[: stop - start]
        decode_outputs(codec, bounds, outputs, span, piece)
        yield span, piece
