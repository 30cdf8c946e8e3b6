"""The serving side of the directory: py-libp2p's Kademlia server within our limits, and its way to write peers down."""

from collections.abc import Iterable
from typing import Any

import trio
from libp2p.kad_dht import provider_store, value_store
from libp2p.kad_dht.common import format_time_rfc3339
from libp2p.kad_dht.kad_dht import DHTMode, KadDHT
from libp2p.kad_dht.pb.kademlia_pb2 import Message
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import PeerInfo
from libp2p.records.validator import NamespacedValidator, Validator
from libp2p.tools.anyio_service import background_trio_service
from multiaddr import Multiaddr

from ..peer.address import valid_address
from ..peer.identity import is_peer_id
from ..peer.libp2p_host import Libp2pHost
from ..peer.telemetry import Telemetry
from ..peer.transport import Address, PeerId
from .memory_directory import Validate

# Typed Any since their constants are set here.
_provider_store: Any = provider_store
_value_store: Any = value_store

PROVIDER_EXPIRY_SECONDS = 3600.0
"""The library's 48 h would list volunteers two days after they left."""

MAX_VALUES = 4096
"""Values that a server keeps, 64 kB at most each: 256 MB where somebody fills it on purpose (the library: 3 GB)."""

MAX_PEERS = 1000
MAX_ADDRESSES = 16
"""Taken from one answer: members of a run, and addresses of each."""

SERVER_TTL_SECONDS = 7 * 86_400
"""How long a server is named to others after it was met; whoever asks it in vain says so."""

MAX_STREAMS = 256
STREAM_SECONDS = 30.0
"""A server's open streams and the life of one: the library's 12 without limit let 12 silent strangers close the door."""


class DirectoryServer(KadDHT):
    """The serving side: py-libp2p's, within our limits."""

    def __init__(self, host: Libp2pHost, validate: Validate) -> None:
        _value_store.MAX_VALUE_STORE_SIZE = MAX_VALUES
        _provider_store.PROVIDER_RECORD_EXPIRATION_INTERVAL = PROVIDER_EXPIRY_SECONDS
        validator = NamespacedValidator({"flockstep": _Records(validate)}, strict_validation=True)
        super().__init__(host.host, DHTMode.SERVER, validator=validator, validator_changed=True, strict_validation=True)
        self._flock_host = host
        self._inbound_limiter = trio.CapacityLimiter(MAX_STREAMS)

    async def serve(self, telemetry: Telemetry) -> None:
        """Keep house until cancelled."""
        try:
            async with background_trio_service(self):
                await trio.sleep_forever()
        except Exception as error:  # noqa: BLE001  The library's own tasks; what is kept is still served.
            telemetry.emit("directory.housekeeping_failed", reason=repr(error))

    async def handle_stream(self, stream: Any) -> None:
        """Serve one stream, for a while."""
        with trio.move_on_after(STREAM_SECONDS) as scope:
            await super().handle_stream(stream)
        if scope.cancelled_caught:
            await stream.reset()

    async def add_peer(self, peer_id: ID, *, skip_server_mode_check: bool = False) -> bool:
        """Take a server into the routing table; the library would take everyone who asks for one."""
        return await super().add_peer(peer_id)

    async def meet(self, peer: PeerId) -> None:
        """Name this connected server to those who ask."""
        known = ID.from_base58(peer)
        addresses = [Multiaddr(address) for address in self._flock_host.dialled(peer)]
        self.host.get_peerstore().add_addrs(known, addresses, ttl=SERVER_TTL_SECONDS)
        await super().add_peer(known, skip_server_mode_check=True)

    def answer(self, message: Message) -> Message:
        """What this server answers to its own host, which cannot dial itself."""
        answer = Message(type=message.type, key=message.key)
        if message.type == Message.GET_VALUE and (record := self.value_store.get(message.key)):
            answer.record.CopyFrom(record)
        elif message.type == Message.PUT_VALUE:
            message.record.timeReceived = format_time_rfc3339()
            self.value_store.put_record(message.key, message.record)
        elif message.type == Message.GET_PROVIDERS:
            for info in self.provider_store.get_providers(message.key):
                add_peer_to(answer.providerPeers, info.peer_id, [str(address) for address in info.addrs])
        elif message.type == Message.ADD_PROVIDER:
            for peer, addresses in peers_of(message.providerPeers).items():
                info = PeerInfo(ID.from_base58(peer), [Multiaddr(address) for address in addresses])
                self.provider_store.add_provider(message.key, info)
        return answer


class _Records(Validator):
    """`validate` in the library's words."""

    def __init__(self, validate: Validate) -> None:
        self._validate = validate

    def validate(self, key: str, value: bytes) -> None:
        """Raise unless the value may stand under the key."""
        self._validate(key, value)

    def select(self, key: str, values: list[bytes]) -> int:
        """The last of those with the highest sequence: the library takes the first for the one that it has."""
        sequences = [self._validate(key, value) for value in values]
        return max(range(len(values)), key=lambda index: (sequences[index], index))


def add_peer_to(peers: Any, peer: ID, addresses: Iterable[Address]) -> None:
    """Append a peer to a field of a message."""
    entry = peers.add()
    entry.id = peer.to_bytes()
    entry.addrs.extend(Multiaddr(address).to_bytes() for address in addresses)


def peers_of(peers: Any) -> dict[PeerId, tuple[Address, ...]]:
    """The peers that a stranger names, as far as they make sense."""
    found: dict[PeerId, tuple[Address, ...]] = {}
    for entry in peers[:MAX_PEERS]:
        peer = str(ID(entry.id))
        if is_peer_id(peer):
            found[peer] = tuple(address for raw in entry.addrs[:MAX_ADDRESSES] if (address := _address(raw, peer)))
    return found


def _address(raw: bytes, peer: PeerId) -> Address:
    """An address as text, empty where it is none that can be dialled."""
    try:
        text = str(Multiaddr(raw)).removesuffix(f"/p2p/{peer}")
    except (ValueError, LookupError):  # multiaddr's errors for bytes of no and of unknown protocols.
        return ""
    return text if valid_address(text) else ""
