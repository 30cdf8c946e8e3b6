"""CPU seconds of a simulation are charged to what they are for."""

from contextlib import suppress

import trio
from flockstep.peer.memory.network import run_virtual
from flockstep.peer.node.bulk import BULK_PROTOCOL
from flockstep.scripts.lab.simulate.meter import MEMBERSHIP, REST, ROUNDS, Meter
from flockstep.scripts.lab.simulate.world import simulate
from support.simulations import CALM


class Work:
    """A clock of CPU time that goes on where something works."""

    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        return self.time

    async def on(self, seconds: float) -> None:
        for _ in range(2):
            self.time += seconds / 2
            await trio.lowlevel.checkpoint()


def test_a_block_and_the_tasks_that_it_starts_are_of_its_purpose_alone() -> None:
    work = Work()
    meter = Meter(work)

    async def main() -> None:
        trio.lowlevel.add_instrument(meter)
        async with trio.open_nursery() as nursery:
            with meter.of(MEMBERSHIP):
                nursery.start_soon(work.on, 1.0)
                with meter.of(ROUNDS):
                    await work.on(10.0)
            nursery.start_soon(work.on, 100.0)
            nursery.start_soon(work.on, 1000.0, name=f"somebody {BULK_PROTOCOL}")

    run_virtual(main)
    assert meter.seconds == {ROUNDS: 1010.0, MEMBERSHIP: 1.0, REST: 100.0}


def test_a_block_that_raises_is_charged() -> None:
    work = Work()
    meter = Meter(work)
    with suppress(ValueError), meter.of(ROUNDS):
        work.time = 3.0
        raise ValueError
    work.time = 5.0
    meter.mark(REST)
    assert meter.seconds == {ROUNDS: 3.0, MEMBERSHIP: 0.0, REST: 2.0}


def test_a_simulation_charges_rounds_and_membership() -> None:
    report, lines = simulate(CALM), list[str]()
    report.show(lines.append, as_json=False)
    assert min(report.cpu.values()) > 0
    spent = ", ".join(f"{purpose} {report.cpu[purpose]:.1f}" for purpose in (ROUNDS, MEMBERSHIP, REST))
    assert f" CPU-s ({spent}), trace" in lines[-1]
