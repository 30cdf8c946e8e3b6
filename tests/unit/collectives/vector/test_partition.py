"""Parts by measured rates: complete, proportional, within their limits, and equal on every peer."""

import math
from fractions import Fraction
from itertools import pairwise

import pytest
from flockstep.collectives.vector.partition import check_bounds, fragment_of, split
from flockstep.peer.base.errors import ProtocolViolation
from hypothesis import given
from hypothesis import strategies as st

uploads_of_any_kind = st.lists(st.floats() | st.sampled_from([0.0, 1e6]), min_size=1, max_size=64)


def sizes(bounds: tuple[int, ...]) -> list[int]:
    return [high - low for low, high in pairwise(bounds)]


@given(num_cells=st.integers(0, 10**7), uploads=uploads_of_any_kind)
def test_every_cell_has_one_owner_whatever_is_claimed(num_cells: int, uploads: list[float]) -> None:
    bounds = split(range(num_cells), uploads)
    check_bounds(bounds, len(uploads), range(num_cells))
    owners = [upload for upload in uploads if 0 < upload < math.inf]
    for size, upload in zip(sizes(bounds), uploads, strict=True):
        if owners and not 0 < upload < math.inf:
            assert size == 0
        if len(owners) >= 3:
            assert size <= -(-num_cells // 2)


@given(num_cells=st.integers(0, 10**7), uploads=st.lists(st.integers(1, 10**6), min_size=1, max_size=2))
def test_sizes_are_within_one_cell_of_proportional(num_cells: int, uploads: list[int]) -> None:
    for size, upload in zip(sizes(split(range(num_cells), uploads)), uploads, strict=True):
        assert abs(size - num_cells * Fraction(upload, sum(uploads))) < 1


def test_remainders_go_to_the_largest_then_to_the_first() -> None:
    assert sizes(split(range(11), [3, 1, 1, 3])) == [4, 2, 1, 4]
    assert sizes(split(range(5), [1, 1, 1])) == [2, 2, 1]


def test_one_claim_cannot_own_more_than_half_among_three() -> None:
    assert sizes(split(range(1000), [1e12, 30, 10])) == [500, 375, 125]
    assert sizes(split(range(1000), [90, 10])) == [900, 100]
    assert sizes(split(range(1000), [90, 0, 10])) == [900, 0, 100]


def test_a_part_rises_with_the_others_until_its_limit() -> None:
    tenth, fifth = Fraction(1, 10), Fraction(1, 5)
    assert sizes(split(range(1000), [30, 10, 10, 10], [tenth, None, None, None])) == [100, 300, 300, 300]
    assert sizes(split(range(1000), [6, 3, 1], [None, fifth, None])) == [500, 200, 300]


def test_limits_that_do_not_suffice_are_all_doubled() -> None:
    tenth = Fraction(1, 10)
    assert sizes(split(range(1000), [1, 10, 1], [tenth, tenth, 3 * tenth])) == [300, 400, 300]
    assert sizes(split(range(1000), [1, 0, 1], [tenth, None, tenth])) == [500, 0, 500]


@given(
    num_cells=st.integers(0, 10**7),
    members=st.lists(st.tuples(st.integers(0, 1000), st.none() | st.fractions(0, 2)), min_size=1, max_size=64),
)
def test_water_filling_leaves_no_part_below_its_level_and_none_above_its_limit(
    num_cells: int, members: list[tuple[int, Fraction | None]]
) -> None:
    rates, limits = [rate for rate, _ in members], [limit for _, limit in members]
    bounds = split(range(num_cells), rates, limits)
    check_bounds(bounds, len(rates), range(num_cells))
    owners = [i for i, rate in enumerate(rates) if rate]
    most = Fraction(1) if len(owners) < 3 else Fraction(1, 2)
    held = [min(most, limit) if (limit := limits[i]) else most for i in owners]
    if not owners or sum(held) < 1:
        return
    got = [sizes(bounds)[i] for i in owners]
    assert all(size <= num_cells * limit + 1 for size, limit in zip(got, held, strict=True))
    level = max(Fraction(size - 1, rates[i]) for size, i in zip(got, owners, strict=True))
    for size, i, limit in zip(got, owners, held, strict=True):
        assert size + 1 >= min(level * rates[i], num_cells * limit)


def test_all_own_alike_where_nobody_is_measured() -> None:
    assert sizes(split(range(9), [0.0, math.nan, -1.0])) == [3, 3, 3]


@pytest.mark.parametrize("bounds", [(0, 5), (0, 5, 9, 10), (1, 5, 10), (0, 5, 9), (0, 11, 10), (0, -1, 10)])
def test_bounds_that_do_not_cover_the_vector_break_the_rules(bounds: tuple[int, ...]) -> None:
    with pytest.raises(ProtocolViolation, match="bounds"):
        check_bounds(bounds, 2, range(10))


@given(num_cells=st.integers(1, 10**7), num_fragments=st.integers(1, 64), first=st.integers(1, 10**6))
def test_any_rounds_in_a_row_average_every_cell_once(num_cells: int, num_fragments: int, first: int) -> None:
    count = min(num_cells, num_fragments)
    fragments = [fragment_of(first + offset, num_cells, num_fragments) for offset in range(count)]
    assert fragment_of(first + count, num_cells, num_fragments) == fragments[0]
    ordered = sorted(fragments, key=lambda cells: cells.start)
    assert (ordered[0].start, ordered[-1].stop) == (0, num_cells)
    assert all(before.stop == after.start for before, after in pairwise(ordered))
    assert {len(cells) for cells in fragments} <= {num_cells // count, -(-num_cells // count)}


@given(start=st.integers(0, 10**6), length=st.integers(0, 10**6), uploads=uploads_of_any_kind)
def test_parts_divide_a_fragment(start: int, length: int, uploads: list[float]) -> None:
    cells = range(start, start + length)
    bounds = split(cells, uploads)
    check_bounds(bounds, len(uploads), cells)
    with pytest.raises(ProtocolViolation):
        check_bounds(bounds, len(uploads), range(start, start + length + 1))
