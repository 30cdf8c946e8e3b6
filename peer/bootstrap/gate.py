"""Admission control for a bootstrap's connections: limits per origin, idle timeouts.

Theory of operation. A socket is counted from its accept to its end, so that file descriptors and memory are bounded by
`BootstrapLimits`, whatever strangers send or leave unsent:

- beyond the limits of its origin, it is closed before a byte is read;
- of more than `handshakes` unfinished handshakes the oldest is closed. A flood of half-open connections keeps an honest
  peer out only if as many arrive within the third of a second that its handshake takes;
- a connection without a stream for `IDLE_SECONDS` is closed, unless its peer is needed: it holds a reservation or is a
  directory server. Volunteers keep a stream open; other peers redial for a question;
- if all places are taken, the connection that has been idle for the longest is evicted for the newcomer.
"""

from collections.abc import Awaitable, Callable
from typing import Any

import trio

from ..quota.limits import BootstrapLimits
from ..quota.origins import UNKNOWN, Origin, Origins, Tally
from ..quota.refusals import REFUSAL_PERIOD, Refusals
from ..transport import PeerId

IDLE_SECONDS = 120.0
"""The idle timeout: go-libp2p's and other connection managers grant one to two minutes."""

LOOK_PERIOD = 5.0
"""Seconds between checks for idle connections; one that was found idle can be evicted."""

MAX_CLOSING = 32
"""Connections allowed beyond the limit, while the evicted ones are being closed."""


class Gate:
    """One bootstrap's gate. `is_needed` returns True for peers whose connections may be idle."""

    def __init__(self, limits: BootstrapLimits, refusals: Refusals, swarm: Any, is_needed: Callable[[PeerId], bool]) -> None:
        self.origins = Origins(limits.exempt)
        self.tally = Tally(limits.connections, limits.connections_per_address, limits.connections_per_network)
        self._max_handshakes = limits.handshakes
        self._refusals = refusals
        self._swarm = swarm
        self._is_needed = is_needed
        self._handshakes: dict[Any, Origin] = {}
        self._idle_since: dict[Any, float] = {}

    async def admit(self, stream: Any, serve: Callable[[Any], Awaitable[None]]) -> None:
        """Serve an accepted socket to its end, or close it."""
        origin = self._origin_of(stream)
        reason = self.tally.crowded(origin)
        if not reason and self.tally.count >= self.tally.in_all:
            is_flood = self.tally.count >= self.tally.in_all + MAX_CLOSING
            reason = "" if not is_flood and await self._free_a_place() else "all places are taken"
        if reason:
            self._refusals.add("connection", reason, origin)
            await stream.close()
            return
        self.tally.add(origin)
        self._handshakes[stream] = origin
        try:
            await self._keep_few_handshakes()
            await serve(stream)
        finally:
            self._handshakes.pop(stream, None)
            self.tally.remove(origin)

    async def watch(self) -> None:
        """Close connections that exceed the idle timeout, until cancelled."""
        reported_at = trio.current_time()
        while True:
            await trio.sleep(LOOK_PERIOD)
            now = trio.current_time()
            idle = [connection for connection in self._connections() if self._is_idle(connection)]
            self._idle_since = {connection: self._idle_since.get(connection, now) for connection in idle}
            for connection in [one for one, since in self._idle_since.items() if now - since >= IDLE_SECONDS]:
                await self._close(connection, "idle for too long")
            if now - reported_at >= REFUSAL_PERIOD:
                reported_at = now
                self._refusals.report()

    async def _keep_few_handshakes(self) -> None:
        self._handshakes = {one: origin for one, origin in self._handshakes.items() if not one.upgraded}
        while len(self._handshakes) > self._max_handshakes:
            oldest = next(iter(self._handshakes))
            self._refusals.add("handshake", "unfinished while too many others began", self._handshakes.pop(oldest))
            await oldest.close()

    async def _free_a_place(self) -> bool:
        for connection in sorted(self._idle_since, key=self._idle_since.__getitem__):
            if not connection.is_closed and self._is_idle(connection):
                await self._close(connection, "idle while all places are taken")
                return True
        return False

    async def _close(self, connection: Any, reason: str) -> None:
        self._idle_since.pop(connection, None)
        peer = str(connection.muxed_conn.peer_id)
        self._refusals.add("connection", reason, peer=peer)
        with trio.move_on_after(1):
            await connection.close()

    def _connections(self) -> list[Any]:
        return [connection for some in list(self._swarm.connections.values()) for connection in list(some)]

    def _is_idle(self, connection: Any) -> bool:
        return not connection.get_streams() and not self._is_needed(str(connection.muxed_conn.peer_id))

    def _origin_of(self, stream: Any) -> Origin:
        remote = stream.get_remote_address()
        return self.origins.of(remote[0]) if remote else UNKNOWN
