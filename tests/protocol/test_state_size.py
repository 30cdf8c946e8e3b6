"""A keeper learns how long the run's state is, on the production path."""

from pathlib import Path

import pytest
import trio
from flockstep.optim.keeper.state_size import ASKED_AT_ONCE, size_from_members
from flockstep.peer import wire
from support.restoring_peer import CELLS, RestoringPeer, run_rounds
from support.swarm import RUN, SimSwarm


@pytest.mark.parametrize("num_silent", [3, ASKED_AT_ONCE - 1])
def test_members_that_do_not_answer_do_not_hold_up_the_first_that_does(tmp_path: Path, num_silent: int) -> None:
    async def body(swarm: SimSwarm, others: list[RestoringPeer], late: RestoringPeer) -> None:
        silent, honest = others[0], others[1]

        async def never(peer: str, question: wire.LedgerAsk) -> wire.LedgerPage:
            await trio.sleep_forever()
            raise AssertionError

        silent.sim.node.on_ask(wire.LedgerAsk, never)
        members = [*[silent.member()] * num_silent, honest.member()]
        began = trio.current_time()
        charter = late.sim.averager._spec.charter
        assert await size_from_members(late.sim.node, RUN, members, charter) == CELLS
        assert trio.current_time() < began + 1.0

    run_rounds(3, 1, body, tmp_path)


def test_where_nobody_proves_a_size_most_of_those_that_train_state_it(tmp_path: Path) -> None:
    async def body(swarm: SimSwarm, others: list[RestoringPeer], late: RestoringPeer) -> None:
        trained: dict[str, int | bytes] = {"head": bytes(32), "round": 0, "layout": bytes([1]) * 32}
        members = [others[which].member(**trained, num_cells=cells) for which, cells in ((0, 7), (1, 9), (1, 9))]
        assert await size_from_members(late.sim.node, RUN, members, late.sim.averager._spec.charter) == 9

    run_rounds(3, 1, body, tmp_path)
