"""The Circuit Relay v2 client: reservations, and dialling and accepting through a relay.

Theory of operation. The protocol is libp2p's Circuit Relay v2 (`hop` and `stop`). A *reservation* is a relay's promise
to forward circuits to me, as long as I stay connected to it. A dial opens a stream to the relay and names the peer.
Once the peer accepts, the stream leads to it; Noise and Yamux then run over it end to end, so the relay sees only
ciphertext. The messages are written here: the library's client refuses an address that it did not choose itself.
"""

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Any

import trio
from google.protobuf.message import DecodeError
from libp2p.connection_types import ConnectionType
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.peer.id import ID
from libp2p.relay.circuit_v2.pb.circuit_pb2 import HopMessage, Status, StopMessage
from libp2p.relay.circuit_v2.pb.circuit_pb2 import PeerId as CircuitPeer
from libp2p.relay.circuit_v2.protocol import PROTOCOL_ID as HOP
from libp2p.relay.circuit_v2.protocol import STOP_PROTOCOL_ID as STOP
from libp2p.relay.circuit_v2.utils import read_delimited_msg, write_delimited_msg
from multiaddr import Multiaddr

from ..base.errors import NetworkError
from ..base.transport import Address, PeerId
from ..identity import peer_of
from ..libp2p.stream import CONNECTION_ERRORS
from ..log.telemetry import Telemetry

ACCEPT_TIMEOUT = 10.0
"""The timeout in seconds for the handshake of a peer that a relay announced."""

SHORTEST_RESERVATION = 60.0
LONGEST_RESERVATION = 3600.0
"""The bounds in seconds on the expiry that a relay states."""

_STATUS_TEXTS = {
    Status.RESERVATION_REFUSED: "the relay grants no more reservations to this address or network",
    Status.RESOURCE_LIMIT_EXCEEDED: "the relay is full, or so is the share of one peer or address",
    Status.PERMISSION_DENIED: "the relay does not serve this peer",
    Status.CONNECTION_FAILED: "the relay cannot reach the peer",
    Status.NO_RESERVATION: "the peer holds no reservation at this relay",
    Status.MALFORMED_MESSAGE: "the relay did not understand the request",
    Status.UNEXPECTED_MESSAGE: "the relay did not understand the request",
}


def circuit_address(address: Address, relay: PeerId) -> Address:
    """Return my address through a relay that is at `address`."""
    return f"{address}/p2p/{relay}/p2p-circuit"


def relay_of(address: Address) -> tuple[Address, PeerId]:
    """Split a valid relayed address into the relay's own address and its id."""
    base, _, relay = address.removesuffix("/p2p-circuit").rpartition("/p2p/")
    return base, relay


