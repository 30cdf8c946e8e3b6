"""The claims in a member table: rows of peers that nobody is known to have met, within limits by their origin. Pure.

Theory of operation. A record costs a key, and keys are free; its carrier costs a session. So the room for claims is shared
out by carrier and by the network in which the carrier was seen, and the carrier that takes the most gives way first.
A claim is dropped with its record's lifetime. It stops to be one once its peer was met, by me or by enough others.
"""

from collections import Counter
from collections.abc import Iterable
from collections.abc import Set as AbstractSet

from ...peer.transport import PeerId

CLAIMS_PER_CARRIER = 1024
"""A quarter of a table: a newcomer to a crowd takes all rows from its first few partners."""
CLAIMS_PER_NETWORK = 2048


class Claims:
    """The claims of one table, in the order of their arrival."""

    def __init__(self) -> None:
        self._rows: dict[PeerId, tuple[PeerId, str]] = {}
        self._of_carrier: dict[PeerId, dict[PeerId, None]] = {}
        self._of_network: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, peer: PeerId) -> bool:
        return peer in self._rows

    def carried_by(self, carrier: PeerId) -> AbstractSet[PeerId]:
        """Return the peers that this carrier has claimed."""
        return self._of_carrier.get(carrier, {}).keys()

    def why_not_add(self, carrier: PeerId, network: str) -> str:
        """Return why a carrier in a network (empty: no limit applies to it) may claim no more; empty if it may."""
        if len(self.carried_by(carrier)) >= CLAIMS_PER_CARRIER:
            return f"its carrier claims more than {CLAIMS_PER_CARRIER} members that nobody has met"
        if network and self._of_network[network] >= CLAIMS_PER_NETWORK:
            return f"the network of its carrier claims more than {CLAIMS_PER_NETWORK} members that nobody has met"
        return ""

    def add(self, peer: PeerId, carrier: PeerId, network: str) -> None:
        """Add a claim of a peer that is none yet."""
        self._rows[peer] = carrier, network
        self._of_carrier.setdefault(carrier, {})[peer] = None
        self._of_network[network] += 1

    def remove(self, peer: PeerId) -> bool:
        """Remove a claim; returns whether there was one."""
        if peer not in self._rows:
            return False
        carrier, network = self._rows.pop(peer)
        del self._of_carrier[carrier][peer]
        if not self._of_carrier[carrier]:
            del self._of_carrier[carrier]
        self._of_network[network] -= 1
        if not self._of_network[network]:
            del self._of_network[network]
        return True

    def to_drop(self, carrier: PeerId | None) -> PeerId | None:
        """Return the claim that gives way: the oldest of the carrier with the most.

        None if there is none, or if it is to give way to a claim of a `carrier` that has as many.
        """
        if not self._rows:
            return None
        most = max(self._of_carrier, key=lambda each: len(self._of_carrier[each]))
        if carrier is not None and len(self.carried_by(carrier)) + 1 >= len(self._of_carrier[most]):
            return None
        return next(iter(self._of_carrier[most]))


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
