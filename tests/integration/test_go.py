"""go-libp2p: bulk both ways, on streams of either end; Kademlia; RSA keys. Needs `flockstep[hivemind]`, with its daemon."""

import importlib.util
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import trio
from flockstep.dht.directory.kademlia import open_directory
from flockstep.peer.base.config import PeerConfig
from flockstep.peer.host import Libp2pHost, open_host
from flockstep.peer.https.serve import WebPlace
from flockstep.peer.identity import Identity
from flockstep.peer.libp2p.gate import OTHER_KEY
from flockstep.peer.log.telemetry import Event, Telemetry
from flockstep.peer.quota.limits import BootstrapLimits
from libp2p.crypto.rsa import create_new_key_pair
from libp2p.peer.id import ID
from libp2p.utils.varint import encode_varint_prefixed
from multiaddr import Multiaddr

HIVEMIND = importlib.util.find_spec("hivemind")
pytestmark = pytest.mark.skipif(HIVEMIND is None, reason="flockstep[hivemind] is missing")
ECHO = "/test/echo/1"
PIECE = bytes(range(256)) * 4096
PIECES = 20
"""Of a megabyte: more than the largest window."""


def folder() -> Path:
    assert HIVEMIND is not None
    assert HIVEMIND.submodule_search_locations is not None
    return Path(HIVEMIND.submodule_search_locations[0])


