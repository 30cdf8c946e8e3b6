"""One peer's end of the network in memory: its connections, its streams, and the tasks that serve these.

Theory of operation. Each end of a connection knows only what has arrived: both keep their own list of connected peers
and of streams, and tell the other end by packets of `MemoryNetwork.post`. A stream has two ends that point at each
other. An end is open until it is closed or broken, for one stated reason, and every wait on it ends then. Opening costs
one round trip, as the real host's negotiation of the protocol does.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import trio

from .errors import ConnectFailed, DialAttempt, NetworkError, RemoteError, StreamClosed
from .telemetry import Telemetry
from .transport import Address, PeerId, Rung, StreamHandler, Traffic

if TYPE_CHECKING:
    from .memory import MemoryNetwork

Action: TypeAlias = Callable[[], None]
"""What a packet does when it arrives."""

WINDOW = 1 << 20
"""Bytes in flight or unread on one stream. Yamux starts at 256 KiB and grows with the round trip; this is between."""
SEGMENT = 1 << 16
"""Bytes that leave in one go, the longest frame of Noise: how long one stream can keep another from the uplink."""
DIAL_TIMEOUT = 10.0
"""Seconds, the default of `PeerConfig.dial_timeout`."""


class MemoryTransport:
    """One peer's end of the network. Implements `transport.Transport`. Made by `MemoryNetwork.transport`."""

    def __init__(
        self,
        network: "MemoryNetwork",
        peer_id: PeerId,
        *,
        rates: tuple[float | None, float | None],
        reachable: bool,
        telemetry: Telemetry,
    ) -> None:
        self._network = network
        self._peer_id = peer_id
        self._up, self._down = rates
        self._up_free = self._down_free = 0.0
        self._reachable = reachable
        self._telemetry = telemetry
        self._handlers: dict[str, StreamHandler] = {}
        self._serving: dict[trio.CancelScope, None] = {}  # Dicts stand for sets here, because they have an order.
        self._streams: dict[PeerId, dict[MemoryStream, None]] = {}
        self._sent = self._received = 0
        self._dead = False

    @property
    def peer_id(self) -> PeerId:
        """Who I am on this network."""
        return self._peer_id

    def addresses(self) -> tuple[Address, ...]:
        """The one address of every peer."""
        return (f"/memory/{self._peer_id}",)

    def handle(self, protocol: str, handler: StreamHandler) -> None:
        """Serve incoming streams of `protocol`."""
        self._handlers[protocol] = handler

    def connected(self) -> frozenset[PeerId]:
        """The peers to whom a connection is open, as far as this end has heard."""
        return frozenset(self._streams)

    def rung(self, peer: PeerId) -> Rung | None:
        """Every connection here is direct."""
        return Rung.DIRECT if peer in self._streams else None

    def traffic(self) -> Traffic:
        """Payload only: packets in memory have no headers."""
        return Traffic(self._sent, self._received)

    async def connect(self, peer: PeerId, addresses: Sequence[Address]) -> None:
        """Takes one round trip. Raises `ConnectFailed`."""
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

    async def open_stream(self, peer: PeerId, protocol: str) -> "MemoryStream":
        """Takes one round trip. Raises `StreamClosed`."""
        await trio.lowlevel.checkpoint()
        if peer not in self._streams:
            raise StreamClosed(f"no connection to {peer} is open")
        near = self._attach(MemoryStream(self, peer))
        self.post(peer, partial(self._knock, near, protocol))
        await near.established()
        return near

    async def disconnect(self, peer: PeerId) -> None:
        """Break all streams to `peer`."""
        if peer in self._streams:
            self._network.hang_up(self._peer_id, peer)
            self.lose(peer, f"disconnected from {peer}")
        await trio.lowlevel.checkpoint()

    def die(self) -> None:
        """End this peer: its handlers and every wait of its tasks on its streams."""
        for peer in list(self._streams):
            self.lose(peer, "this peer was killed")
        self._dead = True
        for scope in self._serving:
            scope.cancel()

    def lose(self, peer: PeerId, reason: str) -> None:
        """The connection to `peer` is gone."""
        for stream in list(self._streams.pop(peer, ())):
            stream.break_off(reason)

    def forget(self, stream: "MemoryStream") -> None:
        """One stream is over."""
        self._streams.get(stream.remote, {}).pop(stream, None)

    def post(self, target: PeerId, action: Action, num_bytes: int = 0) -> None:
        """Let a packet leave, unless there is nobody left to send it."""
        if not self._dead:
            self._sent += num_bytes
            self._network.post(self._peer_id, target, action, num_bytes)

    def count_received(self, num_bytes: int) -> None:
        """So many bytes have arrived."""
        self._received += num_bytes

    async def through_uplink(self, num_bytes: int) -> None:
        """Wait for these bytes' turn on the uplink, and until they are out."""
        if self._up is not None:
            self._up_free = max(self._up_free, trio.current_time()) + num_bytes / self._up
            await trio.sleep_until(self._up_free)

    def through_downlink(self, num_bytes: int, arrival: float) -> float:
        """When bytes are in that reach the downlink at `arrival`."""
        if self._down is not None:
            arrival = self._down_free = max(self._down_free, arrival) + num_bytes / self._down
        return arrival

    async def _dial(self, peer: PeerId, address: Address) -> str:
        """Why `peer` did not answer at an address; empty if it did."""
        host = address.removeprefix("/memory/")
        if host == address:
            return "not an address of the network in memory"
        causes: list[str] = []
        answered = trio.Event()

        def arrive() -> None:
            there = self._network.find(host)
            if there is None:
                cause = "connection refused: nothing listens there"
            elif not there._reachable:
                return
            elif host != peer:
                cause = f"another peer id answered: {host}"
            else:
                there._streams.setdefault(self._peer_id, {})
                cause = ""
            self._network.post(host, self._peer_id, partial(hear, cause))

        def hear(cause: str) -> None:
            if not (cause or self._dead):
                self._streams.setdefault(peer, {})
            causes.append(cause)
            answered.set()

        self.post(host, arrive)
        with trio.move_on_after(DIAL_TIMEOUT):
            await answered.wait()
        return causes[0] if causes else f"timed out after {DIAL_TIMEOUT:g} s: host down or port blocked by a firewall"

    def _knock(self, near: "MemoryStream", protocol: str) -> None:
        """Runs at the other end, to which `near` shall lead."""
        there = self._network.find(near.remote)
        if there is None or not there._admit(near, self._peer_id, protocol):
            refusal = f"{near.remote} does not serve {protocol}"
            self._network.post(near.remote, self._peer_id, partial(near.break_off, refusal))

    def _admit(self, opener: "MemoryStream", peer: PeerId, protocol: str) -> bool:
        handler = self._handlers.get(protocol)
        if handler is None or peer not in self._streams:
            return False
        far = self._attach(MemoryStream(self, peer, twin=opener))
        self.post(peer, partial(opener.establish, far))
        self._network.nursery.start_soon(self._serve, far, protocol, handler, name=f"{self._peer_id} {protocol}")
        return True

    def _attach(self, stream: "MemoryStream") -> "MemoryStream":
        self._streams[stream.remote][stream] = None
        return stream

    async def _serve(self, stream: "MemoryStream", protocol: str, handler: StreamHandler) -> None:
        """Run a handler. Any error but a peer's or the road's is a bug, and ends the network: a test must not miss it."""
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


