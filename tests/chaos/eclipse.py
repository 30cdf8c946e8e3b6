"""An eclipse of a run's key over real sockets: free keys nearest to it, each from a network of its own, in one process.

    cd tests && python -m chaos.eclipse --bootstraps 12 --keys 64

The liars are servers that name each other and hold nothing. `tests/protocol/test_eclipse.py` has 10,000 keys in memory.
"""

import argparse
import random
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import trio
from flockstep.dht.directory.kademlia import KademliaDirectory, open_directory
from flockstep.dht.directory.messages import Message, add_peer_to
from flockstep.dht.directory.routing import BUCKET_SIZE, position, position_of_key
from flockstep.peer.config import PeerConfig
from flockstep.peer.errors import ConnectFailed
from flockstep.peer.host import Libp2pHost, open_host
from flockstep.peer.identity import Identity
from flockstep.peer.quota.limits import BootstrapLimits
from flockstep.peer.telemetry import Telemetry
from support.eclipse import KEY, RUN

LIMITS = BootstrapLimits(exempt=("192.0.2.0/24",))
TRIES = 60
"""Keys that are made for each that is used."""
Pair = tuple[Libp2pHost, KademliaDirectory]


@asynccontextmanager
async def at(ip: str, identity: Identity, *, server: bool) -> AsyncIterator[Pair]:
    """A host at an address of 127.0.0.0/8, with a directory."""
    config = PeerConfig(home=Path("unused"), host=ip, port=0)
    async with (
        open_host(identity, config, Telemetry(), bootstrap=LIMITS if server else None) as host,
        open_directory(host, server=server, telemetry=Telemetry(), validate=lambda key, value: 1) as directory,
    ):
        yield host, directory


async def enter(pair: Pair, bootstraps: list[Pair]) -> None:
    """As a peer does with the bootstraps of its link."""
    for other, _ in bootstraps:
        try:
            await pair[0].bootstraps.enter(other.peer_id, other.addresses()[0])
            await pair[1].add_server(other.peer_id)
        except ConnectFailed:  # A busy machine takes longer than a dial may.
            continue


def lie(liars: list[Pair]) -> Any:
    """The answer of each server that names the liars alone."""

    def answer(question: Message, *_: Any) -> Message:
        message = Message(type=question.type, key=question.key)
        for host, _directory in random.sample(liars, min(BUCKET_SIZE, len(liars))):
            add_peer_to(message.closerPeers, host.peer_id, host.addresses())
        return message

    return answer


async def measure(num_bootstraps: int, num_keys: int, num_newcomers: int) -> None:
    """Print how near the liars came, and how many newcomers found a member and the run's value."""
    target = position_of_key(KEY.encode())
    made = [Identity.generate() for _ in range(TRIES * num_keys)]
    made.sort(key=lambda identity: position(identity.peer_id) ^ target)
    async with AsyncExitStack() as stack:

        async def open_at(ip: str, identity: Identity, *, server: bool = True) -> Pair:
            return await stack.enter_async_context(at(ip, identity, server=server))

        bootstraps = [await open_at(f"127.{10 + n}.0.1", Identity.generate()) for n in range(num_bootstraps)]
        for pair in bootstraps:
            await enter(pair, [other for other in bootstraps if other is not pair][:3])
        liars = [await open_at(f"127.{60 + n}.0.1", identity) for n, identity in enumerate(made[:num_keys])]
        for pair in liars:
            await enter(pair, random.sample(bootstraps, num_bootstraps // 2))
        async with trio.open_nursery() as nursery:
            for _, directory in (*bootstraps, *liars):
                nursery.start_soon(directory.look_around)
        answer, names = lie(liars), {host.peer_id for host, _ in liars}
        for _, directory in liars:
            directory.server._answer = answer  # type: ignore[union-attr, method-assign]
        nearest = [directory.servers.nearest(KEY.encode()) for _, directory in bootstraps]
        print("liars among the nearest:", [f"{len(names & set(near))} of {len(near)}" for near in nearest], flush=True)  # noqa: T201
        host, directory = member = await open_at("127.200.0.1", Identity.generate(), server=False)
        await enter(member, bootstraps[:3])
        await directory.provide(RUN)
        await directory.put(KEY, b"manifest")
        seconds, found = list[float](), 0
        for number in range(num_newcomers):
            async with at(f"127.{201 + number}.0.1", Identity.generate(), server=False) as newcomer:
                began = time.monotonic()
                await enter(newcomer, random.sample(bootstraps, min(3, num_bootstraps)))
                value, members = await newcomer[1].get(KEY), await newcomer[1].find(RUN)
                found += value == b"manifest" and host.peer_id in members
                seconds.append(time.monotonic() - began)
        middle, most = sorted(seconds)[len(seconds) // 2], max(seconds)
        print(f"{found} of {num_newcomers} newcomers found both, in {middle:.1f} s (median), {most:.1f} at most")  # noqa: T201


def main() -> None:
    """Measure with the numbers of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bootstraps", type=int, default=12)
    parser.add_argument("--keys", type=int, default=64)
    parser.add_argument("--newcomers", type=int, default=20)
    options = parser.parse_args()
    trio.run(measure, options.bootstraps, options.keys, options.newcomers)


if __name__ == "__main__":
    main()
