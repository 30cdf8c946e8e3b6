"""A bootstrap under load and attack: idle peers, junk connections, spam and Sybils.

The bootstrap is a real process with its default limits, except that loopback is not exempt. Strangers use addresses of
127.0.0.0/8, each /24 of which counts as a network.
"""

import os
import random
import socket
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import psutil
import trio
from flockstep.dht.directory.kademlia import KademliaDirectory, open_directory
from flockstep.dht.directory.messages import Message
from flockstep.dht.keys import member_key, run_key
from flockstep.dht.members.body import MemberBody, MemberState
from flockstep.dht.records import Record
from flockstep.dht.run.link import JoinLink
from flockstep.peer.address import split_p2p
from flockstep.peer.base.config import PeerConfig
from flockstep.peer.base.errors import FlockstepError, NetworkError
from flockstep.peer.base.transport import PeerId, Rung
from flockstep.peer.host import Libp2pHost, open_host
from flockstep.peer.identity import Identity
from flockstep.peer.log.telemetry import Telemetry
from flockstep.peer.wire.schema import encode
from libp2p.peer.id import ID
from multiaddr import Multiaddr
from support.bootstraps import Bootstrap

ANYTHING = lambda key, value: 0  # noqa: E731  A stranger who publishes what no honest peer would.
"""Validates whatever it is given."""
NOT_EXEMPT = ("--exempt", "192.0.2.0/24")
PUBLISH_SECONDS = 30.0
"""As members do (`dht/members/gossip.py`)."""
FIND_SECONDS = 120.0
"""A newcomer that has not found the run by then does not find it."""
ERRORS = (FlockstepError, OSError)


class Door:
    """A bootstrap with a page of metrics, and what is known of its process."""

    def __init__(self, home: Path, *options: str, port: int = 0) -> None:
        self.metrics = f"127.0.0.1:{free_port()}"
        self.bootstrap = Bootstrap(home, "--metrics", self.metrics, *options, port=port)
        self.process = psutil.Process(self.bootstrap.pid)
        self.address = self.bootstrap.address()

    def rss(self) -> float:
        """MB of memory."""
        return float(self.process.memory_info().rss) / 1e6

    def cpu(self) -> float:
        """Seconds."""
        times = self.process.cpu_times()
        return float(times.user + times.system)

    def figures(self) -> dict[str, float]:
        """Its metrics."""
        with urlopen(f"http://{self.metrics}/metrics", timeout=120) as page:
            lines = page.read().decode().splitlines()
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}

    def refused(self, word: str) -> float:
        """How often something was refused for a reason with this word."""
        return sum(value for name, value in self.figures().items() if "refusals" in name and word in name)


