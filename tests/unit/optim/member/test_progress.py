"""The sums of an inner phase."""

from typing import Any, cast

import pytest
from flockstep.optim.member.progress import Progress
from flockstep.peer.log.telemetry import Telemetry


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


def test_a_phase_is_as_long_as_its_steps_and_no_wait_for_a_round_is_a_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others wait for late members by what is stated here: a wait that were a part of it would lengthen the next one."""
    clock = Clock()
    monkeypatch.setattr("flockstep.optim.member.progress.time", clock)
    progress = Progress(Telemetry(), cast(Any, None))
    for _ in range(3):
        clock.now += 2.0
        progress.count(10)
    assert progress.phase_seconds == 6.0
    trained = progress.phase_seconds
    progress.begin_phase()
    clock.now += 100.0  # The round is void.
    progress.waited()
    progress.resume_phase(3, 30, 1.0, trained)
    clock.now += 2.0
    progress.count(10)
    assert (progress.phase_steps, progress.phase_tokens, progress.phase_seconds) == (4, 40, 8.0)
