"""An eclipse of the directory: 50 honest bootstraps, a run that some know, and 10,000 free keys around the run's key.

The directory's own code, client and server, on the network in memory; addresses are given out here, and the routing
tables are filled as by servers that were reached, in an order that is the worst or the best for the honest.
"""

import random
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import trio
from flockstep.dht.directory.kademlia import KademliaDirectory
from flockstep.dht.directory.messages import Message, MessageReader, add_peer_to, send
from flockstep.dht.directory.routing import position, position_of_key
from flockstep.dht.directory.server import DirectoryServer
from flockstep.peer.base.errors import ProtocolViolation
from flockstep.peer.base.transport import Address, PeerId, Stream
from flockstep.peer.identity import Identity
from flockstep.peer.log.telemetry import Telemetry
from flockstep.peer.memory.network import MemoryNetwork
from flockstep.peer.quota.limits import BootstrapLimits
from flockstep.peer.quota.origins import Origins
from flockstep.peer.quota.refusals import Refusals
from libp2p.kad_dht.common import PROTOCOL_ID

RUN = "a" * 52
KEY = f"/flockstep/{RUN}"
NUM_HONEST, NUM_KEYS, NUM_MEMBERS = 50, 10_000, 4
MANIFEST = f"{KEY} 1".encode()
NUM_FAKES = 128
VIA = 3
"""Bootstraps of a link, and others that the operator of each names."""


def validate(key: str, value: bytes) -> int:
    """Values of these tests are `<key> <sequence>`."""
    found, _, sequence = value.decode(errors="replace").partition(" ")
    if found != key or not sequence.isdecimal():
        raise ProtocolViolation(f"not a value of {key}")
    return int(sequence)


@cache
def keys(kind: str, count: int) -> list[PeerId]:
    return [Identity.from_seed(f"{kind} {number}".encode().ljust(32)).peer_id for number in range(count)]


@cache
def nearest_first() -> list[PeerId]:
    """The attackers' keys."""
    target = position_of_key(KEY.encode())
    return sorted(keys("attacker", NUM_KEYS), key=lambda peer: position(peer) ^ target)


class Seen:
    """A stream that shows the address from which its peer comes."""

    def __init__(self, stream: Any, ip: str) -> None:
        self._stream, self._ip = stream, ip
        self.remote: PeerId = stream.remote
        self.send_all, self.receive_some = stream.send_all, stream.receive_some
        self.aclose, self.reset = stream.aclose, stream.reset

    def remote_socket(self) -> tuple[str, int]:
        return self._ip, 4001

    def hold_at_most(self, num_bytes: int) -> None:
        pass


class Town:
    """Who is on the network, and at which addresses."""

    def __init__(self, network: MemoryNetwork) -> None:
        self.network = network
        self.ips: dict[PeerId, str] = {}

    def addresses(self, peer: PeerId) -> tuple[Address, ...]:
        return (f"/ip4/{self.ips[peer]}/tcp/4001",)


class TownHost:
    """What a directory needs of a host."""

    def __init__(self, town: Town, peer: PeerId, ip: str) -> None:
        town.ips[peer] = ip
        self._town, self.peer_id = town, peer
        self._transport = town.network.transport(peer)
        self.rung, self.open_stream = self._transport.rung, self._transport.open_stream
        self.connected = self._transport.connected
        self.bootstraps = self
        self.limits = BootstrapLimits()
        self.origins = Origins(())
        self.gate = self
        self.bootstrap_server = self
        self.refusals = Refusals(Telemetry(clock=trio.current_time), trio.current_time, "bootstrap.refused")

    def on_return(self, _back: object) -> None:
        """No bootstrap goes away here."""

    def addresses(self) -> tuple[Address, ...]:
        return self._town.addresses(self.peer_id)

    def dialled(self, peer: PeerId) -> tuple[Address, ...]:
        return self._town.addresses(peer)

    def announced(self, _peer: PeerId, _protocol: str) -> tuple[Address, ...]:
        return ()

    async def connect(self, peer: PeerId, _addresses: Sequence[Address]) -> None:
        await self._transport.connect(peer, [f"/memory/{peer}"])

    def handle(self, protocol: str, handler: Any) -> None:
        async def serve(stream: Any) -> None:
            await handler(Seen(stream, self._town.ips[stream.remote]))

        self._transport.handle(protocol, serve)


