"""`flockstep bench strangers`: what a stranger's question costs a host, and what strangers hold at its limits.

Theory of operation. A bootstrap and a run's owner, which keeps it, are real processes on loopback, which is exempt from the
limits of an address: so thousands of questions fit into seconds. A stranger asks each kind of question of the table in
docs/strangers.md a fixed number of times. Taken are

    CPU      nanoseconds that the kernel has run the host's process (`/proc/<pid>/task/*/schedstat`), less what it takes
             while nobody asks; until it rests again, so what it does after its answer counts, too
    bytes    those of the stranger's sockets: what it sends is what the host reads
    memory   by how much the resident size grows for each thing that is held open, none of them closed meanwhile

A clock is read for nothing but the resting state, so that a busy machine changes little. What an address, a network and all
networks hold at the limits is the limit times the cost: a rate by CPU is a share of a core, a number of places by memory is
MB. The limits are read from the modules that enforce them. Kinds without a rate of their own have that of streams.
"""

import json
import math
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import trio

from ....dht.directory import server as directory_server
from ....dht.directory.kademlia import open_directory
from ....dht.directory.messages import Message, MessageReader, about, add_peer_to, send
from ....dht.directory.store import MAX_PROVIDERS, PROVIDER_SECONDS, Entry, Store
from ....dht.directory.store_file import StoreFile
from ....dht.keys import run_key
from ....dht.members.body import MemberBody, MemberState
from ....dht.published import validate_published
from ....dht.records import Record
from ....dht.run.link import JoinLink
from ....peer import host as host_module
from ....peer import wire
from ....peer.address import split_p2p
from ....peer.config import PeerConfig
from ....peer.disk import write_whole
from ....peer.errors import LocalError, NetworkError, StreamClosed, UsageError
from ....peer.host import Libp2pHost, open_host
from ....peer.identity import Identity
from ....peer.libp2p import gate
from ....peer.metrics import MAX_READERS
from ....peer.nat import dialback, speed
from ....peer.node import guard
from ....peer.node.bulk import BULK_PROTOCOL
from ....peer.node.session import SESSION_PROTOCOL, Session, message_packet
from ....peer.quota.limits import BootstrapLimits, GateLimits
from ....peer.quota.shares import ALL_SHARE, NETWORK_SHARE
from ....peer.strangers import frames, ping
from ....peer.strangers.greeting import MAX_LINES
from ....peer.strangers.streams import FEW
from ....peer.telemetry import Telemetry, log_path, read_events
from ....peer.transport import PeerId, Rung, Stream
from ....peer.wire.framing import FrameBuffer, frame
from ....peer.wire.schema import encode
from ...local_run import ADDRESS, LINK, START_SECONDS
from ...page.server import (
    MAX_CONNECTIONS,
    MAX_CONNECTIONS_OF_ADDRESS,
    MAX_CONNECTIONS_OF_NETWORK,
    REQUESTS_PER_SECOND,
)
from ...processes import Process, Processes, descendants

RUN_TOML = """\
name = "bench-strangers"
[model]
name = "gpt"
size = "0.2m"
[data]
source = "text:{stdlib}"
sequence_length = 32
batch_size = 1
"""
REST_SECONDS = 0.2
REST_SHARE = 0.05
"""A host rests once it takes less than so much of a core, beyond what it takes idle, for so long."""
IDLE_SECONDS = 3.0
SETTLE_TIMEOUT = 20.0
QUESTION_TIMEOUT = 120.0
"""Seconds after which a kind of question is a row with the reason why it could not be measured."""
HELD = 96
"""Streams of one connection that are held open: of the 128 that it may have."""
HELD_CONNECTIONS = 48

Level = tuple[float, float, float]
"""A limit of an address, of a network and of all networks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One kind of question: how it is asked, and what bounds it."""

    name: str
    """The first cell of its row in docs/strangers.md."""
    host: str
    ask: Callable[["Lab", int], Awaitable[int]]
    """Asks so often, and returns how often it was answered or taken in."""
    count: int = 100
    rate: Level | None = None
    """Questions a second that are allowed; None: as many as streams."""
    hold: Callable[["Lab", AsyncExitStack], Awaitable[int]] | None = None
    """Opens what costs memory while it is open, and returns how many."""
    places: Level | None = None
    """How many may be open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What one question costs a host, and what strangers hold at the limits; None where it has no meaning."""

    question: str
    host: str
    asked: int
    cpu_us: float
    read_bytes: float
    sent_bytes: float
    open_kb: float | None
    cores: Level
    """Shares of a core: of an address, a network and all networks."""
    open_mb: Level | None
    failure: str = ""


