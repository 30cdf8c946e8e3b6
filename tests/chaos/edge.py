"""A fuzzer of every protocol that a host answers, over real sockets, and what it costs the process that is fuzzed.

    cd tests && python -m chaos.edge --seconds 600 --seed 1 --kind bootstrap

The victim is one process with a node (or a bootstrap with its directory) on loopback, which is not exempt from limits. It is
sent, on streams of every protocol and as Yamux frames of its own making, well-formed first messages and what mutation makes
of them: bytes flipped, cut, doubled, out of order, lengths that lie. Its memory, files, tasks and the longest delay of its
event loop are printed at the end, after all strangers have gone.
"""

import argparse
import json
import random
import struct
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import trio
from flockstep.dht.directory.kademlia import open_directory
from flockstep.dht.directory.messages import Message, about
from flockstep.dht.published import validate_published
from flockstep.peer import wire
from flockstep.peer.base.config import PeerConfig
from flockstep.peer.base.errors import FlockstepError
from flockstep.peer.host import Libp2pHost, open_host
from flockstep.peer.identity import Identity
from flockstep.peer.log.telemetry import Event, Telemetry
from flockstep.peer.node.node import Node
from flockstep.peer.node.session import ASK, _packet, message_packet
from flockstep.peer.quota.limits import BootstrapLimits, GateLimits
from libp2p.exceptions import BaseLibp2pError
from libp2p.peer.id import ID
from libp2p.relay.circuit_v2.pb.circuit_pb2 import HopMessage, PeerId, StopMessage
from libp2p.relay.circuit_v2.pb.dcutr_pb2 import HolePunch
from libp2p.utils.varint import encode_delim, encode_varint_prefixed
from support.commands import Command

NOT_EXEMPT = ("192.0.2.0/24",)
KINDS = ("member", "bootstrap")
BROKEN = ("host.died", "task.broken", "handler.failed")
"""Events that no stranger may cause."""
RUN = "a" * 52
SOMEBODY = Identity.from_seed(bytes(32)).peer_id
LOOK_SECONDS = 0.01


def protocols(host: Libp2pHost) -> tuple[str, ...]:
    """Every protocol that a host answers."""
    return tuple(sorted(str(name) for name in host.host.get_mux().get_protocols()))


@asynccontextmanager
async def victim(kind: str, telemetry: Telemetry) -> AsyncIterator[Libp2pHost]:
    """A member's host and node, or a bootstrap's host and directory, with the default limits on loopback, too."""
    identity, config = Identity.generate(), PeerConfig(home=Path("unused"), host="127.0.0.1", port=0)
    limits = BootstrapLimits(exempt=NOT_EXEMPT) if kind == "bootstrap" else None
    async with AsyncExitStack() as stack:
        opened = open_host(identity, config, telemetry, bootstrap=limits, gate=GateLimits(exempt=NOT_EXEMPT))
        host = await stack.enter_async_context(opened)
        if limits is None:
            await stack.enter_async_context(Node(host, identity, config, telemetry))
        is_server, validate = limits is not None, validate_published
        await stack.enter_async_context(
            open_directory(host, server=is_server, telemetry=telemetry, validate=validate)
        )
        yield host


async def be_victim(kind: str) -> None:
    """Print the address, and then once a second the figures, one JSON object a line."""
    broken: list[Event] = []
    telemetry = Telemetry()
    telemetry.subscribe(lambda event: broken.append(event) if event["event"] in BROKEN else None)
    async with victim(kind, telemetry) as host:
        say(json.dumps({"peer": host.peer_id, "port": host.port, "protocols": protocols(host)}))
        process = psutil.Process()
        while True:
            lag = 0.0
            for _ in range(100):
                began = time.monotonic()
                await trio.sleep(LOOK_SECONDS)
                lag = max(lag, time.monotonic() - began - LOOK_SECONDS)
            figures = {
                "mb": process.memory_info().rss / 1e6,
                "files": process.num_fds(),
                "tasks": trio.lowlevel.current_statistics().tasks_living,
                "lag": lag,
                "known": len(host.host.get_peerstore().peer_data_map),
                "broken": [f"{event['event']} {event.get('step')}: {event.get('reason')}" for event in broken],
            }
            say(json.dumps(figures))


class Victim:
    """The process of a victim."""

    def __init__(self, process: Command) -> None:
        self._process = process
        first = self._next()
        self.peer, self.port, self.protocols = first["peer"], first["port"], tuple(first["protocols"])

    def _next(self) -> dict[str, Any]:
        line: dict[str, Any] = json.loads(self._process.stdout.readline())
        return line

    def figures(self, lines: int = 1) -> dict[str, Any]:
        """The figures after so many seconds that were not looked at yet, with the most memory and the longest lag of them."""
        read = [self._next() for _ in range(lines)]
        return {**read[-1], "most_mb": max(one["mb"] for one in read), "lag": max(one["lag"] for one in read)}


@contextmanager
def victim_process(kind: str) -> Iterator[Victim]:
    """Start a victim, and kill it at the end."""
    with Command("--be-victim", "--kind", kind, program="chaos.edge") as process:
        try:
            yield Victim(process)
        finally:
            process.kill()


