"""The residual test: honest outputs pass whoever is silent, and no lie has more room than what the silent contributed."""

import hashlib
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pytest
from flockstep.collectives.robust import residual
from flockstep.collectives.robust.checks import columns_of, sketch_parts, tables_of
from flockstep.collectives.robust.residual import Residual, Verdict, judge_outputs, residual_of, sketched
from flockstep.collectives.robust.sketch import ROWS
from flockstep.collectives.vector.codec import CELL, Codec, Encoded, codec_named, weighted_mean
from hypothesis import given, settings
from hypothesis import strategies as st

Floats = npt.NDArray[np.float32]
N, CELLS = 8, 20
PASSES, FALSE, UNHEARD = Verdict((), ()), Verdict((0,), ()), Verdict((), (0,))
LARGEST = 3e38
RESULTS = ("int4", "int8", "bf16", "fp32")


def seed_of(*words: object) -> bytes:
    return hashlib.sha256(repr(words).encode()).digest()


def normal(*shape: int, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def alike(n: int = N, cells: int = CELLS, seed: int = 0) -> Floats:
    """Contributions with cosines of a half to each other."""
    return normal(cells * CELL, seed=2 * seed) + normal(n, cells * CELL, seed=2 * seed + 1)


@dataclass(frozen=True)
class Case:
    """One part of contributions that have been weighed and summed, with both sketches of each."""

    codec: Codec
    parts: Sequence[Encoded]
    weights: npt.NDArray[np.float64]
    bounds: tuple[int, int]
    first: tuple[bytes, ...]
    second: tuple[bytes, ...]
    seed: bytes

    @classmethod
    def of(
        cls, vectors: Floats, codec: str = "int4", weights: Sequence[float] = (), number: int = 0, columns: int = 0
    ) -> "Case":
        kind, n, cells = codec_named(codec), len(vectors), vectors.shape[1] // CELL
        parts, bounds = [kind.encode(row) for row in vectors], (5, 5 + cells)
        seeds = [seed_of(number, stage) for stage in ("cut", "outputs")]
        first, second = (
            tuple(sketch_parts(kind, [part], bounds, seed, columns or columns_of(n)) for part in parts) for seed in seeds
        )
        return cls(kind, parts, np.asarray(weights or [1 / n] * n), bounds, first, second, seeds[1])

    @property
    def sum(self) -> Floats:
        return self.of_weights(self.weights)

    def of_weights(self, weights: npt.NDArray[np.float64]) -> Floats:
        """The sum with other weights, negative ones too."""
        rows = np.empty((len(weights), (self.bounds[1] - self.bounds[0]) * CELL), np.float32)
        for data, row in zip(self.parts, rows, strict=True):
            self.codec.decode(data, row)
        terms = [np.float32(weight) * row for weight, row in zip(weights, rows, strict=True)]
        return np.asarray(np.add.reduce(terms), np.float32)

    def judge(self, output: Floats, silent: Collection[int] = ()) -> Verdict:
        data = {0: self.codec.encode(np.ascontiguousarray(output, np.float32))}
        args = (self.codec, data, self.bounds, self.weights[None], self.first, self.second)
        return judge_outputs(*args, silent, self.seed)

    def residual(self, output: Floats, silent: Collection[int] = ()) -> Residual:
        before, after = (np.stack([tables_of(it, 1)[0] for it in each]) for each in (self.first, self.second))
        seen = sketched(self.codec, self.codec.encode(output), self.bounds, 0, self.seed, before.shape[-1])
        heard = np.asarray([place not in silent for place in range(len(before))])
        return residual_of(seen, self.weights, before, after, heard)

    def says(self, place: int, table: bytes, *, at_first: bool = False) -> "Case":
        """The case in which one contributor has this sketch in place of its own."""
        told = list(self.first if at_first else self.second)
        told[place] = table
        return replace(self, first=tuple(told)) if at_first else replace(self, second=tuple(told))

    def says_of(self, place: int, vector: Floats) -> "Case":
        columns = len(self.first[0]) // ROWS // 4
        return self.says(place, sketch_parts(self.codec, [self.codec.encode(vector)], self.bounds, self.seed, columns))


@given(
    st.sampled_from(RESULTS),
    st.lists(st.floats(0.5, 1.5), min_size=4, max_size=12),
    st.sampled_from([0.0, 0.1, 1.0, 10.0]),
    st.integers(1, 10**6),
    st.data(),
)
@settings(max_examples=60, deadline=None)
def test_an_honest_output_passes_whoever_is_silent(
    codec: str, weights: list[float], common: float, number: int, data: st.DataObject
) -> None:
    n = len(weights)
    vectors = np.float32(common) * normal(CELLS * CELL, seed=number) + normal(n, CELLS * CELL, seed=number + 1)
    columns = data.draw(st.sampled_from([32, 64, 128]))
    case = Case.of(vectors, codec, np.divide(weights, sum(weights)).tolist(), number, columns)
    silent: set[int] = set()
    for place in data.draw(st.permutations(range(n))):
        if data.draw(st.booleans()) and 3 * sum(case.weights[[*silent, place]]) <= 1:
            silent.add(place)
    assert case.judge(case.sum, silent) == PASSES


def test_each_part_is_judged_alone() -> None:
    codec, bounds, weights = codec_named("int4"), (0, 12, 12, 30), np.full((3, 4), 0.25)
    cut = 12 * CELL
    parts: list[list[Encoded]] = [[codec.encode(row[:cut]), b"", codec.encode(row[cut:])] for row in alike(4, 30)]
    first, second = ([sketch_parts(codec, each, bounds, seed, 128) for each in parts] for seed in (b"1" * 32, b"2" * 32))
    sums = [weighted_mean(codec, [each[part] for each in parts], [1.0] * 4, 12 - 12 * part) for part in (0, 1)]
    outputs: dict[int, Encoded] = {2: codec.encode(normal(18 * CELL, seed=77)), **dict(enumerate(map(codec.encode, sums)))}
    assert judge_outputs(codec, outputs, bounds, weights, first, second, {3}, b"2" * 32) == Verdict((2,), ())
    assert judge_outputs(codec, outputs, bounds, weights, first, second, {1, 2, 3}, b"2" * 32) == Verdict((), (0, 2))
    weights[0] = [0.7, 0.3, 0.0, 0.0]  # The weight counts, and not the heads.
    assert judge_outputs(codec, outputs, bounds, weights, first, second, {1, 2, 3}, b"2" * 32) == Verdict((), (2,))


def share_of(case: Case, mine: npt.NDArray[np.bool_], gain: float, other: float = 1.0) -> Floats:
    """The sum in which the contributions of some have a `gain`, those of all others another one."""
    return case.of_weights(np.where(mine, gain, other) * case.weights)


def turned_back(case: Case, mine: npt.NDArray[np.bool_]) -> Floats:
    """As much less of the others as the silent have."""
    rest, absent = share_of(case, mine, 0), share_of(case, mine, 1, 0)
    return np.asarray(rest * np.float32(1 - np.linalg.norm(absent) / np.linalg.norm(rest)), np.float32)


Lie = Callable[[Case, npt.NDArray[np.bool_]], Floats]
LIES: dict[str, Lie] = {
    "four times what the silent have": lambda case, mine: share_of(case, mine, 4),
    "the silent turned round": lambda case, mine: share_of(case, mine, -1),
    "the others turned back": turned_back,
    "noise": lambda case, mine: share_of(case, mine, 0) + np.float32(3) * as_long_as(share_of(case, mine, 1, 0)),
}


def as_long_as(vector: Floats) -> Floats:
    return scaled(normal(vector.size, seed=99), vector)


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize(("codec", "silent"), [("int4", [3, 4]), ("int8", [3]), ("int8", [3, 4])])
def test_a_lie_about_the_silent_is_found(codec: str, silent: list[int], lie: str) -> None:
    for number in range(10):
        case = Case.of(alike(seed=number), codec, number=number)
        output = LIES[lie](case, np.isin(np.arange(N), silent))
        assert case.judge(output, silent) == FALSE, (number, case.residual(output, silent))


def test_whatever_the_silent_have_may_be_missing_and_nothing_else() -> None:
    case = Case.of(alike())
    for share in (0.0, 0.5):
        assert case.judge(case.of_weights(np.where(np.arange(N) == 3, share, 1) * case.weights), [3]) == PASSES
        assert case.judge(case.of_weights(np.where(np.arange(N) == 2, share - 0.5, 1) * case.weights), [3]) == FALSE


CAUGHT = [("int4", "elements", 128), ("int8", "norm", 128), ("int8", "norm", 32)]


@pytest.mark.parametrize(("codec", "lie", "columns"), CAUGHT)
def test_a_lying_owner_is_caught_200_times_of_200_and_an_honest_one_never(codec: str, lie: str, columns: int) -> None:
    caught = alarms = 0
    for number in range(200):
        case = Case.of(alike(6, seed=number % 5), codec, [0.3, 0.2, 0.2, 0.2, 0.1, 0.0], number, columns)
        honest, random = case.sum, np.random.default_rng(number)
        if lie == "elements":  # 2 % of them turned round.
            tampered = np.where(random.random(honest.size) < 0.02, -honest, honest)
        else:  # Noise of 2 % of the norm.
            tampered = honest + np.float32(0.02 * honest.std()) * normal(honest.size, seed=number)
        caught += case.judge(tampered) == FALSE
        alarms += case.judge(honest) != PASSES
    assert (caught, alarms) == (200, 0)


def test_an_output_that_hides_from_the_sketch_is_not_longer_than_twice_the_sum() -> None:
    case = Case.of(alike())
    before, after = (np.stack([tables_of(it, 1)[0] for it in each]) for each in (case.first, case.second))
    seen = sketched(case.codec, case.codec.encode(case.sum), case.bounds, 0, case.seed, 128)
    for longer, passes in ((1.0, True), (1.5, True), (2.5, False), (math.inf, False), (math.nan, False)):
        found = residual_of(replace(seen, square=seen.square * longer**2), case.weights, before, after, np.ones(N, bool))
        assert (found.length <= 1) is passes
        assert found.excess <= 1


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, LARGEST])
def test_what_is_not_finite_has_no_voice_and_lets_no_output_pass(number: float) -> None:
    case = Case.of(alike())
    bad = np.full(ROWS * 128, number, "<f4").tobytes()
    assert case.says(2, bad).judge(case.sum) == PASSES
    assert not case.says(2, bad).residual(case.sum).voices[2]
    assert case.says(2, bad).judge(normal(CELLS * CELL, seed=77)) == FALSE
    if number != LARGEST:  # A finite one is for the rule, which weighs by it.
        assert case.says(2, bad, at_first=True).judge(case.sum, [2]) == FALSE
        assert case.says(2, bad, at_first=True).judge(case.sum) == FALSE
    assert replace(case, second=(bad,) * N).judge(case.sum) == UNHEARD
    assert replace(case, first=(bad,) * N, second=(bad,) * N).judge(case.sum) != PASSES
    without = replace(case, weights=np.where(np.arange(N) == 2, 0, case.weights))
    assert without.says(2, bad).says(2, bad, at_first=True).judge(without.sum) == PASSES


