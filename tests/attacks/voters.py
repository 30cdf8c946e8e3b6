"""Runs whose founders are all peers of a swarm: they vote on the first round, in turns by id."""

from collections.abc import Sequence
from typing import Any

import trio
from flockstep.collectives.chain.certificate import genesis
from flockstep.dht.run.admission import Charter
from flockstep.peer import wire
from support.swarm import RUN, SimPeer, identities

SLOT = wire.Slot(RUN, 1, genesis(RUN))
"""The first attempt of the first round."""

PAUSE = 0.1
"""Virtual seconds between two attempts of a peer: it trains."""


async def until_done(sims: Sequence[SimPeer], round_: int, *beside: SimPeer, within: float = 400.0) -> None:
    """Make rounds until these peers have this one behind them with one state, while those `beside` make theirs."""

    async def go_on(sim: SimPeer) -> None:
        while sim.averager.round <= round_:
            await sim.round()
            await trio.sleep(PAUSE)

    with trio.fail_after(within):
        async with trio.open_nursery() as outer:
            for sim in beside:
                outer.start_soon(go_on, sim)
            async with trio.open_nursery() as nursery:
                for sim in sims:
                    nursery.start_soon(go_on, sim)
            outer.cancel_scope.cancel()
    assert len({sim.root for sim in sims}) == 1


def founded(count: int, **rules: Any) -> Charter:
    """Return the charter of a run that the first `count` identities of a swarm have founded.

    Where too few votes are here it waits: after that no promise holds against liars in the other runs (docs/trust.md).
    """
    return Charter(founders=frozenset(identity.peer_id for identity in identities(count)), **rules)


def in_turn(sims: Sequence[SimPeer], round_: int = 1) -> list[SimPeer]:
    """Return founders in the order in which they propose in the attempts of a round."""
    order = sorted(sims, key=lambda sim: sim.peer)
    first = round_ % len(order)
    return order[first:] + order[:first]
