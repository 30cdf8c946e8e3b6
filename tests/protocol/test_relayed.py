"""Who is reached through a relay only: it owns no part of a round, and contributes and receives like everybody else."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from flockstep.collectives.chain.certificate import check_certificate, verify
from flockstep.collectives.round.actions import OutcomeKind
from flockstep.peer.memory.network import run_virtual
from flockstep.peer.transport import Climber
from support.swarm import Bird, Flock, all_at_once, with_flock

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


def owned(bird: Bird) -> dict[str, int]:
    """How many cells each member owned in the last round."""
    certificate = bird.averager.certificate
    assert certificate is not None
    roster, _, _ = check_certificate(certificate, verify)
    return {peer: high - low for peer, (low, high) in zip(roster.members, pairwise(roster.bounds), strict=True)}


@pytest.mark.parametrize("num_relayed", [1, 2, 3, PEERS])
def test_a_relayed_peer_owns_no_part_unless_nobody_else_can(num_relayed: int) -> None:
    async def body(flock: Flock) -> None:
        relayed = flock.birds[:num_relayed]
        for bird in relayed:
            bird.node.transport = BehindRelay(bird.node.transport)
            assert isinstance(bird.node.transport, Climber)
        await all_at_once(flock.birds, rounds=2)
        parts = owned(flock.birds[0])
        for bird in flock.birds:
            assert bird.outcomes[-1].kind is OutcomeKind.DONE
            assert len(bird.outcomes[-1].cut) == PEERS
            assert (parts[bird.peer] == 0) == (bird in relayed and num_relayed < PEERS)
        assert len({bird.root for bird in flock.birds}) == 1

    run_virtual(lambda: with_flock(PEERS, body))