class RelayClient:
    """One host's relay client; the host keeps the connections to relays.

    `admit` holds the place of a relay's circuit from a peer, and yields what takes that peer once it is proven; `budget`
    returns the frame budget of a relay's circuits.
    """

    def __init__(
        self,
        host: Any,
        telemetry: Telemetry,
        admit: Callable[[PeerId, PeerId], AbstractContextManager[Callable[[PeerId], None]]],
        budget: Callable[[PeerId], Callable[[PeerId, float], float]],
    ) -> None:
        self._host = host
        self._swarm: Any = host.get_network()
        self._telemetry = telemetry
        self._admit = admit
        self._budget = budget
        self._reserved: dict[PeerId, float] = {}
        """When my reservation at each relay ends: who holds none of mine has no circuit for me."""
        host.set_stream_handler(STOP, self._accept)

    async def reserve(self, relay: PeerId) -> float:
        """Reserve at a connected relay; returns the lifetime in seconds. Raises `NetworkError`."""
        stream, answer = await self._ask(relay, HopMessage(type=HopMessage.RESERVE))
        with trio.CancelScope(deadline=trio.current_time() + 1, shield=True), suppress(*CONNECTION_ERRORS):
            await stream.close()
        seconds = float(answer.reservation.expire) - time.time()
        lifetime = float(min(max(seconds, SHORTEST_RESERVATION), LONGEST_RESERVATION))
        self._reserved[relay] = trio.current_time() + lifetime
        return lifetime

    async def dial(self, relay: PeerId, peer: PeerId) -> None:
        """Open a connection to `peer` through a connected relay. Raises `NetworkError` or the library's errors."""
        target = ID.from_base58(peer)
        stream, _ = await self._ask(relay, HopMessage(type=HopMessage.CONNECT, peer=CircuitPeer(id=target.to_bytes())))
        raw = self._circuit(stream, relay, initiator=True)
        try:
            await self._swarm.upgrade_outbound_raw_conn(raw, target)
        except BaseException:
            with trio.CancelScope(deadline=trio.current_time() + 1, shield=True):
                await stream.reset()
            raise

    async def _ask(self, relay: PeerId, question: Any) -> tuple[Any, Any]:
        """Send one request on a stream of its own, and receive a positive answer. Raises `NetworkError`."""
        stream: Any = None
        try:
            stream = await self._host.new_stream(ID.from_base58(relay), [HOP])
            await write_delimited_msg(stream, question)
            answer = await read_delimited_msg(stream, HopMessage)
            if answer.type != HopMessage.STATUS or answer.status != Status.OK:
                raise NetworkError(_STATUS_TEXTS.get(answer.status, "the relay refused without a known status"))
        except (*CONNECTION_ERRORS, DecodeError) as error:
            await _drop(stream)
            raise NetworkError(f"the relay gave no answer: {error}") from error
        except BaseException:
            await _drop(stream)
            raise
        return stream, answer

    async def _accept(self, stream: Any) -> None:
        """Accept a circuit that a relay announces, and hold it to its end."""
        relay = str(stream.muxed_conn.peer_id)
        try:
            # Else anybody makes circuits on its own connection, and takes the places of those that others relay.
            if self._reserved.get(relay, -math.inf) < trio.current_time():
                raise NetworkError("it announces a circuit, and is no relay of mine")
            if stream.swarm_conn.get_connection_type() is ConnectionType.RELAYED:
                raise NetworkError("it announces a circuit inside of a circuit")
            deadline = trio.current_time() + ACCEPT_TIMEOUT
            with trio.fail_at(deadline):
                announced = await read_delimited_msg(stream, StopMessage)
            if announced.type != StopMessage.CONNECT or not (peer := peer_of(announced.peer.id)):
                raise NetworkError("the relay announced no peer")
            with self._admit(relay, peer) as welcome:
                await trio.lowlevel.checkpoint_if_cancelled()
                with trio.fail_at(deadline):
                    await write_delimited_msg(stream, StopMessage(type=StopMessage.STATUS, status=Status.OK))
                    raw = self._circuit(stream, relay, initiator=False)
                    muxed = await self._swarm.upgrade_inbound_raw_conn(raw, raw.get_transport_addresses()[0])
                welcome(str(muxed.peer_id))
                if str(muxed.peer_id) != peer:
                    # Noise has authenticated the peer, so this is harmless, but the relay misroutes.
                    self._telemetry.emit("peer.charged", peer=relay, step="relay", reason="it announced another peer")
                await muxed.event_closed.wait()
            await _drop(stream)
        except (NetworkError, trio.TooSlowError, DecodeError, *CONNECTION_ERRORS) as error:
            self._telemetry.emit("relay.not_accepted", peer=relay, step="relayed", reason=str(error) or "no handshake")
            await _drop(stream)

    def _circuit(self, stream: Any, relay: PeerId, *, initiator: bool) -> RawConnection:
        stream.spend_frames = self._budget(relay)
        address = Multiaddr(f"/p2p/{relay}/p2p-circuit")
        return RawConnection(stream, initiator, ConnectionType.RELAYED, [address])


async def _drop(stream: Any) -> None:
    if stream is not None:
        with trio.CancelScope(deadline=trio.current_time() + 1, shield=True):
            await stream.reset()
