"""The network in memory: its figures are exact, and a seed gives one trace."""

import gc
import weakref

import pytest
import trio
import trio.testing
from flockstep.peer.base.errors import ProtocolViolation, StreamClosed
from flockstep.peer.base.transport import EagerStream, Rung, Stream, Traffic
from flockstep.peer.log.telemetry import Event, Telemetry
from flockstep.peer.memory.network import MemoryNetwork, run_virtual
from flockstep.peer.memory.peer import MemoryTransport
from flockstep.peer.memory.stream import SEGMENT, STREAM_WINDOW
from support.memory_peers import DEAF, ECHO, SINK, dial, plug, receive_exactly, virtually


def test_latency_is_exact() -> None:
    async def body(network: MemoryNetwork) -> None:
        a, b = plug(network, "a"), plug(network, "b")
        await a.connect("b", b.addresses())
        assert trio.current_time() == pytest.approx(0.1)
        assert a.connected() == {"b"}
        assert b.connected() == {"a"}
        assert a.rung("b") is Rung.DIRECT
        stream = await a.open_stream("b", ECHO)
        assert stream.remote == "b"
        assert trio.current_time() == pytest.approx(0.2)
        await stream.send_all(b"hello")
        assert trio.current_time() == pytest.approx(0.2)
        assert await stream.receive_some(100) == b"hello"
        assert trio.current_time() == pytest.approx(0.3)
        assert a.traffic() == b.traffic() == Traffic(sent=5, received=5)

    virtually(MemoryNetwork(latency=0.05), body)


@pytest.mark.parametrize("shared", ["uplink", "downlink"])
def test_bandwidth_is_shared_by_the_streams_of_a_peer(shared: str) -> None:
    ends: list[float] = []

    async def fetch(source: MemoryTransport, target: MemoryTransport) -> None:
        stream = await dial(source, target, SINK)
        await stream.send_all(bytes(1_000_000))
        assert await stream.receive_some(4) == b"done"
        ends.append(trio.current_time())

    async def body(network: MemoryNetwork) -> None:
        one, two = plug(network, "one"), plug(network, "two")
        hub = plug(network, "hub", up=1e6, down=1e6)
        async with trio.open_nursery() as nursery:
            for other in (one, two):
                nursery.start_soon(fetch, *((hub, other) if shared == "uplink" else (other, hub)))

    virtually(MemoryNetwork(), body)
    assert ends[1] == pytest.approx(2.0, abs=1e-3)
    if shared == "uplink":  # Senders take turns; at a downlink it is first come, first served.
        assert ends[0] == pytest.approx(2.0, abs=2 * SEGMENT / 1e6)


