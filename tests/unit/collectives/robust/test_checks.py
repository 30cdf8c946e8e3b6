"""Weights of parts, without what their holders contribute to them."""

import numpy as np
import pytest
from flockstep.collectives.robust.checks import without_own


@pytest.mark.parametrize(
    ("masses", "is_out"),
    [
        ([1, 1, 1, 1], True),
        ([1, 1, 1], False),  # Too few others.
        ([6, 2, 2, 2], False),  # The others have half of the mass: they may be free keys.
        ([3, 2, 2, 2], False),  # Two thirds of it are not more than two thirds.
        ([2.9, 2, 2, 2], True),
    ],
)
def test_what_a_holder_contributes_to_its_own_part_weighs_nothing_where_others_can_do_without(
    masses: list[float], is_out: bool
) -> None:
    shares = np.array(masses, np.float64)
    rows = np.tile(shares / shares.sum(), (2, 1))
    found = without_own(rows, shares, {0: 0})
    assert (not found[0, 0]) is is_out
    assert found[0].sum() == pytest.approx(rows[0].sum())
    assert np.array_equal(found[1], rows[1]), "of another part it counts"


def test_who_does_not_count_in_a_part_makes_nobody_else_enough() -> None:
    rows = np.array([[0.25, 0.25, 0.25, 0.0]])
    assert np.array_equal(without_own(rows, np.ones(4), {0: 0}), rows)
