"""Strangers that ask a bootstrap for what it answers anybody, as fast as they can: CPU, memory, and a newcomer's time.

    cd tests && python -m chaos.floods --seconds 30

Each flood comes from eight addresses of one network, over one connection each, and begins a new stream whenever one is reset.
The bootstrap is a real process with its default limits, except that loopback is not exempt.
"""

import argparse
import struct
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import trio
from chaos.door import ERRORS, NOT_EXEMPT, Door, connect, newcomer_finds, one_member, stranger
from flockstep.dht.directory.messages import Message, about
from flockstep.dht.run.link import JoinLink
from flockstep.peer.base.transport import PeerId
from flockstep.peer.host import Libp2pHost
from flockstep.peer.libp2p.stream import CONNECTION_ERRORS
from flockstep.peer.nat.dialback import DIALBACK_PROTOCOL, Question
from flockstep.peer.strangers.ping import PING_BYTES, PING_PROTOCOL
from flockstep.peer.wire.framing import frame
from flockstep.peer.wire.schema import encode
from libp2p.kad_dht.common import PROTOCOL_ID as KAD
from libp2p.peer.id import ID
from libp2p.relay.circuit_v2.pb.circuit_pb2 import HopMessage, StopMessage
from libp2p.relay.circuit_v2.protocol import PROTOCOL_ID as HOP
from libp2p.relay.circuit_v2.protocol import STOP_PROTOCOL_ID as STOP
from libp2p.utils.varint import encode_varint_prefixed
from support.bootstraps import publish_run
from support.trainers import RUN

NUM_HOSTS = 8
HEADER = struct.Struct("!BBHLL")
DATA, WINDOW, PING, SYN, RST = 0, 1, 2, 1, 8
HELLO = b"\x13/multistream/1.0.0\n\x08/nosuch\n"
Flood = Callable[[Libp2pHost, PeerId, JoinLink], Awaitable[None]]


def asking(protocol: str, question: Callable[[JoinLink], bytes]) -> Flood:
    """A flood of one question on streams of a protocol, whose answers are read and dropped."""

    async def flood(host: Libp2pHost, peer: PeerId, link: JoinLink) -> None:
        burst = question(link) * 64
        while True:
            with suppress(*ERRORS):
                stream = await host.open_stream(peer, protocol)
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(_repeat, stream, burst)
                    with suppress(*ERRORS):
                        while await stream.receive_some(1 << 16):
                            pass
                    nursery.cancel_scope.cancel()
                await stream.reset()
            await trio.sleep(0.01)

    return flood


async def _repeat(stream: Any, burst: bytes) -> None:
    with suppress(*ERRORS):
        while True:
            await stream.send_all(burst)


def framing(frames: Callable[[int], bytes]) -> Flood:
    """A flood of Yamux frames; `frames` gets a number that grows."""

    async def flood(host: Libp2pHost, peer: PeerId, _: JoinLink) -> None:
        number = 1 << 20
        while True:
            (connection, *_more) = host.host.get_network().connections[ID.from_base58(peer)]
            muxer: Any = connection.muxed_conn
            muxer.machine.outbox.append(b"".join(frames(number + 2 * each) for each in range(1, 128, 2)))
            number += 512
            muxer.post()
            with trio.move_on_after(1):
                await muxer.written()
            await trio.sleep(0.01)

    return flood


def _providers(link: JoinLink) -> bytes:
    return encode_varint_prefixed(about(Message.GET_PROVIDERS, f"/flockstep/{link.run_id}").SerializeToString())


def _fixed(data: bytes) -> Callable[[JoinLink], bytes]:
    return lambda _: data


FLOODS: dict[str, Flood] = {
    "questions about addresses": asking(DIALBACK_PROTOCOL, _fixed(frame(encode(Question(0))))),
    "dials back": asking(DIALBACK_PROTOCOL, _fixed(frame(encode(Question(9))))),
    "look-ups of members": asking(str(KAD), _providers),
    "pings": asking(PING_PROTOCOL, _fixed(bytes(PING_BYTES))),
    "reservations": asking(
        str(HOP), _fixed(encode_varint_prefixed(HopMessage(type=HopMessage.RESERVE).SerializeToString()))
    ),
    "announced circuits": asking(
        str(STOP), _fixed(encode_varint_prefixed(StopMessage(type=StopMessage.CONNECT).SerializeToString()))
    ),
    "streams of no protocol": framing(
        lambda number: (
            HEADER.pack(0, DATA, SYN, number | 1, len(HELLO)) + HELLO + HEADER.pack(0, WINDOW, RST, number | 1, 0)
        )
    ),
    "frames": framing(lambda number: HEADER.pack(0, PING, SYN, 0, number) + HEADER.pack(0, WINDOW, 0, 999_999, 1)),
}


LIMITED = ('step="stream"', 'step="directory"')
"""Labels of the refusals that all of them together meet at least."""


@asynccontextmanager
async def flooded(door: Door, link: JoinLink, flood: Flood) -> AsyncIterator[None]:
    """Under this flood."""
    async with trio.open_nursery() as nursery:
        for number in range(NUM_HOSTS):
            nursery.start_soon(persist, door, f"127.92.0.{number + 1}", link, flood)
        yield
        nursery.cancel_scope.cancel()


async def persist(door: Door, ip: str, link: JoinLink, flood: Flood) -> None:
    """Connect again whenever the connection was ended."""
    async with stranger(ip) as (host, _):
        while True:
            with suppress(*ERRORS, *CONNECTION_ERRORS, KeyError):
                await flood(host, await connect(door, host), link)
            await trio.sleep(0.2)


async def measure(seconds: float, home: Path) -> None:
    """Each flood in turn, with a line of figures."""
    door = Door(home / "door", *NOT_EXEMPT)
    run = RUN.format(rounds=9, peers=2)
    link = JoinLink.parse(await trio.to_thread.run_sync(publish_run, run, (door.address,), home / "owner"))

    async def look(what: str) -> None:
        started, cpu = time.monotonic(), door.cpu()
        await trio.sleep(seconds)
        busy = (door.cpu() - cpu) / (time.monotonic() - started)
        found = await newcomer_finds(door, link, member)
        print(f"{what}: {100 * busy:.1f} % of a core, {door.rss():.0f} MB, a newcomer {found:.1f} s", flush=True)  # noqa: T201

    try:
        async with one_member(door, link) as member:
            await look("idle")
            for name, flood in FLOODS.items():
                async with flooded(door, link, flood):
                    await trio.sleep(seconds / 4)
                    await look(name)
    finally:
        door.bootstrap.kill()


def main() -> None:
    """Measure for as long as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=30.0, help="of each flood")
    with tempfile.TemporaryDirectory() as home:
        trio.run(measure, parser.parse_args().seconds, Path(home))


if __name__ == "__main__":
    main()
