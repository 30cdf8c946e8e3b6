"""A host of fresh keys as a process: it attacks the peers of a run at the greatest rate that it reaches.

    cd tests && python -m chaos.besieger PLAN

PLAN is a `Plan` as JSON. A line of JSON with the number of everything that it has done so far is printed each second, and
the last one when the plan's seconds are over. What it does (`KINDS`):

    connects    opens TCP connections; half of them are closed at once, half are held
    handshakes  connects under fresh keys, with Noise and Yamux, and leaves
    streams     opens streams of several protocols under a fresh key, and drops them
    records     says that it is a member, then sends pages of 256 records of other keys, each page once
    readys      says that it is a member, then sends signed Readys for the next round
    questions   asks for members, certificates, states and votes, and reads the answers
    fetches     asks for bulk bytes that nobody has
    directory   publishes itself as a member at the bootstraps, under one key after the other
"""

import contextlib
import json
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trio
from flockstep.dht.directory.kademlia import open_directory
from flockstep.dht.keys import member_key
from flockstep.dht.members.body import MemberBody, MemberState
from flockstep.dht.records import Record
from flockstep.peer import wire
from flockstep.peer.address import split_p2p
from flockstep.peer.config import PeerConfig
from flockstep.peer.digest import keyed
from flockstep.peer.errors import NetworkError, RemoteError, StreamClosed
from flockstep.peer.host import Libp2pHost, open_host
from flockstep.peer.identity import Identity
from flockstep.peer.node.bulk import BULK_PROTOCOL
from flockstep.peer.node.session import ASK, SESSION_PROTOCOL, _packet, message_packet
from flockstep.peer.telemetry import Telemetry
from flockstep.peer.transport import PeerId, Stream
from flockstep.peer.wire.framing import frame
from flockstep.peer.wire.schema import encode
from flockstep.peer.wire.signed import sign

PAGE = 256
KEY_SEED = "key of the host"
HELD_CONNECTS = 128
"""TCP connections that are held open to each victim: twice what one address may have."""
Packets = tuple[bytes, int]
"""Bytes to send, and of how many messages they are."""
Take = Callable[[], Packets]
ERRORS = (NetworkError, RemoteError, OSError, trio.TooSlowError, trio.BrokenResourceError, trio.ClosedResourceError)


@dataclass(frozen=True, slots=True)
class Plan:
    """What a host does, to whom and for how long."""

    run: str
    victims: tuple[str, ...]
    """Full addresses."""
    kinds: tuple[str, ...]
    seconds: float
    workers: int
    """Tasks of each kind at each victim."""
    pages: str
    """The file that `sign_pages` has written."""
    first_page: int = 0


def key(number: int) -> Identity:
    """Return one of the host's keys."""
    return Identity.from_seed(keyed(KEY_SEED, number.to_bytes(8, "big")))


def record(identity: Identity, run: str, sequence: int = 1) -> bytes:
    """Return what it says of itself: as short as a member's record can be, that of a keeper."""
    body = encode(MemberBody(state=MemberState.TRAINING))
    return Record.sign(identity, run=run, kind="member", sequence=sequence, lifetime=180.0, body=body).encode()


def page(run: str, number: int) -> bytes:
    """Return the packet of a message with the records of 256 keys."""
    keys = range(number * PAGE, (number + 1) * PAGE)
    return message_packet(wire.Members(tuple(record(key(each), run) for each in keys)))


