"""A network in memory: `transport.Transport` for tests and simulations, under trio's virtual clock.

Theory of operation. Whatever travels, data or control, is a packet: a function that runs when it arrives. The packets
from one peer to another form a lane, first in first out like one TCP connection, so that the end of a stream cannot
overtake its bytes. For every packet one entry stands in the network's list for its time of arrival; when that comes,
the first packet of the lane runs. Entries of the same time are ordered by a seeded random number, so a seed stands for
one order of events and another seed tries another one.

    bandwidth   a sender waits while its segment goes through its uplink, so that streams take turns; the segment then
                takes its time in the receiver's downlink; both are queues shared by all streams of a peer
    window      a sender waits while 1 MiB is unread at the other end
    latency     of the network, and of both ends
    jitter      up to so many seconds more per packet; what follows on the lane waits (head-of-line blocking)
    loss        the chance that a packet must be sent again: on a reliable stream it is a delay
    silence     a stalled peer, a cut one, or another side of a partition: a lane keeps its packets until it is over
    kill        the end of a peer, as by SIGKILL: its kernel still closes the connections, so the others notice
    grain       arrivals wait for the next multiple of it, so that a simulation of many peers wakes less often
    unreachable nobody can dial it; connections that it dials itself carry both ways, as behind a NAT
"""

import heapq
import itertools
import math
import random
import sys
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import trio

from ..telemetry import Telemetry
from ..transport import PeerId
from .peer import MemoryTransport
from .stream import Action

T = TypeVar("T")
RETRANSMISSION = 0.2
"""Seconds until a lost packet is sent again: the least timeout of Linux's TCP."""
GRAIN_SLACK = 1e-6
"""Grains by which an arrival may miss its grain: a sum of floats that should lie on one must not fall to the next."""


class VirtualClock(trio.abc.Clock):
    """Time stands still while any task can run, and leaps to the next deadline when none can.

    As trio's `MockClock` does with `autojump_threshold=0`, for a fraction of its cost: that one looks at the real clock
    at every question for the time, and takes a turn of the loop more for every leap.
    """

    def __init__(self) -> None:
        self._now = 0.0

    def start_clock(self) -> None:
        """It stands."""

    def current_time(self) -> float:
        """Seconds since the start."""
        return self._now

    def deadline_to_sleep_time(self, deadline: float) -> float:
        """Asked when nothing can run: no seconds, for then it is the deadline. Without one, whatever time I/O takes."""
        if deadline == math.inf:
            return math.inf
        self._now = max(self._now, deadline)
        return 0.0


def run_virtual(main: Callable[[], Awaitable[T]], *, seed: int = 0) -> T:
    """Run `main` with trio under a virtual clock from 0.0; the same seed gives the same schedule of tasks.

    trio shuffles the tasks of every tick on purpose. The two names below are what Hypothesis uses to make it repeat.
    """
    scheduler = sys.modules["trio._core._run"].__dict__
    kept = {name: scheduler[name] for name in ("_ALLOW_DETERMINISTIC_SCHEDULING", "_r")}
    scheduler.update(_ALLOW_DETERMINISTIC_SCHEDULING=True, _r=random.Random(seed))
    try:
        return trio.run(main, clock=VirtualClock())
    finally:
        scheduler.update(kept)


@dataclass(slots=True)
class Lane:
    """One direction between two peers. `owed` packets were due while nothing could pass."""

    source: PeerId
    target: PeerId
    latency: float = 0.0
    """Of both ends; none where one of them is dead."""
    receiver: MemoryTransport | None = None
    """The other end, where its downlink is limited."""
    packets: deque[tuple[int, Action, float]] = field(default_factory=deque)
    last_arrival: float = 0.0
    owed: int = 0


