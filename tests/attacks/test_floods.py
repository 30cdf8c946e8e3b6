"""What strangers and members send in bulk: what is kept of it, what is verified, and what the others notice."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
import trio
from attacks.voters import founded, in_turn, until_done
from flockstep.collectives.accountability import evidence, waiting
from flockstep.collectives.chain.certificate import genesis
from flockstep.collectives.driver.hints import MAX_HINTS
from flockstep.collectives.driver.incoming import MAX_WAITS
from flockstep.collectives.round import early
from flockstep.collectives.round.early import EarlyMessages
from flockstep.dht.directory.memory import MemoryBoard, MemoryDirectory
from flockstep.dht.members.body import MemberBody, MemberState
from flockstep.dht.members.gossip import Gossip
from flockstep.dht.members.table import MemberTable
from flockstep.dht.published import validate_published
from flockstep.peer import wire
from flockstep.peer.base.config import PeerConfig
from flockstep.peer.base.digest import digest, keyed
from flockstep.peer.base.errors import StreamClosed
from flockstep.peer.identity import Identity
from flockstep.peer.log.telemetry import Event, Telemetry
from flockstep.peer.memory.network import MemoryNetwork, run_virtual
from flockstep.peer.node import bulk
from flockstep.peer.node import node as node_file
from flockstep.peer.node.node import Node
from flockstep.peer.wire.framing import frame
from flockstep.peer.wire.signed import sign
from support.certificates import certify
from support.liars import events_of
from support.swarm import RUN, SimPeer, SimSwarm, all_at_once, with_swarm

STRANGER, *KEYS = (Identity.from_seed(bytes([100 + number]) * 32) for number in range(12))
LONG = 48_000
"""Bytes of the longest value: that of a full roster with invitations."""


def run_rounds(count: int, body: Callable[[SimSwarm], Awaitable[None]], **options: Any) -> None:
    run_virtual(partial(with_swarm, count, body, cells=12, **options))


@asynccontextmanager
async def stranger(swarm: SimSwarm, identity: Identity = STRANGER) -> AsyncIterator[Node]:
    """A node that knows the others, and that none of them knows."""
    telemetry = Telemetry(clock=trio.current_time)
    transport = swarm.network.transport(identity.peer_id, telemetry=telemetry)
    async with Node(transport, identity, PeerConfig(), telemetry, inline=True) as node:
        for sim in swarm.sims:
            node.learn(sim.peer, (f"/memory/{sim.peer}",))
        yield node


def refused(sim: SimPeer) -> set[object]:
    return {event["reason"] for event in events_of([sim], "message.refused")}


def void(number: int, round_: int = 1) -> wire.Void:
    return wire.Void(wire.Slot(RUN, round_, genesis(RUN), number), "x")


def propose(number: int, round_: int = 1, size: int = LONG) -> wire.Propose:
    """Return a proposal of junk, of so many bytes."""
    return wire.Propose(wire.Slot(RUN, round_, genesis(RUN), number), bytes(size), b"")


def sketch(number: int, round_: int = 1) -> wire.Sketch:
    """Return the longest message of a round's data."""
    slot = wire.Slot(RUN, round_, genesis(RUN), number)
    return wire.Sketch(slot, bytes(32), (), bytes(wire.MAX_SKETCH_BYTES))


def ready(round_: int = 1) -> wire.Ready:
    return wire.Ready(wire.Slot(RUN, round_, genesis(RUN)), bytes(32), 1, 1.0, 1.0, bytes(32))


def test_of_strangers_nothing_is_kept_and_nothing_is_verified() -> None:
    async def body(swarm: SimSwarm) -> None:
        target = swarm.sims[0]
        async with stranger(swarm) as node:
            for key in KEYS:
                # Were they verified, the wrong signatures would be charged.
                word = sign(key, propose(0, round_=10**9))
                node.send(target.peer, wire.Signed(word.sender, word.code, word.payload, bytes(64)))
                node.send(target.peer, sign(key, ready()))
            false = certify(None, 1, roster=KEYS)
            node.send(target.peer, wire.Certificate(false.slot, false.value, false.voters, (bytes(64),) * 10))
            await trio.sleep(5)
        averager = target.averager
        assert (averager._early.num_bytes, averager._newcomers._kept, averager._vote) == (0, {}, None)
        assert averager._conduct._witness.num_bytes == 0
        assert not averager.behind
        assert not events_of([target], "peer.charged")
        assert refused(target) == {
            "it or the signer of its message is no member",
            "a stranger's certificate is not checked",
        }

    run_rounds(3, body)


def test_strangers_do_not_speak_for_members_nor_members_for_strangers() -> None:
    async def body(swarm: SimSwarm) -> None:
        member, target, *_ = swarm.sims
        async with stranger(swarm) as node:
            node.send(target.peer, sign(member.identity, ready()))
            member.node.send(target.peer, sign(STRANGER, ready()))
            await trio.sleep(1)
        assert not target.averager.ready()
        assert target.node._refusals.counts.total() == 2

    run_rounds(3, body)


