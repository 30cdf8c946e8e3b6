"""A keeper learns how long the run's state is, on the production path."""

from dataclasses import replace
from pathlib import Path

import pytest
import trio
from flockstep.collectives.chain.chain import start_of_run
from flockstep.collectives.state import merkle
from flockstep.collectives.state.checkpoint_file import Draft, TensorAt
from flockstep.collectives.vector.codec import CELL
from flockstep.dht.run.admission import OPEN
from flockstep.dht.run.layout import LayoutPin
from flockstep.optim.keeper.state_size import ASKED_AT_ONCE, kept_size, size_from_members
from flockstep.peer import wire
from flockstep.peer.base.digest import digest
from flockstep.peer.base.errors import UsageError
from flockstep.peer.log.telemetry import Event
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


def test_no_proof_makes_a_state_longer_than_what_the_manifest_pins(tmp_path: Path) -> None:
    async def body(swarm: SimSwarm, others: list[RestoringPeer], late: RestoringPeer) -> None:
        charter, members = late.sim.averager._spec.charter, [others[0].member()]
        events: list[Event] = []
        late.sim.node.telemetry.subscribe(events.append)
        fits, longer = (replace(charter, layout=b"1" * 32, cells=range(most, most + 1)) for most in (CELLS, CELLS + 1))
        assert await size_from_members(late.sim.node, RUN, members, fits) == CELLS
        await size_from_members(late.sim.node, RUN, members, longer)
        assert [event["event"] for event in events] == ["head.unproven"]  # And nobody is charged.
        assert str(events[0]["reason"]).endswith(f"one of the layout that the run's manifest pins has {CELLS + 1}")

    run_rounds(3, 1, body, tmp_path)


def test_a_checkpoint_of_another_model_than_the_manifest_pins_is_not_kept(tmp_path: Path) -> None:
    draft = Draft(tmp_path / "checkpoints" / "0", 2 * CELL)
    tensors, leaves = (TensorAt("w", (2, CELL), "float32", 0),), [digest(bytes(4 * 2 * CELL))] * 2
    draft.finish("run", start_of_run(merkle.root(leaves)), tensors, leaves)
    pin = LayoutPin.of([("w", (2, CELL))])
    assert kept_size(tmp_path, OPEN, pin) == kept_size(tmp_path, OPEN) == (2, tensors)
    with pytest.raises(UsageError, match=r"the state in .*checkpoints.0 has 1 with 512, under other names"):
        kept_size(tmp_path, OPEN, replace(pin, hash=bytes(32)))
    with pytest.raises(UsageError, match="its state has 2 cells, one of the layout that the run's manifest pins has 3"):
        kept_size(tmp_path, replace(OPEN, layout=pin.hash, cells=range(3, 4)), None)


def test_where_nobody_proves_a_size_most_of_those_that_train_state_it(tmp_path: Path) -> None:
    async def body(swarm: SimSwarm, others: list[RestoringPeer], late: RestoringPeer) -> None:
        trained: dict[str, int | bytes] = {"head": bytes(32), "round": 0, "layout": bytes([1]) * 32}
        members = [others[which].member(**trained, num_cells=cells) for which, cells in ((0, 7), (1, 9), (1, 9))]
        assert await size_from_members(late.sim.node, RUN, members, late.sim.averager._spec.charter) == 9

    run_rounds(3, 1, body, tmp_path)