def messages() -> ModuleType:
    """The daemon's messages, without the package: hivemind and libp2p cannot be imported into one process."""
    spec = importlib.util.spec_from_file_location("p2pd_pb2", folder() / "proto" / "p2pd_pb2.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Daemon:
    """A running go-libp2p daemon, asked over a socket file."""

    def __init__(self, control: Path, p2pd: Any) -> None:
        self._control, self._p2pd = control, p2pd
        self.connections: list[trio.SocketStream] = []

    async def ask(self, **request: Any) -> tuple[Any, trio.SocketStream]:
        """Send a request on a connection of its own, which a stream then goes on with."""
        connection = await trio.open_unix_socket(str(self._control))
        self.connections.append(connection)
        await connection.send_all(encode_varint_prefixed(self._p2pd.Request(**request).SerializeToString()))
        answer = self._p2pd.Response.FromString(await _delimited(connection))
        assert answer.type == self._p2pd.Response.OK, answer
        return answer, connection

    async def identify(self) -> tuple[str, list[str]]:
        """Return its peer id and addresses."""
        answer, _ = await self.ask(type=self._p2pd.Request.IDENTIFY)
        return str(ID(answer.identify.id)), [str(Multiaddr(address)) for address in answer.identify.addrs]

    async def open_stream(self, host: Libp2pHost, protocol: str, addresses: Sequence[str] = ()) -> trio.SocketStream:
        """Connect to a host, and open a stream there."""
        await self.connect(host.peer_id, addresses or host.addresses())
        opening = self._p2pd.StreamOpenRequest(peer=ID.from_base58(host.peer_id).to_bytes(), proto=[protocol])
        return (await self.ask(type=self._p2pd.Request.STREAM_OPEN, streamOpen=opening))[1]

    async def connect(self, peer: str, addresses: Sequence[str]) -> None:
        """Connect to a peer."""
        addrs = [Multiaddr(one).to_bytes() for one in addresses]
        where = self._p2pd.ConnectRequest(peer=ID.from_base58(peer).to_bytes(), addrs=addrs)
        await self.ask(type=self._p2pd.Request.CONNECT, connect=where)

    async def nearest(self, key: bytes) -> set[str]:
        """Return the Kademlia servers that it finds near a key; none if its table is empty."""
        request, response = self._p2pd.DHTRequest, self._p2pd.DHTResponse
        question = request(type=request.GET_CLOSEST_PEERS, key=key)
        try:
            _, connection = await self.ask(type=self._p2pd.Request.DHT, dht=question)
        except AssertionError:
            return set()
        found = set()
        while (one := response.FromString(await _delimited(connection))).type != response.END:
            found.add(str(ID(one.value)))
        return found

    async def addresses_of(self, peer: str) -> list[str]:
        """Return the addresses of a peer that it finds by Kademlia."""
        request = self._p2pd.DHTRequest
        question = request(type=request.FIND_PEER, peer=ID.from_base58(peer).to_bytes())
        answer, _ = await self.ask(type=self._p2pd.Request.DHT, dht=question)
        return [str(Multiaddr(address)) for address in answer.dht.peer.addrs]

    async def serve(self, protocol: str, port: int) -> None:
        """Hand every stream of a protocol to a TCP port."""
        address = Multiaddr(f"/ip4/127.0.0.1/tcp/{port}").to_bytes()
        handler = self._p2pd.StreamHandlerRequest(addr=address, proto=[protocol], balanced=False)
        await self.ask(type=self._p2pd.Request.STREAM_HANDLER, streamHandler=handler)


async def _listening(control: Path) -> None:
    """Wait until the daemon accepts connections: its socket file is there before that."""
    while True:
        with suppress(OSError):
            await (await trio.open_unix_socket(str(control))).aclose()
            return
        await trio.lowlevel.checkpoint()


async def _delimited(connection: trio.SocketStream) -> bytes:
    size = shift = 0
    while True:
        (byte,) = await connection.receive_some(1)
        size |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            break
    data = b""
    while len(data) < size:
        data += await connection.receive_some(size - len(data))
    return data


@contextmanager
def p2pd(key: bytes = b"", *options: str) -> Iterator[Path]:
    """Run the daemon, with an identity of its own or with that of a key; yields its socket file."""
    with tempfile.TemporaryDirectory(dir="/tmp") as home:  # The path of a socket has at most 108 bytes.
        control = Path(home) / "control"
        program = [folder() / "hivemind_cli" / "p2pd", "-listen", f"/unix{control}", "-hostAddrs", "/ip4/127.0.0.1/tcp/0"]
        program += options
        if key:
            (Path(home) / "key").write_bytes(key)
            program += ["-id", Path(home) / "key"]
        process = subprocess.Popen(list(map(str, program)), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            yield control
        finally:
            process.kill()
            process.wait()


@asynccontextmanager
async def both(
    key: bytes = b"", telemetry: Telemetry | None = None, web: Sequence[WebPlace] = ()
) -> AsyncIterator[tuple[Libp2pHost, Daemon]]:
    config = PeerConfig(home=Path("unused"), host="127.0.0.1", port=0)
    with p2pd(key) as control:
        limits = BootstrapLimits() if key or web else None
        async with open_host(Identity.generate(), config, telemetry or Telemetry(), bootstrap=limits, web=web) as host:
            await _listening(control)
            daemon = Daemon(control, messages())
            try:
                yield host, daemon
            finally:
                for connection in daemon.connections:
                    await connection.aclose()


async def echo(stream: Any) -> None:
    while data := await stream.receive_some(1 << 20):
        await stream.send_all(data)


async def come_back(stream: Any) -> None:
    """Send all pieces, and receive them again meanwhile."""

    async def send() -> None:
        for _ in range(PIECES):
            await stream.send_all(PIECE)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(send)
        received = bytearray()
        while len(received) < PIECES * len(PIECE):
            received += await stream.receive_some(1 << 20)
    assert received == PIECES * PIECE


async def test_bytes_of_a_stream_that_go_opened_come_back_to_it() -> None:
    async with both() as (host, daemon):
        host.handle(ECHO, echo)
        await come_back(await daemon.open_stream(host, ECHO))


async def test_bytes_of_a_stream_that_go_opened_over_a_websocket_come_back_to_it() -> None:
    async with both(web=(WebPlace("127.0.0.1", 0),)) as (host, daemon):
        host.handle(ECHO, echo)
        address = f"/ip4/127.0.0.1/tcp/{host._web[0].port}/ws"
        await come_back(await daemon.open_stream(host, ECHO, [address]))


async def test_bytes_of_a_stream_to_go_come_back_from_it() -> None:
    async with both() as (host, daemon), trio.open_nursery() as nursery:

        async def serve(connection: trio.SocketStream) -> None:
            await _delimited(connection)  # Whose stream it is.
            await echo(connection)

        (listener,) = await nursery.start(partial(trio.serve_tcp, host="127.0.0.1"), serve, 0)
        await daemon.serve(ECHO, listener.socket.getsockname()[1])
        peer, addresses = await daemon.identify()
        await host.connect(peer, [one for one in addresses if one.startswith("/ip4/127.0.0.1/tcp/")])
        await come_back(await host.open_stream(peer, ECHO))
        nursery.cancel_scope.cancel()


@pytest.mark.usefixtures("open_internet")
async def test_go_finds_a_peer_by_the_kademlia_of_a_bootstrap() -> None:
    config, telemetry = PeerConfig(home=Path("unused"), host="127.0.0.1", port=0), Telemetry()
    with p2pd(b"", "-dhtClient") as client, p2pd(b"", "-dhtServer") as server:
        async with (
            open_host(Identity.generate(), config, telemetry, bootstrap=BootstrapLimits()) as host,
            open_directory(host, server=True, telemetry=telemetry, validate=lambda key, value: 1) as directory,
        ):
            daemons = [Daemon(control, messages()) for control in (client, server)]
            for control, daemon in zip((client, server), daemons, strict=True):
                await _listening(control)
                await daemon.connect(host.peer_id, host.addresses())
                while await daemon.nearest(b"a key") != {host.peer_id}:  # It is alone: the second one is not yet known.
                    await trio.lowlevel.checkpoint()
            reader, other = daemons
            peer, addresses = await other.identify()
            while peer not in directory.servers:  # Its first question may have come before what it announces.
                await other.nearest(b"a key")
            assert await reader.nearest(b"a key") == {host.peer_id, peer}
            assert await reader.addresses_of(peer) == addresses
            for daemon in daemons:
                for connection in daemon.connections:
                    await connection.aclose()


async def test_a_bootstrap_says_why_it_cut_off_a_daemon_with_an_rsa_key() -> None:
    """hivemind writes such key files."""

    events: list[Event] = []
    telemetry = Telemetry()
    telemetry.subscribe(lambda event: events.append(event) if event["event"] == "bootstrap.refused" else None)
    key = create_new_key_pair(2048).private_key.serialize()
    async with both(key, telemetry) as (host, daemon):
        with pytest.raises(AssertionError):  # As which the daemon reports that it could not connect.
            await daemon.open_stream(host, ECHO)
        while not events:
            await trio.lowlevel.checkpoint()
    assert [event["reason"] for event in events] == [OTHER_KEY]
