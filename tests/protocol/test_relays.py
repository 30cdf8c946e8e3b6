"""Relays of statements against members that lie, ask for too much, or flood."""

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import trio
from flockstep.collectives.driver.relays import (
    MAX_OTHER_PAIRS,
    MAX_PAIRS,
    MAX_PASSED_BYTES,
    MAX_PASSED_MESSAGES,
    NUM_RELAYS,
    Relays,
)
from flockstep.peer import wire
from flockstep.peer.base.config import PeerConfig
from flockstep.peer.identity import Identity
from flockstep.peer.log.telemetry import Event, Telemetry
from flockstep.peer.memory.network import MemoryNetwork, run_virtual
from flockstep.peer.node.node import Node
from flockstep.peer.wire.signed import sign

RUN = "run"
SLOT = wire.Slot(RUN, 1, bytes(32))
IDENTITIES = [Identity.from_seed(bytes([seed + 1]) * 32) for seed in range(MAX_PAIRS + 4)]
NAMES = [identity.peer_id for identity in IDENTITIES]
VOTERS = NAMES[:3]


@dataclass
class Member:
    """A node with relays; it passes on what it receives from its author, as an averager does."""

    node: Node
    relays: Relays
    received: list[tuple[str, wire.Signed]] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    def named(self, event: str) -> list[Event]:
        return [record for record in self.events if record["event"] == event]


def with_members(count: int, body: Callable[[MemoryNetwork, list[Member]], Awaitable[None]]) -> None:
    """Run `body` with members that watch each other and have entered round 1."""

    async def live(network: MemoryNetwork, identity: Identity, members: list[Member], task_status: Any) -> None:
        telemetry = Telemetry(clock=trio.current_time)
        transport = network.transport(identity.peer_id, telemetry=telemetry)
        async with Node(transport, identity, PeerConfig(), telemetry, inline=True) as node:

            def held(peer: str) -> Iterable[wire.Signed]:
                return [signed for _, signed in member.received if signed.sender == peer]

            member = Member(node, Relays(node, RUN, held, lambda peer, reason: member.lost.append(peer), lambda: VOTERS))
            telemetry.subscribe(member.events.append)

            def receive(carrier: str, signed: wire.Signed) -> None:
                member.received.append((carrier, signed))
                member.relays.pass_on(1, signed.sender, signed)

            node.on_message(wire.Signed, receive)
            node.on_lost(lambda peer, reason: member.relays.lost(peer, reason, NAMES))
            members.append(member)
            member.relays.enter(1, 0, NAMES)
            task_status.started()
            await trio.sleep_forever()

    async def main() -> None:
        network, members = MemoryNetwork(latency=0.01), list[Member]()
        async with network.open(), trio.open_nursery() as nursery:
            for identity in IDENTITIES[:count]:
                await nursery.start(live, network, identity, members)
            for member in members:
                for name in NAMES[:count]:
                    member.node.learn(name, (f"/memory/{name}",))
                member.node.watch(NAMES[:count])
            await trio.sleep(20)
            await body(network, members)
            nursery.cancel_scope.cancel()

    run_virtual(main)


def test_nobody_else_can_foresee_who_is_asked_for_a_lost_member() -> None:
    """By a hash of what all know, all would ask the same two; each may leave out itself alone."""

    async def body(network: MemoryNetwork, members: list[Member]) -> None:
        asked = set()
        for member in members[:-1]:
            member.relays.lost(NAMES[len(members) - 1], "it broke", NAMES)
            asked.add(frozenset(member.relays._sought[NAMES[len(members) - 1]]))
        assert len(asked) > NUM_RELAYS + 1

    with_members(len(NAMES), body)


def void(author: int, text: str, round_: int = 1) -> wire.Signed:
    return sign(IDENTITIES[author], wire.Void(wire.Slot(RUN, round_, bytes(32)), text))


def test_what_was_said_before_and_after_a_pair_was_cut_arrives_once() -> None:
    async def body(network: MemoryNetwork, members: list[Member]) -> None:
        network.cut_pair(NAMES[0], NAMES[1])
        before, after = void(0, "before"), void(0, "after")
        members[0].node.send(NAMES[1:4], before)
        await trio.sleep(20)
        assert members[1].relays.sought == {NAMES[0]}
        assert members[1].lost == []
        members[0].node.send(NAMES[1:4], after)
        await trio.sleep(1)
        through = {carrier for carrier, _ in members[1].received}
        assert through <= set(NAMES[2:4])
        assert len(through) == NUM_RELAYS
        assert [signed for carrier, signed in members[1].received if carrier == NAMES[2]] == [before, after]
        assert members[2].lost == members[3].lost == []

    with_members(4, body)