@pytest.mark.parametrize("told", [b"", b"x", bytes(ROWS * 128 * 4), b"\xff" * ROWS * 128 * 4])
def test_what_the_silent_say_is_ignored(told: bytes) -> None:
    case = Case.of(alike()).says(2, told)
    assert case.judge(case.sum, [2]) == PASSES
    assert case.judge(case.sum) == PASSES  # It contradicts the first one, or is none.


@pytest.mark.parametrize("factor", [-1.0, 0.0, 0.5, 2.0])
def test_a_second_sketch_of_something_else_is_disputed_and_nobody_else_is(factor: float) -> None:
    for number in range(10):
        case = Case.of(alike(seed=number), number=number)
        mine = alike(seed=number)
        liars = case.says_of(1, np.float32(factor) * mine[1]).says_of(6, as_long_as(mine[6]))
        assert np.flatnonzero(~liars.residual(case.sum).voices).tolist() == [1, 6]
        assert liars.judge(case.sum) == PASSES


def scaled(vector: Floats, like: Floats) -> Floats:
    return np.asarray(vector * np.float32(np.linalg.norm(like) / np.linalg.norm(vector)), np.float32)


def test_a_sketch_that_differs_from_each_a_little_differs_from_their_sum() -> None:
    vectors = np.float32(0.2) * normal(CELLS * CELL) + normal(16, CELLS * CELL, seed=1)
    away = scaled(vectors[0] - np.float32(1.6) * scaled(vectors[1:].mean(axis=0), vectors[0]), vectors[0])
    for number in range(5):
        case = Case.of(vectors, number=number)
        assert np.flatnonzero(~case.says_of(0, away).residual(case.sum).voices).tolist() == [0]


