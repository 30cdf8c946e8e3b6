"""The store of a directory server: values and provider records, within stated limits. Pure.

Theory of operation. An *entry* is a value under its key, or a provider record: one peer's statement that it provides a
key (a run). It holds its source IP address and its expiry. Ids and signatures cost nothing, so validation does not
does not keep one stranger from filling the store with valid entries (Sybil attack). The space is therefore shared by
origin, and the origin that takes the most is evicted first:

- of one address, of one network, and of one network among the providers of one key, the oldest entry is evicted once
  they exceed the limits of `BootstrapLimits`;
- when the store, or the list of one key's providers, is full, the oldest entry of the network that takes the most space is
  evicted, whichever came last. So a run whose members come from a few networks survives a flood of entries.

In the list of providers that a client is sent, networks take turns (round robin), for the same reason.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Annotated

from ...peer.quota.limits import BootstrapLimits
from ...peer.quota.origins import Origin, Origins
from ...peer.transport import PeerId
from ...peer.wire.schema import Between, Size
from ..records import MAX_RECORD_BYTES

MAX_KEY_BYTES = 128
"""The limit of a key, as in go-libp2p; ours have 125 at most: `/flockstep/`, a run id, `owner`, a peer id, a page."""
MAX_STORED_ADDRESSES = 16
MAX_ADDRESS_BYTES = 256
"""The limits of addresses of one provider, and of one binary multiaddr: that of a circuit has some 60."""

MAX_PROVIDERS = 1000
"""The limit of providers of one key; the members of a run know each other, so a newcomer needs only one of them."""
MAX_ANSWERED = 100
"""The limit of providers in one answer: 6 kB of ids and as much of addresses."""

PROVIDER_SECONDS = 3600.0
"""The specification's 48 h would list volunteers two days after they left; members republish twice a minute."""
VALUE_SECONDS = 48 * 3600.0
"""As in go-libp2p; publishers republish long before (`kademlia.REPUBLISH_SECONDS`)."""
CLOCK_SLACK = 2.0
"""How many times its lifetime an entry may have left: a clock that is set right by minutes drops nothing."""

ENTRY_BYTES = 1200
"""The memory of an entry beyond its bytes: measured 1.1 kB, for the object and its items in five mappings."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A value under a key or, with a `peer`, that peer's record that it provides the key."""

    key: Annotated[bytes, Size(MAX_KEY_BYTES, least=1)]
    peer: Annotated[PeerId, Size(64)]
    value: Annotated[bytes, Size(MAX_RECORD_BYTES)]
    addresses: Annotated[tuple[Annotated[bytes, Size(MAX_ADDRESS_BYTES)], ...], Size(MAX_STORED_ADDRESSES)]
    ip: Annotated[str, Size(64)]
    """The source IP address."""
    expires: Annotated[float, Between(0.0, 1e12)]
    """The expiry in Unix seconds."""

    @property
    def num_bytes(self) -> int:
        """The memory that it takes."""
        return ENTRY_BYTES + len(self.key) + len(self.value) + sum(map(len, self.addresses))

    def is_alive(self, now: float) -> bool:
        """Return True until it expires; also False with far more time left than any is given: the clock was set back."""
        lifetime = PROVIDER_SECONDS if self.peer else VALUE_SECONDS
        return 0 < self.expires - now <= CLOCK_SLACK * lifetime


_Id = tuple[bytes, PeerId]