def first_messages(protocol: str) -> list[bytes]:
    """What an honest peer begins with, by protocol; for any other what means nothing there."""
    if protocol.endswith("/control/1"):
        asks = [wire.MembersAsk(RUN, b""), wire.LedgerAsk(RUN, 1, 1), wire.StateAsk(RUN)]
        return [message_packet(wire.Beat(echo=True)), *(_packet(ASK, 1, wire.pack(ask)) for ask in asks)]
    if protocol.startswith("/libp2p/circuit"):
        peer = PeerId(id=ID.from_base58(SOMEBODY).to_bytes())
        kinds = [(HopMessage, 0), (HopMessage, 1), (StopMessage, 0), (StopMessage, 1)]
        return [encode_varint_prefixed(kind(type=number, peer=peer).SerializeToString()) for kind, number in kinds]
    if protocol == "/libp2p/dcutr":
        return [encode_varint_prefixed(HolePunch(type=HolePunch.CONNECT, ObsAddrs=[bytes(8)]).SerializeToString())]
    if protocol.startswith("/ipfs/kad"):
        kinds_asked = (Message.FIND_NODE, Message.GET_VALUE, Message.GET_PROVIDERS, Message.PUT_VALUE, Message.PING)
        keyed = [about(kind, f"/flockstep/{RUN}") for kind in kinds_asked]
        return [encode_varint_prefixed(message.SerializeToString()) for message in keyed]
    return [bytes((0, 0, 0, 3)) + b"\x91\xcd\x0f", encode_varint_prefixed(b"\x0a\x04\x08\x01\x12\x00"), bytes(40)]


def mutated(chance: random.Random, messages: Sequence[bytes]) -> bytes:
    """A few of these messages, and what is left of them."""
    data = bytearray(b"".join(chance.choices(messages, k=chance.randint(1, 4))))
    for _ in range(chance.randint(0, 4)):
        place = chance.randrange(len(data) + 1)
        match chance.randrange(6):
            case 0:
                del data[place:]
            case 1:
                data[place : place + 1] = bytes((chance.randrange(256),))
            case 2:
                data += data[place:]
            case 3:
                data[:] = data[place:] + data[:place]
            case 4:
                data[place:place] = b"\xff" * chance.randint(1, 12)
            case _:
                data[place:place] = chance.randbytes(chance.choice((1, 30, 3000)))
    return bytes(data)


def frames(chance: random.Random) -> bytes:
    """Yamux frames of any kind, for streams that are there or not."""
    made: list[bytes] = []
    for _ in range(chance.choice((1, 20, 2000))):
        kind, flags = chance.choice((0, 0, 1, 1, 2, chance.randrange(256))), chance.choice((0, 1, 2, 4, 8, 5, 9, 0xFFFF))
        stream, length = chance.choice((0, 1, 2, 3, 7, 9001, 2**32 - 1)), chance.choice((0, 0, 1, 200, 1 << 31))
        body = chance.randbytes(length) if kind == 0 and length <= 200 else b""
        made.append(struct.pack(">BBHII", 0, kind, flags, stream, length) + body)
    return b"".join(made)


ERRORS = (FlockstepError, BaseLibp2pError, OSError, trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError)


async def one_stranger(target: Victim, chance: random.Random, streams: int) -> None:
    """Come with a new key, send so many streams of junk, and now and then frames; leave."""
    config = PeerConfig(home=Path("unused"), host=f"127.{chance.randint(1, 250)}.{chance.randint(1, 250)}.1", port=0)
    async with open_host(Identity.generate(), config, Telemetry()) as host:
        if await host._dialler.from_listen_port(target.peer, f"/ip4/127.0.0.1/tcp/{target.port}"):
            return
        for _ in range(streams):
            if not (connections := host._connections(target.peer)):
                return  # The victim has had enough of it.
            with suppress(*ERRORS), trio.move_on_after(2):
                connection = connections[0]
                if not chance.randrange(6):
                    connection.muxed_conn.machine.outbox.append(frames(chance))
                    await connection.muxed_conn.written()
                    continue
                stream: Any = await connection.muxed_conn.open_stream()
                protocol = chance.choice((*target.protocols, "/nothing/1"))
                negotiation = [encode_delim(b"/multistream/1.0.0"), encode_delim(protocol.encode())]
                await stream.write(b"".join(negotiation) if chance.randrange(8) else mutated(chance, negotiation))
                await stream.write(mutated(chance, first_messages(protocol)))
                if chance.randrange(3):
                    with trio.move_on_after(0.05):
                        await stream.read(1 << 16)
                await (stream.reset() if chance.randrange(2) else stream.close())


async def raw_stranger(target: Victim, chance: random.Random) -> None:
    """Send junk to the socket, before any handshake."""
    with suppress(*ERRORS), trio.move_on_after(1):
        async with await trio.open_tcp_stream("127.0.0.1", target.port) as socket:
            greeting = [encode_delim(b"/multistream/1.0.0"), encode_delim(b"/noise"), bytes((0, 32)) + chance.randbytes(32)]
            await socket.send_all(mutated(chance, greeting))
            await socket.receive_some(1000)


async def fuzz(target: Victim, seconds: float, seed: int, at_once: int = 4) -> int:
    """Send strangers for so long; returns how many came."""
    count, until = 0, trio.current_time() + seconds

    async def keep_coming(number: int) -> None:
        nonlocal count
        chance = random.Random(f"{seed} {number}")
        while trio.current_time() < until:
            await raw_stranger(target, chance)
            with suppress(*ERRORS):
                await one_stranger(target, chance, chance.randint(1, 30))
            count += 1

    async with trio.open_nursery() as nursery:
        for number in range(at_once):
            nursery.start_soon(keep_coming, number)
    return count


def say(line: str) -> None:
    """Write a line to stdout at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    """Run the program of this file's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kind", choices=KINDS, default="member")
    parser.add_argument("--be-victim", action="store_true")
    options = parser.parse_args()
    if options.be_victim:
        trio.run(be_victim, options.kind)
        return
    with victim_process(options.kind) as target:
        say(f"before: {target.figures(2)}")
        count = trio.run(fuzz, target, options.seconds, options.seed)
        say(f"{count} strangers; after: {target.figures(int(options.seconds) + 15)}")


if __name__ == "__main__":
    main()
