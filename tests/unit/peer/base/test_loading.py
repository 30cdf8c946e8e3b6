"""Garbage collection stands still while modules are loaded."""

import gc
from collections.abc import Iterator

import pytest
from flockstep.peer.base.loading import uncollected


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    yield
    gc.unfreeze()
    gc.enable()


def test_collections_stand_still_and_leave_out_what_was_loaded() -> None:
    gc.unfreeze()
    with uncollected():
        assert not gc.isenabled()
    assert gc.isenabled()
    assert gc.get_freeze_count()


def test_they_go_on_where_loading_fails() -> None:
    with pytest.raises(ImportError), uncollected():
        raise ImportError("torch is not here")
    assert gc.isenabled()


def test_whoever_has_none_gets_none() -> None:
    gc.disable()
    with uncollected():
        pass
    assert not gc.isenabled()