class Store:
    """The entries of one server. `now` is Unix seconds everywhere."""

    def __init__(self, limits: BootstrapLimits) -> None:
        self.num_bytes = 0
        self._limits = limits
        self._origins = Origins(limits.exempt)
        self._entries: dict[_Id, tuple[Entry, Origin]] = {}
        self._providers: dict[bytes, dict[PeerId, None]] = {}
        # In the order of their last renewal, as all mappings here: the first of each is evicted first.
        self._of_address: dict[str, dict[_Id, None]] = {}
        self._of_network: dict[str, dict[_Id, None]] = {}
        self._bytes_of_network: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return (entry for entry, _ in self._entries.values())

    def put(self, entry: Entry) -> int:
        """Add an entry, or replace the one with its key and peer; returns how many others were evicted."""
        origin = self._origins.of(entry.ip)
        _, former = self._entries.get((entry.key, entry.peer), (None, None))
        self._drop((entry.key, entry.peer))
        before = len(self._entries)
        self._add(entry)
        if not origin.exempt:
            self._thin(self._of_address[origin.address], self._limits.records_per_address)
            self._thin(self._of_network[origin.network], self._limits.records_per_network)
        if entry.peer and former != origin:  # A renewal, which most are, makes no list longer.
            self._thin_providers(entry.key, origin)
        while self.num_bytes > self._limits.store_bytes:
            largest = max(self._bytes_of_network, key=self._bytes_of_network.__getitem__)
            self._drop(next(iter(self._of_network[largest])))
        return before + 1 - len(self._entries)

    def value(self, key: bytes, now: float) -> Entry | None:
        """Return the unexpired value under a key."""
        return self._alive((key, ""), now)

    def provider(self, key: bytes, peer: PeerId, now: float) -> Entry | None:
        """Return the unexpired record that a peer provides a key."""
        return self._alive((key, peer), now)

    def providers(self, key: bytes, now: float) -> list[Entry]:
        """Return the providers of a key, at most `MAX_ANSWERED`: the latest first, networks in turns."""
        alive = [entry for peer in self._providers.get(key, ()) if (entry := self._alive((key, peer), now))]
        networks: dict[str, list[Entry]] = {}
        for entry in reversed(alive):
            networks.setdefault(self._origins.of(entry.ip).network, []).append(entry)
        turns = chain.from_iterable(zip_longest(*networks.values()))
        return [entry for entry in turns if entry is not None][:MAX_ANSWERED]

    def num_providers(self, key: bytes) -> int:
        """Return how many peers say that they provide a key."""
        return len(self._providers.get(key, ()))

    def expire(self, now: float) -> None:
        """Remove expired entries, and those whose clock has been set back since."""
        for entry in [entry for entry in self if not entry.is_alive(now)]:
            self._drop((entry.key, entry.peer))

    def _alive(self, name: _Id, now: float) -> Entry | None:
        entry, _ = self._entries.get(name, (None, None))
        return entry if entry is not None and entry.is_alive(now) else None

    def _thin(self, names: dict[_Id, None], most: int) -> None:
        while len(names) > most:
            self._drop(next(iter(names)))

    def _thin_providers(self, key: bytes, newest: Origin) -> None:
        """Evict providers of a key beyond the limits of one network and of all together."""
        by_network: dict[str, list[PeerId]] = {}
        for peer in self._providers[key]:
            by_network.setdefault(self._entries[key, peer][1].network, []).append(peer)
        if not newest.exempt and len(by_network[newest.network]) > self._limits.providers_per_network:
            self._drop((key, by_network[newest.network][0]))
        elif len(self._providers[key]) > MAX_PROVIDERS:
            self._drop((key, max(by_network.values(), key=len)[0]))

    def _add(self, entry: Entry) -> None:
        origin, name = self._origins.of(entry.ip), (entry.key, entry.peer)
        self._entries[name] = entry, origin
        self._of_address.setdefault(origin.address, {})[name] = None
        self._of_network.setdefault(origin.network, {})[name] = None
        self._bytes_of_network[origin.network] += entry.num_bytes
        self.num_bytes += entry.num_bytes
        if entry.peer:
            self._providers.setdefault(entry.key, {})[entry.peer] = None

    def _drop(self, name: _Id) -> None:
        if name not in self._entries:
            return
        entry, origin = self._entries.pop(name)
        _take_out(self._of_address, origin.address, name)
        _take_out(self._of_network, origin.network, name)
        self.num_bytes -= entry.num_bytes
        self._bytes_of_network[origin.network] -= entry.num_bytes
        if not self._bytes_of_network[origin.network]:
            del self._bytes_of_network[origin.network]
        if entry.peer:
            _take_out(self._providers, entry.key, entry.peer)


def _take_out(groups: dict, group: object, member: object) -> None:  # type: ignore[type-arg]  # Of any keys.
    """Remove a member of a group, and the group with its last one."""
    del groups[group][member]
    if not groups[group]:
        del groups[group]