def test_the_ready_of_a_newcomer_that_overtakes_its_record_is_heard_once_that_is_here() -> None:
    async def body(swarm: SimSwarm) -> None:
        target = swarm.sims[0]
        async with stranger(swarm) as node:
            node.send(target.peer, sign(STRANGER, ready()))
            await trio.sleep(1)
            assert not target.averager.ready()
            target.node.prefer(frozenset({STRANGER.peer_id}).__contains__)
            target.averager.add_member(STRANGER.peer_id)
            assert target.averager.ready() == {STRANGER.peer_id}

    run_rounds(3, body)


def test_few_newcomers_are_remembered_and_a_long_ready_is_not() -> None:
    async def body(swarm: SimSwarm) -> None:
        target = swarm.sims[0]
        for number in range(MAX_HINTS + 2):
            identity = Identity.from_seed(number.to_bytes(32, "big"))
            target.averager._receive(identity.peer_id, sign(identity, ready()))
        assert len(target.averager._newcomers._kept) == MAX_HINTS
        word = sign(STRANGER, ready())
        target.averager._receive(STRANGER.peer_id, wire.Signed(word.sender, word.code, bytes(5000), word.signature))
        assert STRANGER.peer_id not in target.averager._newcomers._kept

    run_rounds(2, body)


def test_early_messages_have_a_budget_for_each_and_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = EarlyMessages()
    monkeypatch.setattr(early, "EARLY_BYTES_PER_PEER", 300_000)
    for number in range(14):
        message = sketch(number)
        loser = kept.add(sign(KEYS[0], message), message)
    assert loser == KEYS[0].peer_id
    assert kept.num_bytes <= early.EARLY_BYTES_PER_PEER
    for number in range(40):
        short = void(number)
        loser = kept.add(sign(KEYS[1], short), short)
    assert loser == KEYS[1].peer_id
    monkeypatch.setattr(early, "EARLY_BYTES", 300_000)
    for key in KEYS[2:]:
        message = sketch(0)
        kept.add(sign(key, message), message)
        assert kept.num_bytes <= 300_000
    kept.forget(KEYS[1].peer_id)
    taken = kept.take(9)
    assert KEYS[-1].peer_id in {signed.sender for signed, _ in taken}
    assert KEYS[1].peer_id not in {signed.sender for signed, _ in taken}
    assert (kept.num_bytes, kept.take(9)) == (0, [])


def test_what_a_running_attempt_keeps_of_peers_outside_of_it_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flockstep.collectives.driver.rounds.EARLY_BYTES", 3000)

    async def body(swarm: SimSwarm) -> None:
        first, *others = swarm.sims
        first.node.prefer(frozenset(key.peer_id for key in KEYS).__contains__)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(first.round)
            await trio.sleep(0.1)
            for key in KEYS:
                commit = wire.Commit(wire.Slot(RUN, 1, genesis(RUN)), bytes(32), 0, 0, 0.0, (bytes(32),) * 16)
                first.averager._receive(key.peer_id, sign(key, commit))
            nursery.start_soon(all_at_once, others)
        assert "more than an attempt keeps of peers outside of it" in refused(first)
        assert first.averager.round == 2

    run_rounds(4, body)


def test_certificates_are_no_evidence_about_keys_that_nobody_knows() -> None:
    async def body(swarm: SimSwarm) -> None:
        carrier, target, *_ = swarm.sims
        for mark in (b"one", b"another"):
            carrier.node.send(target.peer, certify(None, 100, roster=KEYS[:4], mark=mark))
            await trio.sleep(1)
        assert not events_of([target], "peer.banned")

    run_rounds(2, body)


def test_a_member_that_sends_many_certificates_is_charged_for_their_signatures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flockstep.peer.node.guard.BURST_SIGNATURES", 300)

    async def body(swarm: SimSwarm) -> None:
        liar, target, *_ = swarm.sims
        for _ in range(6):
            liar.node.send(target.peer, certify(None, 100, roster=[sim.identity for sim in swarm.sims]))
        await trio.sleep(1)
        assert [event["peer"] for event in events_of([target], "peer.charged")] == [liar.peer]

    run_rounds(3, body)


def test_few_claims_wait_for_their_exhibits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "MAX_AWAITED_IN_ALL", 0)

    async def body(swarm: SimSwarm) -> None:
        carrier, target, *_ = swarm.sims
        target.node.learn(KEYS[0].peer_id, ("/memory/nobody",))
        slot = wire.Slot(RUN, 1, genesis(RUN))
        seat = (wire.Seat(1.0, 0),)
        roster = sign(KEYS[0], wire.Roster(slot, bytes(32), (KEYS[0].peer_id,), (0, 12), seat, b"\1", bytes(32)))
        commit = sign(KEYS[0], wire.Commit(slot, roster.hash, 0, 0, 0.0, (bytes(32),)))
        claim = sign(carrier.identity, evidence.claim_of(RUN, (commit, roster)))
        carrier.node.send(target.peer, wire.Accusations((wire.schema.encode(claim),)))
        await trio.sleep(1)
        assert [event["peer"] for event in events_of([target], "evidence.missing")] == [carrier.peer]

    run_rounds(3, body)


