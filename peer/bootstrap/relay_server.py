"""The Circuit Relay v2 server: reservations and circuits, within `BootstrapLimits`.

Theory of operation. A peer that others cannot dial asks for a *reservation* (RESERVE) on its own connection. It holds
for some minutes, as long as the connection lives. A peer that wants to reach it asks for a *circuit* (CONNECT): the relay
opens a stream to the target (STOP), and then forwards bytes between the two streams, in pieces, under two token
buckets, one of the circuits from one address and one of all circuits, until either end closes it or it carries nothing for
`CIRCUIT_IDLE_SECONDS`.

Reservations and circuits are `Places`, circuits in all and of each of their two peers, by where the caller comes from: so
nobody who holds many of them, at one target or at all, keeps a newcomer out. Circuits a second to one target are limited in
the same parts, here and not at the target, which knows no addresses: each costs it a handshake. Whose reservation gave way is
not told, and reserves anew at half of the time; whose circuit did finds it closed, and dials again. A refusal is answered by
a status, and is an event:

    RESOURCE_LIMIT_EXCEEDED   this relay has no places, or too many circuits a second to one peer
    PERMISSION_DENIED         the request came through another relay
    NO_RESERVATION            the peer has none here
    CONNECTION_FAILED         the peer does not answer

Only the messages are the library's. Its own server lets any peer reserve for any other, keys circuits by peer, so that
the end of one ends another to the same peer (`relay/circuit_v2/protocol.py:672,722,929`), drops a reader that pauses
for more than 15 s, and has no limit per address nor of bytes per second.
"""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

import trio
from google.protobuf.message import DecodeError
from libp2p.peer.id import ID
from libp2p.relay.circuit_v2.pb.circuit_pb2 import HopMessage, Limit, Reservation, Status, StopMessage
from libp2p.relay.circuit_v2.pb.circuit_pb2 import PeerId as CircuitPeer
from libp2p.relay.circuit_v2.protocol import PROTOCOL_ID as HOP
from libp2p.relay.circuit_v2.protocol import STOP_PROTOCOL_ID as STOP
from libp2p.relay.circuit_v2.utils import read_delimited_msg, write_delimited_msg
from multiaddr import Multiaddr

from ..base.transport import PeerId
from ..identity import peer_of
from ..libp2p.stream import CONNECTION_ERRORS
from ..nat.upgrade import is_relayed
from ..quota.limits import BootstrapLimits
from ..quota.origins import UNKNOWN, Origin, Origins
from ..quota.places import GAVE_WAY, Places
from ..quota.refusals import Refusals
from ..quota.shares import Shares

RESERVATION_SECONDS = 240.0
"""Renewed at half of it, which takes 1 % of a core for all places: so long is a peer without its place that gave way."""

CIRCUIT_IDLE_SECONDS = 120.0
"""The idle timeout of a circuit, as that of a connection (`libp2p.gate`): two members exchange a heartbeat every five."""

RELAY_ANSWER_TIMEOUT = 10.0
"""The timeout in seconds for a whole request, and for a peer to accept a circuit."""

CALLS_PER_SECOND, CALLS_BURST_SECONDS, ALL_CALLS = 2.0, 32.0, 4
"""Circuits to one peer that are asked for from one address, as a member accepts connections, 64 in a burst; and from all, in
those of one address: 8 a second, and 256 in a burst."""

PIECE = 1 << 17
"""Bytes forwarded at a time: two frames."""

RELAY_BURST_SECONDS = 0.5
"""The burst of a quiet circuit, in seconds of its rate: control messages do not wait at the rate of bulk."""

_REFUSALS = {
    Status.RESOURCE_LIMIT_EXCEEDED: "this relay has no places",
    Status.PERMISSION_DENIED: "asked through another relay",
    Status.NO_RESERVATION: "the peer holds no reservation",
    Status.CONNECTION_FAILED: "the peer does not answer",
    Status.UNEXPECTED_MESSAGE: "not a request to a relay",
}


class Throttle:
    """A token bucket in bytes/s; all senders' pieces wait in one queue."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._free_at = -math.inf

    async def pass_on(self, num_bytes: int) -> None:
        """Wait until so many bytes may be sent."""
        now = trio.current_time()
        start = max(self._free_at, now - RELAY_BURST_SECONDS)
        self._free_at = start + num_bytes / self._rate
        await trio.sleep_until(max(start, now))


@dataclass(slots=True)
class _Place:
    """A reservation: whose, the origin that it counts for, its expiry on trio's clock, and the rate of its calls."""

    holder: ID
    """The library's form: each question looks at all places, and 512 ids in base58 take 3 ms."""
    origin: Origin
    expires: float
    calls: Shares = field(default_factory=lambda: Shares(CALLS_PER_SECOND, CALLS_BURST_SECONDS, all_share=ALL_CALLS))
    """Begun anew by each renewal, so that it remembers the origins of some minutes and no more."""