def test_a_sender_waits_for_the_window() -> None:
    async def reader(stream: Stream) -> None:
        for _ in range(STREAM_WINDOW // SEGMENT):
            await receive_exactly(stream, SEGMENT)
        await trio.sleep_forever()

    async def body(network: MemoryNetwork) -> None:
        a, b = plug(network, "a"), plug(network, "b")
        b.handle(SINK, reader)
        for protocol, room in ((DEAF, STREAM_WINDOW), (SINK, 2 * STREAM_WINDOW)):
            stream = await dial(a, b, protocol)
            await stream.send_all(bytes(room))
            with trio.move_on_after(3600) as scope:
                await stream.send_all(b"x")
            assert scope.cancelled_caught

    virtually(MemoryNetwork(), body)


def test_closing_lets_what_was_sent_arrive() -> None:
    async def body(network: MemoryNetwork) -> None:
        a, b = plug(network, "a"), plug(network, "b", down=1e6)
        got: list[bytes] = []

        async def reader(stream: Stream) -> None:
            while data := await stream.receive_some(SEGMENT):
                got.append(data)
            with pytest.raises(StreamClosed, match="has closed"):
                await stream.send_all(b"too late")
            got.append(b"the end")

        b.handle(SINK, reader)
        stream = await dial(a, b, SINK)
        await stream.send_all(bytes(3 * STREAM_WINDOW))
        await stream.aclose()
        with pytest.raises(StreamClosed, match="at this end"):
            await stream.receive_some(1)
        await trio.sleep(10)
        assert got.pop() == b"the end"
        assert sum(map(len, got)) == 3 * STREAM_WINDOW

    virtually(MemoryNetwork(latency=0.1), body)


def test_a_handler_that_raises_resets_its_stream_and_is_charged_to_the_peer() -> None:
    events: list[Event] = []

    async def offended(stream: Stream) -> None:
        async with trio.open_nursery():
            raise ProtocolViolation("you must not say that")

    async def body(network: MemoryNetwork) -> None:
        telemetry = Telemetry(clock=trio.current_time)
        telemetry.subscribe(events.append)
        a, b = plug(network, "a"), plug(network, "b", telemetry=telemetry)
        b.handle(SINK, offended)
        stream = await dial(a, b, SINK)
        with pytest.raises(StreamClosed, match="b reset"):
            await stream.receive_some(1)

    virtually(MemoryNetwork(), body)
    assert events == [
        {"time": 0.0, "event": "peer.charged", "peer": "a", "step": SINK, "reason": "you must not say that"}
    ]


def test_a_stream_that_is_over_is_let_go() -> None:
    async def body(network: MemoryNetwork) -> None:
        stream = await dial(plug(network, "a"), plug(network, "b"), ECHO)
        trace = weakref.ref(stream)
        await trio.sleep(1)  # Until the handler at the other end waits.
        await stream.aclose()
        await trio.sleep(1)
        del stream
        gc.collect()
        assert trace() is None

    virtually(MemoryNetwork(), body)


def trace(seed: int) -> tuple[str, ...]:
    """What three peers see who all talk to each other at once."""
    seen: list[str] = []

    async def talk(source: MemoryTransport, target: MemoryTransport) -> None:
        stream = await dial(source, target, ECHO)
        for number in range(5):
            await stream.send_all(bytes(10_000 * number + 1))
            data = await stream.receive_some(SEGMENT)
            seen.append(f"{trio.current_time()!r} {source.peer_id}-{target.peer_id} {len(data)}")

    async def body(network: MemoryNetwork) -> None:
        peers = [plug(network, name) for name in "abc"]
        async with trio.open_nursery() as nursery:
            for source in peers:
                for target in peers:
                    if source is not target:
                        nursery.start_soon(talk, source, target)

    virtually(MemoryNetwork(seed=seed, latency=0.01, bandwidth=1e7), body, seed)
    return tuple(seen)


def test_run_virtual_leaves_trio_as_it_was() -> None:
    async def main() -> float:
        await trio.sleep(1000)
        return trio.current_time()

    scheduler = trio.run.__globals__
    before = scheduler["_r"], scheduler["_ALLOW_DETERMINISTIC_SCHEDULING"]
    assert run_virtual(main) == 1000
    assert (scheduler["_r"], scheduler["_ALLOW_DETERMINISTIC_SCHEDULING"]) == before


def test_each_end_adds_its_own_latency_and_arrivals_wait_for_the_grain() -> None:
    times: list[float] = []

    async def body(network: MemoryNetwork) -> None:
        a, b = plug(network, "a", latency=0.0104), plug(network, "b", latency=0.02)
        await a.connect("b", b.addresses())
        times.append(trio.current_time())

    virtually(MemoryNetwork(latency=0.03), body)
    virtually(MemoryNetwork(latency=0.03, grain=0.001), body)
    assert times == pytest.approx([0.1208, 0.122])


def test_what_is_diverted_gives_the_window_back() -> None:
    async def reader(stream: Stream) -> None:
        assert isinstance(stream, EagerStream)
        stream.divert(lambda data: True)
        await stream.receive_some(1)

    async def body(network: MemoryNetwork) -> None:
        a, b = plug(network, "a"), plug(network, "b")
        b.handle(SINK, reader)
        stream = await dial(a, b, SINK)
        assert isinstance(stream, EagerStream)
        sent = 0
        for _ in range(3 * STREAM_WINDOW // SEGMENT):
            await trio.sleep(0.1)
            sent += stream.send_now(bytes(SEGMENT))
        assert sent == 3 * STREAM_WINDOW // SEGMENT

    virtually(MemoryNetwork(latency=0.01), body)
