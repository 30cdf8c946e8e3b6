"""The residual test: an output is the weighted sum of contributions, up to those that nobody can vouch for. Pure.

Theory of operation. Each contribution i of a part has two sketches: A[i] under the seed of the cut, by which it was weighed,
and B[i] under the seed σ of the outputs, which nobody knew when the output was made. C = S_σ(output). A contributor has two
voices if both its sketches are there and agree:

    V = the counted contributors (weight > 0) with two agreeing voices
        squares within a factor of 1 / max(1/4, 1 - 5.7·√(2/s + 2/s)), s = ROWS·columns; inner products within 5.7 σ, with
        those of most of the other weight, and with the weighted sum of the others in V
    U = all other counted ones: silent after the outputs, or disputed

No sketch under σ is asked for U. What the output has beyond the sum over V must look like what U had by its first sketches:

    r = C - Σ_V wᵢB[i]     u = Σ_U wᵢA[i]     gⱼ = ⟨u, A[j]⟩     hⱼ = ⟨r, B[j]⟩     x̂ = Σ_all wᵢA[i]
    |output|² ≤ 4·|x̂|²                                                          length
    |r| ≤ √λ·|u| + √τ + φ                                                       excess
    min(0, gⱼ) - εⱼ ≤ hⱼ ≤ max(0, gⱼ) + εⱼ   for each j ∈ V and for Σ_V wⱼB[j]  angles, where |r| > √τ + φ
    εⱼ = 5.7·√(1/s + 1/s)·√(max(|r|², |u|²)·|xⱼ|² + min(gⱼ, hⱼ)²)

λ = exp(5.7·√(2/s + 2/s)) covers the chance in two squares. τ is the rounding that the output's bytes show, κ·|x̂|² at
most (`Codec.most_rounding`), times 1 + 8/√columns; φ is float32's rounding. If U is empty, u = 0 and only rounding is left:
then a lie is detected if it is about as long as the rounding error, 0.7 % of the output's norm with int8, 10 % with int4.
If V has less than two thirds of the weight, the sketches decide nothing.

The angles allow anything between 0 and gⱼ: U may be missing from the output in part or altogether. So the output cannot turn
against the others; a maker can withhold U, or put something as long as U was and at right angles to the others in its place.
A shorter r than rounding explains has any angle: of a block with one long element int4 keeps nothing else, and where one
contributor alone has anything in a part, the rounding of the scales is along it.

Same bits everywhere, as in `rule`: float64, +, -, ×, ÷, √, sums in one order. An exponential is not fixed by IEEE 754, so λ
is its Padé approximant of order 2. Every comparison is written so that NaN fails it.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..vector.arrays import Floats
from ..vector.codec import CELL, Codec, Encoded, square_of
from .checks import tables_of
from .rule import SAME_MASS, Floats64, Mask, total
from .sketch import ROWS, CountSketch, decoded, gram

DEVIATIONS = 5.7
"""How far two estimates of one number may be apart, in standard deviations; beyond it by chance once in 10⁸."""
CERTAINTY = 8.0
"""Times 1/√columns over the expected square of the rounding: 5.7 standard deviations of one row's."""
LENGTHS_DIFFER = 4.0
"""The most that two estimates of one square differ by, and an output's square from that of the sum. It bounds a maker that
searches for a seed under which its lie cancels: no output is longer than twice the sum."""
FLOAT_ERROR = 1e-6
"""Relative to the summands' norms: float32's rounding of a sum of 64, in the output and in the sketches."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The parts that do not pass. A part of neither kind does."""

    false: tuple[int, ...]
    """Parts whose output cannot be the weighted sum."""
    unheard: tuple[int, ...]
    """Parts where those with two agreeing voices have less than two thirds of the weight: the sketches decide nothing."""


@dataclass(frozen=True, slots=True)
class Output:
    """An output as the test sees it."""

    table: Floats64
    """[ROWS·columns], its sketch under the seed of the outputs."""
    square: float
    rounding: float
    """`Codec.rounding` of its bytes, and at most `most_rounding` of the sum's square is believed."""
    most_rounding: float


@dataclass(frozen=True, slots=True)
class Residual:
    """What the sketches show of one output; each number is relative to what is allowed: more than 1 is a lie."""

    voices: Mask
    """[n] True for V."""
    length: float
    excess: float
    angle: float


def judge_outputs(
    codec: Codec,
    outputs: Mapping[int, Encoded],
    bounds: Sequence[int],
    weights: Floats64,
    first: Sequence[bytes],
    second: Sequence[bytes],
    silent: Collection[int],
    seed: bytes,
) -> Verdict:
    """Test the outputs, by part, of n contributions with these `weights` [parts, n].

    `first` are the sketches of all parts after the cut, of one size, zeros where they do not count. `second` are those after
    the outputs, under `seed`; the places in `silent` have none, and whatever stands there is ignored.
    """
    members = len(bounds) - 1
    heard = np.asarray([place not in silent and len(it) == len(first[place]) for place, it in enumerate(second)])
    before = np.stack([tables_of(it, members) for it in first])
    nothing = np.zeros_like(before[0])
    after = np.stack([tables_of(it, members) if ok else nothing for it, ok in zip(second, heard, strict=True)])
    false: list[int] = []
    unheard: list[int] = []
    for part, data in sorted(outputs.items()):
        if bounds[part + 1] == bounds[part]:
            continue
        mine = weights[part]
        output = sketched(codec, data, bounds, part, seed, before.shape[-1])
        found = residual_of(output, mine, before[:, part], after[:, part], heard)
        if not found.length <= 1:
            false.append(part)
        elif 3 * total(np.where(found.voices, mine, 0.0)) < 2 * total(mine) * (1 - SAME_MASS):
            unheard.append(part)
        elif not (found.excess <= 1 and found.angle <= 1):
            false.append(part)
    return Verdict(tuple(false), tuple(unheard))


