"""Free keys that are Ready at once neither end the phases of the others nor make keepers go on without them."""

import pytest
from attacks.voters import founded
from flockstep.collectives.accountability.trust import YOUNG_ROUNDS, newcomer_record
from flockstep.optim.pace import Pace
from flockstep.peer.memory.network import run_virtual
from flockstep.peer.wire import Certificate
from support.certificates import certify
from support.swarm import SimSwarm, identities, with_swarm

LIARS = {f"12D3KooWliar{index:040d}" for index in range(20)}
PACE = Pace(steps=500, floor=2.0)


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
        pacing = conduct.pacing(honest | LIARS)
        holds = earned and rounds == YOUNG_ROUNDS
        assert pacing == (honest if holds else honest | LIARS)  # In a run's first rounds nobody is known.
        ready_at = [0.0] * len(LIARS & pacing)
        deadline = PACE.deadline(started=0.0, ready_at=ready_at, num_active=len(pacing))
        called = PACE.called(started=0.0, ready_at=ready_at, num_training=len(pacing), expected=100.0)
        assert deadline == (None if holds else 2.0)
        assert called == (None if holds else (0.0, True))

    newcomer = newcomer_record(earned)
    run_virtual(lambda: with_swarm(4, body, charter=founded(4, earned=earned)))
