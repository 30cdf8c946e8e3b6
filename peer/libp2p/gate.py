"""Admission control for a host's connections: limits per origin, bounded handshakes, eviction of strangers.

Theory of operation. A socket is counted from its accept to its end, so that file descriptors and memory are bounded by
`GateLimits`, whatever strangers send or leave unsent:

- beyond the limits of its origin, it is closed before a byte is read, unless another one of that origin gives way;
- where its address or network opens too many a second, since handshakes with fresh keys could take a whole core, it is
  closed as soon as it is accepted, and the kernel drops further attempts for some seconds: even those cost too much;
- of more than `handshakes` unfinished handshakes the oldest of the address that has most of them is closed. A flood of
  half-open connections keeps an honest peer of its own address out only if as many arrive within the third of a second
  that a handshake takes, and a peer of another address never;
- an incoming connection without a stream for `IDLE_SECONDS` is closed, unless its peer is needed. At a bootstrap those are
  the peers that hold a reservation, and other bootstraps; at a member its bootstraps and the other members;
- if all places are taken, a connection of a peer that is not needed is evicted for the newcomer: the one that has been
  idle for the longest, else (at a member, `busy_give_way`) the oldest one of the network that has most of them, as
  Bitcoin Core does (`SelectNodeToEvict`). So whoever opens many connections loses its own first.

Relayed connections take no socket here. They have a limit of their own, under the same rule of eviction. What a connection
inside of another may send it takes from what the outer one has: messages and bytes count for the relay's address, streams
and frames for the relay as if it were a network, in which each peer has an equal part (`quota.shares`). So circuits in one
socket multiply nothing; only needed peers have budgets of their own.
"""

from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakSet

import trio
from libp2p.connection_types import ConnectionType
from libp2p.crypto.exceptions import MissingDeserializerError
from libp2p.rcmgr import Direction

from ..base.transport import PeerId
from ..quota.limits import GateLimits
from ..quota.origins import UNKNOWN, Origin, Origins, Rates, Tally
from ..quota.refusals import REFUSAL_PERIOD, Refusals
from ..quota.shares import Shares
from ..strangers.frames import FRAMES_BURST_SECONDS, FRAMES_PER_SECOND, Spend
from .dial import tcp_stream
from .listen import SelectiveListener

IDLE_SECONDS = 120.0
"""The idle timeout: go-libp2p's and other connection managers grant one to two minutes."""

LOOK_PERIOD = 5.0
"""Seconds between checks for idle connections; one that was found idle can be evicted. Until the next one the kernel keeps
out who connects too fast: shorter than the timeout of a dial."""

CONNECT_BURST_SECONDS = 32.0
"""Of the limit of connections a second: 64, a full roster behind one NAT that starts at once."""
ALL_CONNECTS = 16
"""Connections a second of all networks, in those of one address: 32, a sixth of a core."""

MAX_CLOSING = 32
"""Connections allowed beyond the limit, while the evicted ones are being closed."""

MAX_RELAYED = 64
"""Relayed connections that others have opened to one host: a full roster, and as many as a relay carries for one peer."""

OTHER_KEY = "its identity key is of another kind than ed25519"
"""As it is of go-libp2p and js-libp2p programs that keep an old RSA key: they see a connection that ends, and no reason."""


