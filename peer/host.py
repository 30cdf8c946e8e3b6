"""The real network: py-libp2p over TCP, Noise and Yamux, behind the `Transport` protocol.

Theory of operation. `open_host` runs one libp2p host in a task of its own, shielded from the cancellation of its
caller, so that it always leaves gracefully (on Ctrl-C, too): connections are closed in parallel, the listener ends, and
connections still open after `CLOSE_TIMEOUT` are cut. An error of the caller's body is raised as it is, never as a
group. No error of the library leaves this file: those of connections become `NetworkError`, in words for volunteers.

Reaching a peer is the work of other files: `libp2p.ladder` tries its addresses in order, `nat.relay` goes through
relays, `nat.punch` and `nat.upgrade` get from there to a direct connection, `nat.bootstraps` decides how others
reach me.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import trio
from libp2p.custom_types import TProtocol
from libp2p.peer.id import ID
from libp2p.peer.peerstore import PeerStoreError
from libp2p.rcmgr import Direction
from multiaddr import Multiaddr

from .address import Surroundings, is_ipv6, is_web, rung_of, valid_address, why_not_dial
from .base.background import background
from .base.config import PeerConfig, bytes_per_second
from .base.errors import (
    ConnectFailed,
    LocalError,
    NetworkError,
    RemoteError,
    StreamClosed,
    UsageError,
    sole_error,
)
from .base.transport import Address, PeerId, Reachability, Rung, Stream, StreamHandler, Traffic
from .bootstrap.server import BootstrapServer
from .https.dial import WebDialler
from .https.serve import WebPlace, WebServer
from .identity import Identity
from .libp2p import fixes
from .libp2p.dial import Dialler
from .libp2p.gate import Gate
from .libp2p.ladder import Climb
from .libp2p.line_rate import LineRate
from .libp2p.listen import NUM_LISTEN_PORTS, interfaces, listen
from .libp2p.settings import make_host
from .libp2p.stream import CONNECTION_ERRORS, Libp2pStream
from .libp2p.tcp import MeteredTCP, TrafficMeter, plain_words
from .log.telemetry import Telemetry
from .nat import dialback
from .nat.bootstraps import Bootstraps
from .nat.punch import Dials, Puncher
from .nat.relay import RelayClient, relay_of
from .nat.upgrade import Moves, is_relayed
from .quota.limits import BootstrapLimits, GateLimits
from .quota.origins import UNKNOWN, Origins, Rates
from .quota.places import GAVE_WAY, Places
from .quota.refusals import Refusals
from .quota.shares import Shares
from .strangers.ping import PING_PROTOCOL, Pings
from .strangers.streams import few_of_each

STATED_DIAL_PERIOD = 60.0
DIALS_TO_ONE = 64
"""Dials to one IP address (IPv6: to one /64) in a period, at addresses that members state: a full roster behind one NAT. All
runs together must not be a flood for a bystander."""
NONE_EXEMPT = Origins(())
DIALS_IN_ALL = 1024
"""Dials to all of them: a full roster, of 16 addresses each."""
MAX_STREAMS_PER_CONNECTION = 128
"""Twice the circuits of a relay; keeps one stranger from using up the 10 000 of all connections."""

STREAMS_BURST_SECONDS = 64.0
"""Of the limit of streams a second: a newcomer's 128 lookups fit into the burst of a member four times."""

NETWORK_STREAMS = 2
"""Streams a second of a network, in those of one address: at a bootstrap 64, which at 2 to 4 ms for whatever is asked on
one are a fifth of a core."""

STREAMS_OF_A_CONNECTION = 8
"""Streams that strangers hold open, for each connection that their address or network may have: a peer asks on four or
five, and one behind a relay has a circuit to each of 64 others."""
OPEN_STREAMS = 2048
"""Those of all strangers, some 25 kB each: two of each of the 900 peers at a bootstrap."""

CLOSE_TIMEOUT = 0.8
"""Seconds for a graceful close on leaving."""


