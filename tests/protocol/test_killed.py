"""A voter that is killed at any call which changes its disk comes back, signs nothing twice, and keeps what it accepted."""

from pathlib import Path

import pytest
from flockstep.collectives.state import merkle
from flockstep.peer.memory.network import run_virtual
from support.killed_lives import killed_at


@pytest.fixture(autouse=True)
def small_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merkle, "LEAF_ELEMENTS", 1024)


@pytest.mark.parametrize(("count", "begin"), [(1, 1), (2, 2), (4, 3)])
@pytest.mark.parametrize("number", range(0, 39, 3))
def test_a_voter_that_is_killed_at_any_write_of_a_round_comes_back(
    number: int, begin: int, count: int, tmp_path: Path
) -> None:
    """Two rounds have 41 such calls, from the first slot to the second certificate; the checkpoint follows (test_move)."""
    killed = run_virtual(lambda: killed_at(number + begin, count, tmp_path))
    assert killed.at
    assert all(len(payloads) == 1 for payloads in killed.signed.values())
    assert killed.missing == []
    assert killed.events == []
    assert killed.rounds >= 2
