"""A silent peer is lost at the failure detector's timeout, and no more is awaited of it."""

from collections.abc import Awaitable, Callable

import pytest
import trio
from flockstep.peer import wire
from flockstep.peer.base.config import PeerConfig
from flockstep.peer.base.digest import digest
from flockstep.peer.base.errors import StreamClosed
from flockstep.peer.base.transport import Stream
from flockstep.peer.identity import Identity
from flockstep.peer.log.telemetry import Event, Telemetry
from flockstep.peer.memory.network import MemoryNetwork, run_virtual
from flockstep.peer.memory.peer import MemoryTransport
from flockstep.peer.node import bulk
from flockstep.peer.node.node import MAX_MISSED_BEATS, Node
from flockstep.peer.node.session import SESSION_PROTOCOL, message_packet
from flockstep.peer.wire.framing import frame

ANNA, BERT = (Identity.from_seed(bytes([n]) * 32) for n in (1, 2))
BEAT = 1.0


async def send_nothing(stream: Stream) -> None:
    await trio.sleep_forever()


def with_silent_bert(body: Callable[[Node, list[Event], MemoryTransport], Awaitable[None]]) -> None:
    """Anna watches Bert, who takes connections and bytes and never says a word, like a process that is stopped."""

    async def main() -> None:
        network, events = MemoryNetwork(latency=0.01), list[Event]()
        async with network.open():
            telemetry = Telemetry(clock=trio.current_time)
            telemetry.subscribe(events.append)
            silent = network.transport(BERT.peer_id, telemetry=Telemetry())
            for protocol in (SESSION_PROTOCOL, bulk.BULK_PROTOCOL):
                silent.handle(protocol, send_nothing)
            transport = network.transport(ANNA.peer_id, telemetry=telemetry)
            config = PeerConfig(beat_outside=BEAT)
            async with Node(transport, ANNA, config, telemetry, inline=True) as node:
                node.learn(BERT.peer_id, silent.addresses())
                await trio.sleep(0.3 * BEAT)  # So that silence does not run out at a beat.
                node.watch([BERT.peer_id])
                with trio.fail_after(60 * BEAT):  # Of virtual time: what waits for Bert would wait for ever.
                    await body(node, events, silent)

    run_virtual(main)


def test_silence_is_noticed_when_it_has_lasted_and_not_a_beat_later() -> None:
    async def body(node: Node, events: list[Event], bert: MemoryTransport) -> None:
        began, lost = trio.current_time(), trio.Event()
        node.on_lost(lambda peer, reason: lost.set())
        await lost.wait()
        assert trio.current_time() - began == pytest.approx(MAX_MISSED_BEATS * BEAT)

    with_silent_bert(body)


def stand_still(seconds: float) -> None:
    """Let the event loop do nothing for so long, like a process that is stopped."""
    trio.lowlevel.current_clock().deadline_to_sleep_time(trio.current_time() + seconds)


def test_a_pause_of_ones_own_is_not_the_silence_of_another() -> None:
    """Bert's beat comes while Anna's loop stands still, and she has not read it when his silence seems to have lasted."""

    async def body(node: Node, events: list[Event], bert: MemoryTransport) -> None:
        began = trio.current_time()
        await bert.connect(ANNA.peer_id, node.transport.addresses())
        stream = await bert.open_stream(ANNA.peer_id, SESSION_PROTOCOL)
        await trio.sleep_until(began + (MAX_MISSED_BEATS - 0.001) * BEAT)
        await stream.send_all(message_packet(wire.Beat()))
        stand_still(0.9 * BEAT)
        await trio.sleep(BEAT)
        assert [event["event"] for event in events] == ["peer.overslept"]
        assert node.watched == {BERT.peer_id}

    with_silent_bert(body)


def test_pauses_of_ones_own_keep_nobody_who_is_gone() -> None:
    async def body(node: Node, events: list[Event], bert: MemoryTransport) -> None:
        lost = trio.Event()
        node.on_lost(lambda peer, reason: lost.set())
        await trio.sleep((MAX_MISSED_BEATS - 0.1) * BEAT)
        stand_still(20 * BEAT)
        back = trio.current_time()
        await lost.wait()
        assert trio.current_time() == pytest.approx(back + BEAT)

    with_silent_bert(body)


def test_bulk_bytes_that_come_show_life_where_no_beat_gets_through() -> None:
    """On a line that is full a beat waits behind the bytes that were sent before it."""

    async def body(node: Node, events: list[Event], bert: MemoryTransport) -> None:
        pieces, size = 5, 1000
        blob = bytes(pieces * size)

        async def serve_slowly(stream: Stream) -> None:
            await stream.receive_some(size)
            await stream.send_all(frame(wire.pack(wire.Serve(len(blob), ""))))
            for start in range(0, len(blob), size):
                await trio.sleep((MAX_MISSED_BEATS - 0.5) * BEAT)
                await stream.send_all(blob[start : start + size])
            await trio.sleep_forever()

        bert.handle(bulk.BULK_PROTOCOL, serve_slowly)
        assert await node.fetch(BERT.peer_id, digest(blob), len(blob)) == blob
        last, lost = trio.current_time(), trio.Event()
        node.on_lost(lambda peer, reason: lost.set())
        await lost.wait()
        assert trio.current_time() == pytest.approx(last + MAX_MISSED_BEATS * BEAT)

    with_silent_bert(body)


def test_a_fetch_from_a_peer_that_is_lost_ends_with_it_and_the_next_one_does_not_begin() -> None:
    async def body(node: Node, events: list[Event], bert: MemoryTransport) -> None:
        began = trio.current_time()
        with pytest.raises(StreamClosed, match=r"is lost: silent for 3\.0 s"):
            await node.fetch(BERT.peer_id, bytes(32), 1000)
        assert trio.current_time() - began == pytest.approx(MAX_MISSED_BEATS * BEAT, abs=0.2)
        again = trio.current_time()
        with pytest.raises(StreamClosed, match="is lost"):
            await node.fetch(BERT.peer_id, bytes(32), 1000)
        assert trio.current_time() == again
        node.watch([BERT.peer_id])
        with trio.move_on_after(BEAT) as waiting:
            await node.fetch(BERT.peer_id, bytes(32), 1000)
        assert waiting.cancelled_caught  # It is asked again once it counts again.

    with_silent_bert(body)
