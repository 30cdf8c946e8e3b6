"""One peer's transport on the network in memory: connections, links, stream handlers.

Theory of operation. Each end of a connection knows only what has arrived: both keep their own lists of connected peers
and of streams, and signal the other end by packets of `MemoryNetwork.post`. Opening a stream costs one round trip, as
the real host's negotiation of the protocol does.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import trio

from ..base.errors import ConnectFailed, DialAttempt, NetworkError, RemoteError, StreamClosed
from ..base.transport import Address, PeerId, Rung, StreamHandler, Traffic
from ..base.troubles import REFUSED, SILENT, WRONG_PEER
from ..log.telemetry import Telemetry
from .stream import MemoryStream, Packet

if TYPE_CHECKING:
    from .network import Lane, MemoryNetwork

MEMORY_DIAL_TIMEOUT = 10.0
"""Seconds, the default of `PeerConfig.dial_timeout`."""


class MemoryTransport:
    """One peer's end of the network. Implements `transport.Transport`. Made by `MemoryNetwork.transport`."""

    def __init__(
        self,
        network: "MemoryNetwork",
        peer_id: PeerId,
        *,
        rates: tuple[float | None, float | None],
        latency: float,
        reachable: bool,
        telemetry: Telemetry,
    ) -> None:
        self._network = network
        self.peer_id = peer_id
        """My peer id."""
        self._up, self._down = rates
        self._up_free = self._down_free = 0.0
        self.has_uplink, self.has_downlink = self._up is not None, self._down is not None
        """True if the uplink, or the downlink, has a limited rate."""
        self.latency = latency
        self._reachable = reachable
        self._telemetry = telemetry
        self._handlers: dict[str, StreamHandler] = {}
        self._serving: dict[trio.CancelScope, None] = {}  # Dicts stand for sets here, because they have an order.
        self._streams: dict[PeerId, dict[MemoryStream, None]] = {}
        self._sent = 0
        self.received = 0
        """The bytes received so far."""
        self._dead = False

    def addresses(self) -> tuple[Address, ...]:
        """Return my address; every peer has one."""
        return (f"/memory/{self.peer_id}",)

    def handle(self, protocol: str, handler: StreamHandler) -> None:
        """Serve incoming streams of `protocol`."""
        self._handlers[protocol] = handler

    def connected(self) -> frozenset[PeerId]:
        """Return the peers with an open connection, as far as this end has been notified."""
        return frozenset(self._streams)

    def rung(self, peer: PeerId) -> Rung | None:
        """Return the rung of a connection, always direct here; None without a connection."""
        return Rung.DIRECT if peer in self._streams else None

    def traffic(self) -> Traffic:
        """Return the bytes sent and received, of payload only: packets in memory have no headers."""
        return Traffic(self._sent, self.received)

    async def connect(self, peer: PeerId, addresses: Sequence[Address]) -> None:
        """Dial a peer, in one round trip. Raises `ConnectFailed`."""
        await trio.lowlevel.checkpoint()
        if peer in self._streams:
            return
        attempts: list[DialAttempt] = []
        for address in addresses:
            cause = await self._dial(peer, address)
            if not cause:
                return
            attempts.append(DialAttempt(address, Rung.DIRECT, cause))
        raise ConnectFailed(peer, attempts)

    async def open_stream(self, peer: PeerId, protocol: str) -> MemoryStream:
        """Open a stream, in one round trip. Raises `StreamClosed`."""
        await trio.lowlevel.checkpoint()
        if peer not in self._streams:
            raise StreamClosed(f"no connection to {peer} is open")
        near = self._attach(MemoryStream(self, peer))
        self.post(peer, partial(self._request, near, protocol))
        await near.established()
        return near

    async def disconnect(self, peer: PeerId) -> None:
        """Break all streams to `peer`."""
        if peer in self._streams:
            self._network.hang_up(self.peer_id, peer)
            self.lose(peer, f"disconnected from {peer}")
        await trio.lowlevel.checkpoint()

    def die(self) -> None:
        """End this peer: cancel its handlers, and end every wait of its tasks on its streams."""
        for peer in list(self._streams):
            self.lose(peer, "this peer was killed")
        self._dead = True
        for scope in self._serving:
            scope.cancel()

    def lose(self, peer: PeerId, reason: str) -> None:
        """Drop the connection to `peer`, and break its streams."""
        for stream in list(self._streams.pop(peer, ())):
            stream.break_off(reason)

    def forget(self, stream: MemoryStream) -> None:
        """Remove a stream that has ended."""
        self._streams.get(stream.remote, {}).pop(stream, None)

    def post(self, target: PeerId, action: Packet) -> None:
        """Send a packet at once, unless this peer is dead."""
        if not self._dead:
            self._network.post(self.peer_id, target, action)

    def lane(self, target: PeerId) -> "Lane":
        """Return the lane to `target`, for `send`."""
        return self._network.lane(self.peer_id, target)

    def send(self, lane: "Lane", action: Packet, num_bytes: int, leaves: float = 0.0) -> None:
        """Send a packet of so many bytes now, or at the time `leaves`, unless this peer is dead."""
        if not self._dead:
            self._sent += num_bytes
            self._network.send(lane, action, num_bytes, leaves)

    def through_uplink(self, num_bytes: int) -> float:
        """Queue bytes on the uplink; returns when they will have left it, 0 if its rate is not limited."""
        if self._up is None:
            return 0.0
        self._up_free = max(self._up_free, trio.current_time()) + num_bytes / self._up
        return self._up_free

    def through_downlink(self, num_bytes: int, arrival: float) -> float:
        """Queue bytes that reach the limited downlink at `arrival`; returns when they will have passed it."""
        assert self._down is not None
        self._down_free = max(self._down_free, arrival) + num_bytes / self._down
        return self._down_free

    async def _dial(self, peer: PeerId, address: Address) -> str:
        """Dial an address; returns why `peer` did not answer, empty if it did."""
        host = address.removeprefix("/memory/")
        if host == address:
            return "not an address of the network in memory"
        causes: list[str] = []
        answered = trio.Event()

        def arrive() -> None:
            there = self._network.find(host)
            if there is None:
                cause = REFUSED.cause
            elif not there._reachable:
                return
            elif host != peer:
                cause = WRONG_PEER.with_details(host).cause
            else:
                there._streams.setdefault(self.peer_id, {})
                cause = ""
            self._network.post(host, self.peer_id, partial(receive, cause))

        def receive(cause: str) -> None:
            if not (cause or self._dead):
                self._streams.setdefault(peer, {})
            causes.append(cause)
            answered.set()

        self.post(host, arrive)
        with trio.move_on_after(MEMORY_DIAL_TIMEOUT):
            await answered.wait()
        return (
            causes[0]
            if causes
            else f"{SILENT.cause} after {MEMORY_DIAL_TIMEOUT:g} s: host down or port blocked by a firewall"
        )

    def _request(self, near: MemoryStream, protocol: str) -> None:
        """Ask the other end to accept the stream `near`; this runs there."""
        there = self._network.find(near.remote)
        if there is None or not there._admit(near, self.peer_id, protocol):
            refusal = f"{near.remote} does not serve {protocol}"
            self._network.post(near.remote, self.peer_id, partial(near.break_off, refusal))

    def _admit(self, opener: MemoryStream, peer: PeerId, protocol: str) -> bool:
        handler = self._handlers.get(protocol)
        if handler is None or peer not in self._streams:
            return False
        far = self._attach(MemoryStream(self, peer, twin=opener))
        self.post(peer, partial(opener.establish, far))
        self._network.nursery.start_soon(self._serve, far, protocol, handler, name=f"{self.peer_id} {protocol}")
        return True

    def _attach(self, stream: MemoryStream) -> MemoryStream:
        self._streams[stream.remote][stream] = None
        return stream

    async def _serve(self, stream: MemoryStream, protocol: str, handler: StreamHandler) -> None:
        """Run a handler. Errors other than `RemoteError` and `NetworkError` are bugs, and end the network and its test."""
        if self._dead:
            return
        with trio.CancelScope() as scope:
            self._serving[scope] = None
            try:
                await handler(stream)
            except* (RemoteError, NetworkError) as group:
                await stream.reset()
                for error in _leaves(group):
                    event = "peer.charged" if isinstance(error, RemoteError) else "stream.lost"
                    self._telemetry.emit(event, peer=stream.remote, step=protocol, reason=str(error))
            else:
                await stream.aclose()
        del self._serving[scope]


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error
