"""Admission control for a host's connections: limits per origin, bounded handshakes, and whose connections give way.

Theory of operation. A socket is counted from its accept to its end, so that file descriptors and memory are bounded by
`GateLimits`, whatever strangers send or leave unsent:

- where its address or network opens too many a second, since handshakes with fresh keys could take a whole core, it is
  closed as soon as it is accepted, and the kernel drops further attempts for some seconds: even those cost too much;
- until it has proven a key it holds one of `handshakes` places, and then one of `connections`; both are `Places`. A flood of
  half-open connections closes none that is finished, keeps a peer of its own address out only if as many arrive within the
  third of a second that a handshake takes, and a peer of another address never;
- an incoming connection without a stream for `IDLE_SECONDS` is closed, unless its peer is needed. At a bootstrap those are
  the peers that hold a reservation, and other bootstraps; at a member its bootstraps, and whoever votes, has a seat in the
  last certificate or has tenure. Whoever only calls itself a member is a stranger, since keys are free;
- a quarter of the places, `KEPT` at most, is for the needed: a needed peer whose connection would give way moves there, and
  only other needed peers take that place from it;
- voters, and at a bootstrap the other bootstraps, always stay (`stays`): the only connection of one
  needs no place any more once it would give way.

Relayed connections take no socket here. They have places of their own, in which each relay is a network and each peer behind
it an address; the needed among them move as above. What a connection inside of another may send it takes from what the outer
one has: messages and bytes count for the relay's address, streams and frames for the relay as if it were a network, in which
each peer has an equal part (`quota.shares`). So circuits in one socket multiply nothing; only those that stay have budgets
of their own, since seats and tenure can be had by keys that are free.
"""

from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import trio
from libp2p.crypto.exceptions import MissingDeserializerError
from libp2p.rcmgr import Direction

from ..base.transport import PeerId
from ..quota.limits import GateLimits
from ..quota.origins import UNKNOWN, Origin, Origins, Rates
from ..quota.places import GAVE_WAY, Places
from ..quota.refusals import REFUSAL_PERIOD, Refusals
from ..quota.shares import Shares
from ..strangers.frames import FRAMES_BURST_SECONDS, FRAMES_PER_SECOND, Spend
from .dial import tcp_stream
from .listen import SelectiveListener

IDLE_SECONDS = 120.0
"""The idle timeout: go-libp2p's and other connection managers grant one to two minutes."""

LOOK_PERIOD = 5.0
"""Seconds between checks for idle connections. Until the next one the kernel keeps out who connects too fast: shorter than
the timeout of a dial."""

CONNECT_BURST_SECONDS = 32.0
"""Of the limit of connections a second: 64, a full roster behind one NAT that starts at once."""
ALL_CONNECTS = 16
"""Connections a second of all networks, or of one relay, in those of one address: 32, a sixth of a core."""

KEPT = 64
"""Places for needed peers alone: a full roster."""

MAX_RELAYED, MAX_RELAYED_BY_ONE = 256, 96
"""Relayed connections that others have opened to one host, in all and through one relay. A relay carries 64 for one peer and
decides which by their addresses, which only it knows: here must be room for all of them, and for those that are ending."""

OTHER_KEY = "its identity key is of another kind than ed25519"
"""As it is of go-libp2p and js-libp2p programs that keep an old RSA key: they see a connection that ends, and no reason."""


@dataclass(slots=True, eq=False)
class _Guest:
    """A connection that others have opened; ended by its scope."""

    origin: Origin
    places: Places["_Guest"]
    """The places that it competes for once its peer is known."""
    peer: PeerId = ""
    """Empty until it has proven its key."""
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)


class _Tiers(NamedTuple):
    """The places that connections compete for."""

    handshakes: Places[_Guest]
    """Of sockets whose peer has not proven its key."""
    sockets: Places[_Guest]
    circuits: Places[_Guest]
    kept: Places[_Guest]
    """Of needed peers, whose socket or circuit has given way."""


