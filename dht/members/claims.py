"""The claims in a member table: rows of peers that nobody is known to have met, within limits by their origin. Pure.

Theory of operation. A record costs a key, and keys are free; its carrier costs a session. So the room for claims is shared
out by carrier and by the network in which the carrier was seen, and the carrier that takes the most gives way first.
A record longer than `CLAIM_BYTES` takes the room of several. A claim is dropped with its record's lifetime. It stops to be
one once its peer was met, by me or by enough others.
"""

from collections import Counter
from collections.abc import Iterable
from collections.abc import Set as AbstractSet

from ...peer.base.transport import PeerId

CLAIMS_PER_CARRIER = 1024
"""A quarter of a table: a newcomer to a crowd takes all rows from its first few partners."""
CLAIMS_PER_NETWORK = 2048
CLAIM_BYTES = 1500
"""The body of a usual record has 300 to 1,000 bytes, and the longest 6,000: without this a table of those takes 120 MB."""


def room_of(num_bytes: int) -> int:
    """Return how many usual claims' room one with a body of so many bytes takes."""
    return max(1, -(-num_bytes // CLAIM_BYTES))


class Claims:
    """The claims of one table, in the order of their arrival."""

    def __init__(self) -> None:
        self.room = 0
        """What all of them take, in usual claims."""
        self._rows: dict[PeerId, tuple[PeerId, str, int]] = {}
        self._of_carrier: dict[PeerId, dict[PeerId, None]] = {}
        self._room_of_carrier: Counter[PeerId] = Counter()
        self._room_of_network: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, peer: PeerId) -> bool:
        return peer in self._rows

    def carried_by(self, carrier: PeerId) -> AbstractSet[PeerId]:
        """Return the peers that this carrier has claimed."""
        return self._of_carrier.get(carrier, {}).keys()

    def room_for(self, carrier: PeerId, network: str) -> int:
        """Return how many usual claims a carrier in a network may add."""
        of_network = CLAIMS_PER_NETWORK - self._room_of_network[network] if network else CLAIMS_PER_NETWORK
        return max(0, min(CLAIMS_PER_CARRIER - self._room_of_carrier[carrier], of_network))

    def why_not_add(self, carrier: PeerId | None, network: str, room: int = 1) -> str:
        """Return why a carrier in a network may claim no more; empty if it may. To None and to "" no limit applies."""
        if carrier is not None and self._room_of_carrier[carrier] + room > CLAIMS_PER_CARRIER:
            return f"its carrier claims more than {CLAIMS_PER_CARRIER} members that nobody has met"
        if network and self._room_of_network[network] + room > CLAIMS_PER_NETWORK:
            return f"the network of its carrier claims more than {CLAIMS_PER_NETWORK} members that nobody has met"
        return ""

    def why_not_grow(self, peer: PeerId, room: int) -> str:
        """Return why a newer record of a claimed peer may not take so much room; empty if it may."""
        carrier, network, before = self._rows[peer]
        return self.why_not_add(carrier, network, room - before) if room > before else ""

    def add(self, peer: PeerId, carrier: PeerId, network: str, room: int = 1) -> None:
        """Add a claim, or let one take another room."""
        carrier, network, before = self._rows.get(peer, (carrier, network, 0))
        self._rows[peer] = carrier, network, room
        self._of_carrier.setdefault(carrier, {})[peer] = None
        self._resize(carrier, network, room - before)

    def remove(self, peer: PeerId) -> bool:
        """Remove a claim; returns whether there was one."""
        if peer not in self._rows:
            return False
        carrier, network, room = self._rows.pop(peer)
        del self._of_carrier[carrier][peer]
        if not self._of_carrier[carrier]:
            del self._of_carrier[carrier]
        self._resize(carrier, network, -room)
        return True

    def to_drop(self, carrier: PeerId | None) -> PeerId | None:
        """Return the claim that gives way: the oldest of the carrier with the most.

        None if there is none, or if it is to give way to a claim of a `carrier` that has as many.
        """
        if not self._rows:
            return None
        most = max(self._room_of_carrier, key=self._room_of_carrier.__getitem__)
        if carrier is not None and self._room_of_carrier[carrier] + 1 >= self._room_of_carrier[most]:
            return None
        return next(iter(self._of_carrier[most]))

    def _resize(self, carrier: PeerId, network: str, by: int) -> None:
        self.room += by
        counters: tuple[tuple[Counter[str], str], ...] = (self._room_of_carrier, carrier), (self._room_of_network, network)
        for counter, key in counters:
            counter[key] += by
            if not counter[key]:
                del counter[key]


class Probes:
    """The claimed peers that I am to dial: carriers take turns, so that none keeps the others' claims waiting."""

    def __init__(self) -> None:
        self._waiting: dict[PeerId, dict[PeerId, None]] = {}
        self._tried: dict[PeerId, float] = {}

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def add(self, peer: PeerId, carrier: PeerId) -> None:
        """Add a claim; a carrier that has too many waiting loses the oldest."""
        waiting = self._waiting.setdefault(carrier, {})
        waiting[peer] = None
        if len(waiting) > CLAIMS_PER_CARRIER:
            del waiting[next(iter(waiting))]

    def take(self, most: int, now: float, wanted: Iterable[PeerId] | None = None) -> list[PeerId]:
        """Take up to `most` claims, each carrier's in their order; only `wanted` ones if given, in the order of these.

        A peer that was taken within `PROBE_AGAIN` is skipped, and those that are not wanted are dropped.
        """
        order = None if wanted is None else {peer: number for number, peer in enumerate(wanted)}
        for carrier, waiting in list(self._waiting.items()):
            for peer in [each for each in waiting if (order is not None and each not in order) or self._is_tried(each, now)]:
                del waiting[peer]
            if not waiting:
                del self._waiting[carrier]
        taken: list[PeerId] = []
        while self._waiting and len(taken) < most:
            for carrier, waiting in list(self._waiting.items())[: most - len(taken)]:
                peer = next(iter(waiting)) if order is None else min(waiting, key=order.__getitem__)
                # Whose turn it was stands last from now on.
                del waiting[peer], self._waiting[carrier]
                if waiting:
                    self._waiting[carrier] = waiting
                if not self._is_tried(peer, now):
                    self._tried.pop(peer, None)
                    self._tried[peer] = now
                    taken.append(peer)
        while len(self._tried) > MAX_TRIED:
            del self._tried[next(iter(self._tried))]
        return taken

    def _is_tried(self, peer: PeerId, now: float) -> bool:
        return peer in self._tried and self._tried[peer] + PROBE_AGAIN > now


PROBE_AGAIN = 60.0
"""Seconds until a peer is dialled again because of a claim: whoever is here dials me, too."""
MAX_TRIED = 4096
"""Peers whose last probe is remembered; a carrier that claims more costs further dials within their budget."""