def test_a_relay_in_another_round_says_that_it_has_lost_a_member_too() -> None:
    """Or that member would count as one that is here, and a stalled round would wait for it."""

    async def body(network: MemoryNetwork, members: list[Member]) -> None:
        for member, round_ in zip(members[1:], (7, 0, 3), strict=True):
            member.relays.enter(round_, 0, NAMES)
        network.kill(NAMES[0])  # Noticed by all at once.
        await trio.sleep(1)
        assert [member.lost for member in members[1:]] == [[NAMES[0]]] * 3

    with_members(4, body)


def test_a_relay_in_another_round_says_so_when_it_loses_a_member_later() -> None:
    async def body(network: MemoryNetwork, members: list[Member]) -> None:
        members[1].relays.enter(7, 0, NAMES)
        network.cut_pair(NAMES[0], NAMES[1])
        await trio.sleep(20)
        assert members[1].relays.sought == {NAMES[0]}
        network.cut(NAMES[0])
        await trio.sleep(20)
        assert members[1].lost == [NAMES[0]]

    with_members(4, body)


def test_who_has_no_relay_loses_a_member_at_once() -> None:
    async def body(network: MemoryNetwork, members: list[Member]) -> None:
        network.kill(NAMES[0])
        await trio.sleep(1)
        assert members[1].lost == [NAMES[0]]

    with_members(2, body)


def test_a_lost_relay_is_replaced() -> None:
    async def body(network: MemoryNetwork, members: list[Member]) -> None:
        network.cut_pair(NAMES[0], NAMES[1])
        await trio.sleep(20)
        network.kill(NAMES[2])
        network.kill(NAMES[3])
        await trio.sleep(1)
        members[0].node.send(NAMES[4:6], said := void(0, "after both relays may have failed"))
        await trio.sleep(1)
        assert said in [signed for _, signed in members[1].received]
        assert NAMES[0] not in members[1].lost

    with_members(6, body)


def test_a_liar_that_claims_to_have_lost_a_member_takes_it_from_nobody_alone() -> None:
    async def body(network: MemoryNetwork, members: list[Member]) -> None:
        network.cut_pair(NAMES[0], NAMES[1])
        await trio.sleep(20)
        for round_ in (0, 1, 2):
            members[2].node.send(NAMES[:], wire.Unheard(RUN, round_, NAMES[0], asks=False))
        await trio.sleep(1)
        assert members[1].relays.sought == {NAMES[0]}
        assert all(member.lost == [] for member in members)

    with_members(4, body)


def test_a_reader_is_served_with_few_authors_in_a_round_of_mine() -> None:
    async def body(network: MemoryNetwork, members: list[Member]) -> None:
        reader, relay = members[0], members[1]
        refused: list[wire.Unheard] = []
        reader.node.on_message(wire.Unheard, lambda peer, message: refused.append(message))
        for name in NAMES[2:]:
            reader.node.send(relay.node.peer_id, wire.Unheard(RUN, 1, name, asks=True))
        await trio.sleep(1)
        assert [it.peer for it in refused] == NAMES[2 + MAX_PAIRS :]
        for author in range(2, len(NAMES)):
            members[author].node.send(relay.node.peer_id, void(author, "to the relay"))
        reader.node.send(relay.node.peer_id, wire.Unheard(RUN, 99, NAMES[2], asks=True))
        await trio.sleep(30)
        assert {signed.sender for _, signed in reader.received} == set(NAMES[2 : 2 + MAX_PAIRS])
        assert any("round 99 is not mine" in str(event["reason"]) for event in relay.named("message.refused"))

    with_members(MAX_PAIRS + 4, body)