@dataclass
class Attackers:
    """10,000 keys, on hosts of so many networks. Each has no value, and names others of them and invented members."""

    town: Town
    num_networks: int
    silent: bool = False

    @property
    def peers(self) -> list[PeerId]:
        """Nearest to the run's key first."""
        return nearest_first()

    def settle(self, fakes: Sequence[PeerId]) -> None:
        for number, peer in enumerate(self.peers):
            network = number % self.num_networks
            self.town.ips[peer] = (
                f"{100 + network // 65536}.{network // 256 % 256}.{network % 256}.{1 + number // self.num_networks % 250}"
            )
        self._fakes = fakes

    def start(self, wanted: Iterable[PeerId]) -> None:
        """Only those that somebody may ask need a host."""
        for peer in dict.fromkeys([*self.peers[:300], *wanted]):
            self.town.network.transport(peer).handle(PROTOCOL_ID, self._serve)

    async def _serve(self, stream: Stream) -> None:
        reader = MessageReader(stream, 1 << 20)
        while question := await reader.next():
            if self.silent:
                await trio.sleep_forever()
            answer = Message(type=question.type, key=question.key)
            for peer in self.peers[:200]:
                add_peer_to(answer.closerPeers, peer, self.town.addresses(peer))
            if question.type == Message.GET_PROVIDERS:
                for peer in self._fakes:
                    add_peer_to(answer.providerPeers, peer, ("/ip4/192.0.2.1/tcp/4001",))
            await send(stream, answer)


@dataclass
class Eclipse:
    """The honest bootstraps under attack."""

    town: Town
    honest: list[PeerId]
    members: tuple[PeerId, ...] = ()

    def client(self, name: str, ip: str, via: Sequence[PeerId]) -> KademliaDirectory:
        """Open the directory of a member or newcomer whose link names these bootstraps."""
        host: Any = TownHost(self.town, keys(name, 1)[0], ip)
        directory = KademliaDirectory(host, Telemetry(clock=trio.current_time), validate)
        for peer in via:
            directory.servers.pin(peer, self.town.addresses(peer))
        return directory

    async def publish(self, via: Sequence[PeerId]) -> None:
        """Let the members publish the run twice, as they do again and again."""
        clients = [self.client(f"member {number}", f"90.0.{number}.1", via) for number in range(NUM_MEMBERS)]
        for _ in range(2):
            for directory in clients:
                await directory.put(KEY, MANIFEST)
                await directory.provide(RUN)
        self.members = tuple(directory._host.peer_id for directory in clients)

    async def joins(self, number: int, via: Sequence[PeerId]) -> tuple[bool, bool]:
        """Return whether a newcomer finds the manifest, and whether it finds a member."""
        directory = self.client(f"newcomer {number}", f"80.0.{number}.1", via)
        found = await directory.get(KEY)
        return found == MANIFEST, bool(set(await directory.find(RUN)) & set(self.members))


@asynccontextmanager
async def eclipse(
    num_networks: int, *, first: str, num_honest: int = NUM_HONEST, silent: bool = False, seed: int = 0
) -> AsyncIterator[Eclipse]:
    """Run it: `first` in the routing tables are the `honest`, the `attackers`, or `nobody` (in a random order)."""
    chance = random.Random(seed)
    network = MemoryNetwork(latency=0.02)
    async with network.open(), trio.open_nursery() as nursery:
        town = Town(network)
        honest = keys("honest", num_honest)
        servers: list[DirectoryServer] = []
        for number, peer in enumerate(honest):
            host: Any = TownHost(town, peer, f"60.{number}.0.1")
            server = DirectoryServer(host, validate, None)
            await nursery.start(server.serve)
            servers.append(server)
        attackers = Attackers(town, num_networks, silent)
        attackers.settle(keys("fake", NUM_FAKES))
        for server in servers:
            own = server._host.peer_id
            others = [peer for peer in honest if peer != own]
            for peer in chance.sample(others, min(VIA, len(others))):
                server.servers.pin(peer, town.addresses(peer))
            # The nearest take the bucket of the run's key, any others the other buckets: more would find no room.
            groups = [chance.sample(others, len(others)), attackers.peers[:100] + chance.sample(attackers.peers, 200)]
            order = groups[0] + groups[1] if first == "honest" else groups[1] + groups[0]
            if first == "nobody":
                chance.shuffle(order)
            for peer in order:
                server.servers.answered(peer, town.addresses(peer))
        attackers.start(peer for server in servers for peer in server.servers._servers if peer not in honest)
        yield Eclipse(town, honest)
        nursery.cancel_scope.cancel()
