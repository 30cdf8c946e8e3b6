"""Every loop that reads a socket ends with the socket, whatever its parser says of the bytes so far.

Each reads the empty input, every prefix of a valid one, and a valid one byte for byte. Decoders of whole messages are in
`test_decoders`.
"""

import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing
from cryptography.exceptions import InvalidTag
from flockstep.dht.directory.messages import MessageReader
from flockstep.peer import wire
from flockstep.peer.base.errors import NetworkError, RemoteError
from flockstep.peer.https.proxy import Proxy, _connect
from flockstep.peer.https.websocket import WebStream
from flockstep.peer.identity import Identity
from flockstep.peer.libp2p.fixes import apply_fixes
from flockstep.peer.libp2p.packets import NoiseChannel, PacketChannel, PacketTransport
from flockstep.peer.libp2p.stream import CONNECTION_ERRORS, Libp2pStream
from flockstep.peer.nat import gateway
from flockstep.peer.nat.dialback import Dialback, DialbackAnswer, Question, ask
from flockstep.peer.node.backlog import Backlog
from flockstep.peer.node.bulk import _begin_answer, _rest_of_answer
from flockstep.peer.node.session import message_packet, serve_session, unpack_message
from flockstep.peer.strangers.ping import Pings
from flockstep.peer.wire.framing import frame
from flockstep.peer.wire.schema import encode
from google.protobuf.message import DecodeError
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.x25519 import create_new_key_pair as create_noise_key_pair
from libp2p.kad_dht.pb.kademlia_pb2 import Message
from libp2p.peer.id import ID
from libp2p.protocol_muxer.exceptions import MultiselectError
from libp2p.protocol_muxer.multiselect import Multiselect
from libp2p.protocol_muxer.multiselect_communicator import MultiselectCommunicator
from libp2p.relay.circuit_v2.pb.circuit_pb2 import HopMessage
from libp2p.relay.circuit_v2.utils import read_delimited_msg
from libp2p.utils.varint import encode_delim, encode_varint_prefixed
from wsproto import ConnectionType as Role
from wsproto import WSConnection
from wsproto.events import AcceptConnection, BytesMessage, CloseConnection, Ping, Request

SOMEBODY = Identity.from_seed(bytes(32)).peer_id
MOST = 1 << 18
MOST_AFTER_THE_END = 2
"""Reads: one that shows it, and one of a caller that asks whether there is more."""
ERRORS = (NetworkError, RemoteError, DecodeError, MultiselectError, InvalidTag, *CONNECTION_ERRORS)


class Runaway(BaseException):
    """A loop that goes on behind the end: nothing may catch it."""


class Ending(Libp2pStream):
    """A socket, and a stream, from which so many bytes come and then the end; it takes what is written."""

    def __init__(self, answer: Callable[[bytes], bytes], most: int, piece: int) -> None:
        self.remote = SOMEBODY
        self._answer, self._most, self._piece = answer, most, piece
        self._arriving: bytes | None = None
        self._written = b""
        self.length = self._reads_after_the_end = 0
        self.socket = SimpleNamespace(getsockname=lambda: ("192.168.1.2", 4001))

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        await trio.lowlevel.checkpoint()
        if self._arriving is None:
            whole = self._answer(self._written)
            self.length, self._arriving = len(whole), whole[: self._most]
        count = min(self._piece, max_bytes or self._piece)
        data, self._arriving = self._arriving[:count], self._arriving[count:]
        self._reads_after_the_end += not data and max_bytes != 0
        if self._reads_after_the_end > MOST_AFTER_THE_END:
            raise Runaway
        return data

    read = receive_some

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await trio.lowlevel.checkpoint()
        self._written += data

    write = send_all

    async def close(self) -> None:
        pass

    async def __aenter__(self) -> "Ending":
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    def remote_socket(self) -> tuple[str, int]:
        return "192.0.2.1", 4001

    def hold_at_most(self, num_bytes: int) -> None:
        pass


@contextmanager
def web(carrier: Ending, *, is_client: bool) -> Iterator[WebStream]:
    one, other = socket.socketpair()
    with one, other:
        stream: Any = carrier
        yield WebStream(trio.SocketStream(trio.socket.from_stdlib_socket(one)), stream, is_client=is_client)


async def accept_websocket(carrier: Ending) -> None:
    with web(carrier, is_client=False) as stream:
        await stream.answer(from_proxy=True)
        while await stream.read(16):
            pass


async def open_websocket(carrier: Ending) -> None:
    with web(carrier, is_client=True) as stream:
        await stream.ask("boot.example:443")
        while await stream.read(16):
            pass


def requested(_: bytes) -> bytes:
    machine = WSConnection(Role.CLIENT)
    head = machine.send(Request(host="a", target="/", extra_headers=[(b"X-Forwarded-For", b"192.0.2.1")]))
    frames = b"\x82\x85\0\0\0\0hello" + b"\x89\x80\0\0\0\0" + b"\x02\x80\0\0\0\0" + b"\x80\x81\0\0\0\0a"
    return head + frames + b"\x88\x82\0\0\0\0\x03\xe8"


def accepted(asked: bytes) -> bytes:
    machine = WSConnection(Role.SERVER)
    machine.receive_data(asked)
    list(machine.events())
    events = (AcceptConnection(), BytesMessage(b"hello"), Ping(b"a"), BytesMessage(b""), CloseConnection(1000))
    return b"".join(bytes(machine.send(event)) for event in events)