def test_many_keys_ask_for_no_more_than_a_bound_and_keep_no_voter_from_its_relay() -> None:
    async def body(network: MemoryNetwork, members: list[Member]) -> None:
        relay, refused = members[0], list[tuple[str, str]]()

        def note(reader: str, relay: str, message: wire.Unheard) -> None:
            refused.append((reader, message.peer))

        for reader in members[1:]:
            reader.node.on_message(wire.Unheard, partial(note, reader.node.peer_id))
        others = [member for member in members if member.node.peer_id not in VOTERS]
        assert len(others) * MAX_PAIRS > MAX_OTHER_PAIRS
        for _ in range(2):  # Asking for a pair again takes no more.
            for reader in others:
                for name in [name for name in NAMES[1:] if name != reader.node.peer_id][:MAX_PAIRS]:
                    reader.node.send(relay.node.peer_id, wire.Unheard(RUN, 1, name, asks=True))
            await trio.sleep(1)
        assert len(refused) == 2 * (len(others) * MAX_PAIRS - MAX_OTHER_PAIRS)
        members[1].node.send(relay.node.peer_id, wire.Unheard(RUN, 1, NAMES[2], asks=True))
        members[2].node.send(relay.node.peer_id, said := void(2, "for a voter"))
        relay.relays.pass_on(1, NAMES[2], said)
        await trio.sleep(1)
        assert said in [signed for carrier, signed in members[1].received if carrier == relay.node.peer_id]
        assert VOTERS[1] not in [name for name, _ in refused]

    with_members(MAX_PAIRS + 4, body)


def test_a_flood_of_an_author_is_passed_on_to_its_limits() -> None:
    async def body(network: MemoryNetwork, members: list[Member]) -> None:
        author, reader, relay = members[0], members[1], members[2]
        reader.node.send(relay.node.peer_id, wire.Unheard(RUN, 1, NAMES[0], asks=True))
        await trio.sleep(1)
        for number in range(MAX_PASSED_MESSAGES + 50):
            author.node.send(relay.node.peer_id, void(0, str(number)))
        await trio.sleep(30)
        assert len(reader.received) == MAX_PASSED_MESSAGES
        assert {event["peer"] for event in relay.named("message.refused")} == {NAMES[0]}
        reader.node.send(relay.node.peer_id, wire.Unheard(RUN, 1, NAMES[3], asks=True))
        await trio.sleep(1)
        long = sign(IDENTITIES[3], wire.Sketch(SLOT, bytes(32), (), bytes(24_576)))
        for number in range(MAX_PASSED_BYTES // 24_576 + 10):
            relay.relays.pass_on(1, NAMES[3], wire.Signed(NAMES[3], long.code, long.payload, bytes([number]) * 64))
        await trio.sleep(1)
        num_bytes = sum(len(signed.payload) for _, signed in reader.received if signed.sender == NAMES[3])
        assert MAX_PASSED_BYTES // 2 < num_bytes <= MAX_PASSED_BYTES

    with_members(4, body)


def test_nobody_but_members_is_served() -> None:
    async def body(network: MemoryNetwork, members: list[Member]) -> None:
        stranger, relay = members[0], members[1]
        relay.node.watch(NAMES[1:4])
        stranger.node.send(relay.node.peer_id, wire.Unheard(RUN, 1, NAMES[2], asks=True))
        members[3].node.send(relay.node.peer_id, wire.Unheard("another run", 1, NAMES[2], asks=True))
        await trio.sleep(1)
        relay.relays.pass_on(1, NAMES[2], void(2, "for members"))
        await trio.sleep(1)
        assert stranger.received == members[3].received == []

    with_members(4, body)


def test_a_statement_is_passed_on_once_and_pairs_last_as_long_as_their_round() -> None:
    async def body(network: MemoryNetwork, members: list[Member]) -> None:
        reader, relay = members[0], members[1]
        for round_ in (1, 2):
            reader.node.send(relay.node.peer_id, wire.Unheard(RUN, round_, NAMES[2], asks=True))
        await trio.sleep(1)
        said = [void(2, f"in round {round_}", round_) for round_ in (1, 2)]
        relay.relays.enter(2, 0, NAMES)
        for _ in range(2):
            for round_ in (1, 2):
                relay.relays.pass_on(round_, NAMES[2], said[round_ - 1])
        await trio.sleep(1)
        assert [signed for _, signed in reader.received] == said[1:]

    with_members(3, body)


def test_who_has_lost_many_seeks_few_and_loses_the_others() -> None:
    async def body(network: MemoryNetwork, members: list[Member]) -> None:
        alone = members[0]
        for name in NAMES[1:-2]:
            network.cut_pair(NAMES[0], name)
        await trio.sleep(30)
        assert len(alone.relays.sought) == MAX_PAIRS
        assert len(alone.lost) == len(NAMES[1:-2]) - MAX_PAIRS

    with_members(MAX_PAIRS + 4, body)
