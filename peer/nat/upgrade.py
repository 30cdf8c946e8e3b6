"""Upgrades a relayed connection or a WebSocket: detects a direct one, announces it, and closes the other.

Theory of operation. Two peers may hold several connections; the library opens each new stream on a direct one where there
is one. So when a direct connection opens beside a relayed one or a WebSocket, by a hole punch or by a dial that took longer,
nothing breaks: the owners of streams are called back (`on_climb`) and open new ones in their place, transfers on the old ones
end there, and the other connection is closed once it carries no stream any more, or after `GRACE`.
"""

from collections.abc import Callable
from typing import Any

import trio
from libp2p.connection_types import ConnectionType
from libp2p.rcmgr import Direction

from ..base.transport import PeerId, Rung
from ..libp2p.liveness import Liveness
from ..log.telemetry import Telemetry

GRACE = 30.0
"""Seconds for transfers under way: a part of 50 MB at 20 Mbit/s takes 20. A cut one resumes at its offset."""

POLL = 0.5
"""Seconds between checks whether the relayed connection is empty."""


class Moves:
    """Receives the library's notifications of connections (its `INotifee`)."""

    def __init__(
        self,
        telemetry: Telemetry,
        connections: Callable[[PeerId], list[Any]],
        rung: Callable[[PeerId], Rung | None],
        punch: Callable[[PeerId], None],
        spawn: Callable[..., None],
    ) -> None:
        self._telemetry = telemetry
        self._liveness = Liveness(telemetry)
        self._connections = connections
        self._rung = rung
        self._punch = punch
        self._spawn = spawn
        self._handlers: list[Callable[[PeerId], None]] = []

    def on_climb(self, handler: Callable[[PeerId], None]) -> None:
        """Call `handler(peer)` when a better connection to a peer has opened beside the one in use."""
        self._handlers.append(handler)

    async def connected(self, network: Any, connection: Any) -> None:
        """Handle a connection that has opened."""
        peer = str(connection.muxed_conn.peer_id)
        indirect, num_direct = self._indirect(peer), len(self._connections(peer)) - len(self._indirect(peer))
        if is_relayed(connection):
            if num_direct:
                self._spawn(self._doubt, peer)
            elif connection.direction is Direction.INBOUND:
                self._punch(peer)
        elif connection in indirect:
            if len(indirect) + num_direct > 1:
                self._spawn(self._doubt, peer)
        elif indirect and num_direct == 1:  # The same punch may open a second one.
            self._telemetry.emit("connection.climbed", peer=peer, step=str(self._rung(peer)))
            for handler in self._handlers:
                handler(peer)
            self._spawn(self._let_go, peer)
        elif num_direct > 1:
            self._spawn(self._doubt, peer)

    async def _doubt(self, peer: PeerId) -> None:
        """Check the earlier connections of a peer that connected again: its end of them may have died silently."""
        async with trio.open_nursery() as nursery:
            for connection in self._connections(peer):
                if not is_relayed(connection):
                    nursery.start_soon(self._liveness.close_if_dead, peer, connection)
        if len(self._indirect(peer)) < len(self._connections(peer)):
            await self._let_go(peer)
        elif self._rung(peer) is Rung.RELAYED:
            self._punch(peer)

    async def _let_go(self, peer: PeerId) -> None:
        """Close the relayed connections and WebSockets to a peer, as long as there is a direct one."""
        with trio.move_on_after(GRACE):
            # The library's notification comes before the end of a stream, so there is no event to wait for.
            while any(connection.get_streams() for connection in self._indirect(peer)):  # noqa: ASYNC110
                await trio.sleep(POLL)
        if len(indirect := self._indirect(peer)) < len(self._connections(peer)):
            for connection in indirect:
                await connection.close()

    def _indirect(self, peer: PeerId) -> list[Any]:
        connections = self._connections(peer)
        return [one for one in connections if one.get_connection_type() is not ConnectionType.DIRECT]

    async def disconnected(self, network: Any, connection: Any) -> None:
        """Report why a connection was ended here, unless it was closed in order."""
        muxed, peer = connection.muxed_conn, str(connection.muxed_conn.peer_id)
        if muxed.machine.violation:
            self._telemetry.emit("peer.charged", peer=peer, step="yamux", reason=muxed.machine.violation)
        elif muxed.gave_way:
            self._telemetry.emit("connection.refused", peer=peer, step="yamux", reason=muxed.machine.end)

    async def opened_stream(self, network: Any, stream: Any) -> None:
        """Ignore it."""

    async def closed_stream(self, network: Any, stream: Any) -> None:
        """Ignore it."""

    async def listen(self, network: Any, address: Any) -> None:
        """Ignore it."""

    async def listen_close(self, network: Any, address: Any) -> None:
        """Ignore it."""


def is_relayed(connection: Any) -> bool:
    """Return True if one of the library's connections goes through a relay."""
    return connection.get_connection_type() is ConnectionType.RELAYED