def test_a_node_remembers_a_bounded_number_of_peers_and_answers_no_strangers_beat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_file, "MAX_LEARNED", 20)

    async def body(swarm: SimSwarm) -> None:
        target = swarm.sims[0]
        for number in range(50):
            target.node.learn(f"peer {number}", ("/memory/nobody",))
        assert len(target.node._addresses) <= 20
        assert all(target.node.knows(sim.peer) for sim in swarm.sims[1:])  # They are watched.
        async with stranger(swarm) as node:
            node.send(target.peer, wire.Beat(echo=True))
            await trio.sleep(1)
            assert STRANGER.peer_id not in target.node._last_received
            assert STRANGER.peer_id not in target.node._sessions

    run_rounds(3, body)


def test_a_stranger_brings_its_own_record_and_no_others() -> None:
    async def main() -> None:
        network, board, events = MemoryNetwork(latency=0.01), MemoryBoard(), list[Event]()
        async with network.open():
            log = Telemetry(clock=trio.current_time)
            log.subscribe(events.append)
            transport = network.transport(KEYS[0].peer_id, telemetry=log)
            async with Node(transport, KEYS[0], PeerConfig(), log, inline=True) as node:
                directory = MemoryDirectory(board, KEYS[0].peer_id, transport.addresses(), validate_published)
                table = MemberTable(RUN, KEYS[0].peer_id)
                gossip = Gossip(node, table, directory, RUN, seed=0)
                body = MemberBody(state=MemberState.TRAINING)
                tables = {one: MemberTable(RUN, one.peer_id) for one in (STRANGER, *KEYS[1:4])}
                own, *others = (table.update_own(one, body, 0.0).encode() for one, table in tables.items())
                node._note_arrival(STRANGER.peer_id)  # As any message of it does.
                gossip._receive_rumours(STRANGER.peer_id, wire.Members((own, *others)))
                assert gossip.presence.others() == (STRANGER.peer_id,)
                assert [event["reason"] for event in events if event["event"] == "message.refused"] == [
                    "a stranger brings records of others"
                ]
                gossip._receive_rumours(STRANGER.peer_id, wire.Members(tuple(others)))  # It is a member now.
                assert len(table) == 4
                assert gossip.presence.others() == (STRANGER.peer_id,)
                node.watch(())  # As in a crowd, where heartbeats go to a few.
                assert node.is_member(STRANGER.peer_id)

    run_virtual(main)


def test_who_waits_for_much_that_is_still_to_come_is_charged_and_strangers_wait_for_nothing() -> None:
    async def body(swarm: SimSwarm) -> None:
        sender, target, liar, honest, *others = in_turn(swarm.sims)[::-1]

        async def ask(asker: Node) -> str:
            """Ask for a part that its sender does not deliver; returns how that ended."""
            attempt, sending = target.averager._work, sender.averager._work
            assert attempt is not None
            assert sending is not None
            part = attempt.machine.exchange.members.index(target.peer)
            name = keyed("part of a contributor", sender.peer.encode(), digest(sending.mine[part]))
            asker.learn(target.peer, target.node.transport.addresses())
            await asker.transport.connect(target.peer, target.node.transport.addresses())
            stream = await asker.transport.open_stream(target.peer, bulk.BULK_PROTOCOL)
            await stream.send_all(frame(wire.pack(wire.Fetch(name, 0))))
            with trio.move_on_after(0.1):
                try:
                    return "answered" if await stream.receive_some(1 << 10) else "closed"
                except StreamClosed:
                    return "closed"
            return "waits"

        async def hang(name: bytes, reader: str) -> None:
            await trio.sleep_forever()

        async def withhold() -> None:
            while not (sender.averager._work and sender.averager._work.mine):  # noqa: ASYNC110
                await trio.sleep(0.01)  # Virtual time.
            find = sender.node.blobs.find
            sender.node.blobs.find = (  # type: ignore[method-assign]
                lambda key, reader: find(key, reader) if reader == sender.peer else None
            )
            sender.node.blobs.obtain = hang
            await trio.sleep(0.1)
            assert [await ask(liar.node) for _ in range(MAX_WAITS)] == ["waits"] * MAX_WAITS
            assert await ask(liar.node) == "closed"
            assert await ask(honest.node) == "waits"
            async with stranger(swarm) as node:
                assert await ask(node) == "answered"  # It is told that this is not here.

        async with trio.open_nursery() as nursery:
            nursery.start_soon(withhold)
            await until_done([target, honest, *others], 1, sender, liar)
        (charged,) = events_of(swarm.sims, "peer.charged")
        assert (charged["peer"], charged["step"]) == (liar.peer, bulk.BULK_PROTOCOL)

    run_rounds(7, body, charter=founded(7))
