"""The checks of a judged round: sketches of parts, weights from them, verification of outputs. Pure.

Theory of operation. A rule weighs contributions by their inner products. These come from CountSketches that
each sender signs: if owners computed them, an owner could lie about them unnoticed. Two seeds are used, each a hash of its
kind and of what was fixed before (`seed_of`):

    the cut      it binds all contributions, and the nonces that holders had committed to before these: the rule weighs
                 the contributions by the sketches under it (`columns_of`)
    the outputs  of all parts, and the cut: the sketches under it (`CHECK_COLUMNS`) show whether each output is the
                 weighted sum of the contributions, without computing it again (`sketch.excess`)

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
from .sketch import ROWS, SKETCH_COLUMNS, CountSketch, decoded, excess, gram, square_of_sum

CHECK_COLUMNS = 32
"""Enough to detect a lie of 2 % of an int8 output's norm; see `sketch`."""
MEMBERS_OF_FULL = 16
"""The largest roster with full-width sketches; in larger ones they are narrower, so that their bytes do not grow."""
TRUE_WITHIN = 1e-3
"""Relative to the largest number of a sketch: honest computers differ by far less, and lies need far more."""
LENGTHS_DIFFER = 4.0
"""The factor between the squared lengths of one part by two sketches: honest ones are 20 deviations away from it."""
DEVIATIONS = 5.7
"""How far two estimates of one inner product may be apart, in standard deviations, as in `sketch.CERTAINTY`."""


def commitment(nonce: bytes) -> bytes:
    """Return the commitment to a nonce, which hides it until it is opened."""
    return keyed("commitment to a nonce", nonce)


def columns_of(members: int) -> int:
    """Return the width of sketches in a roster of so many members."""
    columns = SKETCH_COLUMNS
    while columns > CHECK_COLUMNS and members * columns > MEMBERS_OF_FULL * SKETCH_COLUMNS:
        columns //= 2
    return columns


def seed_of(cut: bytes, outputs: Sequence[bytes] = ()) -> bytes:
    """Return the seed of the sketches after a cut, or after all of its outputs; both by their hashes."""
    return keyed(f"seed of the sketches after {'outputs' if outputs else 'a cut'}", cut, *outputs)


def width_of(outputs: Sequence[bytes], members: int) -> int:
    """Return the columns of sketches after outputs, or after a cut if there are none."""
    return CHECK_COLUMNS if outputs else columns_of(members)


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


def with_seconds(sketch: bytes, members: int, seconds: Mapping[int, bytes]) -> bytes:
    """Return the sketches of all parts with these by others in place of some, by part."""
    if not seconds:
        return sketch
    tables = tables_of(sketch, members).copy()
    for part, table in seconds.items():
        tables[part] = np.frombuffer(table, "<f4").reshape(tables.shape[1:])
    return tables.astype("<f4").tobytes()


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


def is_true_second(second: wire.Second, bounds: Sequence[int], part: int, codec: Codec, data: Encoded) -> bool:
    """Return True if another's sketch of a part of a contribution matches the bytes of the part."""
    mine = sketch_part(codec, data, bounds, part, second.seed, CHECK_COLUMNS)
    return are_alike(mine.astype("<f4").tobytes(), dict(second.tables)[part])


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


def false_outputs(
    codec: Codec,
    outputs: Mapping[int, Encoded],
    bounds: Sequence[int],
    weights: Floats64,
    first: Sequence[bytes],
    second: Sequence[bytes],
    seed: bytes,
) -> tuple[int, ...]:
    """Return the parts whose output is not the sum of the contributions with these `weights` [parts, n].

    `first` are their sketches after the cut, and `second` those after the outputs, under `seed`, by which a sum is checked.
    That check bounds an owner that does not search for a seed, the length one that does.
    Of the sum's two estimates the longer one counts: a contributor may have searched for the first seed.
    """
    members = len(bounds) - 1
    tables = [np.stack([tables_of(sketch, members) for sketch in each]) for each in (first, second)]
    found: list[int] = []
    for part, data in sorted(outputs.items()):
        cells, square, sketch = bounds[part + 1] - bounds[part], 0.0, CountSketch(seed, CHECK_COLUMNS)
        for at, chunk in decoded(codec, data, cells):
            square += _square(chunk)
            sketch.add(chunk, bounds[part] * CELL + at)
        summands = [np.ascontiguousarray(table[:, part]) for table in tables]
        most = max(square_of_sum(each, weights[part]) for each in summands)
        off = excess(sketch.table(), summands[-1], weights[part], codec.rounding(data, cells), codec.most_rounding)
        if not (square <= LENGTHS_DIFFER * most and off <= 1):
            found.append(part)
    return tuple(found)


def _square(chunk: Floats) -> float:
    """Return ‖x‖²; in float32, which is several times as fast, where that does not overflow."""
    with np.errstate(over="ignore"):
        square = float(np.dot(chunk, chunk))
    return square if np.isfinite(square) else float(np.square(chunk, dtype=np.float64).sum())


def doubtful(
    first: Sequence[bytes], second: Sequence[bytes], members: int, weights: Floats64
) -> tuple[tuple[int, int], ...]:
    """Return the (part, contributor in the order of the cut) whose two sketches cannot be of one vector: an owner hid a lie.

    They differ in length, or in their inner products with contributors of most of the other `weights` [parts, n]: honest
    ones differ with liars alone, which have less.
    """
    one, other = (np.stack([tables_of(sketch, members) for sketch in sketches]) for sketches in (first, second))
    chance = DEVIATIONS * (1 / one[0, 0].size + 1 / other[0, 0].size) ** 0.5
    found: list[tuple[int, int]] = []
    for part in range(members):
        before, after = (gram(np.ascontiguousarray(tables[:, part])) for tables in (one, other))
        squares = np.maximum(np.diagonal(before), np.diagonal(after))
        with np.errstate(over="ignore", invalid="ignore"):
            apart = np.abs(before - after)
            usual = np.sqrt(squares[:, None] * squares[None, :] + np.minimum(np.square(before), np.square(after)))
            differ = np.where(np.eye(len(squares), dtype=bool), 0.0, ~(apart <= chance * usual) * weights[part])
            alike = squares <= LENGTHS_DIFFER * np.minimum(np.diagonal(before), np.diagonal(after))
        lies = ~alike | (2 * total(differ) > total(weights[part]) - weights[part])
        found += [(part, int(index)) for index in np.flatnonzero(lies & (weights[part] > 0))]
    return tuple(found)
