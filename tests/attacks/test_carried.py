"""Messages that break a rule, and that an honest member has carried: their author is charged for them, and nobody else."""

from functools import partial

import pytest
import trio
from attacks.voters import founded, in_turn, until_done
from flockstep.collectives.allreduce.actions import OutcomeKind
from flockstep.peer import wire
from flockstep.peer.memory.network import run_virtual
from flockstep.peer.wire.signed import sign
from support.liars import events_of
from support.swarm import SimSwarm, with_swarm


@pytest.mark.parametrize("is_of_another_round", [False, True])
def test_who_passes_a_false_proposal_on_is_not_charged_for_it(is_of_another_round: bool) -> None:
    """The liar has cut its connection to a member that trains; two others pass on to that one what it signs."""

    async def body(swarm: SimSwarm) -> None:
        liar, victim, *others = in_turn(swarm.sims)
        await until_done(swarm.sims, 1)
        certificate = victim.averager.certificate
        assert certificate is not None
        swarm.network.cut_pair(liar.peer, victim.peer)
        await trio.sleep(30)
        assert (await victim.round()).kind is OutcomeKind.VOID  # It was alone, asked its relays, and trains again.
        assert victim.averager._relays.sought == {liar.peer}
        value = certificate.value if is_of_another_round else b"no value"
        proposal = wire.Propose(victim.averager._vote_on().slot, value, b"r" * 32)
        liar.node.send([sim.peer for sim in others], sign(liar.identity, proposal))
        await trio.sleep(30)
        honest = [victim, *others]
        assert {event["peer"] for event in events_of([victim], "peer.charged")} == {liar.peer}
        assert {event["peer"] for event in events_of(honest, "peer.charged")} == {liar.peer}
        assert {event["peer"] for event in events_of(honest, "peer.lost")} <= {liar.peer}

    run_virtual(partial(with_swarm, 5, body, cells=12, charter=founded(5)))
