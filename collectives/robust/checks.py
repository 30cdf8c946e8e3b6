"""The sketches of a judged round, and the weights that follow from them. Pure.

Theory of operation. A rule weighs contributions by their inner products. These come from CountSketches that
each sender signs: if owners computed them, an owner could lie about them unnoticed. Two seeds are used, each a hash of its
kind and of what was fixed before (`seed_of`):

    the cut      it binds all contributions, and the nonces that holders had committed to before these: the rule weighs
                 the contributions by the sketches under it
    the outputs  of all parts, and the cut: the sketches under it show whether each output is the weighted sum of the
                 contributions, without computing it again (`residual`)

A peer that holds a part's bytes compares both with them. The peer that acts last could try several contributions, or
outputs, for a seed that suits it (grinding): inner products are then off by five deviations instead of two, and among
some thousand seeds is one that does not show two false elements. So no output may be longer than its inputs allow.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from ...peer import wire
from ...peer.base.digest import keyed
from ..vector.arrays import Floats
from ..vector.codec import CELL, Codec, Encoded
from .rule import Floats64, Rule, Weighting, quotient, total
from .sketch import ROWS, SKETCH_COLUMNS, CountSketch, gram

LEAST_COLUMNS = 32
"""The narrowest sketches."""
MEMBERS_OF_FULL = 16
"""The largest roster with full-width sketches; in larger ones they are narrower, so that their bytes do not grow."""
OTHERS = 3
"""Contributors to a part that can do without what its holder contributes to it."""
TRUE_WITHIN = 1e-3
"""Relative to the largest number of a sketch: honest computers differ by far less, and lies need far more."""


def commitment(nonce: bytes) -> bytes:
    """Return the commitment to a nonce, which hides it until it is opened."""
    return keyed("commitment to a nonce", nonce)


def columns_of(members: int) -> int:
    """Return the width of sketches in a roster of so many members."""
    columns = SKETCH_COLUMNS
    while columns > LEAST_COLUMNS and members * columns > MEMBERS_OF_FULL * SKETCH_COLUMNS:
        columns //= 2
    return columns


def seed_of(cut: bytes, outputs: Sequence[bytes] = ()) -> bytes:
    """Return the seed of the sketches after a cut, or after all of its outputs; both by their hashes."""
    return keyed(f"seed of the sketches after {'outputs' if outputs else 'a cut'}", cut, *outputs)


def num_bytes(members: int, columns: int) -> int:
    """Return the size of one member's sketches of all parts."""
    return members * ROWS * columns * 4


def sketch_parts(codec: Codec, parts: Sequence[Encoded], bounds: Sequence[int], seed: bytes, columns: int) -> bytes:
    """Return the sketches of encoded parts, one after the other: float32, little-endian, [parts, ROWS, columns]."""
    tables = [sketch_part(codec, data, bounds, part, seed, columns) for part, data in enumerate(parts)]
    return np.stack(tables).astype("<f4").tobytes()


def sketch_part(codec: Codec, data: Encoded, bounds: Sequence[int], part: int, seed: bytes, columns: int) -> Floats:
    """Return the sketch of one encoded part; zeros for an empty one."""
    cells = bounds[part + 1] - bounds[part]
    return CountSketch.of_part(codec, data, cells, seed, bounds[part] * CELL, columns)


def tables_of(sketch: bytes, members: int) -> Floats:
    """Decode [parts, ROWS, columns] from the result of `sketch_parts`, whose size must have been checked before."""
    return np.frombuffer(sketch, "<f4").astype(np.float32).reshape(members, ROWS, -1)


def masked(sketch: bytes, counts: Sequence[bool]) -> bytes:
    """Return the sketches of all parts with zeros for those that do not count."""
    if all(counts):
        return sketch
    kept = np.where(np.asarray(counts)[:, None, None], tables_of(sketch, len(counts)), np.float32(0))
    return kept.astype("<f4").tobytes()


def are_alike(one: bytes, other: bytes) -> bool:
    """Return True if two sketches of one part are of the same bytes, as far as honest computers differ."""
    mine, theirs = (np.frombuffer(table, "<f4").astype(np.float64) for table in (one, other))
    with np.errstate(over="ignore", invalid="ignore"):
        # Written so that NaN is never alike.
        return mine.size == theirs.size and bool((np.abs(mine - theirs) <= TRUE_WITHIN * np.abs(mine).max()).all())


def is_true(sketch: wire.Sketch, bounds: Sequence[int], part: int, codec: Codec, data: Encoded) -> bool:
    """Return True if a sender's signed sketch of one of its parts matches the bytes of the part."""
    theirs = tables_of(sketch.tables, len(bounds) - 1)[part]
    mine = sketch_part(codec, data, bounds, part, seed_of(sketch.cut, sketch.outputs), theirs.shape[-1])
    return are_alike(mine.astype("<f4").tobytes(), theirs.astype("<f4").tobytes())


def without_own(rows: Floats64, masses: Floats64, own: Mapping[int, int]) -> Floats64:
    """Return the weights of n contributions in p parts, `rows` [p, n], without what a part's holder contributes to it.

    `own` has, by part, the place of its holder among the contributors, whose `masses` are [n]. Nobody else has seen what a
    holder contributes to its own part. So that weighs nothing there, and the others' weights have the sum that they had with
    it. Where fewer than `OTHERS` others weigh, or have two thirds of the mass or less, it stays: it would be missed, or free
    keys could be all that is left.
    """
    result = rows.copy()
    for part, place in own.items():
        others = np.where(np.arange(masses.size) == place, 0.0, rows[part])
        rest = total(np.where(others > 0, masses, 0.0))
        if np.count_nonzero(others) >= OTHERS and 3 * rest > 2 * total(np.where(rows[part] > 0, masses, 0.0)):
            result[part] = others * quotient(total(rows[part]), total(others))
    return result


def judge_sketches(
    rule: Rule, sketches: Sequence[bytes], voices: Sequence[float], masses: Sequence[float], members: int
) -> Weighting:
    """Apply a rule to n contributions by their sketches, in the order of the cut: see `weighed`."""
    tables = np.stack([tables_of(sketch, members) for sketch in sketches])
    parts = np.stack([gram(np.ascontiguousarray(tables[:, part])) for part in range(members)])
    weighting = rule.weights(np.add.accumulate(parts, axis=0)[-1], parts, np.asarray(voices, np.float64))
    return weighed(weighting, voices, masses)


def weighed(weighting: Weighting, voices: Sequence[float], masses: Sequence[float]) -> Weighting:
    """Weigh by masses what a rule has judged by voices; the sum of a part's weights stays as it is.

    A voice is a mass without the tokens that its author claims: these weigh, and enter no median and no bound. With them
    four of ten liars that claim most had half of all mass.
    """
    rows = weighting.weights * quotient(np.asarray(masses, np.float64), np.asarray(voices, np.float64))
    scales = quotient(total(weighting.weights), total(rows))
    return replace(weighting, weights=rows * scales[:, None])