class MemoryNetwork:
    """All peers, the roads between them, and what goes wrong on these. Rates in bytes a second, times in seconds."""

    def __init__(
        self,
        *,
        seed: int = 0,
        latency: float = 0.0,
        bandwidth: float | None = None,
        jitter: float = 0.0,
        loss: float = 0.0,
        grain: float = 0.0,
    ) -> None:
        self._chance = random.Random(seed).random
        self._latency = latency
        self._bandwidth = bandwidth
        self._jitter = jitter
        self._loss = loss
        self._grain = grain
        self._peers: dict[PeerId, MemoryTransport] = {}
        self._lanes: dict[tuple[PeerId, PeerId], Lane] = {}
        self._due: dict[float, list[tuple[float, int, Lane]]] = {}
        self._times: list[float] = []
        self._alarm = trio.CancelScope()
        self._now: float | None = None
        """The time while packets run: asking the clock for each would cost more than the rest."""
        self._stalled: set[PeerId] = set()
        self._cut: set[PeerId] = set()
        self._side: dict[PeerId, int] = {}
        self.nursery: trio.Nursery

    @asynccontextmanager
    async def open(self) -> AsyncIterator["MemoryNetwork"]:
        """Run the network; its end cancels every handler."""
        async with trio.open_nursery() as self.nursery:
            self.nursery.start_soon(self._pump)
            yield self
            self.nursery.cancel_scope.cancel()

    def transport(
        self,
        peer_id: PeerId,
        *,
        up: float | None = None,
        down: float | None = None,
        latency: float = 0.0,
        reachable: bool = True,
        telemetry: Telemetry | None = None,
    ) -> "MemoryTransport":
        """Plug in a peer, or start a killed one anew."""
        assert peer_id not in self._peers, f"{peer_id} is already on this network"
        rates = up or self._bandwidth, down or self._bandwidth
        log = telemetry or Telemetry(clock=trio.current_time)
        self._peers[peer_id] = MemoryTransport(
            self, peer_id, rates=rates, latency=latency, reachable=reachable, telemetry=log
        )
        self._lay_anew(peer_id)
        return self._peers[peer_id]

    def kill(self, peer: PeerId) -> None:
        """End a peer at once: its handlers are cancelled, its connections break at the others."""
        self._stalled.discard(peer)  # SIGKILL ends a stopped process, too.
        self._release()
        self._peers.pop(peer).die()
        self._lay_anew(peer)
        for source, target in list(self._lanes):
            if source == peer:
                self.hang_up(peer, target)

    def stall(self, peer: PeerId) -> None:
        """As SIGSTOP: nothing comes from a peer and nothing reaches it, yet nothing is lost. Its own timers run on."""
        self._stalled.add(peer)

    def resume(self, peer: PeerId) -> None:
        """As SIGCONT."""
        self._stalled.discard(peer)
        self._release()

    def cut(self, peer: PeerId) -> None:
        """Drop everything from and to a peer without a word; TCP sends it again once the road is mended."""
        self._cut.add(peer)

    def mend(self, peer: PeerId) -> None:
        """Undo `cut`."""
        self._cut.discard(peer)
        self._release()

    def partition(self, *groups: Sequence[PeerId]) -> None:
        """Let nothing pass between groups; all peers that are in none of them form one more."""
        self._side = {peer: number for number, group in enumerate(groups, start=1) for peer in group}
        self._release()

    def heal(self) -> None:
        """Undo `partition`."""
        self.partition()

    def find(self, peer: PeerId) -> "MemoryTransport | None":
        """The living transport of a peer."""
        return self._peers.get(peer)

    def post(self, source: PeerId, target: PeerId, action: Action, num_bytes: int = 0, leaves: float = 0.0) -> None:
        """Run `action` at `target` when a packet arrives that leaves now, or at the time `leaves`."""
        self.send(self.lane(source, target), action, num_bytes, leaves)

    def lane(self, source: PeerId, target: PeerId) -> Lane:
        """The lane from one peer to another: always the same, whatever happens to its ends."""
        lane = self._lanes.get((source, target))
        if lane is None:
            lane = self._lanes[source, target] = Lane(source, target)
            self._lay(lane)
        return lane

    def send(self, lane: Lane, action: Action, num_bytes: int, leaves: float) -> None:
        """As `post`, on a lane that is at hand."""
        lane.packets.append((num_bytes, action, leaves))
        if (self._stalled or self._cut or self._side) and self._silent(lane):
            lane.owed += 1
        else:
            self._schedule(lane, num_bytes, leaves)

    def hang_up(self, source: PeerId, target: PeerId) -> None:
        """Let `target` see its connection to `source` break."""

        def arrive() -> None:
            if there := self._peers.get(target):
                there.lose(source, f"the connection to {source} broke")

        self.post(source, target, arrive)

    def _schedule(self, lane: Lane, num_bytes: int, leaves: float) -> None:
        chance = self._chance
        delay = self._latency
        if self._jitter:
            delay += self._jitter * chance()
        while self._loss and chance() < self._loss:
            delay += RETRANSMISSION
        now = trio.current_time() if self._now is None else self._now
        arrival = (leaves if leaves > now else now) + delay + lane.latency
        if arrival < lane.last_arrival:
            arrival = lane.last_arrival
        if lane.receiver is not None:
            arrival = lane.receiver.through_downlink(num_bytes, arrival)
        if self._grain:
            arrival = math.ceil(arrival / self._grain - GRAIN_SLACK) * self._grain
        lane.last_arrival = arrival
        due = self._due.get(arrival)
        if due is None:
            self._due[arrival] = due = []
            heapq.heappush(self._times, arrival)
            if arrival < self._alarm.deadline:
                self._alarm.deadline = arrival
        due.append((chance(), len(due), lane))

    async def _pump(self) -> None:
        while True:
            with trio.CancelScope(deadline=self._times[0] if self._times else math.inf) as self._alarm:
                await trio.sleep_forever()
            self._now = now = trio.current_time()
            while self._times and self._times[0] <= now:
                for _, _, lane in sorted(self._due.pop(heapq.heappop(self._times))):
                    if (self._stalled or self._cut or self._side) and self._silent(lane):
                        lane.owed += 1
                    else:
                        lane.packets.popleft()[1]()
            self._now = None

    def _lay(self, lane: Lane) -> None:
        source, receiver = self._peers.get(lane.source), self._peers.get(lane.target)
        lane.latency = source.latency + receiver.latency if source is not None and receiver is not None else 0.0
        lane.receiver = receiver if receiver is not None and receiver.has_downlink else None

    def _lay_anew(self, peer: PeerId) -> None:
        for lane in self._lanes.values():
            if peer in (lane.source, lane.target):
                self._lay(lane)

    def _silent(self, lane: Lane) -> bool:
        ends = {lane.source, lane.target}
        sides = {self._side.get(peer, 0) for peer in ends}
        return bool(ends & (self._stalled | self._cut)) or len(sides) > 1

    def _release(self) -> None:
        for lane in self._lanes.values():
            if lane.owed and not self._silent(lane):
                late, lane.owed = lane.owed, 0
                for num_bytes, _, leaves in list(itertools.islice(lane.packets, late)):
                    self._schedule(lane, num_bytes, leaves)
