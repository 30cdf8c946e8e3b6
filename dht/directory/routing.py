"""Kademlia's routing table: the directory servers that a node knows, few of any one network. Pure.

Theory of operation. A server enters the table once it has answered: a peer that others name is only a candidate of the
lookup in which it was named. Buckets are by the length of the prefix that the hash of an id shares with that of mine
(Maymounkov and Mazières 2002, section 2.2). A full bucket keeps its servers, since one that was up for long is likely
to stay up. At most `PER_BUCKET` of a bucket and `PER_TABLE` of all may be of one network (go-libp2p's peer diversity
filter, with its numbers), so that ids ground out on rented addresses of one network cannot surround a key (eclipse
attack). *Pinned* servers, those of the user's own link or options, never count, are never dropped, and are asked in
every lookup. So are the first `BUCKET_SIZE` that each of them names, where its own pinned ones come first: whoever has
ground out the nearest ids to a key, in however many networks, keeps nobody from the bootstraps that operators know by name.
"""

import ipaddress
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from hashlib import sha256

import base58

from ...peer.base.transport import Address, PeerId
from ...peer.quota.origins import Origin, Origins

BUCKET_SIZE = 20
"""Kademlia's k, as in the paper and in every libp2p: the number of servers nearest to a key that keep its value."""

PER_BUCKET = 2
PER_TABLE = 3

MAX_SERVER_FAILURES = 3
"""Timeouts in a row until a server is dropped."""


@dataclass(slots=True)
class _Server:
    position: int
    addresses: tuple[Address, ...]
    origin: Origin
    bucket: int
    pinned: bool
    failures: int = 0


class Servers:
    """The routing table of one node."""

    def __init__(self, own: PeerId) -> None:
        self._own = position(own)
        self._own_id = own
        self._origins = Origins(())
        self._servers: dict[PeerId, _Server] = {}

    def __contains__(self, peer: PeerId) -> bool:
        return peer in self._servers

    def __len__(self) -> int:
        return len(self._servers)

    def pin(self, peer: PeerId, addresses: tuple[Address, ...]) -> None:
        """Add a server that is never dropped."""
        self._servers[peer] = self._server(peer, addresses, pinned=True)

    def answered(self, peer: PeerId, addresses: tuple[Address, ...]) -> None:
        """Reset the failures of a server that has answered, or add it if there is room."""
        if server := self._servers.get(peer):
            server.failures = 0
        elif peer != self._own_id and addresses:
            new = self._server(peer, addresses, pinned=False)
            if self._has_room(new):
                self._servers[peer] = new

    def failed(self, peer: PeerId) -> None:
        """Count a failure of a server; too many in a row drop it."""
        if server := self._servers.get(peer):
            server.failures += 1
            if server.failures >= MAX_SERVER_FAILURES and not server.pinned:
                del self._servers[peer]

    def nearest(self, key: bytes) -> dict[PeerId, tuple[Address, ...]]:
        """Return the pinned servers, and then the `BUCKET_SIZE` nearest to a key, nearest first."""
        target = position_of_key(key)
        near = sorted(self._servers, key=lambda peer: self._servers[peer].position ^ target)
        chosen = [*filter(self.is_pinned, near), *near[:BUCKET_SIZE]]
        return {peer: self._servers[peer].addresses for peer in chosen}

    def unasked(
        self, key: bytes, known: Mapping[PeerId, object], vouched: Collection[PeerId], asked: Collection[PeerId]
    ) -> list[PeerId]:
        """Return the servers that a lookup asks next, the pinned ones first.

        These are of those it knows the pinned ones, those that these vouch for, and the `BUCKET_SIZE` nearest.
        """
        target = position_of_key(key)
        near = sorted(known, key=lambda peer: position(peer) ^ target)[:BUCKET_SIZE]
        chosen = [peer for peer in known if peer not in asked and (peer in near or peer in vouched or self.is_pinned(peer))]
        return sorted(chosen, key=self.is_pinned, reverse=True)

    def buckets(self) -> set[int]:
        """The buckets that are not empty."""
        return {server.bucket for server in self._servers.values()}

    def is_pinned(self, peer: PeerId) -> bool:
        """Return True for a server of the user's own link or options."""
        return peer in self._servers and self._servers[peer].pinned

    def _server(self, peer: PeerId, addresses: tuple[Address, ...], *, pinned: bool) -> _Server:
        at = position(peer)
        return _Server(at, addresses, origin_of(addresses, self._origins), shared_bits(self._own, at), pinned)

    def _has_room(self, new: _Server) -> bool:
        others = [server for server in self._servers.values() if not server.pinned]
        mates = [server for server in others if server.bucket == new.bucket]
        if len(mates) >= BUCKET_SIZE:
            return False
        kin = [server for server in others if server.origin.network == new.origin.network]
        return len(kin) < PER_TABLE and sum(server.bucket == new.bucket for server in kin) < PER_BUCKET


class Candidates:
    """The servers that others name during one lookup: not too many, and few of each network."""

    def __init__(self, known: Iterable[PeerId]) -> None:
        self._origins = Origins(())
        self._known = set(known)
        self._of_network: dict[str, int] = {}

    def take(self, peer: PeerId, addresses: tuple[Address, ...]) -> bool:
        """Return True if the lookup may ask this server, too."""
        origin = origin_of(addresses, self._origins)
        kin = self._of_network.get(origin.network, 0)
        if peer in self._known or not addresses or len(self._known) >= 5 * BUCKET_SIZE or kin >= PER_TABLE:
            return False
        self._known.add(peer)
        self._of_network[origin.network] = kin + 1
        return True


def position_of_key(key: bytes) -> int:
    """Return the position of a key: its SHA-256."""
    return int.from_bytes(sha256(key).digest(), "big")


def position(peer: PeerId) -> int:
    """Return the position of a peer among the keys: the SHA-256 of its binary id."""
    return position_of_key(base58.b58decode(peer))


def shared_bits(one: int, other: int) -> int:
    """Return the length of the common prefix of two positions, in bits."""
    return 256 - (one ^ other).bit_length()


def origin_of(addresses: tuple[Address, ...], origins: Origins) -> Origin:
    """Return the origin of the first IP address; host names count as one origin, since names cost little."""
    for address in addresses:
        _, kind, host, *_ = address.split("/")
        if kind in ("ip4", "ip6"):
            return origins.of(str(ipaddress.ip_address(host)))
    return origins.of("")