@asynccontextmanager
async def open_host(
    identity: Identity,
    config: PeerConfig,
    telemetry: Telemetry,
    *,
    gate: GateLimits | None = None,
    bootstrap: BootstrapLimits | None = None,
    web: Sequence[WebPlace] = (),
) -> AsyncIterator["Libp2pHost"]:
    """Run a host that listens; with the limits of a bootstrap it is one, which relays and dials back for others.

    `web`: where a bootstrap also accepts WebSockets.

    Raises `LocalError` if no port can be had or py-libp2p is of another version, `UsageError` for an invalid announced
    address.
    """
    for address in config.announce:
        if not valid_address(address):
            raise UsageError(f"{address!r} cannot be announced", remedy="write it as /ip4/192.0.2.1/tcp/4001")
    fixes.apply_fixes()
    host = Libp2pHost(identity, config, telemetry, bootstrap, gate or GateLimits(), web)
    async with background() as nursery:
        await nursery.start(host.run, nursery)
        try:
            if host.failure is None:
                yield host
        finally:
            await host.stop()
    if host.failure is not None:
        raise host.failure


class Libp2pHost:
    """One peer's libp2p host, a `transport.Host`; made by `open_host`."""

    def __init__(
        self,
        identity: Identity,
        config: PeerConfig,
        telemetry: Telemetry,
        bootstrap: BootstrapLimits | None,
        gate: GateLimits,
        web: Sequence[WebPlace] = (),
    ) -> None:
        self.config = config
        self.peer_id = identity.peer_id
        self.port = 0
        self.failure: LocalError | None = None
        self._telemetry = telemetry
        up, down = (LineRate(bytes_per_second(mbit)) for mbit in (config.max_up, config.max_down))
        self._meter = TrafficMeter(up=up, down=down)
        self._nursery: trio.Nursery | None = None
        self._stopping = trio.Event()
        self._stopped = trio.Event()
        self._dialing: WeakValueDictionary[PeerId, trio.Lock] = WeakValueDictionary()
        tcp = MeteredTCP(self._meter)
        self.host = make_host(identity, tcp, self.addresses, (bootstrap or gate).connections)
        self._swarm: Any = self.host.get_network()
        self._swarm.set_stream_handler(self._accept)
        self._dialler = Dialler(self._swarm, tcp, WebDialler(self._meter), config)
        self.bootstrap_server = BootstrapServer(self.host, bootstrap, telemetry) if bootstrap is not None else None
        """The server role of a bootstrap; None on other hosts."""
        if self.bootstrap_server is None:
            refusals = Refusals(telemetry, trio.current_time, "connection.refused")
            self._gate = Gate(gate, refusals, self._swarm, self._is_needed, self._stays)
        else:
            self._gate = self.bootstrap_server.gate
        self._needs: Callable[[PeerId], bool] = lambda peer: False
        self._votes: Callable[[PeerId], bool] = lambda peer: False
        tcp.admit = self._gate.admit
        self._web = [WebServer(place, self._gate, self._meter, telemetry, self._swarm_accept) for place in web]
        self._relays = RelayClient(self.host, telemetry, self._gate.admit_circuit, self._gate.circuit_budget)
        self._dials_to_one = Rates(DIALS_TO_ONE / STATED_DIAL_PERIOD, STATED_DIAL_PERIOD)
        self._dials_in_all = Rates(DIALS_IN_ALL / STATED_DIAL_PERIOD, STATED_DIAL_PERIOD)
        limits = bootstrap.gate if bootstrap is not None else gate
        self._streams = Shares(limits.streams_per_second, STREAMS_BURST_SECONDS, network_share=NETWORK_STREAMS)
        most = (STREAMS_OF_A_CONNECTION * limits.per_address, STREAMS_OF_A_CONNECTION * limits.per_network)
        self._open_streams = Places[trio.CancelScope](OPEN_STREAMS, *most)
        dialler = self._dialler
        dials = Dials(*map(self._guarded, (dialler.plainly, dialler.simultaneous_open, dialler.accepting)))
        self._puncher = Puncher(self.host, telemetry, self._aims, dials, lambda peer: self.rung(peer) is Rung.RELAYED)
        self._moves = Moves(telemetry, self._connections, self.rung, self._punch, self._spawn)
        self._swarm.register_notifee(self._moves)
        self.bootstraps = Bootstraps(self, self._dialler, self._relays, telemetry, self._spawn, self._interfaces)
        if self.bootstrap_server is not None:
            self.handle(dialback.DIALBACK_PROTOCOL, few_of_each(dialback.Dialback(self._dialler.probe).serve))
            self.handle(PING_PROTOCOL, few_of_each(Pings().serve))

    async def run(self, nursery: trio.Nursery, *, task_status: Any) -> None:
        """Listen until `stop`; cancels `nursery` if the library fails."""
        try:
            with trio.CancelScope(shield=True) as scope:
                async with self.host.run(listen_addrs=[]):
                    # The links of runs name a bootstrap's port: on the next one nobody would look for it.
                    num_ports = 1 if self.bootstrap_server is not None else NUM_LISTEN_PORTS
                    port = await listen(self.host, self.config, self._telemetry, num_ports)
                    self.failure = port if isinstance(port, LocalError) else await self._listen_for_web()
                    if not isinstance(port, LocalError):
                        self.port = self._dialler.port = port
                        open_ones = (*self._swarm.listeners.values(), *self._web)
                        self._gate.guard([one for listener in open_ones for one in listener.listeners])
                    self._nursery = nursery
                    nursery.start_soon(self._gate.watch)
                    for web in self._web if self.failure is None else ():
                        nursery.start_soon(web.run)
                    if self.config.upnp and not self.config.announce:
                        self._spawn(self.bootstraps.mapping.keep, self.port)
                    task_status.started()
                    await self._stopping.wait()
                    self._nursery = None
                    scope.deadline = trio.current_time() + CLOSE_TIMEOUT
                    async with trio.open_nursery() as closing:
                        closing.start_soon(self.bootstraps.mapping.close)
                        for connection in [one for some in self._swarm.connections.values() for one in some]:
                            closing.start_soon(_close_gracefully, connection)
                    await self._swarm.close()
        except Exception as error:  # noqa: BLE001  The library's own tasks belong to no peer: the host ends with the reason.
            self.failure = LocalError(f"the libp2p host stopped: {error!r}", remedy="start the peer again")
            self._telemetry.emit("host.died", reason=repr(error))
            nursery.cancel_scope.cancel()
        finally:
            self._stopped.set()

    async def _listen_for_web(self) -> LocalError | None:
        try:
            for web in self._web:
                await web.listen()
        except LocalError as error:
            return error
        return None

    async def _swarm_accept(self, stream: Any) -> None:
        """Serve an admitted WebSocket to its end, as the library does the sockets of its own listeners."""
        await self._swarm._handle_inbound_connection(stream, Multiaddr(f"/ip4/0.0.0.0/tcp/{self.port}/ws"))

    async def stop(self) -> None:
        """Close everything, in less than a second."""
        self._stopping.set()
        with trio.CancelScope(shield=True):
            await self._stopped.wait()

    @property
    def reachability(self) -> Reachability:
        """How others reach me, as decided from what bootstraps observe."""
        return self.bootstraps.reachability

    @property
    def is_relayed(self) -> bool:
        """Return True if most others can reach me through a relay only."""
        return self.reachability.rung is Rung.RELAYED

    def on_climb(self, handler: Callable[[PeerId], None]) -> None:
        """Call `handler(peer)` when the connection to a peer is upgraded: new streams use the better one."""
        self._moves.on_climb(handler)

    def addresses(self) -> tuple[Address, ...]:
        """The addresses at which others may dial me: announced by the user, or confirmed and those of my interfaces.

        Where I accept WebSockets follows, and relays that hold a reservation for me, as long as some peers need them. Of the
        interfaces those with a public address come first, and loopback is listed only if there is no other.
        """
        if not self.port:
            return self.config.announce
        announced = tuple(address for address in self.config.announce if not is_web(address))
        web = (*filter(is_web, self.config.announce), *(address for one in self._web for address in one.addresses))
        own = announced or (*self.reachability.confirmed, *self._interfaces())
        beyond_loopback = tuple(address for address in own if not address.startswith(("/ip4/127.", "/ip6/::1/"))) or own
        return tuple(dict.fromkeys((*beyond_loopback, *web, *self.bootstraps.circuits())))

    def prefer(self, needs: Callable[[PeerId], bool], votes: Callable[[PeerId], bool]) -> None:
        """Keep places for the peers that a run needs; never close the connection of a voter for the sake of another."""
        self._needs, self._votes = needs, votes

    def _is_needed(self, peer: PeerId) -> bool:
        return self._stays(peer) or self._needs(peer)

    def _stays(self, peer: PeerId) -> bool:
        return self.bootstraps.holds(peer) or self._votes(peer)

    def _interfaces(self) -> tuple[Address, ...]:
        return interfaces(self.config.host, self.port)

    def handle(self, protocol: str, handler: StreamHandler) -> None:
        """Serve incoming streams of `protocol` with `handler`, each in its own task."""
        self.host.set_stream_handler(TProtocol(protocol), partial(self._serve, protocol, handler))

    async def connect(self, peer: PeerId, addresses: Sequence[Address]) -> None:
        """Ensure that a connection to `peer` is open; tries one address after the other. Raises `ConnectFailed`."""
        if peer == self.peer_id:
            raise LocalError("a peer does not connect to itself")
        async with self._dialing.setdefault(peer, trio.Lock()):
            if peer in self.connected():
                return
            climb = Climb(peer, addresses, partial(self._dial, tuple(addresses)), self._telemetry)
            self._spawn(climb.run)
            try:
                await climb.settled.wait()
            except trio.Cancelled:
                climb.scope.cancel()
                raise
            if peer not in self.connected():
                raise ConnectFailed(peer, climb.attempts)

    async def probe(self, peer: PeerId, address: Address, seconds: float) -> str:
        """Dial a peer at an address, shake hands and hang up; returns why that failed, or ""."""
        return await self._dialler.probe(peer, address, seconds)

    async def open_stream(self, peer: PeerId, protocol: str) -> Stream:
        """Open a stream over an open connection. Raises `StreamClosed` if there is none or the stream is refused."""
        if peer not in self.connected():
            raise StreamClosed(f"no connection to {peer} is open")
        try:
            raw = await self.host.new_stream(ID.from_base58(peer), [TProtocol(protocol)])
        except CONNECTION_ERRORS as error:
            raise StreamClosed(f"{peer} opened no {protocol} stream: {error}") from error
        return Libp2pStream(raw)

    async def disconnect(self, peer: PeerId) -> None:
        """Close every connection to `peer` that is open now."""
        # Not the library's `close_peer`: it leaks connections that are accepted while it closes the others.
        async with trio.open_nursery() as nursery:
            for connection in list(self._swarm.connections.get(ID.from_base58(peer), ())):
                nursery.start_soon(connection.close)

    def connected(self) -> frozenset[PeerId]:
        """The peers to which a connection is open."""
        return frozenset(str(peer) for peer in list(self._swarm.connections) if self._open_connections(peer))

    def dialled(self, peer: PeerId) -> tuple[Address, ...]:
        """Return the addresses at which `peer` accepted my dials, as far as these connections are still open."""
        outgoing = [connection for connection in self._connections(peer) if connection.direction is Direction.OUTBOUND]
        return tuple(str(address) for connection in outgoing for address in connection.get_transport_addresses())

    def announced(self, peer: PeerId, protocol: str) -> tuple[Address, ...]:
        """Return the addresses that a connected peer announces, if it also announces `protocol`."""
        book, peer_id = self.host.get_peerstore(), ID.from_base58(peer)
        try:
            listens = book.addrs(peer_id) if protocol in book.get_protocols(peer_id) else []
        except PeerStoreError:  # It has not sent its protocols yet.
            return ()
        return tuple(str(address).partition("/p2p/")[0] for address in listens)

    def rung(self, peer: PeerId) -> Rung | None:
        """Return the rung of the best connection to `peer`; None if there is none."""
        rungs = [self._rung_of_connection(connection) for connection in self._connections(peer)]
        return min(rungs, key=list(Rung).index, default=None)

    def traffic(self) -> Traffic:
        """The bytes on the TCP sockets so far."""
        return Traffic(self._meter.sent, self._meter.received)

    def _open_connections(self, peer: ID) -> list[Any]:
        return [
            connection
            for connection in self._swarm.connections.get(peer, ())
            if not connection.is_closed and connection.muxed_conn.is_established
        ]

    def _connections(self, peer: PeerId) -> list[Any]:
        return self._open_connections(ID.from_base58(peer))

    def _rung_of_connection(self, connection: Any) -> Rung:
        if is_relayed(connection):
            return Rung.RELAYED
        if self._dialler.is_simultaneous(connection):
            return Rung.PUNCHED
        addresses = connection.get_transport_addresses()  # None are known when the socket died while it was accepted.
        return rung_of(str(addresses[0])) if addresses else Rung.DIRECT

    def _punch(self, peer: PeerId) -> None:
        self._spawn(self._puncher.ask, peer)

    def _aims(self) -> tuple[Address, ...]:
        """The addresses at which a punch aims; on IPv6 a router filters but does not translate, so my own address works."""
        public = tuple(address for address in self.addresses() if rung_of(address) is Rung.DIRECT)
        return (*self.reachability.aims, *filter(is_ipv6, public)) if self.reachability.aims else public

    def _spawn(self, task: Callable[..., Awaitable[None]], *args: Any) -> None:
        """Run a network task until the host ends; a failed connection ends the task, not the host."""
        if self._nursery is None:
            raise StreamClosed("this peer is leaving")

        async def run() -> None:
            try:
                await task(*args)
            except* (NetworkError, RemoteError, trio.TooSlowError, *CONNECTION_ERRORS) as group:
                name = task.__name__.strip("_")
                self._telemetry.emit("task.broken", step=name, reason=repr(sole_error(group)))

        self._nursery.start_soon(run)

    def why_not_dial(self, address: Address, theirs: Sequence[Address] = ()) -> str:
        """Return why I do not dial an address that a member states among `theirs`; empty if I do. It spends my budget."""
        here = Surroundings(
            interfaces=(*self._interfaces(), *self.addresses()),
            bootstraps=self.bootstraps.entered,
            seen_at=(*self.bootstraps.seen_at, *self.reachability.confirmed),
        )
        if reason := why_not_dial(address, theirs, here):
            return reason
        now = trio.current_time()
        if not self._dials_to_one.take(NONE_EXEMPT.of(address.split("/")[2]), now):
            return f"more than {DIALS_TO_ONE} dials to one address (IPv6: one /64) within {STATED_DIAL_PERIOD:g} s"
        if not self._dials_in_all.take(UNKNOWN, now):
            return f"more than {DIALS_IN_ALL} dials within {STATED_DIAL_PERIOD:g} s"
        return ""

    def _guarded(self, dial: Callable[[PeerId, Address], Awaitable[str]]) -> Callable[[PeerId, Address], Awaitable[str]]:
        """A dial to where a peer wants to meet me: an IP, since what a name stands for may change."""

        async def guarded(peer: PeerId, address: Address) -> str:
            if not address.startswith(("/ip4/", "/ip6/")):
                return "a name is no place to meet"
            return self.why_not_dial(address) or await dial(peer, address)

        return guarded

    async def _dial(self, theirs: tuple[Address, ...], peer: PeerId, address: Address, rung: Rung) -> str:
        """Dial one of a peer's addresses; returns the cause in plain words if that failed."""
        if rung is not Rung.RELAYED:
            return await self._dialler.plainly(peer, address, rung, partial(self.why_not_dial, theirs=theirs))
        base, relay = relay_of(address)
        if relay in (self.peer_id, peer):
            return "the relay is one of the two itself"
        try:
            with trio.fail_after(self.config.dial_timeout):
                await self.connect(relay, [base])
                await self._relays.dial(relay, peer)
        except trio.TooSlowError:
            return f"timed out after {self.config.dial_timeout:g} s"
        except NetworkError as error:
            return str(error)
        except CONNECTION_ERRORS as error:
            return plain_words(error)
        return ""

    async def _accept(self, raw: Any) -> None:
        """Serve every incoming stream, those of the library's own protocols too: an error ends that stream only."""
        peer = str(raw.muxed_conn.peer_id)
        if len(raw.swarm_conn.get_streams()) > MAX_STREAMS_PER_CONNECTION:
            self._telemetry.emit("peer.charged", peer=peer, step="stream", reason="too many open streams")
            await raw.reset()
            return
        if self._stays(peer):
            await self._negotiate(peer, raw)
            return
        origin = self._gate.payer(self._gate.origin_of(raw.swarm_conn), peer)
        if whose := self._streams.exceeded(origin, trio.current_time()):
            self._gate.refusals.add("stream", f"too many a second from {whose}", origin, peer)
            await raw.swarm_conn.close()
            return
        scope = trio.CancelScope()
        if (oldest := self._open_streams.enter(scope, origin, peer)) is not None:
            self._gate.refusals.add("stream", GAVE_WAY, origin, peer)
            oldest.cancel()
        try:
            with scope:
                await self._negotiate(peer, raw)
        finally:
            self._open_streams.leave(scope)
        if scope.cancelled_caught:
            await raw.reset()

    async def _negotiate(self, peer: PeerId, raw: Any) -> None:
        """Agree on a protocol, and serve it."""
        try:
            await self.host._swarm_stream_handler(raw)
        except Exception as error:  # noqa: BLE001  The boundary of one peer.
            self._telemetry.emit("stream.lost", peer=peer, step="negotiation", reason=repr(error))
            await raw.reset()

    async def _serve(self, protocol: str, handler: StreamHandler, raw: Any) -> None:
        stream = Libp2pStream(raw)
        events: list[tuple[str, str]] = []
        try:
            await handler(stream)
        except* RemoteError as group:  # A handler with a nursery raises a group, one without raises a bare error.
            events += [("peer.charged", str(error)) for error in _leaves(group)]
        except* NetworkError as group:
            events += [("stream.lost", str(error)) for error in _leaves(group)]
        except* Exception as group:  # noqa: BLE001  The boundary of one peer.
            events += [("handler.failed", repr(error)) for error in _leaves(group)]
        for event, reason in events:
            self._telemetry.emit(event, peer=stream.remote, step=protocol, reason=reason)
        await (stream.reset() if events else stream.aclose())


async def _close_gracefully(connection: Any) -> None:
    """Close a connection without the library's two pauses of 0.1 s on a socket that is closed already."""
    async with trio.open_nursery() as nursery:

        async def close() -> None:
            await connection.close()
            nursery.cancel_scope.cancel()

        nursery.start_soon(close)
        await connection.muxed_conn.event_closed.wait()
        nursery.cancel_scope.cancel()


def _leaves(group: BaseExceptionGroup[Any]) -> list[BaseException]:
    """Return the errors of a group and of the groups within it."""
    return [
        leaf
        for error in group.exceptions
        for leaf in (_leaves(error) if isinstance(error, BaseExceptionGroup) else [error])
    ]