async def ask_router(stream: Ending) -> None:
    async def connect(*_: object) -> Ending:
        return stream

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trio, "open_tcp_stream", connect)
        await gateway._ask(gateway._Place("192.168.1.1", 80, "/"), [], b"")


async def negotiate(stream: Ending) -> None:
    await Multiselect({}).negotiate(MultiselectCommunicator(stream))  # type: ignore[arg-type]


async def shake_hands(stream: Ending, *, dials: bool) -> None:
    transport = PacketTransport(create_new_key_pair(bytes(32)), create_noise_key_pair().private_key)
    connection: Any = SimpleNamespace(read=stream.read, write=stream.write, close=stream.close, is_initiator=dials)
    if dials:
        await transport.secure_outbound(connection, ID.from_base58(SOMEBODY))
    else:
        await transport.secure_inbound(connection)


def channel(kind: type[NoiseChannel], stream: Ending) -> NoiseChannel:
    key = SimpleNamespace(k=bytes(32))
    keys = SimpleNamespace(cipher_state_encrypt=key, cipher_state_decrypt=key)
    noise = SimpleNamespace(noise_protocol=keys, decrypt=lambda data: data)
    connection: Any = stream
    return kind(connection, noise)


async def read_channel(kind: type[NoiseChannel], stream: Ending) -> None:
    reader = channel(kind, stream)
    while True:
        await reader.read_msg()


def packets(_: bytes) -> bytes:
    sender = channel(PacketChannel, Ending(lambda _: b"", 0, 1))
    return bytes(sender.sealed([b"one"])) + bytes(sender.sealed([b"two"]))


async def fetch(stream: Ending) -> None:
    _, piece = await _begin_answer(stream, 40)
    async for _ in _rest_of_answer(stream, piece, 40):
        pass


async def hold_session(stream: Ending) -> None:
    def ignore(*_: object) -> None:
        pass

    async def answer(*_: object) -> object:
        return wire.Beat(False)

    backlog = Backlog(streams=4, per_peer=1 << 20, in_all=1 << 20, is_member=lambda peer: False)
    await serve_session(stream, ignore, answer, ignore, unpack_message, backlog)


async def dialled(peer: str, address: str, seconds: float) -> str:
    return ""


async def read_kademlia(stream: Ending) -> None:
    reader = MessageReader(stream, 10_000)
    while await reader.next():
        pass


def always(data: bytes) -> Callable[[bytes], bytes]:
    return lambda _: data


QUESTION = frame(encode(Question(0)))
HOP = encode_varint_prefixed(HopMessage(type=HopMessage.RESERVE).SerializeToString())
LINES = encode_delim(b"/multistream/1.0.0") + encode_delim(b"/nothing/1") + encode_delim(b"ls")
READERS: dict[str, tuple[Callable[[Ending], Awaitable[Any]], Callable[[bytes], bytes]]] = {
    "a request for a WebSocket, and its frames": (accept_websocket, requested),
    "a WebSocket that was asked for": (open_websocket, accepted),
    "a WebSocket that is refused": (open_websocket, always(b"HTTP/1.1 403 No\r\nContent-Length: 5\r\n\r\nhello")),
    "the answer of a proxy": (
        lambda stream: _connect(stream, Proxy("a", 1, ""), "b:443"),  # type: ignore[arg-type]
        always(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nA: b\r\n\r\n"),
    ),
    "the answer of a router": (
        ask_router,
        always(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\n<a>\r\n0\r\n\r\n"),
    ),
    "a negotiation": (negotiate, always(LINES)),
    "a handshake that others begin": (
        partial(shake_hands, dials=False),
        always(b"\0\x20" + bytes(range(32)) + b"\0\x40" + bytes(64)),
    ),
    "a handshake": (partial(shake_hands, dials=True), always(b"\0\xa0" + bytes(range(160)))),
    "messages of Noise": (partial(read_channel, NoiseChannel), always(b"\0\x03abc\0\x01d")),
    "packets": (partial(read_channel, PacketChannel), packets),
    "questions for a dial back": (lambda stream: Dialback(dialled).serve(stream), always(2 * QUESTION)),
    "the answer of a dial back": (
        lambda stream: ask(stream, 1),
        always(frame(encode(DialbackAnswer("/ip4/192.0.2.1/tcp/1", True, "", 1.0)))),
    ),
    "pings": (lambda stream: Pings().serve(stream), always(bytes(70))),
    "a question to a relay": (lambda stream: read_delimited_msg(stream, HopMessage), always(bytes(HOP))),
    "messages of Kademlia": (
        read_kademlia,
        always(2 * bytes(encode_varint_prefixed(Message(type=Message.PING, key=b"a").SerializeToString()))),
    ),
    "bulk bytes": (fetch, always(frame(wire.pack(wire.Serve(40, ""))) + bytes(40))),
    "a session": (hold_session, always(2 * message_packet(wire.Beat(True)))),
}


@pytest.mark.parametrize("name", READERS)
def test_a_loop_over_a_socket_ends_with_it(name: str) -> None:
    apply_fixes()
    read, answer = READERS[name]

    async def take(most: int, piece: int) -> int:
        """Return how long all of it is."""
        stream = Ending(answer, most, piece)
        with suppress(*ERRORS):
            await read(stream)
        return stream.length

    async def main() -> None:
        length = await take(MOST, 1)
        assert length == await take(MOST, MOST) > 0
        for most in range(length):
            await take(most, MOST)

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