class MemoryStream:
    """One end of a stream. Implements `transport.Stream`. Made by `open_stream`, or handed to a handler."""

    def __init__(self, transport: MemoryTransport, remote: PeerId, twin: "MemoryStream | None" = None) -> None:
        self._transport = transport
        self._remote = remote
        self._twin = twin
        self._inbox = bytearray()
        self._credit = WINDOW
        self._unreported = 0
        self._over = ""
        self._finished = False
        self._changed = trio.lowlevel.ParkingLot()

    @property
    def remote(self) -> PeerId:
        """The peer at the other end."""
        return self._remote

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Send everything. Raises `StreamClosed`, also once the other end has closed, since nobody would read it."""
        await trio.lowlevel.checkpoint()
        rest = memoryview(data).cast("B")
        self._check_sendable()
        while rest:
            size = min(len(rest), SEGMENT, self._credit)
            if size:
                self._credit -= size
                segment, rest = bytes(rest[:size]), rest[size:]
                await self._transport.through_uplink(size)
            else:
                await self._changed.park()
            self._check_sendable()
            if size:
                self._transport.post(self._remote, partial(self._far.deliver, segment), size)

    async def receive_some(self, max_bytes: int) -> bytes:
        """What has arrived; `b""` at the end. Raises `StreamClosed`."""
        await trio.lowlevel.checkpoint()
        while not self._inbox and not self._finished:
            self._check_open()
            await self._changed.park()
        self._check_open()
        chunk = bytes(self._inbox[:max_bytes])
        del self._inbox[: len(chunk)]
        self._unreported += len(chunk)
        if self._unreported >= WINDOW // 2:  # As Yamux does, instead of a packet for every read.
            self._transport.post(self._remote, partial(self._far.grant, self._unreported))
            self._unreported = 0
        return chunk

    async def aclose(self) -> None:
        """Close in order."""
        if not self._over:
            self._transport.post(self._remote, self._far.finish)
            self.break_off("closed at this end")
        await trio.lowlevel.checkpoint()

    async def reset(self) -> None:
        """Drop the stream at both ends."""
        if not self._over:
            self._transport.post(
                self._remote, partial(self._far.break_off, f"{self._transport.peer_id} reset the stream")
            )
            self.break_off("reset at this end")
        await trio.lowlevel.checkpoint()

    async def established(self) -> None:
        """Wait until the other end has taken the stream. Raises `StreamClosed`."""
        try:
            while self._twin is None:
                self._check_open()
                await self._changed.park()
        except trio.Cancelled:
            self.break_off("given up at this end")
            raise

    def establish(self, twin: "MemoryStream") -> None:
        """The other end has taken the stream."""
        self._twin = twin
        if self._over:
            self._transport.post(self._remote, partial(twin.break_off, self._over))
        self._changed.unpark_all()

    def deliver(self, segment: bytes) -> None:
        """Bytes have arrived."""
        self._transport.count_received(len(segment))
        if not self._over:
            self._inbox += segment
            self._changed.unpark_all()

    def grant(self, num_bytes: int) -> None:
        """The other end has read so many bytes."""
        self._credit += num_bytes
        self._changed.unpark_all()

    def finish(self) -> None:
        """The other end has closed, and all that it sent is here."""
        self._finished = True
        self._changed.unpark_all()

    def break_off(self, reason: str) -> None:
        """This end is over."""
        if not self._over:
            self._over = reason
            self._inbox.clear()
            self._transport.forget(self)
            self._changed.unpark_all()

    @property
    def _far(self) -> "MemoryStream":
        assert self._twin is not None, "only an established stream leaves this file"
        return self._twin

    def _check_open(self) -> None:
        if self._over:
            raise StreamClosed(f"the stream to {self._remote} is gone: {self._over}")

    def _check_sendable(self) -> None:
        self._check_open()
        if self._finished:
            raise StreamClosed(f"{self._remote} has closed the stream")


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error
