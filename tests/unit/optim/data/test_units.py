"""Data units: an epoch has every item once, in an order of its own, equal on all peers."""

import numpy as np
import pytest
from flockstep.optim.data.units import MAX_UNITS, UnitPlan, drawn
from hypothesis import given
from hypothesis import strategies as st


@given(num_items=st.integers(1, 5000), seed=st.integers(0, 2**32 - 1), epoch=st.integers(0, 2**40))
def test_the_units_of_an_epoch_have_every_item_once(num_items: int, seed: int, epoch: int) -> None:
    cut = UnitPlan(seed, num_items)
    units = [cut.items(epoch, unit) for unit in range(cut.num_units)]
    assert sorted(np.concatenate(units).tolist()) == list(range(num_items))
    assert min(len(unit) for unit in units) > 0


def test_the_order_depends_on_seed_and_epoch_alone() -> None:
    first, again, seed, epoch = (
        np.concatenate([cut.items(at, unit) for unit in range(cut.num_units)]).tolist()
        for cut, at in [(UnitPlan(1, 900), 0), (UnitPlan(1, 900), 0), (UnitPlan(2, 900), 0), (UnitPlan(1, 900), 1)]
    )
    assert first == again
    assert first != seed
    assert first != epoch


@pytest.mark.parametrize(("num_items", "num_units"), [(1, 1), (20, 20), (900, 32), (100_000, 195), (10**8, MAX_UNITS)])
def test_the_number_of_units_fits_the_data(num_items: int, num_units: int) -> None:
    assert UnitPlan(0, num_items).num_units == num_units


def test_what_stands_in_one_batch_comes_from_many_places() -> None:
    items = UnitPlan(0, 10**6).items(0, 3)
    assert len(set((items[:32] // 1000).tolist())) > 25


def test_what_is_drawn_is_the_same_with_every_version_of_numpy() -> None:
    assert drawn(3, "test", b"key").tolist() == GOLDEN


GOLDEN = [3877118009575388190, 4335423104497800494, 882133987261826705]