class Lab:
    """One host's process, and a stranger that is connected to it."""

    def __init__(self, process: Process, peer: PeerId, address: str) -> None:
        self.pids = (process.pid, *descendants(process.pid))
        self.peer = peer
        self.address = address
        self.run = ""
        self.idle = 0.0
        """The share of a core that the host takes while nobody asks."""
        self.http: dict[str, tuple[str, int]] = {}
        """Where the host answers HTTP, by what."""
        self.identity = Identity.generate()
        self.me: Libp2pHost
        self.sent = self.received = 0
        """Bytes of strangers that have left, and of sockets that are not the host's."""

    def cpu(self) -> float:
        """Return the seconds that the host has run."""
        return sum(map(cpu_seconds_of, self.pids))

    def rss(self) -> int:
        """Return the bytes of memory that the host holds."""
        return sum(resident_bytes_of(pid) for pid in self.pids)

    def traffic(self) -> tuple[int, int]:
        """Return the bytes that strangers have sent to the host and received from it."""
        mine = self.me.traffic()
        return self.sent + mine.sent, self.received + mine.received

    @asynccontextmanager
    async def stranger(self) -> AsyncIterator[Libp2pHost]:
        """One more stranger, connected."""
        async with open_host(Identity.generate(), HERE, Telemetry()) as host:
            await host.connect(self.peer, [self.address])
            yield host
            traffic = host.traffic()
            self.sent, self.received = self.sent + traffic.sent, self.received + traffic.received

    async def rest(self, idle: float = 0.0) -> None:
        """Wait until the host does nothing more, but for what it does while nobody asks."""
        with trio.move_on_after(SETTLE_TIMEOUT):
            while True:
                before, at = self.cpu(), time.monotonic()
                await trio.sleep(REST_SECONDS)
                if self.cpu() - before < (idle + REST_SHARE) * (time.monotonic() - at):
                    return


HERE = PeerConfig(home=Path("unused"), host="127.0.0.1", port=0, upnp=False, dial_timeout=30.0)
"""What strangers are; on a busy machine a dial takes longer than usual."""


def cpu_seconds_of(pid: int) -> float:
    """Return the seconds that a process has run, those of its threads that have not ended."""
    spent = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):  # A thread that has just ended.
            spent += int((task / "schedstat").read_text().split()[0])
    return spent / 1e9


def resident_bytes_of(pid: int) -> int:
    """Return the resident size of a process."""
    (line,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) << 10


async def reply(stream: Stream, buffer: FrameBuffer) -> bytes:
    """Return the next frame of a stream. Raises `StreamClosed`."""
    while (payload := buffer.next_frame()) is None:
        if not (data := await stream.receive_some(1 << 16)):
            raise StreamClosed("the host has ended the stream")
        buffer.feed(data)
    return bytes(payload)


UPGRADE = (
    "GET / HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
)
GREETING = b"/multistream/1.0.0"


def line(text: str) -> bytes:
    """Return a line of multistream."""
    return bytes((len(text) + 1,)) + text.encode() + b"\n"


async def connections(lab: Lab, count: int) -> int:
    """Come, exchange identify messages as the library does, and leave."""
    for _ in range(count):
        async with lab.stranger():
            pass
    return count


async def streams(lab: Lab, count: int) -> int:
    """Propose a protocol that nobody has."""
    for _ in range(count):
        with suppress(StreamClosed):
            await lab.me.open_stream(lab.peer, "/nothing/1")
    return count


