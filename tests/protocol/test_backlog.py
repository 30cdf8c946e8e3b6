"""Answers and bulk bytes that nobody reads: what they cost their asker, and what is left for the others."""

from collections.abc import Awaitable, Callable

import pytest
import trio
from flockstep.peer import wire
from flockstep.peer.base.config import PeerConfig
from flockstep.peer.base.errors import StreamClosed
from flockstep.peer.base.transport import Stream, Transport
from flockstep.peer.identity import Identity
from flockstep.peer.log.telemetry import Event, Telemetry
from flockstep.peer.memory.network import MemoryNetwork, run_virtual
from flockstep.peer.memory.stream import STREAM_WINDOW
from flockstep.peer.node import bulk, node
from flockstep.peer.node.bulk import BULK_PROTOCOL
from flockstep.peer.node.node import Node
from flockstep.peer.node.session import ASK, MAX_OPEN_ASKS, SESSION_PROTOCOL, _packet
from flockstep.peer.wire.framing import frame

SERVER, READER, OTHER = (Identity.from_seed(bytes([seed]) * 32) for seed in (1, 2, 3))
PAGE = wire.LedgerPage((bytes(60_000),) * 16)
QUESTION = _packet(ASK, 1, wire.pack(wire.LedgerAsk("run", 1, 16)))


class Party:
    """A node that answers with pages of 960 kB, and transports that ask it."""

    def __init__(self, network: MemoryNetwork, server: Node, events: list[Event]) -> None:
        self.server, self.events = server, events
        self.asked: list[str] = []
        self.page = PAGE
        self.reader, self.other = (network.transport(one.peer_id, telemetry=Telemetry()) for one in (READER, OTHER))
        server.on_ask(wire.LedgerAsk, self.answer)

    async def answer(self, peer: str, question: wire.LedgerAsk) -> wire.LedgerPage:
        self.asked.append(peer)
        return self.page

    async def stream(self, asker: Transport, protocol: str = SESSION_PROTOCOL) -> Stream:
        await asker.connect(self.server.peer_id, self.server.transport.addresses())
        return await asker.open_stream(self.server.peer_id, protocol)

    def lost(self, asker: Transport) -> list[str]:
        mine = [event for event in self.events if event["event"] == "stream.lost" and event["peer"] == asker.peer_id]
        return [str(event["reason"]) for event in mine]


def run_test(body: Callable[[Party], Awaitable[None]]) -> None:
    async def main() -> None:
        network, events = MemoryNetwork(latency=0.01), list[Event]()
        log = Telemetry(clock=trio.current_time)
        log.subscribe(events.append)
        async with network.open():
            transport = network.transport(SERVER.peer_id, telemetry=log)
            async with Node(transport, SERVER, PeerConfig(), log, inline=True) as server:
                await body(Party(network, server, events))

    run_virtual(main)


async def is_open(stream: Stream) -> bool:
    """Whether a stream with something to read was not reset."""
    try:
        return bool(await stream.receive_some(1))
    except StreamClosed:
        return False


async def test_a_peer_that_asks_and_does_not_read_loses_its_stream(party: Party, /) -> None:
    stream = await party.stream(party.reader)
    for _ in range(40):
        await stream.send_all(QUESTION)
    await trio.sleep(5)
    assert party.lost(party.reader) == [f"{READER.peer_id} leaves more than {node.MAX_UNREAD_ANSWERS} bytes unread"]
    assert party.server._answers.total == 0
    assert not await is_open(stream)


async def test_the_unread_answers_of_all_streams_of_a_peer_count_together(party: Party, /) -> None:
    streams = [await party.stream(party.reader) for _ in range(4)]
    for stream in streams:
        await stream.send_all(QUESTION * 2)
    await trio.sleep(5)
    assert len(party.lost(party.reader)) >= 1
    assert party.server._answers.total <= node.MAX_UNREAD_ANSWERS


async def test_an_answer_keeps_its_slot_until_it_is_read(party: Party, /) -> None:
    party.page = wire.LedgerPage((bytes(50_000),) * 2)
    stream = await party.stream(party.reader)
    await stream.send_all(QUESTION * 40)
    await trio.sleep(1)
    in_window = STREAM_WINDOW // 100_000
    assert len(party.asked) <= in_window + MAX_OPEN_ASKS
    read = 0
    while read < 40 * 100_000:
        read += len(await stream.receive_some(1 << 16))
    assert len(party.asked) == 40


def test_beyond_what_is_there_for_all_a_stranger_is_cut_off_before_a_member(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "MAX_UNREAD_ANSWERS_IN_ALL", 3_000_000)

    async def body(party: Party) -> None:
        party.server.prefer(frozenset({READER.peer_id}).__contains__)
        member, stranger = await party.stream(party.reader), await party.stream(party.other)
        await stranger.send_all(QUESTION * 2)
        await trio.sleep(1)
        await member.send_all(QUESTION * 4)
        await trio.sleep(1)
        assert [reason.split()[0] for reason in party.lost(party.other)] == [OTHER.peer_id]
        assert not party.lost(party.reader)
        assert await is_open(member)
        assert not await is_open(stranger)

    run_test(body)


@pytest.mark.parametrize(("protocol", "limit"), [(SESSION_PROTOCOL, 4), (BULK_PROTOCOL, 8)])
async def test_of_too_many_streams_the_oldest_is_reset(party: Party, /, protocol: str, limit: int) -> None:
    assert limit == {SESSION_PROTOCOL: node.MAX_CONTROL_STREAMS, BULK_PROTOCOL: bulk.MAX_SERVED_STREAMS}[protocol]

    key = bytes(32)
    party.server.blobs.put(key, bytes(3 << 20))
    question = QUESTION if protocol == SESSION_PROTOCOL else frame(wire.pack(wire.Fetch(key, 0)))
    streams = [await party.stream(party.reader, protocol) for _ in range(limit + 1)]
    await trio.sleep(1)
    assert party.lost(party.reader) == [f"{READER.peer_id} has opened more than {limit} such streams"]
    assert not await is_open(streams[0])
    for stream in streams[1:]:
        await stream.send_all(question)
        assert await is_open(stream)


def test_bulk_bytes_that_nobody_reads_are_counted_and_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "MAX_UNREAD_BULK_IN_ALL", 3 << 20)

    async def body(party: Party) -> None:
        key = bytes(32)
        party.server.blobs.put(key, bytes(4 << 20))
        for asker in (party.reader, party.other):
            for _ in range(2):
                stream = await party.stream(asker, BULK_PROTOCOL)
                await stream.send_all(frame(wire.pack(wire.Fetch(key, 0))))
        await trio.sleep(1)
        assert len(party.lost(party.reader) + party.lost(party.other)) == 2  # Both streams of one of them.
        assert party.server._bulk._backlog.total <= 3 << 20

    run_test(body)
