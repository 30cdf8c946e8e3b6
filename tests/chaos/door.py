"""A bootstrap under attack, a member that it serves, and strangers.

The bootstrap is a real process with its default limits, except that loopback is not exempt. Strangers use addresses of
127.0.0.0/8, each /24 of which counts as a network.
"""

import random
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from urllib.request import urlopen

import psutil
import trio
from flockstep.dht.directory.kademlia import KademliaDirectory, open_directory
from flockstep.dht.keys import run_key
from flockstep.dht.run.link import JoinLink
from flockstep.peer.address import split_p2p
from flockstep.peer.base.config import PeerConfig
from flockstep.peer.base.errors import FlockstepError, NetworkError
from flockstep.peer.base.transport import PeerId
from flockstep.peer.host import Libp2pHost, open_host
from flockstep.peer.identity import Identity
from flockstep.peer.log.telemetry import Telemetry
from support.bootstraps import Bootstrap

ANYTHING = lambda key, value: 0  # noqa: E731  A stranger who publishes what no honest peer would.
"""Validates whatever it is given."""
NOT_EXEMPT = ("--exempt", "192.0.2.0/24")
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
async def stranger(ip: str) -> AsyncIterator[tuple[Libp2pHost, KademliaDirectory]]:
    """A host at an address of 127.0.0.0/8 with a directory that accepts anything."""
    config = PeerConfig(home=Path("unused"), host=ip, port=0)
    telemetry = Telemetry()
    async with (
        open_host(Identity.generate(), config, telemetry) as host,
        open_directory(host, server=False, telemetry=telemetry, validate=ANYTHING) as directory,
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


@asynccontextmanager
async def one_member(door: Door, link: JoinLink) -> AsyncIterator[str]:
    """An honest member that is in the run; its id."""
    async with stranger("127.80.0.1") as (host, directory):
        await come_in(door, host, directory)
        await directory.provide(link.run_id)
        yield host.peer_id
