"""The contributions of a chaos run and their expected average, from the seed alone."""

from collections.abc import Sequence
from functools import cache, lru_cache

import numpy as np
from flockstep.collectives.accountability.trust import token_weights
from flockstep.collectives.robust.rule import Weighting
from flockstep.collectives.robust.rules import MEAN
from flockstep.collectives.vector.arrays import Floats
from flockstep.collectives.vector.codec import CELL, Codec, codec_named
from flockstep.peer.base.digest import digest

RUN = "c" * 52
"""The id of the run that all peers of chaos take part in."""


def codecs_named(names: str) -> tuple[Codec, Codec]:
    """The codecs of contributions and of outputs: `int4`, or `int8/int4`."""
    contribution, _, output = names.partition("/")
    return codec_named(contribution), codec_named(output or contribution)


def tokens_of(index: int) -> int:
    """Different for every peer, so that a mean with the wrong weights is another one."""
    return 100 + index


@cache
def _first_vector(seed: int, index: int, num_cells: int) -> Floats:
    vector = np.random.default_rng([seed, index]).standard_normal(num_cells * CELL, np.float32)
    vector *= np.float32(1e-3)
    return vector


def vector_of(seed: int, index: int, round_: int, num_cells: int) -> Floats:
    """What a peer brings into a round: in every round the same cells in another place, so no bytes ever repeat."""
    return np.roll(_first_vector(seed, index, num_cells), round_ * CELL)


def mean_hash(
    seed: int, cut: Sequence[int], parts: Sequence[tuple[int, int, Sequence[int]]], round_: int, num_cells: int, names: str
) -> str:
    """The hash of the decoded weighted mean of these peers' contributions, added in this order.

    `parts` are (first cell, end, the peers that count there): what another one contributes there counts as zeros.
    """
    mean = np.zeros(num_cells * CELL, np.float32)
    for low, high, counted in parts:
        whole = np.roll(_mean(seed, tuple(cut), tuple(counted), num_cells, names), round_ * CELL)
        mean[low * CELL : high * CELL] = whole[low * CELL : high * CELL]
    return hash_of(mean)


def hash_of(vector: Floats) -> str:
    """The hash of a vector's bytes."""
    return digest(vector.view(np.uint8).data).hex()


@lru_cache(maxsize=4)  # A group whose roster keeps its order asks for the same one again.
def _mean(seed: int, cut: tuple[int, ...], counted: tuple[int, ...], num_cells: int, names: str) -> Floats:
    # Blocks never cross cells, so the whole vector at once gives the same bits as part by part.
    contribution, output = codecs_named(names)
    parts = [_encoded(seed, index, num_cells, contribution.name) for index in cut]
    weights = token_weights([tokens_of(index) for index in cut])
    row = [weight if index in counted else 0.0 for index, weight in zip(cut, weights, strict=True)]
    weighting = Weighting(weights=np.array([row]), flagged={})
    mean = np.concatenate([chunk.copy() for chunk in MEAN.chunks(contribution, parts, weighting, 0, num_cells)])
    output.decode(output.encode(mean), mean)
    return mean


@cache
def _encoded(seed: int, index: int, num_cells: int, name: str) -> memoryview:
    encoded = codec_named(name).encode(_first_vector(seed, index, num_cells))
    _first_vector.cache_clear()
    return encoded