def free_port() -> int:
    """A port that was free a moment ago, below those that the system lends to connections: none takes it meanwhile."""
    for port in random.sample(range(20_000, 30_000), 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError("none of 100 ports between 20000 and 30000 is free")


@asynccontextmanager
async def stranger(
    ip: str, identity: Identity | None = None, validate: Any = ANYTHING
) -> AsyncIterator[tuple[Libp2pHost, KademliaDirectory]]:
    """A host at an address of 127.0.0.0/8 with a directory that accepts anything."""
    config = PeerConfig(home=Path("unused"), host=ip, port=0)
    telemetry = Telemetry()
    async with (
        open_host(identity or Identity.generate(), config, telemetry) as host,
        open_directory(host, server=False, telemetry=telemetry, validate=validate) as directory,
    ):
        yield host, directory


async def come_in(door: Door, host: Libp2pHost, directory: KademliaDirectory) -> None:
    """As a peer does with the bootstrap of its link. Raises `ConnectFailed`."""
    address, peer = split_p2p(door.address)
    await host.bootstraps.enter(peer, address)
    await directory.add_server(peer)


async def connect(door: Door, host: Libp2pHost) -> PeerId:
    """Connect from the host's own address, and no more; the bootstrap's id. Raises `NetworkError`."""
    address, peer = split_p2p(door.address)
    if failure := await host._dialler.from_listen_port(peer, address):
        raise NetworkError(failure)
    return peer


def member_record(identity: Identity, run: str, sequence: int) -> bytes:
    """What a member says of itself."""
    body = encode(MemberBody(MemberState.TRAINING, ("/ip4/192.0.2.1/tcp/4001",), Rung.DIRECT))
    return Record.sign(identity, run=run, kind="member", sequence=sequence, lifetime=60.0, body=body).encode()


async def newcomer_finds(door: Door, link: JoinLink, wanted: str) -> float:
    """Seconds until a newcomer at its own address has the manifest and has found a member. Raises `trio.TooSlowError`."""
    started = time.monotonic()
    with trio.fail_after(FIND_SECONDS):
        while True:
            with suppress(NetworkError):
                async with stranger("127.200.1.1") as (host, directory):
                    await come_in(door, host, directory)
                    if await directory.get(run_key(link.run_id)) and wanted in await directory.find(link.run_id):
                        return time.monotonic() - started
            await trio.sleep(0.5)


class Idlers:
    """Peers that are in a run and do nothing else: held connections, reservations, and a word twice a minute."""

    def __init__(self, door: Door, link: JoinLink) -> None:
        self.all_there = trio.Event()
        self._left = 0
        self._door = door
        self._link = link
        self._slots = trio.CapacityLimiter(2)  # Handshakes of 10 s are cut: eight at once on a busy machine take longer.

    async def run(self, number: int) -> None:
        """All of them, until cancelled."""
        async with trio.open_nursery() as nursery:
            for index in range(number):
                nursery.start_soon(self._idle, f"127.{index // 200 + 1}.{index % 200}.1")
            self._left = number

    async def _idle(self, ip: str) -> None:
        identity = Identity.generate()
        async with AsyncExitStack() as stack:
            async with self._slots:
                host, directory = await stack.enter_async_context(stranger(ip, identity))
                await come_in(self._door, host, directory)
                relays: Any = host.bootstraps._relays
                await relays.reserve(split_p2p(self._door.address)[1])
            self._left -= 1
            if not self._left:
                self.all_there.set()
            sequence = 0
            while True:
                sequence += 1
                await directory.provide(self._link.run_id)
                key = member_key(self._link.run_id, identity.peer_id)
                await directory.put(key, member_record(identity, self._link.run_id, sequence))
                await trio.sleep(PUBLISH_SECONDS)


class Junk:
    """Connections that lead nowhere; each is held as long as the other side lets it."""

    def __init__(self, door: Door) -> None:
        self.opened = 0
        self._address, self._peer = split_p2p(door.address)
        self._port = int(self._address.rpartition("/")[2])
        self._slots = trio.CapacityLimiter(32)

    async def run(self, number: int, num_networks: int, *, task_status: Any = trio.TASK_STATUS_IGNORED) -> None:
        """A third each: half-open, garbage, and valid Noise then nothing; started once all were opened."""
        async with trio.open_nursery() as nursery, stranger("127.100.0.1") as (host, _):
            kinds = (self._half_open, self._garbage, self._noise)
            async with trio.open_nursery() as opening:
                for index in range(number):
                    ip = f"127.{101 + index % num_networks // 200}.{index % num_networks % 200}.{1 + index // num_networks}"
                    opening.start_soon(self._one, kinds[index % 3], ip, host, nursery)
            task_status.started()
            await trio.sleep_forever()

    async def _one(self, kind: Any, ip: str, host: Any, nursery: trio.Nursery) -> None:
        async with self._slots:
            with trio.move_on_after(15):
                with suppress(Exception):  # Most are thrown out, in whatever way.
                    nursery.start_soon(_hold, await kind(ip, host))
        self.opened += 1

    async def _half_open(self, ip: str, host: Any) -> Any:
        return await trio.open_tcp_stream("127.0.0.1", self._port, local_address=ip)

    async def _garbage(self, ip: str, host: Any) -> Any:
        stream = await trio.open_tcp_stream("127.0.0.1", self._port, local_address=ip)
        try:
            await stream.send_all(os.urandom(3000))
        except BaseException:
            await stream.aclose()
            raise
        return stream

    async def _noise(self, ip: str, host: Any) -> Any:
        raw = await host._dialler._tcp.dial_from(Multiaddr(self._address), (ip, 0))
        try:
            await host.host.get_network().upgrader.upgrade_security(raw, True, ID.from_base58(self._peer))
        except BaseException:
            await raw.stream.stream.aclose()
            raise
        return raw.stream.stream


async def _hold(stream: Any) -> None:
    try:
        while await stream.receive_some(4096):
            pass
    except (trio.BrokenResourceError, trio.ClosedResourceError):
        pass
    finally:
        await stream.aclose()


async def sybil(door: Door, link: JoinLink, ip: str) -> None:
    """An id of a crowded network that says it is in the run, and publishes a member's record of itself."""
    identity = Identity.generate()
    try:
        async with stranger(ip, identity) as (host, directory):
            await directory.add_server(await connect(door, host))
            await directory.provide(link.run_id)
            await directory.put(member_key(link.run_id, identity.peer_id), member_record(identity, link.run_id, 1))
    except* ERRORS:
        pass


async def sybils(door: Door, link: JoinLink, number: int) -> None:
    """So many of them, from one /24."""
    slots = trio.CapacityLimiter(32)

    async def one(index: int) -> None:
        async with slots:
            await sybil(door, link, f"127.90.0.{index % 250 + 1}")

    async with trio.open_nursery() as nursery:
        for index in range(number):
            nursery.start_soon(one, index)


async def spam(door: Door, link: JoinLink, number: int) -> tuple[int, int]:
    """One key, written again and again, then records that are too big; how many of each were taken."""
    identity = Identity.generate()
    key = member_key(link.run_id, identity.peer_id)
    async with stranger("127.91.0.1", identity) as (host, directory):
        await come_in(door, host, directory)

        async def write(value: bytes) -> bool:
            message = Message(type=Message.PUT_VALUE, key=key.encode())
            message.record.key, message.record.value = message.key, value
            try:
                return bool(await directory._ask(split_p2p(door.address)[1], (), message))
            except ERRORS:
                return False

        taken = [await write(member_record(identity, link.run_id, sequence)) for sequence in range(number)]
        oversized = [await write(bytes(size)) for size in (70_000, 200_000, 2_000_000)]
    return sum(taken), sum(oversized)


@asynccontextmanager
async def one_member(door: Door, link: JoinLink) -> AsyncIterator[str]:
    """An honest member that is in the run; its id."""
    async with stranger("127.80.0.1") as (host, directory):
        await come_in(door, host, directory)
        await directory.provide(link.run_id)
        yield host.peer_id
