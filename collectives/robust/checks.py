"""The arithmetic of a judged round: sketches of parts, the verdict over them, and the check of what owners made of them.

Theory of operation (DESIGN §9). What contributions count follows from their inner products, and these from CountSketches
that each sender signs: an owner could lie about them, and whom it hurt nobody could tell. Two seeds are used, each a
hash of its kind and of what was fixed before (`seed_of`):

    the cut      it binds all contributions and the nonces that holders had committed to before these: the sketches
                 under it (`columns_of`) give the verdict
    the outputs  of all parts, and the cut: the sketches under it (`CHECK_COLUMNS`) tell whether each output is the sum that
                 the verdict demands, without making it again (`sketch.excess`)

Whoever holds a part's bytes compares both with them. Who speaks last could try several contributions, or outputs, for a
seed that suits it; it gets the best of as many draws as it has time for, and an inner product that is off by five
deviations instead of two is still one that is 10 % off. Pure.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from ...peer import wire
from ...peer.arrays import Floats
from ...peer.digest import keyed
from ..codec import CELL, Codec, Encoded
from .rule import Floats64, Rule, Weighting, total
from .sketch import ROWS, SKETCH_COLUMNS, CountSketch, excess, gram

CHECK_COLUMNS = 32
"""Enough to see a lie of 2 % of an int8 output's norm; see `sketch`."""
MEMBERS_OF_FULL = 16
"""Members whose sketches are as wide as can be; of more they are narrower, so that they have no more bytes."""
TRUE_WITHIN = 1e-3
"""Of the largest number of a sketch: what may differ between two honest computers is far less, and lies need far more."""
LENGTHS_DIFFER = 4.0
"""The squared length of a part by one sketch, over that by the other: honest ones are 20 deviations away from that."""


def commitment(nonce: bytes) -> bytes:
    """What commits to a nonce, and hides it."""
    return keyed("commitment to a nonce", nonce)


def columns_of(members: int) -> int:
    """The width of sketches in a roster of so many members."""
    columns = SKETCH_COLUMNS
    while columns > CHECK_COLUMNS and members * columns > MEMBERS_OF_FULL * SKETCH_COLUMNS:
        columns //= 2
    return columns


def seed_of(cut: bytes, outputs: Sequence[bytes] = ()) -> bytes:
    """The seed of the sketches after a cut, or after all of its outputs; both by their hashes."""
    return keyed(f"seed of the sketches after {'outputs' if outputs else 'a cut'}", cut, *outputs)


def width_of(outputs: Sequence[bytes], members: int) -> int:
    """The columns of sketches after outputs, or after a cut if there are none."""
    return CHECK_COLUMNS if outputs else columns_of(members)


def num_bytes(members: int, columns: int) -> int:
    """The size of one member's sketches of all parts."""
    return members * ROWS * columns * 4


def sketch_parts(
    codec: Codec, parts: Sequence[Encoded], bounds: Sequence[int], seed: bytes, columns: int
) -> bytes:
    """The sketches of encoded parts, one after the other: float32, little-endian, [parts, ROWS, columns]."""
    tables = [
        sketch_part(codec, data, bounds, part, seed, columns) for part, data in enumerate(parts)
    ]
    return np.stack(tables).astype("<f4").tobytes()


def sketch_part(
    codec: Codec, data: Encoded, bounds: Sequence[int], part: int, seed: bytes, columns: int
) -> Floats:
    """The sketch of one encoded part; zeros for an empty one."""
    cells = bounds[part + 1] - bounds[part]
    return CountSketch.of_part(codec, data, cells, seed, bounds[part] * CELL, columns)


def tables_of(sketch: bytes, members: int) -> Floats:
    """[parts, ROWS, columns] of what `sketch_parts` gave; its size must have been checked before."""
    return np.frombuffer(sketch, "<f4").astype(np.float32).reshape(members, ROWS, -1)


def is_true(sketch: wire.Sketch, bounds: Sequence[int], part: int, codec: Codec, data: Encoded) -> bool:
    """Whether what a sender signed of one of its parts fits the bytes of it."""
    theirs = tables_of(sketch.tables, len(bounds) - 1)[part]
    mine = sketch_part(codec, data, bounds, part, seed_of(sketch.cut, sketch.outputs), theirs.shape[-1])
    with np.errstate(over="ignore", invalid="ignore"):
        off = np.abs(mine.astype(np.float64) - theirs)
        # Written so that what is not a number is not true; `mine` is finite, as every encoded contribution is.
        return bool((off <= TRUE_WITHIN * np.abs(mine).max()).all())


def judge_sketches(rule: Rule, sketches: Sequence[bytes], masses: Sequence[float], members: int) -> Weighting:
    """What each of n contributions counts, from their sketches in the order of the cut."""
    tables = np.stack([tables_of(sketch, members) for sketch in sketches])
    parts = np.stack([gram(np.ascontiguousarray(tables[:, part])) for part in range(members)])
    return rule.weights(np.add.accumulate(parts, axis=0)[-1], parts, np.asarray(masses, np.float64))


def false_outputs(
    codec: Codec,
    outputs: Mapping[int, Encoded],
    bounds: Sequence[int],
    weights: Floats64,
    sketches: Sequence[bytes],
    seed: bytes,
) -> tuple[int, ...]:
    """The parts whose output is not the sum of the contributions with the `weights` [parts, n] that they have."""
    members = len(bounds) - 1
    tables = np.stack([tables_of(sketch, members) for sketch in sketches])
    found: list[int] = []
    for part, data in sorted(outputs.items()):
        output = sketch_part(codec, data, bounds, part, seed, CHECK_COLUMNS)
        rounding = codec.rounding(data, bounds[part + 1] - bounds[part])
        if not excess(output, np.ascontiguousarray(tables[:, part]), weights[part], rounding) <= 1:
            found.append(part)
    return tuple(found)


def doubtful(first: Sequence[bytes], second: Sequence[bytes], members: int) -> tuple[int, ...]:
    """Whose two sketches of a part cannot be of one vector, by the order of the cut: an owner has covered a lie."""
    found: list[int] = []
    for index, pair in enumerate(zip(first, second, strict=True)):
        one, other = (_squares(tables_of(sketch, members)) for sketch in pair)
        longer, shorter = np.maximum(one, other), np.minimum(one, other)
        if not (longer <= LENGTHS_DIFFER * shorter).all():
            found.append(index)
    return tuple(found)


def _squares(tables: Floats) -> Floats64:
    """[parts] estimates of squared lengths."""
    with np.errstate(over="ignore", invalid="ignore"):
        wide = tables.astype(np.float64).reshape(len(tables), -1)
        return total(wide * wide) / ROWS
