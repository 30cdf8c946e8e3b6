"""Identify messages: their length, what is kept of them, and for how long.

Theory of operation. Each host asks every peer that connects for its identify message; none takes those that are pushed
(`/ipfs/id/push/1.0.0`, see `libp2p.settings`). py-libp2p 0.8.1 reads 1 MiB, makes up to half a million names of protocols
of it, verifies a signed record of the same addresses, and keeps all of that for good: 6 MB for each key that was here for a
moment, and keys cost nothing. Of us only a directory server reads any of it, the addresses at which a connected peer listens
(`kademlia`). So a message has `MAX_IDENTIFY_BYTES`, a few addresses and protocols of it are kept, and they go with the
peer's last connection. The library also keeps addresses that it cannot read, and raises where one is shown: these are left
out. What this host says of itself names flockstep, not the library.
"""

from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any

import libp2p.host.basic_host
import libp2p.identity.identify.identify
import libp2p.network.swarm
from libp2p.peer.peerstore import PeerStoreError
from multiaddr import Multiaddr

from ... import __version__
from ..address import MAX_ADDRESS_BYTES, valid_address
from ..base.transport import Address, PeerId

# A type checker forbids an assignment to a module or a class, which is what `limit_identify` does.
_basic_host: Any = libp2p.host.basic_host
_identify: Any = libp2p.identity.identify.identify
_swarm: Any = libp2p.network.swarm.Swarm

MAX_IDENTIFY_BYTES = 8 << 10
"""As in go-libp2p (`signedIDSize`); that of a bootstrap with 16 addresses has 2.5 kB."""

MAX_LISTENED = 32
MAX_PROTOCOLS = 64
"""Addresses and protocols that are kept of one peer; a member states 16 and 12 at most."""

Update = Callable[[Any, Any, Any], Awaitable[None]]


def limit_identify() -> None:
    """Put these limits and this program's name into the library, once per process."""
    _identify.AGENT_VERSION = f"flockstep/{__version__}"
    read = _basic_host.read_length_prefixed_protobuf
    _basic_host.read_length_prefixed_protobuf = partial(read, max_length=MAX_IDENTIFY_BYTES)
    _basic_host.update_peerstore_from_identify = _keeping_little(_basic_host.update_peerstore_from_identify)
    _swarm.remove_conn = _forgetting(_swarm.remove_conn)


def stated_address(raw: bytes, peer: PeerId) -> Address:
    """Return an address in multiaddr's binary form as text, without the id of its own peer; empty if it cannot be dialled.

    Its length comes first: 8 KiB of names take 7 ms.
    """
    if len(raw) > MAX_ADDRESS_BYTES:
        return ""
    try:
        text = str(Multiaddr(raw)).removesuffix(f"/p2p/{peer}")
    except (ValueError, LookupError):  # multiaddr's errors for bytes of no and of unknown protocols.
        return ""
    return text if valid_address(text) else ""


def _keeping_little(update: Update) -> Update:
    async def keep(peerstore: Any, peer_id: Any, message: Any) -> None:
        if message.ByteSize() > MAX_IDENTIFY_BYTES:  # One without a length, as early programs send it.
            return
        listened = [raw for raw in message.listen_addrs[:MAX_LISTENED] if stated_address(raw, str(peer_id))]
        del message.listen_addrs[:], message.protocols[MAX_PROTOCOLS:]
        message.listen_addrs.extend(listened)
        message.ClearField("signedPeerRecord")
        await update(peerstore, peer_id, message)
        if peer_id not in peerstore.__dict__.get("connections", (peer_id,)):  # It came with the end of its last connection.
            with suppress(PeerStoreError):  # It said nothing.
                peerstore.clear_peerdata(peer_id)

    return keep


def _forgetting(remove: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    def forget(self: Any, connection: Any) -> None:
        remove(self, connection)
        self.peerstore.__dict__["connections"] = self.connections
        peer_id = connection.muxed_conn.peer_id
        if peer_id not in self.connections:
            with suppress(PeerStoreError):  # It said nothing.
                self.peerstore.clear_peerdata(peer_id)

    return forget