class RelayServer:
    """The relay server of one host."""

    def __init__(self, host: Any, limits: BootstrapLimits, refusals: Refusals) -> None:
        self.num_bytes = 0
        """The bytes forwarded so far."""
        self._host = host
        self._limits = limits
        self._refusals = refusals
        self._origins = Origins(limits.exempt)
        self._throttle = Throttle(limits.relay_rate)
        self._throttles: WeakValueDictionary[str, Throttle] = WeakValueDictionary()
        self._places: dict[PeerId, _Place] = {}
        most = limits.reservations, limits.reservations_per_address, limits.reservations_per_network
        self._reserved = Places[PeerId](*most)
        self._circuits = Places[trio.CancelScope](limits.circuits, limits.circuits_per_address)
        self._of_peer: dict[PeerId, Places[trio.CancelScope]] = {}
        """The circuits from or to each peer."""
        host.set_stream_handler(HOP, self._serve)

    @property
    def num_reservations(self) -> int:
        """The number of reservations held here."""
        return len(self._places)

    @property
    def num_circuits(self) -> int:
        """The number of open circuits."""
        return len(self._circuits)

    def serves(self, peer: PeerId) -> bool:
        """Return True if a peer holds a reservation."""
        return peer in self._places

    async def _serve(self, stream: Any) -> None:
        """Answer one request, and forward the bytes of the circuit that it opens."""
        peer = str(stream.muxed_conn.peer_id)
        remote = stream.get_remote_address()
        origin = self._origins.of(remote[0]) if remote else UNKNOWN
        is_through_another = is_relayed(stream.swarm_conn)
        try:
            with trio.fail_after(RELAY_ANSWER_TIMEOUT):
                request = await read_delimited_msg(stream, HopMessage)
            if is_through_another:
                await self._refuse(stream, Status.PERMISSION_DENIED, peer, origin)
            elif request.type == HopMessage.RESERVE:
                await self._reserve(stream, peer, origin)
            elif request.type == HopMessage.CONNECT and (target := peer_of(request.peer.id)):
                await self._connect(stream, peer, target, origin)
            else:
                await self._refuse(stream, Status.UNEXPECTED_MESSAGE, peer, origin)
        except (trio.TooSlowError, DecodeError, *CONNECTION_ERRORS) as error:
            self._refusals.add("relay", f"broken off: {type(error).__name__}", origin, peer)
            await stream.reset()

    async def _reserve(self, stream: Any, peer: PeerId, origin: Origin) -> None:
        self._drop_expired()
        before = self._places.get(peer)
        if before is None or before.origin != origin:  # A renewal makes nobody's place younger.
            self._reserved.leave(peer)
            if (oldest := self._reserved.enter(peer, origin)) is not None:
                self._places.pop(oldest, None)
                if oldest == peer:
                    await self._refuse(stream, Status.RESOURCE_LIMIT_EXCEEDED, peer, origin)
                    return
                self._refusals.add("relay", f"reservations: {GAVE_WAY}", origin, oldest)
        self._places[peer] = _Place(stream.muxed_conn.peer_id, origin, trio.current_time() + RESERVATION_SECONDS)
        me = Multiaddr(f"/p2p/{self._host.get_id()}")
        addresses = [Multiaddr(str(address).partition("/p2p/")[0]) for address in self._host.get_addrs()]
        reservation = Reservation(
            expire=int(time.time() + RESERVATION_SECONDS),
            addrs=[address.encapsulate(me).to_bytes() for address in addresses],
        )
        await self._agree(stream, reservation=reservation)
        await stream.close()

    async def _connect(self, stream: Any, peer: PeerId, target: PeerId, origin: Origin) -> None:
        self._drop_expired()
        if (place := self._places.get(target)) is None:
            await self._refuse(stream, Status.NO_RESERVATION, peer, origin)
            return
        if (whose := place.calls.exceeded(origin, trio.current_time())) or not self._limits.circuits:
            reason = whose and f"too many circuits a second to one peer from {whose}"
            await self._refuse(stream, Status.RESOURCE_LIMIT_EXCEEDED, peer, origin, reason)
            return
        with self._circuit(peer, target, origin) as scope:
            other = await self._stop(peer, target)
            if other is None:
                await self._refuse(stream, Status.CONNECTION_FAILED, peer, origin)
                return
            try:
                await self._agree(stream)
                await self._carry(stream, other, peer, origin, scope)
            finally:
                await _cut(other)
        if scope.cancelled_caught:
            await _cut(stream)

    @contextmanager
    def _circuit(self, peer: PeerId, target: PeerId, origin: Origin) -> Iterator[trio.CancelScope]:
        """Hold the places of a circuit while it is open; they are lost, and it is cancelled, where it has to give way."""
        scope = trio.CancelScope()
        most = self._limits.circuits_per_peer
        held = {one: self._of_peer.setdefault(one, Places(most)) for one in (peer, target)}.values()
        try:
            for places in (self._circuits, *held):
                if (oldest := places.enter(scope, origin, peer)) is not None:
                    self._refusals.add("relay", f"circuits: {GAVE_WAY}", origin, peer)
                    oldest.cancel()
            with scope:
                yield scope
        finally:
            for places in (self._circuits, *held):
                places.leave(scope)
            self._of_peer = {one: places for one, places in self._of_peer.items() if len(places)}

    async def _stop(self, peer: PeerId, target: PeerId) -> Any:
        """Open a stream to the target; None if it does not accept a circuit from the peer."""
        other: Any = None
        answer: Any = None
        try:
            with trio.fail_after(RELAY_ANSWER_TIMEOUT):
                other = await self._host.new_stream(ID.from_base58(target), [STOP])
                caller = CircuitPeer(id=ID.from_base58(peer).to_bytes())
                await write_delimited_msg(other, StopMessage(type=StopMessage.CONNECT, peer=caller, limit=self._limit()))
                answer = await read_delimited_msg(other, StopMessage)
        except (trio.TooSlowError, DecodeError, *CONNECTION_ERRORS):
            answer = None
        finally:
            agreed = answer is not None and (answer.type, answer.status) == (StopMessage.STATUS, Status.OK)
            if other is not None and not agreed:
                await _cut(other)
        return other if agreed else None

    async def _carry(self, one: Any, other: Any, peer: PeerId, origin: Origin, scope: trio.CancelScope) -> None:
        """Forward both directions, until either ends, the circuit's byte limit is reached or it is idle; then end both."""
        throttle = self._throttle_of(origin)
        left = self._limits.circuit_bytes

        async def carry(source: Any, target: Any) -> None:
            nonlocal left
            try:
                while left > 0 and (data := await source.read(PIECE)):
                    scope.deadline = trio.current_time() + CIRCUIT_IDLE_SECONDS
                    left -= len(data)
                    await throttle.pass_on(len(data))
                    await self._throttle.pass_on(len(data))
                    await target.write(data)
                    self.num_bytes += len(data)
            except CONNECTION_ERRORS:
                pass
            finally:
                await _cut(one)
                await _cut(other)
                nursery.cancel_scope.cancel()  # A stream that I reset does not wake the one who reads it.

        scope.deadline = trio.current_time() + CIRCUIT_IDLE_SECONDS
        async with trio.open_nursery() as nursery:
            nursery.start_soon(carry, one, other)
            nursery.start_soon(carry, other, one)
        if left <= 0:
            self._refusals.add("relay", "the circuit has reached its byte limit", origin, peer)

    def _throttle_of(self, origin: Origin) -> Throttle:
        """Return what limits a new circuit: one circuit's rate, which all circuits from one address have together."""
        fresh = Throttle(self._limits.circuit_rate)
        return fresh if origin.exempt else self._throttles.setdefault(origin.address, fresh)

    def _drop_expired(self) -> None:
        now, connected = trio.current_time(), self._host.get_network().connections
        for peer, place in list(self._places.items()):
            if now >= place.expires or place.holder not in connected:
                self._reserved.leave(peer)
                del self._places[peer]

    async def _agree(self, stream: Any, **fields: Any) -> None:
        await write_delimited_msg(
            stream, HopMessage(type=HopMessage.STATUS, status=Status.OK, limit=self._limit(), **fields)
        )

    async def _refuse(self, stream: Any, status: Any, peer: PeerId, origin: Origin, reason: str = "") -> None:
        self._refusals.add("relay", reason or _REFUSALS[status], origin, peer)
        with suppress(*CONNECTION_ERRORS):
            await write_delimited_msg(stream, HopMessage(type=HopMessage.STATUS, status=status))
            await stream.close()

    def _limit(self) -> Any:
        """Return the limits in the specification's form: no duration, and the bytes of a circuit."""
        return Limit(duration=0, data=self._limits.circuit_bytes)


async def _cut(stream: Any) -> None:
    with trio.CancelScope(deadline=trio.current_time() + 1, shield=True):
        await stream.reset()
