"""What a proposer shows of others is its choice: by leaving words out it gets no honest owner blamed for them."""

from collections.abc import Collection
from functools import partial

import pytest
import trio
from attacks.test_waits import Prepare, hangs, withholds
from attacks.voters import founded, in_turn, until_done
from flockstep.collectives.allreduce.actions import Action
from flockstep.collectives.allreduce.roster import RosterView
from flockstep.collectives.allreduce.stage import Stage
from flockstep.collectives.chain.certificate import value_of
from flockstep.peer.memory.network import run_virtual
from support.swarm import SimSwarm, with_swarm


def an_owner(table: RosterView, reader: str) -> bool:
    return table.places[reader] == 1


@pytest.mark.parametrize(
    "keeps",
    [
        pytest.param(hangs("contribution", an_owner), id="bytes"),
        pytest.param(withholds("sketch", "second sketch", whom=an_owner), id="sketches"),
        pytest.param(withholds("roster", whom=an_owner), id="rosters"),
        pytest.param(withholds("cut", "second cut", whom=an_owner), id="cuts"),
        pytest.param(withholds("outputs", whom=an_owner), id="outputs"),
    ],
)
def test_an_owner_whose_word_a_proposer_does_not_wait_for_owns_a_part_in_the_next_round(
    keeps: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proposer keeps something from that owner, which waits for it, and cuts: a deputy holds the part."""

    async def body(swarm: SimSwarm) -> None:
        liar, *others = in_turn(swarm.sims)
        propose = Stage.propose

        def cut_at_once(stage: Stage, active: Collection[str]) -> list[Action]:
            if stage._table.members[stage._table.me] == liar.peer and len(stage.words) >= len(others):
                stage.is_late = stage.takes_best = True
            return propose(stage, active)

        monkeypatch.setattr(Stage, "propose", cut_at_once)
        async with trio.open_nursery() as nursery:
            keeps(liar, nursery)
            for round_ in (1, 2):
                await until_done(others, round_, liar)
            nursery.cancel_scope.cancel()
        value = value_of(others[0].averager.certificate)  # type: ignore[arg-type]
        bounds = zip(value.members, value.bounds, value.bounds[1:], strict=False)
        owners = {peer for peer, low, high in bounds if low < high}
        assert {sim.peer for sim in others} <= owners
        blamed = {peer for sim in others for it in sim.outcomes[:1] for peer in (*it.silent, *it.late, *it.unsketched)}
        assert not blamed - {liar.peer}

    run_virtual(partial(with_swarm, 4, body, cells=28, charter=founded(4), rule="gramguard"))
