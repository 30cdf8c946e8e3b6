"""Neither free keys that are Ready at once nor members that are Ready late decide how long a round takes."""

from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import trio
from attacks.voters import founded
from flockstep.collectives.accountability import conduct, trust
from flockstep.collectives.accountability.trust import YOUNG_ROUNDS, newcomer_record
from flockstep.optim.step.pace import Pace
from flockstep.peer.base.transport import PeerId
from flockstep.peer.memory.network import run_virtual
from flockstep.peer.wire import Certificate
from support.certificates import certify
from support.keepers import KeptRun, all_at, in_memory, kept_run, key
from support.swarm import SimSwarm, identities, with_swarm

LIARS = {f"12D3KooWliar{index:040d}" for index in range(20)}
PACE = Pace(steps=500, floor=2.0)
KEEPER = 30


@pytest.mark.parametrize("rounds", [YOUNG_ROUNDS - 1, YOUNG_ROUNDS])
@pytest.mark.parametrize("earned", [True, False])
def test_free_keys_that_are_ready_at_once_end_nobodys_phase_once_others_have_worked(rounds: int, earned: bool) -> None:
    async def body(swarm: SimSwarm) -> None:
        conduct, last = swarm.sims[0].averager._conduct, None
        honest = {sim.peer for sim in swarm.sims}
        for round_ in range(1, rounds + 1):
            known: Certificate | None = last
            last = certify(known, 100, roster=identities(4), trust_of=lambda peer: conduct.trust_of(peer) or newcomer)
            conduct.advance(round_ + 1, last)
        groups = conduct.pacing(honest | LIARS)
        (pacing,) = groups
        holds = earned and rounds == YOUNG_ROUNDS
        assert pacing == (honest if holds else honest | LIARS)  # In a run's first rounds nobody is known.
        ready_at = [0.0] * len(LIARS & pacing)
        deadline = PACE.deadline(started=0.0, ready_at=ready_at, num_active=len(pacing))
        called = PACE.called(started=0.0, ready_at=dict.fromkeys(LIARS, 0.0), groups=groups, expected=100.0)
        assert deadline == (None if holds else 2.0)
        assert called == (None if holds else (0.0, True))

    newcomer = newcomer_record(earned)
    run_virtual(lambda: with_swarm(4, body, charter=founded(4, earned=earned)))


PHASE = 20.0
"""Seconds of an honest phase; with the floor of 2 s a quarter of it is a grace."""


class Late:
    """Is ready when a keeper has waited for nearly twice as long as the last round took, and claims any phase."""

    def __init__(self, run: KeptRun, peer: PeerId, claim: float) -> None:
        self.run, self.peer, self.is_lying = run, peer, False
        run.phases[peer], run.claims[peer] = self.pass_phase, claim

    async def pass_phase(self) -> None:
        began = trio.current_time()
        done = self.run.peers[self.peer].named("round.done")
        times = [float(event["time"]) for event in done[-2:]]  # type: ignore[arg-type]  # numbers
        await trio.sleep(PHASE)
        if self.is_lying and len(times) > 1:
            await trio.sleep_until(began + 1.9 * (times[1] - times[0]))


@pytest.mark.parametrize(
    ("honest", "liars", "claim", "most"),
    [
        (4, 2, 1e9, 1.5),  # A third: two thirds are ready, and a quarter of a phase and a control message go by.
        pytest.param(4, 2, 1e-9, 1.5, marks=pytest.mark.explore),
        (4, 3, 1e9, 2.4),  # Less than half: twice the phase that the median member has trained.
        pytest.param(4, 3, PHASE, 2.4, marks=pytest.mark.explore),
    ],
)
def test_members_that_are_ready_late_round_after_round_delay_each_round_alike(
    tmp_path: Path, honest: int, liars: int, claim: float, most: float
) -> None:
    """A keeper waited for twice as long as it had in the last round: 5.6 s became 1,790 s in ten rounds."""

    async def body(run: KeptRun) -> None:
        keepers = [run.keep(KEEPER + number) for number in range(4)]
        late = [Late(run, key(10 + number).peer_id, claim) for number in range(liars)]
        trainers = [run.train(number, seconds=PHASE) for number in range(honest)]
        lying = [run.train(10 + number, seconds=PHASE) for number in range(liars)]
        await run.until(lambda: all_at([*keepers, *trainers, *lying], 3))
        for liar in late:
            liar.is_lying = True
        began = keepers[0].at[0] + 1
        await run.until(lambda: keepers[0].at[0] >= began + 5, 2000)
        done = [float(event["time"]) for event in keepers[0].named("round.done")]  # type: ignore[arg-type]  # numbers
        took = [after - before for before, after in pairwise(done)]
        usual = min(took)
        assert max(took[began - 1 :]) < most * usual
        honest_ids = {peer.peer for peer in trainers}
        cuts = [set(event["cut"]) for event in keepers[0].named("round.done")]  # type: ignore[arg-type]  # lists
        assert all(cut >= honest_ids for cut in cuts[began:])

    run_virtual(partial(in_memory, kept_run(4, first=KEEPER), tmp_path, body), seed=0)


def test_members_that_claim_any_phase_prevent_no_round(tmp_path: Path) -> None:
    """They are the median, and fall silent: no phase counts for longer than the round has lasted."""

    async def body(run: KeptRun) -> None:
        keeper = run.keep(KEEPER)
        trainers = [run.train(number, seconds=PHASE) for number in range(2)]
        claims = [key(10 + number).peer_id for number in range(3)]
        run.claims |= dict.fromkeys(claims, 1e9)
        lying = [run.train(10 + number, seconds=PHASE) for number in range(3)]
        await run.until(lambda: all_at([keeper, *trainers, *lying], 3))
        run.phases |= dict.fromkeys(claims, trio.sleep_forever)
        before = keeper.at[0]
        await run.until(lambda: all_at([keeper, *trainers], before + 4))
        assert any(set(claims) <= set(event["cut"]) for event in keeper.named("round.done"))  # type: ignore[arg-type]  # lists
        assert not set(claims) & set(keeper.named("round.done")[-1]["cut"])  # type: ignore[arg-type]  # a list

    run_virtual(partial(in_memory, kept_run(1, first=KEEPER), tmp_path, body), seed=0)


@pytest.mark.parametrize("seconds", [0.1, 1e6])
def test_one_of_tenure_beside_younger_members_neither_hastens_rounds_nor_prevents_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    """Its readiness alone counted: rounds were made of its own work, or none at all."""
    for module in (conduct, trust):
        monkeypatch.setattr(module, "YOUNG_ROUNDS", 3)

    async def body(run: KeptRun) -> None:
        keeper, old = run.keep(KEEPER), run.train(0, seconds=PHASE)
        await run.until(lambda: all_at([keeper, old], 3))
        trainers = [run.train(1 + number, seconds=PHASE) for number in range(3)]
        run.phases[old.peer] = partial(trio.sleep, seconds)
        before = keeper.at[0] + 1
        await run.until(lambda: all_at([keeper, *trainers], before + 3))
        done = [event for event in keeper.named("round.done") if int(event["round"]) > before]  # type: ignore[arg-type]  # a number
        honest = {peer.peer for peer in trainers}
        assert all(len(honest & set(event["cut"])) >= 2 for event in done)  # type: ignore[arg-type]  # lists
        assert any(honest <= set(event["cut"]) for event in done)  # type: ignore[arg-type]  # lists

    run_virtual(partial(in_memory, kept_run(1, first=KEEPER), tmp_path, body), seed=0)