def test_a_sketch_that_differs_from_two_and_not_from_their_sum_takes_none_of_them_with_it() -> None:
    vectors = normal(3, CELLS * CELL)
    for number in range(5):
        case = Case.of(vectors, number=number).says_of(0, scaled(vectors[1] - vectors[2], vectors[0]))
        assert case.residual(case.sum).voices.tolist() == [False, True, True]


def test_who_has_no_weight_has_no_voice() -> None:
    case = replace(Case.of(alike(4)), weights=np.asarray([0.5, 0.25, 0.25, 0.0]))
    assert case.residual(case.sum).voices.tolist() == [True, True, True, False]


def test_where_most_are_silent_the_sketches_decide_nothing_but_lengths() -> None:
    case = Case.of(alike(4))
    assert case.judge(case.sum, range(4)) == UNHEARD
    assert case.judge(case.sum, range(2)) == UNHEARD
    assert case.judge(case.sum, range(1)) == PASSES
    assert case.judge(np.float32(3) * case.sum, range(4)) == FALSE


def test_nobody_with_a_weight_makes_zeros() -> None:
    case = replace(Case.of(alike()), weights=np.zeros(N))
    for silent in ((), range(N)):
        assert case.judge(np.zeros(CELLS * CELL, np.float32), silent) == PASSES
        assert case.judge(normal(CELLS * CELL, seed=77), silent) == FALSE