class Host:
    """The attacker."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.done: Counter[str] = Counter()
        self._file = Path(plan.pages).open("rb") if plan.pages else None  # noqa: SIM115  Open as long as the process.
        self._page_bytes = len(page(plan.run, 0))
        self._next_page = plan.first_page

    async def run(self) -> None:
        """Attack for the plan's seconds."""
        async with trio.open_nursery() as nursery:
            for address in self.plan.victims:
                for kind in self.plan.kinds:
                    for _ in range(self.plan.workers):
                        nursery.start_soon(self._again, getattr(self, f"_{kind}"), address)
            until = time.monotonic() + self.plan.seconds
            while time.monotonic() < until:
                await trio.sleep(1)
                self._say()
            nursery.cancel_scope.cancel()

    def _say(self) -> None:
        figures = {**self.done, "next_page": self._next_page, "cpu": time.process_time()}
        print(json.dumps(figures), flush=True)  # noqa: T201

    async def _again(self, attack: Any, address: str) -> None:
        while True:
            try:
                await attack(address)
            except* ERRORS:
                self.done["refused"] += 1
            await trio.lowlevel.checkpoint()

    @asynccontextmanager
    async def _connected(self, address: str) -> AsyncIterator[tuple[Identity, Libp2pHost, PeerId]]:
        identity = Identity.generate()
        config = PeerConfig(home=Path("unused"), port=0, upnp=False)
        where, peer = split_p2p(address)
        async with open_host(identity, config, Telemetry()) as host:
            if failure := await host._dialler.plainly(peer, where):
                raise NetworkError(failure)
            self.done["sessions"] += 1
            yield identity, host, peer

    async def _flood(self, address: str, protocol: str, kind: str, packets: Callable[[Identity], Take]) -> None:
        """Send packets as fast as they are taken, on one stream after the other, until the connection is closed.

        What comes back is read and dropped. On control streams the key says first that it is a member.
        """
        async with self._connected(address) as (identity, host, peer):
            make = packets(identity)
            while host.connected():
                with contextlib.suppress(*ERRORS):
                    stream = await host.open_stream(peer, protocol)
                    try:
                        async with trio.open_nursery() as nursery:
                            nursery.start_soon(self._drain, stream)
                            if protocol == SESSION_PROTOCOL:
                                await stream.send_all(message_packet(wire.Members((record(identity, self.plan.run),))))
                            while True:
                                data, number = make()
                                await stream.send_all(data)
                                self.done[kind] += number
                    except* ERRORS:
                        self.done["refused"] += 1
                    finally:
                        await stream.reset()

    async def _drain(self, stream: Stream) -> None:
        while data := await stream.receive_some(1 << 16):
            self.done["answer_bytes"] += len(data)
        raise StreamClosed("the other side has ended it")

    async def _connects(self, address: str) -> None:
        where, _ = split_p2p(address)
        _, _, ip, _, port = where.split("/")
        async with trio.open_nursery() as nursery:
            slots = trio.CapacityLimiter(HELD_CONNECTS)
            while True:
                stream = await trio.open_tcp_stream(ip, int(port))
                self.done["connects"] += 1
                if slots.available_tokens:
                    nursery.start_soon(_hold, stream, slots)
                    await trio.lowlevel.checkpoint()
                else:
                    await stream.aclose()

    async def _handshakes(self, address: str) -> None:
        async with self._connected(address):
            pass

    async def _streams(self, address: str) -> None:
        async with self._connected(address) as (_, host, peer):
            while True:
                for protocol in (SESSION_PROTOCOL, BULK_PROTOCOL, "/ipfs/id/1.0.0"):
                    stream = await host.open_stream(peer, protocol)
                    self.done["streams"] += 1
                    await stream.reset()

    async def _records(self, address: str) -> None:
        await self._flood(address, SESSION_PROTOCOL, "records", lambda _: self._take_page)

    def _take_page(self) -> Packets:
        assert self._file is not None
        data = self._file.read(self._page_bytes)
        if len(data) < self._page_bytes:
            self._file.seek(0)
            data = self._file.read(self._page_bytes)
        self._next_page += 1
        return data, PAGE

    async def _readys(self, address: str) -> None:
        def packets(identity: Identity) -> Take:
            slots = (wire.Slot(self.plan.run, 1 + number, bytes(32)) for number in range(PAGE))
            readys = (wire.Ready(slot, bytes(32), 1000, 1e6, 1e6, bytes(32)) for slot in slots)
            data = b"".join(message_packet(sign(identity, ready)) for ready in readys)
            return lambda: (data, PAGE)

        await self._flood(address, SESSION_PROTOCOL, "readys", packets)

    async def _questions(self, address: str) -> None:
        run = self.plan.run
        asked = (
            wire.MembersAsk(run, b""),
            wire.LedgerAsk(run, 1, 16),
            wire.StateAsk(run),
            wire.LeavesAsk(run, bytes(32)),
            wire.VoteAsk(run),
        )
        data = b"".join(_packet(ASK, number, wire.pack(each)) for number, each in enumerate(asked))
        await self._flood(address, SESSION_PROTOCOL, "questions", lambda _: lambda: (data, len(asked)))

    async def _fetches(self, address: str) -> None:
        data = b"".join(frame(wire.pack(wire.Fetch(bytes([number]) * 32, 0))) for number in range(64))
        await self._flood(address, BULK_PROTOCOL, "fetches", lambda _: lambda: (data, 64))

    async def _directory(self, address: str) -> None:
        run, told = self.plan.run, Telemetry()
        async with (
            self._connected(address) as (identity, host, peer),
            open_directory(host, server=False, telemetry=told, validate=lambda *_: 0) as directory,
        ):
            await directory.add_server(peer)
            for sequence in range(1, 17):
                await directory.provide(run)
                await directory.put(member_key(run, identity.peer_id), record(identity, run, sequence))
                self.done["published"] += 1


async def _hold(stream: trio.SocketStream, slots: trio.CapacityLimiter) -> None:
    async with slots:
        with contextlib.suppress(*ERRORS):
            while await stream.receive_some(4096):
                pass
        await stream.aclose()


def main() -> None:
    """Attack as the plan of the command line says."""
    given = json.loads(sys.argv[1])
    plan = Plan(**{**given, "victims": tuple(given["victims"]), "kinds": tuple(given["kinds"])})
    trio.run(Host(plan).run)


if __name__ == "__main__":
    main()
