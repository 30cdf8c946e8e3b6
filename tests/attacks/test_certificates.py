"""Foreign certificates: valid ones that my own quorum has not signed end no attempt of mine."""

from collections.abc import Sequence
from functools import partial

import pytest
import trio
from flockstep.collectives.chain.certificate import check_certificate, genesis
from flockstep.collectives.chain.quorum import quorum
from flockstep.collectives.codec import EMPTY
from flockstep.collectives.round.actions import OutcomeKind
from flockstep.dht.run.admission import OPEN, Charter
from flockstep.peer import wire
from flockstep.peer.config import PeerConfig
from flockstep.peer.identity import Identity
from flockstep.peer.memory.network import run_virtual
from flockstep.peer.node.node import Node
from flockstep.peer.telemetry import Telemetry
from flockstep.peer.wire.schema import encode
from flockstep.peer.wire.signed import verify_signed
from support.certificates import seats, signed
from support.liars import events_of
from support.swarm import RUN, SimSwarm, identities, with_swarm


def certificate(signers: Sequence[Identity], listed: Sequence[str], round_: int, previous: bytes) -> wire.Certificate:
    """Return a valid certificate of a roster that lists peers which have signed nothing."""
    slot = wire.Slot(RUN, round_, 0)
    members = (*(identity.peer_id for identity in signers), *listed)
    assert len(signers) >= quorum(len(members))
    bounds = tuple(range(len(members) + 1))
    roster = signed(signers[0], wire.Roster(slot, bytes(32), members, bounds, seats(len(members))))
    cut = signed(signers[0], wire.Cut(slot, roster.hash, 0, tuple(range(len(members))), bytes(32), ()))
    ack = wire.ResultAck(slot, cut.hash, (EMPTY,) * len(members), bytes(32), previous, 5)
    return wire.Certificate(slot, encode(roster), encode(cut), tuple(encode(signed(signer, ack)) for signer in signers))


@pytest.mark.parametrize("round_", [1, 2, 10**6])
@pytest.mark.parametrize("previous", [genesis(RUN), bytes(32)])
@pytest.mark.parametrize("charter", [OPEN, Charter(kind="allow", allowed=frozenset(one.peer_id for one in identities(10)))])
def test_whatever_certificate_a_third_or_a_stranger_makes_all_rounds_go_on(
    charter: Charter, round_: int, previous: bytes
) -> None:
    """Of a run in which anybody may take part a stranger with as many keys as it likes, else 3 of 10 members."""
    count = 4 if charter is OPEN else 10

    async def body(swarm: SimSwarm) -> None:
        honest = swarm.sims if charter is OPEN else swarm.sims[:7]
        names = [sim.peer for sim in honest]
        if charter is OPEN:
            keys = [Identity.from_seed(bytes([100 + number]) * 32) for number in range(9)]
            made = certificate(keys, names, round_, previous)
        else:
            made = certificate([sim.identity for sim in swarm.sims[7:]], names[:1], round_, previous)
        check_certificate(made, verify_signed, charter=charter)
        me, telemetry = Identity.from_seed(bytes(32)), Telemetry(clock=trio.current_time)

        async def tell(node: Node) -> None:
            while True:
                node.send(names, made)
                await trio.sleep(0.1)

        transport = swarm.network.transport(me.peer_id, telemetry=telemetry)
        async with Node(transport, me, PeerConfig(), telemetry, inline=True) as stranger, trio.open_nursery() as nursery:
            for name in names:
                stranger.learn(name, (f"/memory/{name}",))
            nursery.start_soon(tell, stranger if charter is OPEN else swarm.sims[9].node)
            await trio.sleep(0.5)
            for _ in range(3):
                async with trio.open_nursery() as rounds:
                    for sim in swarm.sims:
                        rounds.start_soon(sim.round)
            nursery.cancel_scope.cancel()
        assert {(outcome.kind, outcome.slot.attempt) for sim in honest for outcome in sim.outcomes} == {(OutcomeKind.DONE, 0)}
        refusal = "message.refused" if charter is OPEN else "certificate.hint"
        assert events_of(honest, refusal) or (round_ == 1 and charter is not OPEN)

    run_virtual(partial(with_swarm, count, body, cells=12, charter=charter))


@pytest.mark.parametrize("previous", [genesis(RUN), bytes(32)])
def test_a_certificate_that_my_quorum_signed_ends_my_attempt_where_it_continues_my_state(previous: bytes) -> None:
    async def body(swarm: SimSwarm) -> None:
        one, *others = swarm.sims
        base = one.root
        async with trio.open_nursery() as nursery:
            nursery.start_soon(one.round)
            await trio.sleep(0.2)
            slot = wire.Slot(RUN, 1, 0)
            signers = [sim.identity for sim in others]
            members = tuple(signer.peer_id for signer in signers)
            roster = signed(signers[0], wire.Roster(slot, base, members, (0, 4, 8, 12), seats(3)))
            cut = signed(signers[0], wire.Cut(slot, roster.hash, 0, (0, 1, 2), bytes(32), ()))
            ack = wire.ResultAck(slot, cut.hash, (EMPTY,) * 3, bytes(32), previous, 5)
            acks = tuple(encode(signed(signer, ack)) for signer in signers)
            others[2].node.send(one.peer, wire.Certificate(slot, encode(roster), encode(cut), acks))
            await trio.sleep(0.1)
            assert [outcome.kind for outcome in one.outcomes] == [OutcomeKind.BEHIND] * (previous == genesis(RUN))
            nursery.cancel_scope.cancel()

    run_virtual(partial(with_swarm, 4, body, cells=12))


def test_the_quorum_of_the_roster_that_i_acknowledged_is_mine_though_more_members_are_known() -> None:
    """Of ten members seven make a round; one of them hears none of the others' results."""

    async def body(swarm: SimSwarm) -> None:
        one, *others = swarm.sims[:7]
        receive = one.averager._receive

        def deaf(carrier: str, word: wire.Signed) -> None:
            if not isinstance(wire.opened(word), wire.ResultAck):
                receive(carrier, word)

        one.node.on_message(wire.Signed, deaf)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(one.round)
            async with trio.open_nursery() as rounds:
                for sim in others:
                    rounds.start_soon(sim.round)
            made = others[0].averager.certificate
            assert made is not None
            assert len(made.acks) < quorum(10)
            assert not one.outcomes
            others[0].node.send(one.peer, made)
        assert one.outcomes[0].kind is OutcomeKind.DONE
        assert one.root == others[0].root

    run_virtual(partial(with_swarm, 10, body, cells=12))
