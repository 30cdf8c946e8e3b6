"""Kademlia's messages as libp2p encodes them: framing on a stream, and the peers that they name."""

import functools
from collections.abc import Iterable
from typing import Any

from google.protobuf.message import DecodeError
from libp2p.kad_dht.pb.kademlia_pb2 import Message
from libp2p.peer.id import ID
from libp2p.utils.varint import encode_varint_prefixed
from multiaddr import Multiaddr

from ...peer.base.errors import MalformedMessage, StreamClosed
from ...peer.base.transport import Address, PeerId, Stream
from ...peer.identity import peer_of
from ...peer.strangers.identify import stated_address
from .store import MAX_STORED_ADDRESSES

__all__ = ["Message", "MessageReader", "about", "about_value", "add_peer_to", "binary_id", "peers_of", "send"]

MAX_NAMED_PEERS = 256
"""The limit of peers taken from one message; a server of ours names a hundred at most."""

MESSAGE_READ_BYTES = 1 << 16
"""Bytes received at a time; a stream may hold so much more than one message in memory."""

MAX_VARINT_BITS = 63
"""The limit of a length: nine bytes, the most that multiformats' unsigned varint allows."""

MAX_CACHED = 1 << 15
"""The limit of ids and of addresses whose binary form is cached, some 300 bytes each. A store holds few providers more,
so no choice of questions makes answers compute them again."""


def about(kind: Any, key: str) -> Message:
    """Build a message of one kind about a key."""
    return Message(type=kind, key=key.encode())


def about_value(key: str, value: bytes) -> Message:
    """Build the message that puts a value under a key."""
    message = about(Message.PUT_VALUE, key)
    message.record.key, message.record.value = message.key, value
    return message


async def send(stream: Stream, message: Message) -> None:
    """Write one message, its length as a varint before it. Raises `StreamClosed`."""
    await stream.send_all(encode_varint_prefixed(message.SerializeToString()))


class MessageReader:
    """Reads the messages of one stream, none longer than `max_bytes`."""

    def __init__(self, stream: Stream, max_bytes: int) -> None:
        self._stream = stream
        self._max_bytes = max_bytes
        self._data = bytearray()

    async def next(self) -> Message | None:
        """Receive the next message; None at the end of the stream. Raises `MalformedMessage` or `StreamClosed`."""
        if not self._data and not await self._receive():
            return None
        length = shift = 0
        more = True
        while more:
            (byte,) = await self._take(1)
            length |= (byte & 0x7F) << shift
            if length > self._max_bytes:  # Before any of it is read.
                raise MalformedMessage("a message of too many bytes")
            more, shift = byte >= 0x80, shift + 7
            if shift > MAX_VARINT_BITS:
                raise MalformedMessage("not a Kademlia message")
        message = Message()
        try:
            message.ParseFromString(await self._take(length))
        except DecodeError as error:
            raise MalformedMessage("not a Kademlia message") from error
        return message

    async def _take(self, count: int) -> bytes:
        while len(self._data) < count:
            if not await self._receive():
                raise StreamClosed(f"{self._stream.remote} ended the stream within a message")
        taken = bytes(self._data[:count])
        del self._data[:count]
        return taken

    async def _receive(self) -> bool:
        data = await self._stream.receive_some(MESSAGE_READ_BYTES)
        self._data += data
        return bool(data)


def add_peer_to(peers: Any, peer: PeerId, addresses: Iterable[Address]) -> None:
    """Append a peer to a field of a message."""
    entry = peers.add()
    entry.id = binary_id(peer)
    entry.addrs.extend(map(_binary, addresses))


def peers_of(peers: Any) -> dict[PeerId, tuple[Address, ...]]:
    """Return the peers that a message names, without invalid ones."""
    found: dict[PeerId, tuple[Address, ...]] = {}
    for entry in peers[:MAX_NAMED_PEERS]:
        if peer := peer_of(entry.id):
            stated = (stated_address(raw, peer) for raw in entry.addrs[:MAX_STORED_ADDRESSES])
            found[peer] = tuple(filter(None, stated))
    return found


@functools.lru_cache(MAX_CACHED)
def binary_id(peer: PeerId) -> bytes:
    """Return the binary form of a peer id. Base58 takes 20 µs, and an answer names up to 120 peers."""
    return bytes(ID.from_base58(peer).to_bytes())


@functools.lru_cache(MAX_CACHED)
def _binary(address: Address) -> bytes:
    return bytes(Multiaddr(address).to_bytes())