@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_honest_sums_that_cancel_pass(codec: str) -> None:
    pairs = normal(2, CELLS * CELL)
    case = Case.of(np.concatenate([pairs, -pairs]) + np.float32(1e-6) * normal(4, CELLS * CELL, seed=2), codec)
    for silent in ((), [0], [3]):
        assert case.judge(case.sum, silent) == PASSES


def test_rounding_along_the_only_contribution_blames_nobody() -> None:
    """int4 of a multiple of int4 has the same codes: the rounding of the scale of all blocks is all that is left."""
    vectors = np.zeros((4, 2 * CELL), np.float32)
    vectors[0] = np.tile(np.linspace(-7, 7, 64, dtype=np.float32).round(), 2 * CELL // 64)
    for number in range(20):
        case = Case.of(vectors, weights=[0.7 + 0.003 * number, 0.1, 0.1, 0.1], number=number)
        assert case.judge(case.sum, [1]) == PASSES


def test_the_exponential_is_one_for_all_widths() -> None:
    for columns in (32, 64, 128):
        x = residual.DEVIATIONS * math.sqrt(4 / (ROWS * columns))
        assert residual._exponential(x) == pytest.approx(math.exp(x), rel=4e-3)


def test_the_numbers_are_those_of_every_other_machine() -> None:
    # Multiples of 1/8 make every sum of the sketches exact, so that this holds the order of operations of the test itself.
    vectors = (np.arange(4 * CELL)[None] * np.arange(1, 7)[:, None] % 97 / 8 - 5).astype(np.float32)
    case = Case.of(vectors, "fp32", [0.3, 0.2, 0.15, 0.15, 0.1, 0.1])
    lie = case.sum + np.float32(0.05) * vectors[4][::-1]
    found = case.says_of(5, -vectors[5]).residual(np.ascontiguousarray(lie), [3])
    assert found.voices.tolist() == [True, True, True, False, True, False]
    numbers = [it.hex() for it in (found.length, found.excess, found.angle)]
    assert numbers == ["0x1.0a341670b56a2p-1", "0x1.a23a434c6b671p-1", "0x1.0434806a3c893p-2"]
