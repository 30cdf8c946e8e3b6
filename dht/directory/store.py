"""The store of a directory server: values and provider records, within stated limits. Pure.

Theory of operation. An *entry* is a value under its key, or a provider record: one peer's statement that it provides a
key (a run). It holds its source IP address and its expiry. Ids and signatures cost nothing, so validation does not
keep one stranger from filling the store with valid entries (Sybil attack). The space is therefore shared by
origin, and the origin that takes the most is evicted first:

- of one address, of one network, and of one network among the providers of one key, the oldest entry is evicted once
  they exceed the limits of `BootstrapLimits`;
- when the store, or the list of one key's providers, is full, the oldest entry of the network that takes the most space is
  evicted, whichever came last. So a run whose members come from a few networks survives a flood of entries.

In the list of providers that a client is sent, networks take turns (round robin), for the same reason. The providers
of a key are kept by network, so that the cost of an answer does not depend on how many providers there are.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Annotated

from ...peer.address import MAX_ADDRESS_BYTES
from ...peer.base.transport import PeerId
from ...peer.quota.limits import BootstrapLimits
from ...peer.quota.origins import Origin, Origins
from ...peer.wire.schema import Between, Size
from ..records import MAX_RECORD_BYTES

MAX_KEY_BYTES = 128
"""The limit of a key, as in go-libp2p; ours have 125 at most: `/flockstep/`, a run id, `owner`, a peer id, a page."""
MAX_STORED_ADDRESSES = 16
"""The limit of addresses of one provider."""

MAX_PROVIDERS = 1000
"""The limit of providers of one key; the members of a run know each other, so a newcomer needs only one of them."""
MAX_ANSWERED = 100
"""The limit of providers in one answer: 6 kB of ids and as much of addresses."""

PROVIDER_SECONDS = 3600.0
"""The specification's 48 h would list volunteers two days after they left; members republish twice a minute."""
VALUE_SECONDS = 48 * 3600.0
"""As in go-libp2p; publishers republish long before (`kademlia.REPUBLISH_SECONDS`)."""

ENTRY_BYTES = 1600
"""The memory of an entry beyond its bytes, for the object and its items in seven mappings: measured 1.6 kB for a provider
that is alone under its key, 1.2 kB for one of many, 1.0 kB for a value."""


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
        """Return True until it expires."""
        return self.expires > now

    def at(self, now: float) -> "Entry":
        """Return the entry as one that arrives now, if it has more time left than that: the clock has been set back."""
        return replace(self, expires=min(self.expires, now + (PROVIDER_SECONDS if self.peer else VALUE_SECONDS)))


_Id = tuple[bytes, PeerId]


class Store:
    """The entries of one server. `now` is Unix seconds everywhere; without it all count that are kept (`expire`)."""

    def __init__(self, limits: BootstrapLimits) -> None:
        self.num_bytes = 0
        self._limits = limits
        self._origins = Origins(limits.exempt)
        self._entries: dict[_Id, tuple[Entry, Origin]] = {}
        # In the order of their last renewal, as all mappings here: the first of each is evicted first.
        self._providers: dict[bytes, dict[str, dict[PeerId, None]]] = {}
        """The providers of each key by network; the network whose last renewal is the latest comes last."""
        self._num_providers: Counter[bytes] = Counter()
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

    def value(self, key: bytes, now: float = 0.0) -> Entry | None:
        """Return the unexpired value under a key."""
        return self._alive((key, ""), now)

    def provider(self, key: bytes, peer: PeerId, now: float) -> Entry | None:
        """Return the unexpired record that a peer provides a key."""
        return self._alive((key, peer), now)

    def providers(self, key: bytes, now: float = 0.0) -> list[Entry]:
        """Return the providers of a key, at most `MAX_ANSWERED`: the latest first, networks in turns."""
        networks = reversed(self._providers.get(key, {}).values())
        return list(islice(_in_turns(self._latest_first(key, peers, now) for peers in networks), MAX_ANSWERED))

    def num_providers(self, key: bytes) -> int:
        """Return how many peers say that they provide a key."""
        return self._num_providers[key]

    def expire(self, now: float) -> None:
        """Remove expired entries."""
        for entry in [entry for entry in self if not entry.is_alive(now)]:
            self._drop((entry.key, entry.peer))

    def _alive(self, name: _Id, now: float) -> Entry | None:
        entry, _ = self._entries.get(name, (None, None))
        return entry if entry is not None and entry.is_alive(now) else None

    def _latest_first(self, key: bytes, peers: dict[PeerId, None], now: float) -> Iterator[Entry]:
        """Yield the unexpired records of some providers of a key. `expire` soon removes those that are passed over."""
        return (entry for peer in reversed(peers) if (entry := self._alive((key, peer), now)))

    def _thin(self, names: dict[_Id, None], most: int) -> None:
        while len(names) > most:
            self._drop(next(iter(names)))

    def _thin_providers(self, key: bytes, newest: Origin) -> None:
        """Evict providers of a key beyond the limits of one network and of all together."""
        by_network = self._providers[key]
        if not newest.exempt and len(by_network[newest.network]) > self._limits.providers_per_network:
            self._drop((key, next(iter(by_network[newest.network]))))
        elif self._num_providers[key] > MAX_PROVIDERS:
            largest = max(by_network, key=lambda network: len(by_network[network]))
            self._drop((key, next(iter(by_network[largest]))))

    def _add(self, entry: Entry) -> None:
        origin, name = self._origins.of(entry.ip), (entry.key, entry.peer)
        self._entries[name] = entry, origin
        self._of_address.setdefault(origin.address, {})[name] = None
        self._of_network.setdefault(origin.network, {})[name] = None
        self._bytes_of_network[origin.network] += entry.num_bytes
        self.num_bytes += entry.num_bytes
        if entry.peer:
            by_network = self._providers.setdefault(entry.key, {})
            mates = by_network.pop(origin.network, {})
            mates[entry.peer] = None
            by_network[origin.network] = mates
            self._num_providers[entry.key] += 1

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
            _take_out(self._providers[entry.key], origin.network, entry.peer)
            self._num_providers[entry.key] -= 1
            if not self._num_providers[entry.key]:
                del self._providers[entry.key], self._num_providers[entry.key]


def _in_turns(groups: Iterable[Iterator[Entry]]) -> Iterator[Entry]:
    """Yield the first of each group, then the second of each, and so on; no group is read ahead."""
    while groups:
        left: list[Iterator[Entry]] = []
        for group in groups:
            for one in islice(group, 1):
                yield one
                left.append(group)
        groups = left


def _take_out(groups: dict, group: object, member: object) -> None:  # type: ignore[type-arg]  # Of any keys.
    """Remove a member of a group, and the group with its last one."""
    del groups[group][member]
    if not groups[group]:
        del groups[group]
