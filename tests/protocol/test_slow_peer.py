"""Mixed hardware: a peer ten times slower contributes fewer tokens, and delays no other."""

import json
from dataclasses import replace

import pytest
import trio
from flockstep.scripts.lab.simulate import world
from flockstep.scripts.lab.simulate.options import Span
from flockstep.scripts.lab.simulate.peer import SIM_STEPS, SimulatedPeer
from support.simulations import CALM

SECONDS = 20.0
"""Of a fast peer's phase: its grace of a quarter is then above the floor."""
ROUNDS = 4
OPTIONS = replace(CALM, rounds=ROUNDS, rule="mean", steps_time=Span(SECONDS, SECONDS))


def test_a_peer_ten_times_slower_takes_part_with_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    phases: list[tuple[bool, int, float]] = []

    class Timed(SimulatedPeer):
        async def _inner_phase(self, duration: float, started: float) -> int:
            slow, began = self.name == "p0", trio.current_time()
            steps = await super()._inner_phase(10 * duration if slow else duration, started)
            phases.append((slow, steps, trio.current_time() - began))
            return steps

    monkeypatch.setattr(world, "SimulatedPeer", Timed)
    report = world.simulate(OPTIONS)
    assert not report.violations
    lines: list[str] = []
    report.show(lines.append, as_json=True)
    assert [row["cut"] for row in json.loads(lines[0])["rounds"]] == ["5"] * ROUNDS
    assert [steps for slow, steps, _ in phases if not slow] == [SIM_STEPS] * 4 * ROUNDS
    assert all(1 <= steps <= SIM_STEPS // 5 for slow, steps, _ in phases if slow)
    assert max(seconds for _, _, seconds in phases) < 1.5 * SECONDS