class Gate:
    """One host's gate.

    `is_needed` returns True for peers whose connections may be idle, and give way to other needed ones alone; `stays` for
    those of them whose connections never give way, and whose frames do not count for their network.
    """

    def __init__(
        self,
        limits: GateLimits,
        refusals: Refusals,
        swarm: Any,
        is_needed: Callable[[PeerId], bool],
        stays: Callable[[PeerId], bool],
    ) -> None:
        self.origins = Origins(limits.exempt)
        self.refusals = refusals
        rate = limits.connects_per_second
        self._connects = Shares(rate, CONNECT_BURST_SECONDS, all_share=ALL_CONNECTS)
        self._calls = Rates(ALL_CONNECTS * rate, CONNECT_BURST_SECONDS)
        self._frames = Shares(FRAMES_PER_SECOND, FRAMES_BURST_SECONDS)
        self._frames_of_voters = Rates(FRAMES_PER_SECOND, FRAMES_BURST_SECONDS)
        self._swarm = swarm
        self._is_needed = is_needed
        self._stays = stays
        kept = min(KEPT, limits.connections // 4)
        self._tiers = _Tiers(
            handshakes=Places(limits.handshakes),
            sockets=Places(limits.connections - kept, limits.per_address, limits.per_network),
            circuits=Places(MAX_RELAYED, per_network=MAX_RELAYED_BY_ONE),
            kept=Places(kept),
        )
        self._guests: set[_Guest] = set()
        self._idle_since: dict[Any, float] = {}
        self._listeners: Sequence[SelectiveListener] = ()
        self._kept_out: dict[str, None] = {}
        """Networks that open too many connections, since the last look."""

    @property
    def num_sockets(self) -> int:
        """The number of accepted sockets that are open."""
        return sum(guest.places is self._tiers.sockets for guest in self._guests)

    def guard(self, listeners: Sequence[SelectiveListener]) -> None:
        """Refuse at these listeners what its origin opens too fast."""
        self._listeners = listeners
        for listener in listeners:
            listener.refuses = self._is_too_fast

    async def admit(self, stream: Any, serve: Callable[[Any], Awaitable[None]]) -> None:
        """Serve an accepted socket to its end, or until it gives way."""
        remote = stream.get_remote_address()
        origin = self.origins.of(remote[0]) if remote else UNKNOWN
        stream.spend_frames = partial(self._spend_frames, origin)
        with self._guest(_Guest(origin, self._tiers.sockets)) as guest:
            stream.welcome = partial(self._welcome, guest)
            if (oldest := self._tiers.handshakes.enter(guest, origin)) is not None:
                self.refusals.add("handshake", "unfinished while too many others began", oldest.origin)
                oldest.scope.cancel()
            try:
                await serve(stream)
            except ValueError as error:  # As which the library's Noise raises all that is wrong with a key.
                if not isinstance(error.__context__, MissingDeserializerError):
                    raise
                self.refusals.add("handshake", OTHER_KEY, origin)
        if guest.scope.cancelled_caught:
            await stream.close()

    @contextmanager
    def admit_circuit(self, relay: PeerId, peer: PeerId) -> Iterator[Callable[[PeerId], None]]:
        """Hold the place of a relayed connection to its end, or until it gives way; yields what takes its proven peer.

        One too many a second of a relay gives way at once: its handshake costs what that of a socket does. A relay passes
        on fewer, in equal parts of the origins that it alone knows: here only one that lies exceeds the limit.
        """
        with self._guest(_Guest(origin := over_relay(relay, peer), self._tiers.circuits)) as guest:
            if self._calls.take(Origin(relay, origin.network, exempt=False), trio.current_time()):
                self._place(guest)
            else:
                self.refusals.add("connection", "too many circuits a second from one relay", origin)
                guest.scope.cancel()
            yield partial(setattr, guest, "peer")

    @contextmanager
    def _guest(self, guest: _Guest) -> Iterator[_Guest]:
        self._guests.add(guest)
        try:
            with guest.scope:
                yield guest
        finally:
            self._guests.remove(guest)
            for places in (self._tiers.handshakes, guest.places, self._tiers.kept):
                places.leave(guest)

    def _welcome(self, guest: _Guest, peer: PeerId) -> None:
        """Give an accepted socket, whose peer has proven its key, a place among all connections."""
        guest.peer = peer
        self._tiers.handshakes.leave(guest)
        self._place(guest)

    def _place(self, guest: _Guest) -> None:
        """Give a connection a place: the one that gives way moves to the needed if it is, and otherwise ends."""
        oldest = guest.places.enter(guest, guest.origin, guest.peer)
        if oldest is not None and self._is_needed(oldest.peer) and not self._needs_no_place(oldest):
            oldest = self._tiers.kept.enter(oldest, oldest.origin, oldest.peer)
        if oldest is not None and not self._needs_no_place(oldest):
            self.refusals.add("connection", GAVE_WAY, oldest.origin, oldest.peer)
            oldest.scope.cancel()

    def _needs_no_place(self, guest: _Guest) -> bool:
        """Return True for the only connection of a peer that stays: of several the oldest give way as anybody's do."""
        return self._stays(guest.peer) and sum(one.peer == guest.peer for one in self._guests) == 1

    def origin_of(self, connection: Any) -> Origin:
        """Return the origin whose limits the streams of a connection count for."""
        below: Any = tcp_stream(connection)
        if (outer := getattr(below, "muxed_conn", None)) is not None:
            return over_relay(str(outer.peer_id), _peer_of(connection))
        remote = below.get_remote_address()
        return self.origins.of(remote[0]) if remote else UNKNOWN

    def circuit_budget(self, relay: PeerId) -> Spend:
        """Return the frame budget that all circuits of a relay share, but for those of peers that stay."""
        return lambda peer, frames: self._spend_frames(over_relay(relay, peer), peer, frames)

    async def watch(self) -> None:
        """Close connections that exceed the idle timeout, until cancelled."""
        reported_at = trio.current_time()
        while True:
            await trio.sleep(LOOK_PERIOD)
            self._let_in_again()
            self._let_go()
            now = trio.current_time()
            idle = [one for one in self._incoming() if not one.get_streams() and not self._is_needed(_peer_of(one))]
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

    def payer(self, origin: Origin, peer: PeerId) -> Origin:
        """Return the origin that the streams of a peer from there count for: a needed one is an address of its own."""
        return replace(origin, address=peer) if self._is_needed(peer) else origin

    def _let_go(self) -> None:
        """Let those compete for a place again that have none and need not stay any more: who votes changes."""
        for guest in [one for one in self._guests if not any(one in places for places in self._tiers)]:
            if not guest.scope.cancel_called and not self._needs_no_place(guest):
                self._place(guest)

    def _spend_frames(self, origin: Origin, peer: PeerId, frames: float) -> float:
        """Take frames from the budget of an origin, or from the own one of a peer that stays, which no neighbour uses up."""
        budget = self._frames_of_voters if self._stays(peer) else self._frames
        return budget.spend(self.payer(origin, peer), trio.current_time(), frames)

    async def _close(self, connection: Any, reason: str) -> None:
        self._idle_since.pop(connection, None)
        self.refusals.add("connection", reason, self.origin_of(connection), _peer_of(connection))
        with trio.move_on_after(1):
            await connection.close()

    def _incoming(self) -> list[Any]:
        """The connections that others have opened."""
        connections = [connection for some in list(self._swarm.connections.values()) for connection in list(some)]
        return [connection for connection in connections if connection.direction is Direction.INBOUND]


def over_relay(relay: PeerId, peer: PeerId) -> Origin:
    """Return the origin of a peer behind a relay, whose peers count as those of one network."""
    return Origin(peer, f"relay {relay}", exempt=False)


def _peer_of(connection: Any) -> PeerId:
    return str(connection.muxed_conn.peer_id)
