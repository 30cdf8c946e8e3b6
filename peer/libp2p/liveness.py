"""Failure detection for one doubted connection: a ping, and a timeout in running time.

Theory of operation. After its network or computer went away silently, a peer connects anew while my end of its old
connection still looks open, and the library goes on choosing the old one for new streams. So the old one is pinged.
A sign of life is any byte that arrives, and any byte of mine that the remote system has acknowledged: on a saturated
line these show long before the answer to the ping, which waits behind earlier bytes. Silence is counted in checks at
an interval. A late check is not counted: then my own event loop did not run (a busy machine, a suspended laptop), and
bytes that arrived meanwhile are not read yet. A second doubt joins the check that is under way.
"""

from collections.abc import Callable
from typing import Any

import trio

from ..base.transport import PeerId
from ..log.telemetry import Telemetry
from .dial import abort, tcp_stream
from .stream import CONNECTION_ERRORS

LOOK_INTERVAL = 0.5
"""Seconds between checks; one that is late by as much again is not counted."""

SILENT_LOOKS = 10
"""Five seconds: TCP retransmits a lost ping after 0.2, 0.6, 1.4 and 3 s (RFC 6298), and a full buffer in a router
delays the answer by a second or two. Heartbeats detect a dead peer sooner where one is expected."""


class Liveness:
    """The liveness checks of one host's connections, at most one of each at a time."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._under_way: dict[Any, trio.Event] = {}

    async def close_if_dead(self, peer: PeerId, connection: Any) -> None:
        """Abort a direct connection that shows no sign of life; join the check of it that is under way, if any."""
        if (ended := self._under_way.get(connection)) is not None:
            await ended.wait()
            return
        ended = self._under_way[connection] = trio.Event()
        try:
            await self._check(peer, connection)
        finally:
            del self._under_way[connection]
            ended.set()

    async def _check(self, peer: PeerId, connection: Any) -> None:
        began = trio.current_time()
        alive, reason = False, f"no byte came and none was acknowledged in {SILENT_LOOKS * LOOK_INTERVAL:g} s"
        async with trio.open_nursery() as nursery:

            async def ping() -> None:
                nonlocal reason
                try:
                    await connection.muxed_conn.ping()
                except CONNECTION_ERRORS as error:
                    reason = str(error)
                    nursery.cancel_scope.cancel()

            nursery.start_soon(ping)
            alive = await shows_life(tcp_stream(connection).signs_of_life)
            nursery.cancel_scope.cancel()
        if connection.is_closed:
            return  # Another task closed it, and reported why.
        seconds = round(trio.current_time() - began, 3)
        if alive:
            self._telemetry.emit("connection.alive", peer=peer, step="ping", seconds=seconds)
        else:
            self._telemetry.emit("connection.dead", peer=peer, step="ping", reason=reason, seconds=seconds)
            await abort(connection)


async def shows_life(signs: Callable[[], object]) -> bool:
    """Return True once `signs()` has changed, False after `SILENT_LOOKS` punctual checks without a change."""
    before, looks = signs(), 0
    while looks < SILENT_LOOKS:
        due = trio.current_time() + LOOK_INTERVAL
        await trio.sleep_until(due)
        if signs() != before:
            return True
        if trio.current_time() < due + LOOK_INTERVAL:
            looks += 1
    return False
