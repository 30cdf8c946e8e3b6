"""A swarm under virtual time whose peers share data by leases alone: they come, leave and die, and every item is counted."""

import heapq
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from statistics import median_low

from flockstep.collectives.accountability.credit import MAX_SPEED_OF_MEDIAN
from flockstep.collectives.accountability.trust import MAX_TOKENS_OF_MEDIAN
from flockstep.optim.data.leases import Lease, Leases, Ranking, Share, look, open_share
from flockstep.peer.wire.schema import encode

SOURCE = b"the same for all"
NEWS = (0.02, 1.0)
"""Seconds that a record takes to another peer: on any real network less."""
UNIT_ITEMS = 4
ROUND = 10.0
"""Seconds between two certificates."""
Item = tuple[int, int, int]
"""An epoch, a unit, and the number of an item in it."""


@dataclass
class Peer:
    """One peer of a simulated swarm: what it has heard, and what it trains."""

    name: str
    leases: Leases
    item_seconds: float
    heard: dict[str, tuple[Share, bool]] = field(default_factory=dict)
    here: bool = True
    unit: Lease | None = None
    newest: Counter[str] = field(default_factory=Counter)
    news: bool = True


class SimSwarm:
    """Peers that train units, tell each other, come, leave and die; every item that is trained is counted."""

    def __init__(self, seed: int, *, num_units: int) -> None:
        self.random = random.Random(seed)
        self.ranking = Ranking(seed, num_units)
        self.now = 0.0
        self.peers: dict[str, Peer] = {}
        self.trained: Counter[Item] = Counter()
        self.reasons: Counter[str] = Counter()
        self.longest_idle = 0.0
        self.credit: dict[str, int] = {}
        """Items that the newest certificate counts for each peer."""
        self.speeds: dict[str, int] = {}
        """What counts of the speed that each states: items between two certificates."""
        self.since: Counter[str] = Counter()
        """Items that each peer has trained since that certificate."""
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._turn = 0
        self.after(ROUND, self.certify)

    def certify(self) -> None:
        """A round ends: it counts what each peer has trained since the last one, under the cap of a round."""
        if self.since:
            median = median_low(self.since.values())
            self.credit = {name: min(items, int(MAX_TOKENS_OF_MEDIAN * median)) for name, items in self.since.items()}
            self.speeds = {name: min(items, int(MAX_SPEED_OF_MEDIAN * median)) for name, items in self.since.items()}
            self.since.clear()
        self.after(ROUND, self.certify)

    def after(self, seconds: float, do: Callable[[], None]) -> None:
        self._turn += 1
        heapq.heappush(self._agenda, (self.now + seconds, self._turn, do))

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self._agenda and self._agenda[0][0] <= end:
            self.now, _, do = heapq.heappop(self._agenda)
            do()
        self.now = end

    def join(self, name: str, item_seconds: float) -> None:
        """A peer comes that has heard everybody's newest word; the others hear of it when they hear it."""
        peer = Peer(name, Leases(name, SOURCE, self.ranking), item_seconds)
        peer.heard = {other.name: (other.leases.share(), other.here) for other in self.peers.values()}
        self.peers[name] = peer
        self.step(peer)

    def depart(self, name: str, *, gone_after: float, last_message: bool) -> None:
        """A peer leaves, or dies; the others know it after a while, and what it last said stays known."""
        peer = self.peers[name]
        peer.here = False
        if last_message:
            self.publish(peer)
        for other in self.peers.values():
            self.after(gone_after, partial(self._count_out, other, name))

    def _count_out(self, other: Peer, name: str) -> None:
        if name in other.heard:
            other.heard[name], other.news = (other.heard[name][0], False), True

    def publish(self, peer: Peer) -> None:
        share = peer.leases.share()
        assert open_share(encode(share)) == share  # Every limit holds.
        for other in self.peers.values():
            if other is not peer:
                self.after(self.random.uniform(*NEWS), partial(self._hear, other, peer, share, self._turn))

    def _hear(self, other: Peer, peer: Peer, share: Share, sequence: int) -> None:
        _, here = other.heard.get(peer.name, (share, True))
        if sequence > other.newest[peer.name]:  # As a record's: what overtakes is not undone.
            other.newest[peer.name] = sequence
            other.heard[peer.name], other.news = (share, here), True

    def step(self, peer: Peer) -> None:
        """Train one item, and look around."""
        if not peer.here:
            return
        before = peer.leases.share()
        if peer.news:
            others = [(name, *known) for name, known in peer.heard.items()]
            peer.leases.look(look(others, peer.name, before, self.ranking, self.credit, self.speeds), self.now)
            peer.news = False
        if peer.unit is not None and not peer.leases.holds((peer.unit.epoch, peer.unit.unit)):
            peer.unit = None
        peer.leases.claim(self.now)
        if peer.unit is None:
            lease, why = peer.leases.begin(self.now)
            self.reasons[why] += 1
            peer.unit = lease
        place = peer.unit.epoch, peer.unit.unit
        done = peer.unit.done or 0
        if done < UNIT_ITEMS:
            self.trained[*place, done] += 1
            self.since[peer.name] += 1
            peer.leases.trained(place, 1)
            peer.unit = Lease(*place, done + 1)
        if done + 1 >= UNIT_ITEMS:
            peer.leases.finish(place, self.now)
            peer.unit = None
        if peer.leases.share() != before:
            peer.news = True
            self.publish(peer)
        self.after(peer.item_seconds, partial(self.step, peer))

    def covered(self, epoch: int) -> bool:
        units = range(self.ranking.num_units)
        return all(self.trained[epoch, unit, item] for unit in units for item in range(UNIT_ITEMS))

    @property
    def twice(self) -> list[Item]:
        return [item for item, times in self.trained.items() if times > 1]

    @property
    def oldest(self) -> int:
        return max(peer.leases.epoch for peer in self.peers.values())


def found(swarm: SimSwarm, number: int, item_seconds: Callable[[], float], *, met: bool) -> None:
    """Peers that begin within a second, and know each other before they train, or do not."""
    for name in (f"founder {index}" for index in range(number)):
        swarm.peers[name] = Peer(name, Leases(name, SOURCE, swarm.ranking), item_seconds())
    for peer in swarm.peers.values():
        if met:
            peer.heard = {name: (Share(), True) for name in swarm.peers if name != peer.name}
        swarm.after(swarm.random.uniform(0, 1), partial(swarm.step, peer))


def unit_of_seconds(random_: random.Random) -> Callable[[], float]:
    """A peer's speed: a unit takes it from one to fifteen seconds."""
    return lambda: 10 ** random_.uniform(0, 1.2) / UNIT_ITEMS
