"""The real network: py-libp2p over TCP, Noise and Yamux, behind the `Transport` protocol.

Theory of operation. `open_host` runs one libp2p host in a task of its own, shielded from the cancellation of its
caller, so that leaving (Ctrl-C, too) always says goodbye: connections are closed side by side, the listener ends, and
after `CLOSE_TIMEOUT` whatever is left is cut. An error of the caller's body comes out as it is, never as a group.
No error of the library passes this file: the road's become `NetworkError`, in words that a volunteer understands.

How a peer is reached is the work of others: `libp2p_ladder` climbs its addresses, `libp2p_relay` goes through relays,
`libp2p_punch` and `libp2p_moves` get from there to a direct connection, `libp2p_bootstraps` finds out how I am reached.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import trio
from libp2p.custom_types import TProtocol
from libp2p.peer.id import ID
from libp2p.rcmgr import Direction

from .address import is_ipv6, rung_of, split_p2p, valid_address
from .background import background
from .bootstrap.server import Door
from .config import PeerConfig
from .errors import ConnectFailed, LocalError, NetworkError, RemoteError, StreamClosed, UsageError, sole_error
from .identity import Identity
from .libp2p import fixes as libp2p_fixes
from .libp2p.dial import Dialler
from .libp2p.ladder import Climb
from .libp2p.listen import interfaces, listen
from .libp2p.settings import make_host
from .libp2p.stream import ROAD_ERRORS, Libp2pStream
from .libp2p.tcp import Meter, MeteredTCP, plain_words
from .limits import BootstrapLimits
from .nat import dialback as libp2p_dialback
from .nat import speed as libp2p_rate
from .nat.bootstraps import Bootstraps
from .nat.punch import Dials, Puncher
from .nat.reachability import Standing
from .nat.relay import RelayClient, relay_of
from .nat.upgrade import Moves, is_relayed
from .telemetry import Telemetry
from .transport import Address, PeerId, Rung, Stream, StreamHandler, Traffic

__all__ = ["Libp2pHost", "Libp2pStream", "open_host", "split_p2p", "valid_address"]

MAX_STREAMS_PER_CONNECTION = 128
"""What may be open at once: twice the circuits of a relay. One stranger cannot use up the 10 000 of all."""

CLOSE_TIMEOUT = 0.8
"""Seconds to say goodbye on leaving."""


@asynccontextmanager
async def open_host(
    identity: Identity, config: PeerConfig, telemetry: Telemetry, *, bootstrap: BootstrapLimits | None = None
) -> AsyncIterator["Libp2pHost"]:
    """A running host that listens; with limits it is a bootstrap, which relays and dials back for others.

    Raises `LocalError` where no port can be had, `UsageError` for a bad announcement.
    """
    for address in config.announce:
        if not valid_address(address):
            raise UsageError(f"{address!r} cannot be announced", remedy="write it as /ip4/192.0.2.1/tcp/4001")
    libp2p_fixes.apply(telemetry)
    host = Libp2pHost(identity, config, telemetry, bootstrap)
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
    """One peer's end of the real network; made by `open_host`. Implements `transport.Transport`."""

    def __init__(
        self, identity: Identity, config: PeerConfig, telemetry: Telemetry, bootstrap: BootstrapLimits | None
    ) -> None:
        self.identity = identity
        self.config = config
        self.peer_id = identity.peer_id
        self.port = 0
        self.failure: LocalError | None = None
        self._telemetry = telemetry
        self._meter = Meter()
        self._nursery: trio.Nursery | None = None
        self._stopping = trio.Event()
        self._stopped = trio.Event()
        self._dialing: WeakValueDictionary[PeerId, trio.Lock] = WeakValueDictionary()
        tcp = MeteredTCP(self._meter)
        self.host = make_host(identity, tcp, self.addresses, bootstrap)
        self._swarm: Any = self.host.get_network()
        self._swarm.set_stream_handler(self._accept)
        self._dialler = Dialler(self._swarm, tcp, config)
        self._relays = RelayClient(self.host, telemetry)
        dials = Dials(self._dialler.plainly, self._dialler.meeting, self._dialler.accepting)
        self._puncher = Puncher(self.host, telemetry, self._aims, dials, self._is_relayed_only)
        self._moves = Moves(telemetry, self._connections, self.rung, self._punch, self._spawn)
        self._swarm.register_notifee(self._moves)
        self.bootstraps = Bootstraps(self, self._dialler, self._relays, telemetry, self._spawn, self._interfaces)
        self.door = Door(self.host, bootstrap, telemetry) if bootstrap is not None else None
        """What this host does for others, if it is a bootstrap."""
        if self.door is not None:
            tcp.admit = self.door.gate.admit
            self.handle(libp2p_dialback.PROTOCOL, libp2p_dialback.Dialback(self._dialler.probe).serve)
            self.handle(libp2p_rate.PROTOCOL, libp2p_rate.RateServer().serve)

    async def run(self, nursery: trio.Nursery, *, task_status: Any) -> None:
        """Listen until `stop`; `nursery` is cancelled should the library give up."""
        try:
            with trio.CancelScope(shield=True) as scope:
                async with self.host.run(listen_addrs=[]):
                    port = await listen(self.host, self.config, self._telemetry)
                    if isinstance(port, LocalError):
                        self.failure = port
                    else:
                        self.port = self._dialler.port = port
                    self._nursery = nursery
                    if self.door is not None:
                        nursery.start_soon(self.door.gate.watch)
                    if self.config.upnp and not self.config.announce:
                        self._spawn(self.bootstraps.mapping.keep, self.port)
                    task_status.started()
                    await self._stopping.wait()
                    self._nursery = None
                    scope.deadline = trio.current_time() + CLOSE_TIMEOUT
                    async with trio.open_nursery() as goodbyes:
                        goodbyes.start_soon(self.bootstraps.mapping.close)
                        for connection in [one for some in self._swarm.connections.values() for one in some]:
                            goodbyes.start_soon(_say_goodbye, connection)
                    await self._swarm.close()
        except Exception as error:  # noqa: BLE001  The library's own tasks: nobody's peer, so the host ends, and says why.
            self.failure = LocalError(f"the libp2p host stopped: {error!r}", remedy="start the peer again")
            self._telemetry.emit("host.died", reason=repr(error))
            nursery.cancel_scope.cancel()
        finally:
            self._stopped.set()

    async def stop(self) -> None:
        """Close everything, in less than a second."""
        self._stopping.set()
        with trio.CancelScope(shield=True):
            await self._stopped.wait()

    @property
    def standing(self) -> Standing:
        """How others reach me, as far as bootstraps have told."""
        return self.bootstraps.standing

    @property
    def is_relayed(self) -> bool:
        """Whether most others can reach me through a relay only."""
        return self.standing.rung is Rung.RELAYED

    def on_climb(self, handler: Callable[[PeerId], None]) -> None:
        """Call `handler(peer)` when a better connection to a peer is there: streams that are opened now are on it."""
        self._moves.on_climb(handler)

    def addresses(self) -> tuple[Address, ...]:
        """Where others may dial me: what the user announces, else where strangers have reached me and my interfaces.

        Behind them come relays that hold a place for me, as long as there are some who cannot reach me without. Of the
        interfaces those with a public address come first, and loopback only where nothing else is there.
        """
        if not self.port:
            return self.config.announce
        own = self.config.announce or (*self.standing.confirmed, *self._interfaces())
        worldly = tuple(address for address in own if not address.startswith(("/ip4/127.", "/ip6/::1/"))) or own
        return tuple(dict.fromkeys((*worldly, *self.bootstraps.circuits())))

    def _interfaces(self) -> tuple[Address, ...]:
        return interfaces(self.config.host, self.port)

    def handle(self, protocol: str, handler: StreamHandler) -> None:
        """Serve incoming streams of `protocol` with `handler`, each in its own task."""
        self.host.set_stream_handler(TProtocol(protocol), partial(self._serve, protocol, handler))

    async def connect(self, peer: PeerId, addresses: Sequence[Address]) -> None:
        """Make sure that a connection to `peer` is open, trying one address after the other. Raises `ConnectFailed`."""
        if peer == self.peer_id:
            raise LocalError("a peer does not connect to itself")
        async with self._dialing.setdefault(peer, trio.Lock()):
            if peer in self.connected():
                return
            climb = Climb(peer, addresses, self._dial, self._telemetry)
            self._spawn(climb.run)
            try:
                await climb.settled.wait()
            except trio.Cancelled:
                climb.scope.cancel()
                raise
            if peer not in self.connected():
                raise ConnectFailed(peer, climb.attempts)

    async def probe(self, peer: PeerId, address: Address, seconds: float) -> str:
        """Dial a peer at an address, shake hands and hang up; why that failed, empty if it did not."""
        return await self._dialler.probe(peer, address, seconds)

    async def open_stream(self, peer: PeerId, protocol: str) -> Stream:
        """A new stream over an open connection. Raises `StreamClosed` when there is none or it is refused."""
        if peer not in self.connected():
            raise StreamClosed(f"no connection to {peer} is open")
        try:
            raw = await self.host.new_stream(ID.from_base58(peer), [TProtocol(protocol)])
        except ROAD_ERRORS as error:
            raise StreamClosed(f"{peer} opened no {protocol} stream: {error}") from error
        return Libp2pStream(raw, self._nursery)

    async def disconnect(self, peer: PeerId) -> None:
        """Close every connection to `peer` that is open now."""
        # Not by the library's `close_peer`: it forgets, without closing it, what has connected while it was closing.
        async with trio.open_nursery() as nursery:
            for connection in list(self._swarm.connections.get(ID.from_base58(peer), ())):
                nursery.start_soon(connection.close)

    def connected(self) -> frozenset[PeerId]:
        """The peers to whom a connection is open."""
        return frozenset(str(peer) for peer in list(self._swarm.connections) if self._open_connections(peer))

    def dialled(self, peer: PeerId) -> tuple[Address, ...]:
        """Where `peer` answered my dials, as far as these connections are still open."""
        outgoing = [connection for connection in self._connections(peer) if connection.direction is Direction.OUTBOUND]
        return tuple(str(address) for connection in outgoing for address in connection.get_transport_addresses())

    def rung(self, peer: PeerId) -> Rung | None:
        """How `peer` is connected, by its best connection; None when it is not."""
        rungs = [self._rung_of_connection(connection) for connection in self._connections(peer)]
        return min(rungs, key=list(Rung).index, default=None)

    def traffic(self) -> Traffic:
        """Bytes on the TCP sockets so far."""
        return Traffic(self._meter.sent, self._meter.received)

    def _open_connections(self, peer: ID) -> list[Any]:
        return [
            connection
            for connection in self._swarm.connections.get(peer, ())
            if not connection.is_closed and not connection.muxed_conn.event_shutting_down.is_set()
        ]

    def _connections(self, peer: PeerId) -> list[Any]:
        return self._open_connections(ID.from_base58(peer))

    def _rung_of_connection(self, connection: Any) -> Rung:
        if is_relayed(connection):
            return Rung.RELAYED
        if self._dialler.has_met(connection):
            return Rung.PUNCHED
        addresses = connection.get_transport_addresses()  # None are known when the socket died while it was accepted.
        return rung_of(str(addresses[0])) if addresses else Rung.DIRECT

    def _is_relayed_only(self, peer: PeerId) -> bool:
        return self.rung(peer) is Rung.RELAYED

    def _punch(self, peer: PeerId) -> None:
        self._spawn(self._puncher.ask, peer)

    def _aims(self) -> tuple[Address, ...]:
        """Where a hole punch should aim at me: a router lets answers in on IPv6, too, and translates nothing there."""
        public = tuple(address for address in self.addresses() if rung_of(address) is Rung.DIRECT)
        return (*self.standing.aims, *filter(is_ipv6, public)) if self.standing.aims else public

    def _spawn(self, task: Callable[..., Awaitable[None]], *args: Any) -> None:
        """Run a task of the network until the host ends; a bad road ends the task, not the host."""
        if self._nursery is None:
            raise StreamClosed("this peer is leaving")

        async def run() -> None:
            try:
                await task(*args)
            except* (NetworkError, RemoteError, trio.TooSlowError, *ROAD_ERRORS) as group:
                name = task.__name__.strip("_")
                self._telemetry.emit("task.broken", step=name, reason=repr(sole_error(group)))

        self._nursery.start_soon(run)

    async def _dial(self, peer: PeerId, address: Address, rung: Rung) -> str:
        """Dial one address; the cause in plain words if that failed."""
        if rung is not Rung.RELAYED:
            return await self._dialler.plainly(peer, address, rung)
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
        except ROAD_ERRORS as error:
            return plain_words(error)
        return ""

    async def _accept(self, raw: Any) -> None:
        """Every incoming stream, the library's own protocols too: none may end more than itself."""
        peer = str(raw.muxed_conn.peer_id)
        if len(raw.swarm_conn.get_streams()) > MAX_STREAMS_PER_CONNECTION:
            self._telemetry.emit("peer.charged", peer=peer, step="stream", reason="too many open streams")
            await raw.reset()
            return
        try:
            await self.host._swarm_stream_handler(raw)
        except Exception as error:  # noqa: BLE001  The boundary of one peer.
            self._telemetry.emit("stream.lost", peer=peer, step="negotiation", reason=repr(error))
            await raw.reset()

    async def _serve(self, protocol: str, handler: StreamHandler, raw: Any) -> None:
        stream = Libp2pStream(raw, self._nursery)
        events: list[tuple[str, str]] = []
        try:
            await handler(stream)
        except* RemoteError as group:  # A handler with a nursery raises a group, one without raises the bare error.
            events += [("peer.charged", str(error)) for error in _leaves(group)]
        except* NetworkError as group:
            events += [("stream.lost", str(error)) for error in _leaves(group)]
        except* Exception as group:  # noqa: BLE001  The boundary of one peer.
            events += [("handler.failed", repr(error)) for error in _leaves(group)]
        for event, reason in events:
            self._telemetry.emit(event, peer=stream.remote, step=protocol, reason=reason)
        await (stream.reset() if events else stream.aclose())


async def _say_goodbye(connection: Any) -> None:
    """Close a connection, without the two pauses of 0.1 s that the library makes when its socket is closed already."""
    async with trio.open_nursery() as nursery:

        async def close() -> None:
            await connection.close()
            nursery.cancel_scope.cancel()

        nursery.start_soon(close)
        await connection.muxed_conn.event_closed.wait()
        nursery.cancel_scope.cancel()


def _leaves(group: BaseExceptionGroup[Any]) -> list[BaseException]:
    """The errors of a group and of the groups within it."""
    return [
        leaf
        for error in group.exceptions
        for leaf in (_leaves(error) if isinstance(error, BaseExceptionGroup) else [error])
    ]
