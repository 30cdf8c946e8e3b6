"""Members that answer as slowly as they may: who joins or returns has the run's state all the same."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio
from flockstep.collectives.chain.chain import NOTHING, ChainLink, HeldChain
from flockstep.collectives.chain.packed import pack_certificate
from flockstep.collectives.chain.reader import ChainReader
from flockstep.collectives.chain.replay import LEDGER_ANSWER_SECONDS, in_my_order
from flockstep.dht.directory.memory import MemoryDirectory
from flockstep.dht.members.body import MemberBody, MemberState
from flockstep.dht.members.gossip import Gossip
from flockstep.dht.members.table import MemberTable
from flockstep.dht.published import validate_published
from flockstep.optim.member.catch_up import PROOF_PATIENCE
from flockstep.peer import wire
from flockstep.peer.base.config import PeerConfig
from flockstep.peer.base.errors import NetworkError
from flockstep.peer.identity import Identity
from flockstep.peer.log.telemetry import Telemetry
from flockstep.peer.node.node import Node
from support.certificates import grow
from support.migrants import PHASE, Town, found, in_town, wait_for
from support.restoring_peer import RestoringPeer, catch_up, run_rounds
from support.swarm import RUN, SimSwarm, identities

SLOW = 9.0
"""Virtual seconds before each answer, and each byte: less than any timeout."""


def trickles(liar: RestoringPeer) -> None:
    """Let a member send each byte of its outputs after a while."""

    async def send(stream: Any, blob: Any, request: wire.Fetch) -> None:
        for number in range(request.offset, len(blob)):
            await trio.sleep(SLOW)
            await stream.send_all(bytes(blob[number : number + 1]))

    liar.sim.node._bulk._send_memory = send  # type: ignore[method-assign]


@pytest.mark.parametrize("num_liars", [1, 3])
def test_holders_that_send_an_output_byte_by_byte_are_asked_once(tmp_path: Path, num_liars: int) -> None:
    async def body(swarm: SimSwarm, others: list[RestoringPeer], late: RestoringPeer) -> None:
        order = in_my_order(late.sim.peer, [other.sim.peer for other in others])
        for liar in (other for other in others if other.sim.peer in order[:num_liars]):
            trickles(liar)
        began = trio.current_time()
        with trio.fail_after(3600):
            await catch_up(late, others)
        assert (late.place.head, late.place.root) == (others[0].place.head, others[0].place.root)  # Copies differ in voters.
        assert trio.current_time() - began < 30 * (num_liars + 1)

    run_rounds(5, 5, body, tmp_path)


def test_certificates_that_come_one_by_one_have_the_time_of_a_page(tmp_path: Path) -> None:
    async def body(swarm: SimSwarm, others: list[RestoringPeer], late: RestoringPeer) -> None:
        liar = others[0]

        async def answer(peer: str, question: wire.LedgerAsk) -> wire.LedgerPage:
            await trio.sleep(SLOW)
            return wire.LedgerPage(liar.ledger.since(question.from_round, 1, max_bytes=1 << 20))

        nothing = HeldChain.of([], NOTHING)

        async def take(*_: object) -> bool:
            return True

        liar.sim.node.on_ask(wire.LedgerAsk, answer)
        began = trio.current_time()
        with pytest.raises(NetworkError):
            await ChainReader(late.sim.node, RUN, late.held.spec.charter).follow(nothing, liar.sim.peer, 6, take)
        assert trio.current_time() - began < LEDGER_ANSWER_SECONDS + 1

    run_rounds(3, 5, body, tmp_path)


async def state_heads(town: Town, ghost: Identity) -> None:
    """A free key that states one head of a chain of its own after the other, and takes its time to prove them."""
    transport, chain = town.network.transport(ghost.peer_id), grow(None, 300)
    async with Node(transport, ghost, PeerConfig(), Telemetry(), inline=True) as node:

        async def answer(peer: str, question: wire.LedgerAsk) -> wire.LedgerPage:
            await trio.sleep(SLOW)
            return wire.LedgerPage(tuple(map(pack_certificate, chain[question.from_round - 1 :][: question.limit])))

        async def announce() -> None:
            body = MemberBody(state=MemberState.TRAINING, addresses=transport.addresses(), layout=b"m" * 32)
            for certificate in chain[200:]:
                head = ChainLink.of(certificate).head
                gossip.announce(replace(body, round=head.round, head=head.hash, chain_tokens=head.tokens))
                await trio.sleep(5)

        node.on_ask(wire.LedgerAsk, answer)
        directory = MemoryDirectory(town.board, ghost.peer_id, transport.addresses(), validate_published)
        gossip = Gossip(node, MemberTable(RUN, ghost.peer_id), directory, RUN, seed=0)
        node.nursery.start_soon(announce)
        await gossip.run()


def test_a_free_key_that_proves_its_heads_slowly_keeps_nobody_from_joining_or_going_on(tmp_path: Path) -> None:
    async def body(town: Town) -> None:
        *holders, late = town.migrants(3)
        found(holders, late)
        town.start(tmp_path, *holders)
        await trio.sleep(1)
        await wait_for(lambda: holders[0].round == 2, 1000)
        town.nursery.start_soon(state_heads, town, identities(9)[8])
        await trio.sleep(10)
        began = trio.current_time()
        await holders[0].catch_up.reach(holders[0].gossip, 15.0)  # A keeper does so at each hint of another chain.
        assert trio.current_time() - began < 2 * PROOF_PATIENCE
        town.start(tmp_path, late)
        await trio.sleep(1)
        await wait_for(lambda: late.done > 0, 3000)
        assert trio.current_time() - began < 4 * PHASE

    in_town(body)