class Gate:
    """One host's gate.

    `is_needed` returns True for peers whose connections may be idle and are never evicted; `is_trusted` for those of them
    whose frames do not count for their network, all of them unless it is given.
    """

    def __init__(
        self,
        limits: GateLimits,
        refusals: Refusals,
        swarm: Any,
        is_needed: Callable[[PeerId], bool],
        is_trusted: Callable[[PeerId], bool] | None = None,
    ) -> None:
        self.origins = Origins(limits.exempt)
        self.tally = Tally(limits.connections, limits.per_address, limits.per_network)
        self.refusals = refusals
        rate = limits.connects_per_second
        self._connects = Shares(rate, CONNECT_BURST_SECONDS, all_share=ALL_CONNECTS)
        self._frames = Shares(FRAMES_PER_SECOND, FRAMES_BURST_SECONDS)
        self._frames_of_trusted = Rates(FRAMES_PER_SECOND, FRAMES_BURST_SECONDS)
        self._limits = limits
        self._swarm = swarm
        self._is_needed = is_needed
        self._is_trusted = is_trusted or is_needed
        self._accepted: dict[Any, Origin] = {}
        """The open sockets, the oldest first."""
        self._handshakes: dict[Any, Origin] = {}
        self._idle_since: dict[Any, float] = {}
        self._closing: WeakSet[Any] = WeakSet()
        self._listeners: Sequence[SelectiveListener] = ()
        self._kept_out: dict[str, None] = {}
        """Networks that open too many connections, since the last look."""

    def guard(self, listeners: Sequence[SelectiveListener]) -> None:
        """Refuse at these listeners what its origin opens too fast."""
        self._listeners = listeners
        for listener in listeners:
            listener.refuses = self._is_too_fast

    async def admit(self, stream: Any, serve: Callable[[Any], Awaitable[None]]) -> None:
        """Serve an accepted socket to its end, or close it."""
        remote = stream.get_remote_address()
        origin = self.origins.of(remote[0]) if remote else UNKNOWN
        if reason := await self._why_not_admit(origin):
            self.refusals.add("connection", reason, origin)
            await stream.close()
            return
        self.tally.add(origin)
        stream.spend_frames = partial(self._spend_frames, origin)
        self._accepted[stream] = self._handshakes[stream] = origin
        try:
            await self._keep_few_handshakes()
            await serve(stream)
        except ValueError as error:  # As which the library's Noise raises all that is wrong with a key.
            if not isinstance(error.__context__, MissingDeserializerError):
                raise
            self.refusals.add("handshake", OTHER_KEY, origin)
        finally:
            del self._accepted[stream]
            self._handshakes.pop(stream, None)
            self.tally.remove(origin)

    async def admit_relayed(self) -> bool:
        """Return True if one more relayed connection may be accepted; another one gives way if need be."""
        relayed = [one for one in self._incoming() if one.get_connection_type() is ConnectionType.RELAYED]
        if len(relayed) < MAX_RELAYED or await self._evict(relayed):
            return True
        self.refusals.add("connection", "all relayed places are taken")
        return False

    def origin_of(self, connection: Any) -> Origin:
        """Return the origin whose limits the streams of a connection count for."""
        below: Any = tcp_stream(connection)
        if (outer := getattr(below, "muxed_conn", None)) is not None:
            return over_relay(str(outer.peer_id), _peer_of(connection))
        remote = below.get_remote_address()
        return self.origins.of(remote[0]) if remote else UNKNOWN

    def circuit_budget(self, relay: PeerId) -> Spend:
        """Return the frame budget that all circuits of a relay share, but for those of needed peers."""
        return lambda peer, frames: self._spend_frames(over_relay(relay, peer), peer, frames)

    async def watch(self) -> None:
        """Close connections that exceed the idle timeout, until cancelled."""
        reported_at = trio.current_time()
        while True:
            await trio.sleep(LOOK_PERIOD)
            self._let_in_again()
            now = trio.current_time()
            idle = [connection for connection in self._incoming() if self._is_idle(connection)]
            self._idle_since = {connection: self._idle_since.get(connection, now) for connection in idle}
            for connection in [one for one, since in self._idle_since.items() if now - since >= IDLE_SECONDS]:
                await self._close(connection, "idle for too long")
            if now - reported_at >= REFUSAL_PERIOD:
                reported_at = now
                self.refusals.report()

    def _is_too_fast(self, ip: str) -> bool:
        """Return True for one connection too many a second; its address or network is kept out until the next look."""
        origin = self.origins.of(ip)
        if not (whose := self._connects.exceeded(origin, trio.current_time())):
            return False
        where = origin.address if whose == "one address" else origin.network
        self.refusals.add("connection", f"too many a second from {whose}", origin)
        if where not in self._kept_out:
            self._kept_out[where] = None
            self._tell_kernel()
        return True

    def _let_in_again(self) -> None:
        if self._kept_out:
            self._kept_out.clear()
            self._tell_kernel()

    def _tell_kernel(self) -> None:
        for listener in self._listeners:
            listener.keep_out(self._kept_out)

    async def _why_not_admit(self, origin: Origin) -> str:
        """Return why a socket of an origin is not accepted; empty if it is, maybe because another one gave way."""
        if reason := self.tally.crowded(origin):
            alike = {stream: place for stream, place in self._accepted.items() if place.network == origin.network}
            if self.tally.of_network(origin) < self.tally.per_network:
                alike = {stream: place for stream, place in alike.items() if place.address == origin.address}
            return "" if await self._evict(self._on(alike)) or await self._end_a_handshake(alike) else reason
        if self.tally.count < self.tally.in_all:
            return ""
        is_flood = self.tally.count >= self.tally.in_all + MAX_CLOSING
        return "" if not is_flood and await self._evict(self._on(self._accepted)) else "all places are taken"

    def _spend_frames(self, origin: Origin, peer: PeerId, frames: float) -> float:
        """Take frames from the budget of an origin, or from a needed peer's own, which its neighbours do not use up."""
        payer = replace(origin, address=peer) if self._is_needed(peer) else origin
        budget = self._frames_of_trusted if self._is_trusted(peer) else self._frames
        return budget.spend(payer, trio.current_time(), frames)

    async def _keep_few_handshakes(self) -> None:
        self._handshakes = {stream: origin for stream, origin in self._handshakes.items() if not stream.upgraded}
        while len(self._handshakes) > self._limits.handshakes:
            await self._end_a_handshake(self._handshakes)

    async def _end_a_handshake(self, among: Collection[Any]) -> bool:
        """Close the oldest unfinished handshake of the address that has most of them; returns whether there is one."""
        unfinished = {one: place for one, place in self._handshakes.items() if one in among and not one.upgraded}
        if not unfinished:
            return False
        count = Counter(place.address for place in unfinished.values())
        oldest = max(unfinished, key=lambda one: count[unfinished[one].address])  # Of equal ones `max` takes the first.
        self.refusals.add("handshake", "unfinished while too many others began", self._handshakes.pop(oldest))
        await oldest.close()
        return True

    async def _evict(self, among: Sequence[Any]) -> bool:
        """Close one of these connections, of a peer that is not needed; returns whether there is one."""
        strangers = [one for one in among if one not in self._closing and not self._is_needed(_peer_of(one))]
        idle = [one for one in strangers if one in self._idle_since and self._is_idle(one)]
        if idle:
            await self._close(min(idle, key=self._idle_since.__getitem__), "idle while all places are taken")
        elif strangers and self._limits.busy_give_way:
            count = Counter(self._origin_of(one).network for one in strangers)
            crowded = max(strangers, key=lambda one: count[self._origin_of(one).network])
            await self._close(crowded, "not needed while all places are taken")
        else:
            return False
        return True

    async def _close(self, connection: Any, reason: str) -> None:
        self._idle_since.pop(connection, None)
        self._closing.add(connection)
        self.refusals.add("connection", reason, self._origin_of(connection), _peer_of(connection))
        with trio.move_on_after(1):
            await connection.close()

    def _incoming(self) -> list[Any]:
        """The connections that others have opened."""
        connections = [connection for some in list(self._swarm.connections.values()) for connection in list(some)]
        return [connection for connection in connections if connection.direction is Direction.INBOUND]

    def _on(self, sockets: Collection[Any]) -> list[Any]:
        """The connections on some of the accepted sockets, the oldest first."""
        found = {tcp_stream(connection): connection for connection in self._incoming()}
        return [found[socket] for socket in self._accepted if socket in sockets and socket in found]

    def _origin_of(self, connection: Any) -> Origin:
        return self._accepted.get(tcp_stream(connection), UNKNOWN)

    def _is_idle(self, connection: Any) -> bool:
        return not connection.get_streams() and not self._is_needed(_peer_of(connection))


def over_relay(relay: PeerId, peer: PeerId) -> Origin:
    """Return the origin of a peer behind a relay, whose peers count as those of one network."""
    return Origin(peer, f"relay {relay}", exempt=False)


def _peer_of(connection: Any) -> PeerId:
    return str(connection.muxed_conn.peer_id)