async def lines(lab: Lab, count: int) -> int:
    """Propose as many protocols on one stream as a negotiation has lines."""
    for _ in range(count // MAX_LINES):
        (connection, *_) = lab.me._connections(lab.peer)
        stream = await connection.muxed_conn.open_stream()
        await stream.write(line("/multistream/1.0.0") + line("/nothing/1") * (MAX_LINES - 1))
        with suppress(Exception):  # Whatever the library raises for a stream that the host has reset.
            while await stream.read(1 << 12):
                pass
    return count // MAX_LINES * MAX_LINES


async def yamux_frames(lab: Lab, count: int) -> int:
    """Send window updates for a stream that does not exist."""
    (connection, *_) = lab.me._connections(lab.peer)
    update = bytes((0, 1, 0, 0)) + (9001).to_bytes(4, "big") + (1).to_bytes(4, "big")
    for _ in range(count // 1024):
        await connection.muxed_conn.secured_conn.write(update * 1024)
    await streams(lab, 1)  # Behind them, so that they have been handled.
    return count // 1024 * 1024


async def whole_answers(lab: Lab, count: int, *, protocol: str, question: bytes = b"") -> int:
    """Ask one question on each stream, and read until the host ends it or, after a question, for an answer."""
    for _ in range(count):
        with suppress(StreamClosed):
            stream = await lab.me.open_stream(lab.peer, protocol)
            if question:
                await stream.send_all(question)
            while await stream.receive_some(1 << 16) and not question:
                pass
            await stream.reset()
    return count


async def beats(lab: Lab, count: int) -> int:
    """Send heartbeats."""
    stream = await lab.me.open_stream(lab.peer, SESSION_PROTOCOL)
    for _ in range(count):
        await stream.send_all(message_packet(wire.Beat()))
    await stream.aclose()
    return count


async def own_records(lab: Lab, count: int) -> int:
    """Send new records of oneself."""
    stream = await lab.me.open_stream(lab.peer, SESSION_PROTOCOL)
    body = encode(MemberBody(MemberState.TRAINING, ("/ip4/192.0.2.1/tcp/4001",), Rung.DIRECT))
    for number in range(count):
        sequence = time.time_ns() // 1_000_000 + number
        record = Record.sign(lab.identity, run=lab.run, kind="member", sequence=sequence, lifetime=60.0, body=body)
        await stream.send_all(message_packet(wire.Members((record.encode(),))))
    await stream.aclose()
    return count


async def asks(lab: Lab, count: int) -> int:
    """Ask who the members are."""
    session = Session(lab.peer, lambda: lab.me.open_stream(lab.peer, SESSION_PROTOCOL), lambda _: None)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(session.run)
        for _ in range(count):
            await session.ask(wire.MembersAsk(lab.run, b""), timeout=QUESTION_TIMEOUT)
        nursery.cancel_scope.cancel()
    return count


async def fetches(lab: Lab, count: int) -> int:
    """Ask for bytes that the host does not have."""
    stream, buffer = await lab.me.open_stream(lab.peer, BULK_PROTOCOL), FrameBuffer()
    for number in range(count):
        await stream.send_all(frame(wire.pack(wire.Fetch(number.to_bytes(32, "big"), 0))))
        await reply(stream, buffer)
    await stream.reset()
    return count


async def look_ups(lab: Lab, count: int) -> int:
    """Ask for the members of a run that has as many as are listed."""
    stream = await lab.me.open_stream(lab.peer, KAD)
    reader = MessageReader(stream, 1 << 20)
    for _ in range(count):
        await send(stream, about(Message.GET_PROVIDERS, CROWDED_KEY))
        if await reader.next() is None:
            raise StreamClosed("the directory has ended the stream")
    await stream.reset()
    return count


async def records(lab: Lab, count: int) -> int:
    """Say that one is a member of ever other runs."""
    stream = await lab.me.open_stream(lab.peer, KAD)
    reader = MessageReader(stream, 1 << 20)
    for number in range(count):
        message = about(Message.ADD_PROVIDER, run_key(f"{number:b}".translate({48: "a", 49: "b"}).rjust(52, "c")))
        add_peer_to(message.providerPeers, lab.me.peer_id, ["/ip4/192.0.2.1/tcp/4001"])
        await send(stream, message)
        if await reader.next() is None:
            raise StreamClosed("the directory has ended the stream")
    await stream.reset()
    return count


async def dialback_questions(lab: Lab, count: int, *, dials: bool) -> int:
    """Ask for the observed address, or to be dialled."""
    stream = await lab.me.open_stream(lab.peer, dialback.DIALBACK_PROTOCOL)
    for _ in range(count):
        answer = await dialback.ask(stream, lab.me.port if dials else 0)
        if answer.dialled is not dials:
            raise LocalError("a question was answered without a dial")
    await stream.reset()
    return count


async def pings(lab: Lab, count: int) -> int:
    """Ping on one stream."""
    stream = await lab.me.open_stream(lab.peer, ping.PING_PROTOCOL)
    for _ in range(count):
        await stream.send_all(bytes(ping.PING_BYTES))
        missing = ping.PING_BYTES
        while missing > 0:
            missing -= len(await stream.receive_some(missing))
    await stream.reset()
    return count


async def pieces(lab: Lab, count: int) -> int:
    """Ask for the largest piece of a measurement."""
    stream = await lab.me.open_stream(lab.peer, speed.SPEED_PROTOCOL)
    for _ in range(count):
        await stream.send_all(frame(encode(speed.Piece(False, speed.MAX_PIECE))))
        missing = speed.MAX_PIECE
        while missing > 0:
            missing -= len(await stream.receive_some(1 << 16))
    await stream.reset()
    return count


async def circuit_bytes(lab: Lab, count: int) -> int:
    """Send so many MiB through the relay."""
    whole = trio.Event()

    async def take(stream: Stream) -> None:
        missing = count << 20
        while missing > 0:
            missing -= len(await stream.receive_some(1 << 20))
        whole.set()

    async with lab.stranger() as target, lab.stranger() as caller:
        target.handle("/bench/sink/1", take)
        await target._relays.reserve(lab.peer)
        await caller._relays.dial(lab.peer, target.peer_id)
        stream = await caller.open_stream(target.peer_id, "/bench/sink/1")
        for _ in range(count):
            await stream.send_all(bytes(1 << 20))
        await whole.wait()
        await stream.reset()
    return count


async def requests(lab: Lab, count: int, *, what: str) -> int:
    """Get the first page, over a connection for each."""
    host, port = lab.http[what]
    question = f"GET {'/' if what == 'page' else '/metrics'} HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n\r\n"
    for _ in range(count):
        async with await trio.open_tcp_stream(host, port) as stream:
            await stream.send_all(question.encode())
            lab.sent += len(question)
            while data := await stream.receive_some(1 << 16):
                lab.received += len(data)
    return count


async def websockets(lab: Lab, count: int) -> int:
    """Ask for a WebSocket, and leave once the host has begun its handshake there."""
    host, port = lab.http["websocket"]
    question = UPGRADE.format(host=host, port=port).encode()
    for _ in range(count):
        async with await trio.open_tcp_stream(host, port) as stream:
            await stream.send_all(question)
            lab.sent += len(question)
            answer = b""
            while GREETING not in answer:
                answer += await stream.receive_some(1 << 12)
            lab.received += len(answer)
    return count


async def hold_connections(lab: Lab, stack: AsyncExitStack) -> int:
    """Hold idle connections."""
    for _ in range(HELD_CONNECTIONS):
        await stack.enter_async_context(lab.stranger())
    return HELD_CONNECTIONS


async def hold_silent_streams(lab: Lab, stack: AsyncExitStack) -> int:
    """Hold streams on which half a line of a negotiation has come, as long as a line may be."""
    stranger = await stack.enter_async_context(lab.stranger())
    (connection, *_) = stranger._connections(lab.peer)
    for _ in range(HELD):
        stream = await connection.muxed_conn.open_stream()
        await stream.write(line("/multistream/1.0.0") + b"\xff\x07" + bytes(900))
    return HELD


async def hold_streams(lab: Lab, stack: AsyncExitStack, *, protocol: str, of_each: int, strangers: int) -> int:
    """Hold streams on which a protocol is agreed."""
    for _ in range(strangers):
        stranger = await stack.enter_async_context(lab.stranger())
        for _ in range(of_each):
            await stranger.open_stream(lab.peer, protocol)
    return of_each * strangers


async def hold_sockets(lab: Lab, stack: AsyncExitStack, *, what: str) -> int:
    """Hold connections on which no request comes."""
    host, port = lab.http[what]
    for _ in range(MAX_READERS):
        await stack.enter_async_context(await trio.open_tcp_stream(host, port))
    return MAX_READERS


def shares(rate: float, all_share: float = ALL_SHARE) -> Level:
    """Return the rates of an address, a network and all networks."""
    return rate, rate * NETWORK_SHARE, rate * all_share


BOOTSTRAP, OWNER = "bootstrap", "owner"
LIMITS = BootstrapLimits()
MEMBER_LIMITS = GateLimits()
UNBOUNDED: Level = (math.inf,) * 3
KAD = "/ipfs/kad/1.0.0"
CROWDED_RUN = "d" * 52
CROWDED_KEY = run_key(CROWDED_RUN)
STREAMS = {
    host: (rate, rate * host_module.NETWORK_STREAMS, rate * ALL_SHARE)
    for host, rate in ((BOOTSTRAP, LIMITS.gate.streams_per_second), (OWNER, MEMBER_LIMITS.streams_per_second))
}
CONNECTIONS: Level = (LIMITS.connections_per_address, LIMITS.connections_per_network, LIMITS.connections)
OPEN: Level = (
    host_module.STREAMS_OF_A_CONNECTION * LIMITS.connections_per_address,
    host_module.STREAMS_OF_A_CONNECTION * LIMITS.connections_per_network,
    host_module.OPEN_STREAMS,
)
MESSAGES: Level = (
    guard.PER_SECOND * guard.BEATS,
    guard.PER_SECOND * guard.BEATS * (guard.NETWORK_SHARE // guard.ADDRESS_SHARE),
    guard.PER_SECOND * guard.STRANGERS_SHARE,
)
SIGNATURES: Level = (
    guard.SIGNATURES_PER_SECOND,
    guard.SIGNATURES_PER_SECOND * (guard.NETWORK_SHARE // guard.ADDRESS_SHARE),
    MESSAGES[2],
)
DIRECTORY_STREAMS: Level = (
    directory_server.MAX_STREAMS_PER_ADDRESS,
    directory_server.MAX_STREAMS_PER_NETWORK,
    directory_server.MAX_SERVER_STREAMS,
)


def _a_few(level: Level, part: float) -> Level:
    return level[0] / part, level[1] / part, level[2] / part


_FEW_STREAMS = partial(hold_streams, of_each=FEW, strangers=24)
_PAGE_PLACES: Level = (MAX_CONNECTIONS_OF_ADDRESS, MAX_CONNECTIONS_OF_NETWORK, MAX_CONNECTIONS)
_PIECES = shares(speed.ALLOWANCE_BYTES / speed.ALLOWANCE_PERIOD / speed.MAX_PIECE, speed.ALL_ALLOWANCES)
_CIRCUITS: Level = (LIMITS.circuit_rate / (1 << 20), LIMITS.relay_rate / (1 << 20), LIMITS.relay_rate / (1 << 20))
_DIALS = shares(dialback.DIALS_PER_PERIOD / dialback.DIAL_PERIOD, dialback.ALL_DIALS)
_SIGNED = "… `Signed`, `Certificate`, `Proof`, `Unheard`, `Accusations`"
_ASKED = "… `MembersAsk`, `LedgerAsk`, `StateAsk`, `LeavesAsk`, `FilesAsk`, `VoteAsk`"
_QUESTIONS: Level = (
    directory_server.QUESTIONS_PER_SECOND,
    directory_server.QUESTIONS_PER_SECOND * directory_server.NETWORK_QUESTIONS,
    directory_server.QUESTIONS_PER_SECOND * ALL_SHARE,
)
_STATEMENT = wire.Signed(Identity.from_seed(bytes(32)).peer_id, 1, bytes(200), bytes(64))
"""It ends the stream of who is no member."""
_RESERVE = b"\x02\x08\x00"
"""HopMessage and StopMessage with type 0 and nothing else, its length before it."""

QUESTIONS = (
    Question(
        name="Noise, both kinds", host=BOOTSTRAP, ask=connections, count=40, hold=hold_connections, places=CONNECTIONS,
        rate=shares(LIMITS.gate.connects_per_second, gate.ALL_CONNECTS),
    ),
    Question(
        name="a WebSocket (`--ws`, `--wss`)", host=BOOTSTRAP, ask=websockets,
        rate=shares(LIMITS.gate.connects_per_second, gate.ALL_CONNECTS),
    ),
    Question(name="a stream", host=BOOTSTRAP, ask=streams, count=300, hold=hold_silent_streams, places=OPEN),
    Question(
        name="lines of multistream", host=BOOTSTRAP, ask=lines, count=960,
        rate=_a_few(STREAMS[BOOTSTRAP], 1 / MAX_LINES),
    ),
    Question(
        name="Yamux frames", host=BOOTSTRAP, ask=yamux_frames, count=16_384, rate=shares(frames.FRAMES_PER_SECOND),
    ),
    Question(name="`/ipfs/id/1.0.0`", host=BOOTSTRAP, ask=partial(whole_answers, protocol="/ipfs/id/1.0.0"), count=200),
    Question(
        name="`/flockstep/control/1`", host=OWNER, places=OPEN,
        ask=partial(whole_answers, protocol=SESSION_PROTOCOL, question=frame(b"junk")),
        hold=partial(hold_streams, protocol=SESSION_PROTOCOL, of_each=4, strangers=24),
    ),
    Question(name="… `Beat`", host=OWNER, ask=beats, count=1000, rate=MESSAGES),
    Question(
        name=_SIGNED, host=OWNER,
        ask=partial(whole_answers, protocol=SESSION_PROTOCOL, question=message_packet(_STATEMENT)),
    ),
    Question(name="… `Members`, `Met`, `Goodbye`", host=OWNER, ask=own_records, rate=SIGNATURES),
    Question(name=_ASKED, host=OWNER, ask=asks, count=200, rate=_a_few(MESSAGES, guard.QUESTION_MESSAGES)),
    Question(
        name="`/flockstep/bulk/1`", host=OWNER, ask=fetches, count=200, rate=_a_few(MESSAGES, guard.QUESTION_MESSAGES),
        hold=partial(hold_streams, protocol=BULK_PROTOCOL, of_each=4, strangers=24), places=OPEN,
    ),
    Question(
        name="`/ipfs/kad/1.0.0`", host=BOOTSTRAP, ask=look_ups, places=DIRECTORY_STREAMS,
        rate=_QUESTIONS,
        hold=partial(hold_streams, protocol=KAD, of_each=directory_server.MAX_STREAMS_PER_PEER, strangers=12),
    ),
    Question(
        name="… a record to keep", host=BOOTSTRAP, ask=records, count=200,
        rate=shares(LIMITS.record_rate, directory_server.ALL_RECORDS),
    ),
    Question(
        name="`/flockstep/dialback/1`", host=BOOTSTRAP, ask=partial(dialback_questions, dials=False), places=OPEN,
        rate=shares(dialback.QUESTIONS_PER_PERIOD / dialback.DIAL_PERIOD),
        hold=partial(_FEW_STREAMS, protocol=dialback.DIALBACK_PROTOCOL),
    ),
    Question(
        name="… with a dial", host=BOOTSTRAP, ask=partial(dialback_questions, dials=True), count=8, rate=_DIALS,
    ),
    Question(
        name="`/flockstep/rate/1`", host=BOOTSTRAP, ask=pieces, count=6, rate=_PIECES, places=OPEN,
        hold=partial(_FEW_STREAMS, protocol=speed.SPEED_PROTOCOL),
    ),
    Question(
        name="`/ipfs/ping/1.0.0`", host=BOOTSTRAP, ask=pings, count=40, places=OPEN,
        rate=shares(ping.PINGS_PER_SECOND),
        hold=partial(_FEW_STREAMS, protocol=ping.PING_PROTOCOL),
    ),
    Question(
        name="`/libp2p/circuit/relay/0.2.0/hop`", host=BOOTSTRAP,
        ask=partial(whole_answers, protocol="/libp2p/circuit/relay/0.2.0/hop", question=_RESERVE),
    ),
    Question(name="… a MiB through a circuit", host=BOOTSTRAP, ask=circuit_bytes, count=24, rate=_CIRCUITS),
    Question(
        name="`/libp2p/circuit/relay/0.2.0/stop`, `/libp2p/dcutr`", host=OWNER,
        ask=partial(whole_answers, protocol="/libp2p/circuit/relay/0.2.0/stop", question=_RESERVE),
    ),
    Question(
        name="HTTP of the [page](page.md) (`--page`)", host=BOOTSTRAP, ask=partial(requests, what="page"),
        rate=shares(REQUESTS_PER_SECOND),
        hold=partial(hold_sockets, what="page"), places=_PAGE_PLACES,
    ),
    Question(
        name="HTTP of the [metrics](metrics.md) (`--metrics`)", host=BOOTSTRAP, ask=partial(requests, what="metrics"),
        rate=UNBOUNDED, hold=partial(hold_sockets, what="metrics"), places=(MAX_READERS,) * 3,
    ),
)
"""Every row of the table, in its order as far as one question needs what another one has left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StrangersOptions:
    """The options of the command line. Raises `UsageError`."""

    only: tuple[str, ...] = ()
    """Parts of the names of the questions that are asked; empty for all."""
    share: float = 1.0
    """Of the usual number of questions."""
    as_json: bool = False

    def __post_init__(self) -> None:
        for word in self.only:
            if not any(word in question.name for question in QUESTIONS):
                names = ", ".join(question.name for question in QUESTIONS)
                raise UsageError(f"--only {word!r} is in the name of no question", remedy=f"such as one of {names}")

    @property
    def questions(self) -> tuple[Question, ...]:
        """The questions that are asked."""
        return tuple(one for one in QUESTIONS if not self.only or any(word in one.name for word in self.only))


def run_strangers(
    options: StrangersOptions, write_line: Callable[[str], None], report: Callable[[str], None]
) -> Sequence[Cost]:
    """Measure, and write the table; `report` gets a line after each question. Raises `UsageError`, `LocalError`."""
    if sys.platform != "linux":
        raise UsageError("the time that a process has run is read from Linux's /proc", remedy="measure on Linux")
    with tempfile.TemporaryDirectory(prefix="flockstep-bench-") as folder, Processes() as processes:
        labs = start_hosts(processes, Path(folder), {question.host for question in options.questions})
        costs = trio.run(measure_all, options, labs, report)
    for text in (json.dumps([as_row(cost) for cost in costs]),) if options.as_json else table(costs):
        write_line(text)
    return costs


def start_hosts(processes: Processes, folder: Path, wanted: set[str]) -> dict[str, Lab]:
    """Start a bootstrap whose directory lists a crowded run, and if it is wanted a run's owner."""
    home, listen = folder / "bootstrap", ("--host", "127.0.0.1", "--port", "0")
    fill_directory(home / "directory")
    pages = ("--page", "127.0.0.1:0", "--metrics", "127.0.0.1:0", "--ws", "127.0.0.1:0")
    arguments = ["bootstrap", "--home", str(home), *listen, *pages]
    bootstrap = processes.start("the bootstrap", arguments, home / "log.txt")
    full = bootstrap.await_line(ADDRESS, START_SECONDS)
    address, peer = split_p2p(full)
    labs = {BOOTSTRAP: Lab(bootstrap, peer, address)}
    labs[BOOTSTRAP].http = http_places(bootstrap, home)
    if OWNER in wanted:
        toml, home = folder / "run.toml", folder / "owner"
        write_whole(toml, RUN_TOML.encode())
        create = ["run", "create", str(toml), "--via", full, "--home", str(home), *listen]
        owner = processes.start("flockstep run create", create, home / "log.txt")
        link = JoinLink.parse(owner.await_line(LINK, START_SECONDS))
        peer, address = trio.run(member_of, link)
        labs[OWNER] = Lab(owner, peer, address)
        labs[OWNER].run = link.run_id
    return labs


def fill_directory(path: Path) -> None:
    """Write a directory in which as many say that they are in one run as are listed."""
    store, until = Store(LIMITS), time.time() + PROVIDER_SECONDS
    for number in range(MAX_PROVIDERS):
        peer = Identity.from_seed(number.to_bytes(32, "big")).peer_id
        where = bytes((4, 198, 18 + number // 256 // 64, number % 256, 1, 6, 0x0F, 0xA1))
        ip = f"198.18.{number % 250}.{number // 250 + 1}"
        store.put(Entry(CROWDED_KEY.encode(), peer, b"", (where,), ip, until))
    path.parent.mkdir(parents=True, exist_ok=True)
    StoreFile(path, Telemetry()).rewrite(store)


async def member_of(link: JoinLink) -> tuple[PeerId, str]:
    """Find the one member of a run. Raises `LocalError`."""
    address, peer = split_p2p(link.bootstraps[0])
    async with (
        open_host(Identity.generate(), HERE, Telemetry()) as host,
        open_directory(host, server=False, telemetry=Telemetry(), validate=validate_published) as directory,
    ):
        await host.connect(peer, [address])
        await directory.add_server(peer)
        with trio.move_on_after(START_SECONDS):
            while True:
                for member in await directory.find(link.run_id):
                    return member, directory.addresses(member)[0]
                await trio.sleep(REST_SECONDS)
    raise LocalError("the bootstrap lists no member of the run", remedy="try again on an idle machine")


async def measure_all(options: StrangersOptions, labs: dict[str, Lab], report: Callable[[str], None]) -> list[Cost]:
    """Ask all questions, one kind after the other."""
    costs: list[Cost] = []
    async with AsyncExitStack() as stack:
        for lab in labs.values():
            lab.me = await stack.enter_async_context(open_host(lab.identity, HERE, Telemetry()))
            await lab.me.connect(lab.peer, [lab.address])
            await lab.rest()
            lab.idle = await idle_share(lab)
        for question in options.questions:
            lab = labs[question.host]
            if lab.peer not in lab.me.connected():
                await lab.me.connect(lab.peer, [lab.address])
            costs.append(await measure(question, lab, options.share, stack))
            report(f"{question.name}: {costs[-1].failure or f'{costs[-1].cpu_us:.0f} µs'}")
    return costs


async def measure(question: Question, lab: Lab, share: float, held: AsyncExitStack) -> Cost:
    """Ask one kind of question; what is held open for it stays so in `held`."""
    asked, failure, open_bytes = 0, "", None
    idle = lab.idle
    await lab.rest(idle)
    before, (sent, received) = lab.cpu(), lab.traffic()
    at = time.monotonic()
    try:
        with trio.fail_after(QUESTION_TIMEOUT):
            asked = await question.ask(lab, max(1, round(question.count * share)))
    except (NetworkError, LocalError, OSError, trio.TooSlowError) as error:
        failure = f"{type(error).__name__}: {error}"
    await lab.rest(idle)
    spent = max(0.0, lab.cpu() - before - idle * (time.monotonic() - at))
    sent_now, received_now = lab.traffic()
    if question.hold is not None and not failure:
        memory = lab.rss()
        try:  # In no cancel scope of its own: what it opens stays open, and its scopes with it.
            count = await question.hold(lab, held)
        except (NetworkError, OSError) as error:
            failure = f"held open: {type(error).__name__}: {error}"
        else:
            await lab.rest(idle)
            open_bytes = max(0.0, (lab.rss() - memory) / count)
    cpu = spent / max(1, asked)
    rate = question.rate or STREAMS[question.host]
    return Cost(
        question=question.name,
        host=question.host,
        asked=asked,
        cpu_us=cpu * 1e6,
        read_bytes=(sent_now - sent) / max(1, asked),
        sent_bytes=(received_now - received) / max(1, asked),
        open_kb=None if open_bytes is None else open_bytes / 1e3,
        cores=_times(rate, cpu),
        open_mb=None if open_bytes is None or question.places is None else _times(question.places, open_bytes / 1e6),
        failure=failure,
    )


async def idle_share(lab: Lab) -> float:
    """Return the share of a core that a host takes while nobody asks."""
    before, at = lab.cpu(), time.monotonic()
    await trio.sleep(IDLE_SECONDS)
    return (lab.cpu() - before) / (time.monotonic() - at)


def _times(level: Level, cost: float) -> Level:
    return level[0] * cost, level[1] * cost, level[2] * cost


def http_places(process: Process, home: Path) -> dict[str, tuple[str, int]]:
    """Return where a bootstrap shows its page and its metrics and accepts WebSockets, as its log says."""
    found: dict[str, tuple[str, int]] = {}
    for what, event in (("page", "page.ready"), ("metrics", "metrics.ready"), ("websocket", "websocket.ready")):
        deadline = time.monotonic() + START_SECONDS
        while what not in found:
            for _, entry in read_events(log_path(home)):
                if entry["event"] == event:
                    found[what] = "127.0.0.1", int(str(entry["port"]))
            if time.monotonic() > deadline or process.code is not None:
                raise process.died()
            time.sleep(REST_SECONDS)
    return found


def as_row(cost: Cost) -> dict[str, Any]:
    """Return a row for programs: what is unbounded is null."""
    row = asdict(cost)
    row["cores"] = [value if math.isfinite(value) else None for value in cost.cores]
    return row


def table(costs: Sequence[Cost]) -> Iterator[str]:
    """Yield the rows as lines of text."""
    yield f"{'question':58} {'CPU µs':>8} {'read B':>7} {'sent B':>8} {'open kB':>8}  % of a core    MB open"
    for cost in costs:
        if cost.failure:
            yield f"{shown(cost.question):58} not measured: {cost.failure}"
            continue
        open_kb = "" if cost.open_kb is None else f"{cost.open_kb:.1f}"
        yield (
            f"{shown(cost.question):58} {cost.cpu_us:8.0f} {cost.read_bytes:7.0f} {cost.sent_bytes:8.0f} {open_kb:>8}  "
            f"{levels(_times(cost.cores, 100)):13}  {levels(cost.open_mb)}"
        )
    yield "At the limits: of one address / one network (/24, /48) / all networks together."


def shown(name: str) -> str:
    """Return a name of a row without the marks of Markdown, as much as fits."""
    return name.replace("`", "").replace("(page.md)", "").replace("(metrics.md)", "")[:58]


def levels(level: Level | None) -> str:
    """Write a limit of an address, a network and all networks."""
    if level is None:
        return ""
    return " / ".join("∞" if math.isinf(value) else f"{value:.2g}" if value < 10 else f"{value:.0f}" for value in level)
