"""A network in memory, under trio's virtual clock, for tests and simulations.

Theory of operation. A packet, data or control, is a function that runs on arrival. The packets from one peer to another
form a lane, first in first out like one TCP connection, so that the end of a stream cannot overtake its bytes. Every
packet has an entry in the network's event queue at its time of arrival; at that time the first packet of its lane runs.
Entries of the same time are ordered by a seeded random number, so a seed determines one order of events, and another
seed tries another order.

    bandwidth   a sender waits while its segment goes through its uplink, so that streams take turns; the segment then
                takes its time in the receiver's downlink; both are queues shared by all streams of a peer
    window      a sender waits while 1 MiB is unread at the other end
    latency     of the network, and of both ends
    jitter      up to so many seconds more per packet; what follows on the lane waits (head-of-line blocking)
    loss        the probability of a retransmission: on a reliable stream it is a delay
    silence     a stalled peer, a cut one, a cut pair, or another side of a partition: a lane queues its packets until
                it is over
    kill        the end of a peer, as by SIGKILL: its kernel still closes the connections, so the others notice
    grain       arrivals wait for the next multiple of it, so that a simulation of many peers wakes less often
    unreachable no peer can dial it; connections that it dials itself carry both ways, as behind a NAT
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

from ..base.transport import PeerId
from ..log.telemetry import Telemetry
from .peer import MemoryTransport
from .stream import Packet

_T = TypeVar("_T")
RETRANSMISSION = 0.2
"""Seconds until a lost packet is retransmitted: the minimum timeout of Linux's TCP."""
GRAIN_SLACK = 1e-6
"""The tolerance in grains: a sum of floats that should lie on a grain must not be rounded up to the next."""


class VirtualClock(trio.abc.Clock):
    """A virtual clock: time stands still while any task can run, and jumps to the next deadline when none can.

    It does what trio's `MockClock` does with `autojump_threshold=0`, at a fraction of the cost: that one reads the real
    clock at every call, and takes one more turn of the loop for every jump.
    """

    def __init__(self) -> None:
        self._now = 0.0

    def start_clock(self) -> None:
        """Do nothing: the clock stands at 0."""

    def current_time(self) -> float:
        """Return the virtual seconds since the start."""
        return self._now

    def deadline_to_sleep_time(self, deadline: float) -> float:
        """Jump to the deadline, since no task can run, and sleep 0 s; without a deadline, wait for I/O."""
        if deadline == math.inf:
            return math.inf
        self._now = max(self._now, deadline)
        return 0.0


