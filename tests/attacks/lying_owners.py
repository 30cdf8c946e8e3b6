"""Detection of an owner that tampers with 2 % of its output, and false alarms, over trials.

    cd tests && python -m attacks.lying_owners --trials 200

A trial is one round of five production peers on the network in memory, other contributions each time, judged by
gramguard. With int8 the lie is noise as long as 2 % of the output's norm; with int4, whose rounding alone is 10 %, the
signs of 2 % of its elements are flipped. Caught means: every other peer has emitted `round.output_false` about the liar and
about no other peer, and all have ended this attempt with one state. The exit code is 1 if a liar was not caught, or an
honest peer was blamed.
"""

import argparse
import sys
import time
from functools import partial
from typing import Any

import numpy as np
from flockstep.collectives.allreduce.actions import OutcomeKind
from flockstep.collectives.codec import CELL
from flockstep.peer.arrays import Floats
from flockstep.peer.digest import digest
from flockstep.peer.memory.network import run_virtual
from flockstep.scripts.lab.attacks.protocol import computes, lying_owner
from support.liars import banned, events_of
from support.swarm import SimPeer, SimSwarm, all_at_once, with_swarm

PEERS, CELLS = 5, 40
SHARE = 0.02


def noisy(liar: SimPeer, draw: np.random.Generator) -> None:
    """Its outputs are noise as long as `SHARE` of them off."""
    codec = liar.averager._spec.output

    def tamper(made: tuple[Any, bytes]) -> tuple[Any, bytes]:
        values = np.empty(len(made[0]) // codec.cell_bytes * CELL, np.float32)
        codec.decode(bytes(made[0]), values)
        noise = draw.standard_normal(values.size, np.float32)
        values += noise * np.float32(SHARE * np.linalg.norm(values) / np.linalg.norm(noise))
        data = codec.encode(values)
        return data, digest(data)

    computes(liar, "reduce", tamper)


def trial(number: int, codec: str, *, lie: bool) -> tuple[bool, bool]:
    """Whether somebody was blamed for a false output, and whether all went as it should."""
    draw = np.random.default_rng([number, len(codec), int(codec[-1])])
    found: list[tuple[bool, bool]] = []

    async def body(swarm: SimSwarm) -> None:
        common = draw.standard_normal(CELLS * CELL, np.float32)
        for sim in swarm.sims:
            x: Floats = np.float32(1e-3) * (common + draw.standard_normal(CELLS * CELL, np.float32))
            sim.delta = partial(lambda x, _: x, x)  # type: ignore[method-assign]
        liar = swarm.sims[number % PEERS]
        if lie and codec == "int8":
            noisy(liar, draw)
        elif lie:
            lying_owner(liar, SHARE)
        await all_at_once(swarm.sims)
        others = [sim for sim in swarm.sims if sim is not liar]
        blamed = [(event["peer"], event["attempt"]) for event in events_of(others, "round.output_false")]
        right = blamed == ([(liar.peer, 0)] * len(others) if lie else [])
        right = right and {sim.outcomes[0].kind for sim in others} == {OutcomeKind.DONE}
        right = right and len({sim.root for sim in others}) == 1 and not any(banned(swarm.sims))
        found.append((bool(blamed), right))

    run_virtual(partial(with_swarm, PEERS, body, cells=CELLS, codec=codec, rule="gramguard", seed=number), seed=number)
    return found[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=200)
    trials = range(parser.parse_args().trials)
    good = True
    for codec in ("int8", "int4"):
        began = time.process_time()
        lying = [trial(number, codec, lie=True) for number in trials]
        honest = [trial(number, codec, lie=False) for number in trials]
        good = good and all(right for _, right in lying + honest)
        sys.stdout.write(
            f"{codec}: caught {sum(right for _, right in lying)} of {len(lying)} liars in the round, blamed "
            f"{sum(blamed for blamed, _ in honest)} of {len(honest)} honest, {time.process_time() - began:.0f} CPU-s\n"
        )
        sys.stdout.flush()
    sys.exit(not good)


if __name__ == "__main__":
    main()
