"""Kademlia's messages as libp2p writes them: on and off a stream, and the peers that they name."""

from collections.abc import Iterable
from typing import Any

from google.protobuf.message import DecodeError
from libp2p.io.exceptions import IncompleteReadError, MessageTooLarge
from libp2p.kad_dht.pb.kademlia_pb2 import Message
from libp2p.peer.id import ID
from libp2p.utils.varint import encode_varint_prefixed, read_varint_prefixed_bytes_limited
from multiaddr import Multiaddr

from ...peer.address import valid_address
from ...peer.errors import MalformedMessage
from ...peer.identity import is_peer_id
from ...peer.transport import Address, PeerId
from .store import MAX_ADDRESS_BYTES, MAX_ADDRESSES

__all__ = ["Message", "about", "about_value", "add_peer_to", "peers_of", "receive", "send"]

MAX_PEERS = 256
"""Taken from one message; a server of ours names a hundred at most."""

MAX_ID_BYTES = 64
"""Of a binary peer id; those of ed25519 keys, the only ones that have a place here, have 38."""


def about(kind: Any, key: str) -> Message:
    """A message of one kind about a key."""
    return Message(type=kind, key=key.encode())


def about_value(key: str, value: bytes) -> Message:
    """The message that puts a value under a key."""
    message = about(Message.PUT_VALUE, key)
    message.record.key, message.record.value = message.key, value
    return message


async def send(stream: Any, message: Message) -> None:
    """Write one message. Raises the library's errors."""
    await stream.write(encode_varint_prefixed(message.SerializeToString()))


async def receive(stream: Any, max_bytes: int) -> Message | None:
    """The next message; None at the end of the stream. Raises `MalformedMessage` or the library's errors."""
    message = Message()
    try:
        message.ParseFromString(await read_varint_prefixed_bytes_limited(stream, max_bytes))
    except IncompleteReadError as error:
        if error.received_bytes == 0:
            return None
        raise
    except MessageTooLarge as error:
        raise MalformedMessage("a message of too many bytes") from error
    except DecodeError as error:
        raise MalformedMessage("no message of Kademlia") from error
    return message


def add_peer_to(peers: Any, peer: ID, addresses: Iterable[Address]) -> None:
    """Append a peer to a field of a message."""
    entry = peers.add()
    entry.id = peer.to_bytes()
    entry.addrs.extend(Multiaddr(address).to_bytes() for address in addresses)


def peers_of(peers: Any) -> dict[PeerId, tuple[Address, ...]]:
    """The peers that a stranger names, as far as they make sense."""
    found: dict[PeerId, tuple[Address, ...]] = {}
    for entry in peers[:MAX_PEERS]:
        peer = str(ID(entry.id)) if len(entry.id) <= MAX_ID_BYTES else ""
        if is_peer_id(peer):
            found[peer] = tuple(address for raw in entry.addrs[:MAX_ADDRESSES] if (address := _address(raw, peer)))
    return found


def _address(raw: bytes, peer: PeerId) -> Address:
    """An address as text, empty where it is none that can be dialled."""
    if len(raw) > MAX_ADDRESS_BYTES:
        return ""
    try:
        text = str(Multiaddr(raw)).removesuffix(f"/p2p/{peer}")
    except (ValueError, LookupError):  # multiaddr's errors for bytes of no and of unknown protocols.
        return ""
    return text if valid_address(text) else ""
