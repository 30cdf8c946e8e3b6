"""Peers on a network in memory, with test protocols."""

from collections.abc import Awaitable, Callable

import trio
from flockstep.peer.base.transport import Stream, Transport
from flockstep.peer.log.telemetry import Telemetry
from flockstep.peer.memory.network import MemoryNetwork, run_virtual
from flockstep.peer.memory.peer import MemoryTransport
from flockstep.peer.memory.stream import SEGMENT

ECHO = "/test/echo/1"
SINK = "/test/sink/1"
DEAF = "/test/deaf/1"


async def echo(stream: Stream) -> None:
    while data := await stream.receive_some(SEGMENT):
        await stream.send_all(data)


async def sink(stream: Stream) -> None:
    """Read to the end, then send `done`."""
    total = 0
    while total < 1_000_000:
        total += len(await stream.receive_some(SEGMENT))
    await stream.send_all(b"done")


async def deaf(_: Stream) -> None:
    await trio.sleep_forever()


def plug(network: MemoryNetwork, peer: str, **options: float | bool | Telemetry) -> MemoryTransport:
    transport = network.transport(peer, **options)  # type: ignore[arg-type]
    for protocol, handler in ((ECHO, echo), (SINK, sink), (DEAF, deaf)):
        transport.handle(protocol, handler)
    return transport


async def dial(source: Transport, target: Transport, protocol: str) -> Stream:
    await source.connect(target.peer_id, target.addresses())
    return await source.open_stream(target.peer_id, protocol)


async def receive_exactly(stream: Stream, size: int) -> bytes:
    data = b""
    while len(data) < size:
        chunk = await stream.receive_some(size - len(data))
        assert chunk, f"the stream ended after {len(data)} of {size} bytes"
        data += chunk
    return data


def virtually(network: MemoryNetwork, body: Callable[[MemoryNetwork], Awaitable[None]], seed: int = 0) -> None:
    async def main() -> None:
        async with network.open():
            await body(network)

    run_virtual(main, seed=seed)
