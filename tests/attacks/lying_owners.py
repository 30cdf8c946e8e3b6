"""An owner that tampers with 2 % of its output: is it caught in the round in which it does, and is an honest one never?

    cd tests && python -m attacks.lying_owners --trials 200

A trial is one round of five production peers on the network in memory, other contributions each time, judged by
gramguard. With int8 the lie is noise as long as 2 % of the output's norm; with int4, whose rounding alone is 10 %, the
signs of 2 % of its elements are turned. Caught means: every other peer has told `round.output_false` of the liar and of
nobody else, and all have ended this attempt with one state. The exit code is 1 where one was not caught, or one was
blamed in vain.
"""

import argparse
import sys
import time
from functools import partial
from typing import Any

import numpy as np
from flockstep.collectives.codec import CELL, Floats
from flockstep.collectives.round.actions import OutcomeKind
from flockstep.peer.digest import digest
from flockstep.peer.memory.network import run_virtual
from flockstep.scripts.attacks.protocol import computes, lying_owner
from support.liars import banned, events_of
from support.swarm import Bird, Flock, all_at_once, with_flock

PEERS, CELLS = 5, 40
SHARE = 0.02


def noisy(liar: Bird, draw: np.random.Generator) -> None:
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

    async def body(flock: Flock) -> None:
        common = draw.standard_normal(CELLS * CELL, np.float32)
        for bird in flock.birds:
            x: Floats = np.float32(1e-3) * (common + draw.standard_normal(CELLS * CELL, np.float32))
            bird.delta = partial(lambda x, _: x, x)  # type: ignore[method-assign]
        liar = flock.birds[number % PEERS]
        if lie and codec == "int8":
            noisy(liar, draw)
        elif lie:
            lying_owner(liar, SHARE)
        await all_at_once(flock.birds)
        others = [bird for bird in flock.birds if bird is not liar]
        blamed = [(event["peer"], event["attempt"]) for event in events_of(others, "round.output_false")]
        right = blamed == ([(liar.peer, 0)] * len(others) if lie else [])
        right = right and {bird.outcomes[0].kind for bird in others} == {OutcomeKind.DONE}
        right = right and len({bird.root for bird in others}) == 1 and not any(banned(flock.birds))
        found.append((bool(blamed), right))

    run_virtual(partial(with_flock, PEERS, body, cells=CELLS, codec=codec, rule="gramguard", seed=number), seed=number)
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