def sketched(codec: Codec, data: Encoded, bounds: Sequence[int], part: int, seed: bytes, columns: int) -> Output:
    """Return what the test needs of an encoded output, decoded once, a chunk at a time."""
    cells, sketch, square = bounds[part + 1] - bounds[part], CountSketch(seed, columns), 0.0
    for at, chunk in decoded(codec, data, cells):
        sketch.add(chunk, bounds[part] * CELL + at)
        square += square_of(chunk)
    table = sketch.table().astype(np.float64).reshape(-1)
    return Output(table, square, codec.rounding(data, cells), codec.most_rounding)


def residual_of(output: Output, weights: Floats64, first: Floats, second: Floats, heard: Mask) -> Residual:
    """Compare an output with its summands' sketches `first` and `second` [n, ROWS, columns]; `heard` [n] have a second."""
    counted = weights > 0
    with np.errstate(over="ignore", invalid="ignore"):
        voices = _voices(weights, first, second, heard & counted)
        before, after = (tables.astype(np.float64).reshape(len(weights), -1) for tables in (first, second))
        spread = DEVIATIONS * math.sqrt(2 * 2 / before.shape[1])
        terms = weights[:, None] * before
        length = np.sqrt(_square(_sum(terms, counted)))
        floor = FLOAT_ERROR * total(np.where(counted, np.sqrt(_square(terms)), 0.0))
        rounding = np.minimum(output.rounding, output.most_rounding * length * length)
        rounding = rounding * (1 + CERTAINTY / math.sqrt(first.shape[-1]))

        told = _sum(weights[:, None] * after, voices)
        rest, absent = output.table - told, _sum(terms, counted & ~voices)
        squares = np.maximum(_square(rest), _square(absent))
        rounded, length_of_rest = np.sqrt(rounding) + floor, np.sqrt(_square(rest))
        angles = np.zeros(1)
        if length_of_rest > rounded:
            usual = np.vstack([before[voices], _sum(terms, voices)])
            now = np.vstack([after[voices], told])
            was, angle = total(usual * absent) / ROWS, total(now * rest) / ROWS
            beyond = np.maximum(np.minimum(was, 0.0) - angle, angle - np.maximum(was, 0.0))
            nearer = np.minimum(np.square(was), np.square(angle))
            chance = spread * np.sqrt((squares * np.maximum(_square(usual), _square(now)) + nearer) / 2)
            angles = _relative(beyond, chance)
        return Residual(
            voices,
            float(_relative(np.sqrt(output.square), math.sqrt(LENGTHS_DIFFER) * length + floor)),
            float(_relative(length_of_rest, np.sqrt(_exponential(spread) * _square(absent)) + rounded)),
            float(angles.max()),
        )


def _voices(weights: Floats64, first: Floats, second: Floats, heard: Mask) -> Mask:
    """Return [n] True for those of `heard` whose two sketches agree.

    Those that fail one comparison enter none of the next ones, so that a liar takes no honest contributor with it.
    """
    spread = DEVIATIONS * math.sqrt(2 * 2 / first[0].size)
    before, after = gram(np.ascontiguousarray(first)), gram(np.ascontiguousarray(second))
    squares = np.maximum(np.diagonal(before), np.diagonal(after))
    least = np.minimum(np.diagonal(before), np.diagonal(after))
    heard = heard & (squares <= least / max(1 / LENGTHS_DIFFER, 1 - spread))
    others = np.where(np.eye(len(weights), dtype=bool), 0.0, np.where(heard, weights, 0.0))
    apart = np.where(_agree(before, after, squares[:, None] * squares, spread), 0.0, others)
    heard = heard & (2 * total(apart) <= total(others))

    ours, theirs = (it.astype(np.float64).reshape(len(weights), -1) for it in (first, second))
    sums = [_sum(weights[:, None] * it, heard) - weights[:, None] * it for it in (ours, theirs)]
    usual = squares * np.maximum(_square(sums[0]), _square(sums[1]))
    return heard & _agree(total(ours * sums[0]) / ROWS, total(theirs * sums[1]) / ROWS, usual, spread)


def _agree(one: Floats64, other: Floats64, squares: Floats64, spread: float) -> Mask:
    """Return True where two estimates of an inner product of vectors with these products of `squares` may be of the same."""
    usual = squares + np.minimum(np.square(one), np.square(other))
    return np.asarray(np.abs(one - other) <= spread * np.sqrt(usual / 2))


def _sum(rows: Floats64, chosen: Mask) -> Floats64:
    """Return the sum of the chosen ones of `rows` [n, s], added in order; numbers that are not finite stay in theirs."""
    return total(np.where(chosen[:, None], rows, 0.0).T)


def _square(tables: Floats64) -> Floats64:
    """Return the estimates of ‖x‖² from sketches [..., s]."""
    return total(tables * tables) / ROWS


def _relative(value: Floats64, most: Floats64) -> Floats64:
    """Return value / most; 0 where `value` is not positive, infinity where `most` is neither, or is not finite."""
    found = np.divide(value, most, out=np.full(np.shape(value), np.inf), where=(most > 0) & (most < np.inf))
    return np.where(value <= 0, 0.0, found)


def _exponential(x: float) -> float:
    """Return exp(x) for 0 ≤ x ≤ 1.2, to 0.4 % and with the same bits everywhere."""
    return (1 + x / 2 + x * x / 12) / (1 - x / 2 + x * x / 12)
