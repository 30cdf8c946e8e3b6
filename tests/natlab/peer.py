"""One peer of the laboratory in a process of its own: a host that does what it is told on stdin, a JSON object a line.

    python peer.py <bootstrap address>…      says {"peer": …} once it is in, then one answer a command

    {"do": "where"}                                     its addresses, its rung and why
    {"do": "aims"}                                      where a hole punch should aim at it
    {"do": "leave", "peer": …}                          disconnect
    {"do": "settle"}                                    the same, once it knows its rung
    {"do": "reach", "peer": …, "addresses": […]}        connect, echo one byte, then wait for the final rung
    {"do": "bulk", "peer": …, "bytes": …}               that many bytes there and back on one stream
    {"do": "events"}                                    everything that it has told
"""

import json
import sys
from pathlib import Path
from typing import Any

import trio
from flockstep.peer.address import split_p2p
from flockstep.peer.base.config import PeerConfig
from flockstep.peer.base.errors import NetworkError
from flockstep.peer.base.transport import Rung, Stream
from flockstep.peer.host import Libp2pHost, open_host
from flockstep.peer.identity import Identity
from flockstep.peer.log.telemetry import Event
from support.recorded import recorded

ECHO = "/natlab/echo/1"
MEGABYTE = 1 << 20
FINAL_SECONDS = 12.0
"""How long to wait for a rung above the relay."""


async def echo(stream: Stream) -> None:
    while data := await stream.receive_some(MEGABYTE):
        await stream.send_all(data)


class Peer:
    """The commands."""

    def __init__(self, host: Libp2pHost, events: list[Event]) -> None:
        self._host = host
        self._events = events

    async def where(self) -> dict[str, Any]:
        reachability = self._host.reachability
        return {"addresses": list(self._host.addresses()), "rung": reachability.rung, "reason": reachability.reason}

    async def aims(self) -> dict[str, Any]:
        return {"aims": list(self._host.reachability.aims)}

    async def leave(self, peer: str) -> dict[str, Any]:
        await self._host.disconnect(peer)
        return {}

    async def settle(self) -> dict[str, Any]:
        while self._host.reachability.rung is None:  # noqa: ASYNC110
            await trio.sleep(0.1)
        return await self.where()

    async def reach(self, peer: str, addresses: list[str]) -> dict[str, Any]:
        began = trio.current_time()
        await self._host.connect(peer, addresses)
        await self._echo(peer, b"x")
        stream_seconds, first = trio.current_time() - began, self._host.rung(peer)
        final_seconds = stream_seconds
        while self._host.rung(peer) is Rung.RELAYED and trio.current_time() < began + FINAL_SECONDS:
            await trio.sleep(0.05)
            if self._host.rung(peer) is not Rung.RELAYED:
                await self._echo(peer, b"x")
                final_seconds = trio.current_time() - began
        seconds = {"stream_s": round(stream_seconds, 2), "final_s": round(final_seconds, 2)}
        return {"first": first, "final": self._host.rung(peer), **seconds}

    async def bulk(self, peer: str, size: int) -> dict[str, Any]:
        began = trio.current_time()
        await self._echo(peer, bytes(size))
        seconds = trio.current_time() - began
        return {"seconds": round(seconds, 2), "mbit_s": round(16 * size / seconds / 1e6, 1)}

    async def events(self) -> dict[str, Any]:
        return {"events": self._events}

    async def _echo(self, peer: str, payload: bytes) -> None:
        stream = await self._host.open_stream(peer, ECHO)
        received = bytearray()

        async def receive() -> None:
            while len(received) < len(payload):
                if not (data := await stream.receive_some(MEGABYTE)):
                    break
                received.extend(data)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(receive)
            await stream.send_all(payload)
        await stream.aclose()
        if received != payload:
            raise NetworkError(f"{len(received)} bytes came back, not the {len(payload)} that were sent")


async def main(bootstraps: list[str]) -> None:
    telemetry, events = recorded()
    config = PeerConfig(home=Path("unused"))
    async with open_host(Identity.generate(), config, telemetry) as host, trio.open_nursery() as nursery:
        host.handle(ECHO, echo)
        peer = Peer(host, events)

        async def answer(number: int, arguments: dict[str, Any]) -> None:
            try:
                result = await getattr(peer, arguments.pop("do"))(**arguments)
            except (NetworkError, ExceptionGroup) as error:
                result = {"error": str(error)}
            say({"number": number, **result})

        places: dict[str, list[str]] = {}
        for address, bootstrap in map(split_p2p, bootstraps):
            places.setdefault(bootstrap, []).append(address)
        for bootstrap, addresses in places.items():
            await host.bootstraps.enter(bootstrap, *addresses)
        say({"peer": host.peer_id})
        commands = trio.wrap_file(sys.stdin)
        async for line in commands:
            command = json.loads(line)
            nursery.start_soon(answer, command.pop("number"), command)
        nursery.cancel_scope.cancel()


def say(words: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(words) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    trio.run(main, sys.argv[1:])
