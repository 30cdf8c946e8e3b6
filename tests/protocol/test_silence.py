"""A peer that falls silent: lost on the beat, and nothing more is awaited of it."""

from collections.abc import Awaitable, Callable

import pytest
import trio
from flockstep.peer.config import PeerConfig
from flockstep.peer.errors import StreamClosed
from flockstep.peer.identity import Identity
from flockstep.peer.memory.network import MemoryNetwork, run_virtual
from flockstep.peer.node.node import MAX_MISSED_BEATS, Node
from flockstep.peer.telemetry import Event, Telemetry
from flockstep.peer.transport import Stream

ANNA, BERT = (Identity.from_seed(bytes([n]) * 32) for n in (1, 2))
BEAT = 1.0


async def say_nothing(stream: Stream) -> None:
    await trio.sleep_forever()


def with_silent_bert(body: Callable[[Node, list[Event]], Awaitable[None]]) -> None:
    """Anna watches Bert, who takes connections and bytes and never says a word, like a process that is stopped."""

    async def main() -> None:
        network, events = MemoryNetwork(latency=0.01), list[Event]()
        async with network.open():
            telemetry = Telemetry(clock=trio.current_time)
            telemetry.subscribe(events.append)
            silent = network.transport(BERT.peer_id, telemetry=Telemetry())
            for protocol in ("/flockstep/control/1", "/flockstep/bulk/1"):
                silent.handle(protocol, say_nothing)
            transport = network.transport(ANNA.peer_id, telemetry=telemetry)
            config = PeerConfig(beat_outside=BEAT)
            async with Node(transport, ANNA, config, telemetry, inline=True) as node:
                node.learn(BERT.peer_id, silent.addresses())
                await trio.sleep(0.3 * BEAT)  # So that silence does not run out at a beat.
                node.watch([BERT.peer_id])
                with trio.fail_after(60 * BEAT):  # Of virtual time: what waits for Bert would wait for ever.
                    await body(node, events)

    run_virtual(main)


def test_silence_is_noticed_when_it_has_lasted_and_not_a_beat_later() -> None:
    async def body(node: Node, events: list[Event]) -> None:
        began, lost = trio.current_time(), trio.Event()
        node.on_lost(lambda peer, reason: lost.set())
        await lost.wait()
        assert trio.current_time() - began == pytest.approx(MAX_MISSED_BEATS * BEAT)

    with_silent_bert(body)


def test_a_fetch_from_a_peer_that_is_lost_ends_with_it_and_the_next_one_does_not_begin() -> None:
    async def body(node: Node, events: list[Event]) -> None:
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