def run_virtual(main: Callable[[], Awaitable[_T]], *, seed: int = 0) -> _T:
    """Run `main` with trio under a virtual clock from 0.0; the same seed gives the same schedule of tasks.

    trio shuffles the tasks of every tick on purpose. Hypothesis uses the two names below to make it deterministic.
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
    """One direction between two peers. `owed` packets were due while the lane was silent."""

    source: PeerId
    target: PeerId
    latency: float = 0.0
    """The latency of both ends; 0 if one of them is dead."""
    receiver: MemoryTransport | None = None
    """The other end, if its downlink is limited."""
    packets: deque[tuple[int, Packet, float]] = field(default_factory=deque)
    last_arrival: float = 0.0
    owed: int = 0


class MemoryNetwork:
    """All peers, the links between them, and their faults. Rates in bytes per second, times in seconds."""

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
        """The time while packets run, cached: reading the clock for each would cost more than the rest."""
        self._stalled: set[PeerId] = set()
        self._cut: set[PeerId] = set()
        self._cut_pairs: set[frozenset[PeerId]] = set()
        self._side: dict[PeerId, int] = {}
        self._is_faulty = False
        """True while anybody is stalled, cut off, or on another side."""
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
        """Attach a peer, or restart a killed one."""
        assert peer_id not in self._peers, f"{peer_id} is already on this network"
        rates = up or self._bandwidth, down or self._bandwidth
        log = telemetry or Telemetry(clock=trio.current_time)
        self._peers[peer_id] = MemoryTransport(
            self, peer_id, rates=rates, latency=latency, reachable=reachable, telemetry=log
        )
        self._refresh_lanes(peer_id)
        return self._peers[peer_id]

    def kill(self, peer: PeerId) -> None:
        """Kill a peer: its handlers are cancelled, and its connections break at the others."""
        self._stalled.discard(peer)  # SIGKILL ends a stopped process, too.
        self._release()
        self._peers.pop(peer).die()
        self._refresh_lanes(peer)
        for source, target in list(self._lanes):
            if source == peer:
                self.hang_up(peer, target)

    def stall(self, peer: PeerId) -> None:
        """Stall a peer, as by SIGSTOP: packets from and to it are queued, and nothing is lost. Its own timers run on."""
        self._stalled.add(peer)
        self._note_faults()

    def resume(self, peer: PeerId) -> None:
        """Resume a stalled peer, as by SIGCONT."""
        self._stalled.discard(peer)
        self._release()

    def cut(self, peer: PeerId) -> None:
        """Cut a peer off silently; TCP retransmits everything once the connection is mended."""
        self._cut.add(peer)
        self._note_faults()

    def mend(self, peer: PeerId) -> None:
        """Undo `cut`."""
        self._cut.discard(peer)
        self._release()

    def cut_pair(self, one: PeerId, other: PeerId) -> None:
        """Cut two peers off from each other silently, and from nobody else."""
        self._cut_pairs.add(frozenset((one, other)))
        self._note_faults()

    def partition(self, *groups: Sequence[PeerId]) -> None:
        """Partition the network into groups; all peers that are in none of them form one more."""
        self._side = {peer: number for number, group in enumerate(groups, start=1) for peer in group}
        self._release()

    def heal(self) -> None:
        """Undo `partition`."""
        self.partition()

    def find(self, peer: PeerId) -> "MemoryTransport | None":
        """Return the living transport of a peer; None if there is none."""
        return self._peers.get(peer)

    def post(self, source: PeerId, target: PeerId, action: Packet, num_bytes: int = 0, leaves: float = 0.0) -> None:
        """Send a packet now, or at the time `leaves`, that runs `action` on arrival at `target`."""
        self.send(self.lane(source, target), action, num_bytes, leaves)

    def lane(self, source: PeerId, target: PeerId) -> Lane:
        """Return the lane from one peer to another; it outlasts restarts of its ends."""
        lane = self._lanes.get((source, target))
        if lane is None:
            lane = self._lanes[source, target] = Lane(source, target)
            self._refresh_lane(lane)
        return lane

    def send(self, lane: Lane, action: Packet, num_bytes: int, leaves: float) -> None:
        """Send a packet as `post` does, on a known lane."""
        lane.packets.append((num_bytes, action, leaves))
        if self._is_faulty and self._silent(lane):
            lane.owed += 1
        else:
            self._schedule(lane, num_bytes, leaves)

    def hang_up(self, source: PeerId, target: PeerId) -> None:
        """Break the connection to `source` at `target`."""

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
                    if self._is_faulty and self._silent(lane):
                        lane.owed += 1
                    else:
                        lane.packets.popleft()[1]()
            self._now = None

    def _refresh_lane(self, lane: Lane) -> None:
        source, receiver = self._peers.get(lane.source), self._peers.get(lane.target)
        lane.latency = source.latency + receiver.latency if source is not None and receiver is not None else 0.0
        lane.receiver = receiver if receiver is not None and receiver.has_downlink else None

    def _refresh_lanes(self, peer: PeerId) -> None:
        for lane in self._lanes.values():
            if peer in (lane.source, lane.target):
                self._refresh_lane(lane)

    def _silent(self, lane: Lane) -> bool:
        ends = {lane.source, lane.target}
        sides = {self._side.get(peer, 0) for peer in ends}
        return bool(ends & (self._stalled | self._cut)) or ends in self._cut_pairs or len(sides) > 1

    def _note_faults(self) -> None:
        self._is_faulty = bool(self._stalled or self._cut or self._cut_pairs or self._side)

    def _release(self) -> None:
        self._note_faults()
        for lane in self._lanes.values():
            if lane.owed and not self._silent(lane):
                late, lane.owed = lane.owed, 0
                for num_bytes, _, leaves in list(itertools.islice(lane.packets, late)):
                    self._schedule(lane, num_bytes, leaves)
