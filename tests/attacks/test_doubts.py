"""A member whose second sketches make honest outputs seem false, and whose bytes hang on whoever would make them again."""

from functools import partial
from typing import Any

import numpy as np
import trio
from attacks.voters import founded, until_done
from flockstep.collectives.robust.checks import seed_of, tables_of
from flockstep.peer import wire
from flockstep.peer.memory.network import run_virtual
from flockstep.scripts.lab.attacks.protocol import computes
from support.liars import banned, events_of
from support.swarm import SimPeer, SimSwarm, identities, with_swarm

VOTERS, HONEST = 4, 4
OFF = 0.35
"""How far a sketch is off, relative to its length: too little to lose its voice, and more than int8's rounding explains."""


def doubts(liar: SimPeer) -> None:
    """Sketch parts of owners without a vote falsely after the outputs, and let their bytes hang on all others."""

    def off(tables: bytes, codec: object, parts: object, bounds: Any, seed: bytes, columns: int) -> bytes:
        exchange, draw = liar.averager._work.machine.exchange, np.random.default_rng(1)  # type: ignore[union-attr]
        if seed == seed_of(exchange.cut):
            return tables
        changed = tables_of(tables, len(bounds) - 1).copy()
        for part in (it for it in exchange.table.owners if it >= VOTERS and it != exchange.table.me):
            noise = draw.normal(size=changed[part].shape)
            changed[part] += noise * OFF * np.linalg.norm(changed[part]) / np.linalg.norm(noise)
        return changed.astype("<f4").tobytes()

    async def hang(stream: Any, blob: Any, request: wire.Fetch) -> None:
        work = liar.averager._work
        if work is not None and work.machine.has_roster:
            members = work.machine.exchange.members
            if any(blob is mine and members[part] != stream.remote for part, mine in enumerate(work.mine) if part >= VOTERS):
                await trio.sleep_forever()
        await serve(stream, blob, request)

    serve = liar.node._bulk._send_memory
    liar.node._bulk._send_memory = hang  # type: ignore[method-assign]
    computes(liar, "sketch_parts", off)


def test_bytes_that_hang_come_from_the_owner_and_convict_who_sketched_falsely() -> None:
    """The parts of honest owners would be zeros else, and these would own none in the next rounds."""

    async def body(swarm: SimSwarm) -> None:
        *others, liar = swarm.sims
        doubts(liar)
        await until_done(others, 1, liar)
        certificate = others[0].averager.certificate
        assert certificate is not None
        assert certificate.slot.attempt == 0
        assert events_of(others, "round.output_doubted")
        assert not events_of(others[:VOTERS], "round.zeros")
        assert banned(others) == [{liar.peer}] * len(others)
        conduct = others[0].averager._conduct
        assert all(conduct.may_own(sim.peer) for sim in others)

    keepers = frozenset(identity.peer_id for identity in identities(VOTERS))
    charter = founded(VOTERS, keepers=keepers)
    run_virtual(partial(with_swarm, VOTERS + HONEST + 1, body, cells=60, codec="int8", rule="gramguard", charter=charter))
