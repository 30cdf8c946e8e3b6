"""A voter that is killed at any call which changes its disk comes back, signs nothing twice, and keeps what it accepted."""

from pathlib import Path

import pytest
from flockstep.collectives.state import merkle
from flockstep.peer.memory.network import run_virtual
from support.killed_lives import killed_at


@pytest.fixture(autouse=True)
def small_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merkle, "LEAF_ELEMENTS", 1024)


# Of every three calls one voter alone is killed at the first, one of two at the second, one of four at the third.
CALLS = [(count, call) for count, begin in ((1, 1), (2, 2), (4, 3)) for call in range(begin, begin + 39, 3)]


@pytest.mark.parametrize(
    ("count", "call"),
    # Four cost ten times as much: at every third of their calls, and at the rest on demand.
    [pytest.param(count, call, marks=[pytest.mark.explore] * (count == 4 and call % 9 != 3)) for count, call in CALLS],
)
def test_a_voter_that_is_killed_at_any_write_of_a_round_comes_back(count: int, call: int, tmp_path: Path) -> None:
    """Two rounds have 41 such calls, from the first slot to the second certificate; the checkpoint follows (test_move)."""
    killed = run_virtual(lambda: killed_at(call, count, tmp_path))
    assert killed.at
    assert all(len(payloads) == 1 for payloads in killed.signed.values())
    assert killed.missing == []
    assert killed.events == []
    assert killed.rounds >= 2
