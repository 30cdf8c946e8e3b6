"""Faults of the network in memory behave as in the real world, and lose nothing else."""

from collections.abc import Callable

import pytest
import trio
import trio.testing
from flockstep.peer.base.errors import ConnectFailed, StreamClosed
from flockstep.peer.base.transport import Stream
from flockstep.peer.memory.network import MemoryNetwork
from support.memory_peers import DEAF, ECHO, SINK, dial, plug, receive_exactly, virtually


def test_dialling_names_each_cause() -> None:
    async def body(network: MemoryNetwork) -> None:
        a, b, hidden = plug(network, "a"), plug(network, "b"), plug(network, "hidden", reachable=False)
        with pytest.raises(ConnectFailed, match=r"/memory/c.*nothing listens there"):
            await a.connect("c", ["/memory/c"])
        with pytest.raises(ConnectFailed, match="another peer id answered: b"):
            await a.connect("c", b.addresses())
        with pytest.raises(ConnectFailed, match=r"/ip4/192.0.2.1/tcp/1.*not an address of the network in memory"):
            await a.connect("b", ["/ip4/192.0.2.1/tcp/1"])
        with pytest.raises(ConnectFailed, match="no address is known"):
            await a.connect("b", [])
        start = trio.current_time()
        with pytest.raises(ConnectFailed, match="timed out after 10 s"):
            await a.connect("hidden", hidden.addresses())
        assert trio.current_time() - start == pytest.approx(10)
        with pytest.raises(StreamClosed, match="no connection"):
            await a.open_stream("hidden", ECHO)
        await hidden.connect("a", a.addresses())
        stream = await a.open_stream("hidden", ECHO)  # The connection that the hidden peer made carries both ways.
        await stream.send_all(b"found")
        assert await stream.receive_some(9) == b"found"
        with pytest.raises(StreamClosed, match="does not serve /unknown"):
            await a.open_stream("hidden", "/unknown")

    virtually(MemoryNetwork(latency=0.01), body)


def test_a_killed_peer_breaks_its_streams_at_the_others_and_can_come_back() -> None:
    served: list[str] = []

    async def body(network: MemoryNetwork) -> None:
        async def endless(stream: Stream) -> None:
            try:
                await trio.sleep_forever()
            finally:
                served.append(stream.remote)

        a, b = plug(network, "a"), plug(network, "b")
        b.handle(DEAF, endless)
        outgoing, incoming = await dial(a, b, DEAF), await dial(b, a, DEAF)
        start = trio.current_time()
        network.kill("b")
        with pytest.raises(StreamClosed, match="the connection to b broke"):
            await outgoing.receive_some(1)
        assert trio.current_time() - start == pytest.approx(0.01)
        assert served == ["a"]
        assert not a.connected()
        with pytest.raises(StreamClosed, match="was killed"):
            await incoming.send_all(b"from the dead")
        with pytest.raises(ConnectFailed, match="nothing listens"):
            await a.connect("b", b.addresses())
        again = await dial(a, plug(network, "b"), ECHO)
        await again.send_all(b"back")
        assert await again.receive_some(9) == b"back"

    virtually(MemoryNetwork(latency=0.01), body)


SILENCES: dict[str, tuple[Callable[[MemoryNetwork], None], Callable[[MemoryNetwork], None]]] = {
    "stall": (lambda network: network.stall("b"), lambda network: network.resume("b")),
    "cut": (lambda network: network.cut("b"), lambda network: network.mend("b")),
    "partition": (lambda network: network.partition(["a", "c"], ["b"]), MemoryNetwork.heal),
}


@pytest.mark.parametrize("how", SILENCES)
def test_silence_holds_everything_back_and_loses_nothing(how: str) -> None:
    begin, end = SILENCES[how]

    async def body(network: MemoryNetwork) -> None:
        a, b, c = plug(network, "a"), plug(network, "b"), plug(network, "c")
        near, far = await dial(a, b, ECHO), await dial(a, c, ECHO)
        await near.send_all(b"in flight, ")
        begin(network)
        await near.send_all(b"after")
        with trio.move_on_after(100) as scope:
            await near.receive_some(100)
        assert scope.cancelled_caught
        with pytest.raises(ConnectFailed, match="timed out"):
            await c.connect("b", b.addresses())
        await far.send_all(b"others are well")
        assert await far.receive_some(100) == b"others are well"
        start = trio.current_time()
        end(network)
        assert await receive_exactly(near, 16) == b"in flight, after"
        assert trio.current_time() - start == pytest.approx(0.2)

    virtually(MemoryNetwork(latency=0.1), body)


def test_a_stream_whose_opener_gave_up_is_reset_at_the_other_end() -> None:
    ended: list[str] = []

    async def body(network: MemoryNetwork) -> None:
        async def reader(stream: Stream) -> None:
            try:
                await stream.receive_some(1)
            except StreamClosed as error:
                ended.append(str(error))
                raise

        a, b = plug(network, "a"), plug(network, "b")
        b.handle(SINK, reader)
        await a.connect("b", b.addresses())
        with trio.move_on_after(0.15) as scope:
            await a.open_stream("b", SINK)
        assert scope.cancelled_caught
        await trio.sleep(10)

    virtually(MemoryNetwork(latency=0.1), body)
    assert len(ended) == 1
    assert "given up" in ended[0]


def test_a_lossy_road_delays_and_keeps_the_order() -> None:
    async def body(network: MemoryNetwork) -> None:
        stream = await dial(plug(network, "a"), plug(network, "b"), ECHO)
        start = trio.current_time()
        for number in range(100):
            await stream.send_all(number.to_bytes(1, "big"))
        assert await receive_exactly(stream, 100) == bytes(range(100))
        assert 0.2 <= trio.current_time() - start < 10

    virtually(MemoryNetwork(seed=1, jitter=0.02, loss=0.1), body)
