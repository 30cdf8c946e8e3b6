"""A peer that is reached through a relay only owns no part, and otherwise takes part."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from flockstep.collectives.allreduce.actions import OutcomeKind
from flockstep.collectives.chain.certificate import check_certificate
from flockstep.peer.base.transport import Climber
from flockstep.peer.memory.network import run_virtual
from flockstep.peer.wire.signed import verify_signed
from support.swarm import SimPeer, SimSwarm, all_at_once, with_swarm

PEERS = 4


class BehindRelay:
    """A transport that knows that strangers reach it through a relay only; otherwise that of the network in memory."""

    is_relayed = True

    def __init__(self, transport: Any) -> None:
        self._transport = transport

    def on_climb(self, handler: Callable[[str], None]) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


def owned(sim: SimPeer) -> dict[str, int]:
    """How many cells each member owned in the last round."""
    certificate = sim.averager.certificate
    assert certificate is not None
    roster = check_certificate(certificate, verify_signed)
    return {peer: high - low for peer, (low, high) in zip(roster.members, pairwise(roster.bounds), strict=True)}


@pytest.mark.parametrize("num_relayed", [1, 2, 3, PEERS])
def test_a_relayed_peer_owns_no_part_unless_nobody_else_can(num_relayed: int) -> None:
    async def body(swarm: SimSwarm) -> None:
        relayed = swarm.sims[:num_relayed]
        for sim in relayed:
            sim.node.transport = BehindRelay(sim.node.transport)
            assert isinstance(sim.node.transport, Climber)
        await all_at_once(swarm.sims, rounds=2)
        parts = owned(swarm.sims[0])
        for sim in swarm.sims:
            assert sim.outcomes[-1].kind is OutcomeKind.DONE
            assert len(sim.outcomes[-1].cut) == PEERS
            assert (parts[sim.peer] == 0) == (sim in relayed and num_relayed < PEERS)
        assert len({sim.root for sim in swarm.sims}) == 1

    run_virtual(lambda: with_swarm(PEERS, body))
