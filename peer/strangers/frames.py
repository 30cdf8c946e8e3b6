"""Yamux frames of strangers: turns for other tasks, a rate for each address, and a bound on windows.

Theory of operation. A frame without a body has 12 bytes and takes the library 10 to 80 µs, so that one slow line could take
a whole core; and the library handles frames of unknown kinds without ever giving others a turn: 1 MiB of them held up the
event loop for 0.8 s. So the loop that reads frames counts them. After `TURN` of them other tasks have a turn, and what is
beyond the budget waits: nothing is dropped, the sender's line fills. A KiB of bodies pays for a frame, so that bulk and
rounds are never held up. The budget is that of the address that the connection came from (see `gate`), or its own.

A window is memory that is promised. It grows while it is read (`fixes.update_window_by_halves`), and a handler that stops
reading then holds all of it: `window_room` bounds what the windows of one connection, and of all, grow to.
"""

from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import trio
from libp2p.stream_muxer.yamux.yamux import DEFAULT_WINDOW_SIZE, MAX_WINDOW_SIZE

from ..quota.origins import UNKNOWN, Rates
from ..transport import PeerId

TURN = 64
"""Frames after which other tasks have a turn: some 2 ms."""

FRAMES_PER_SECOND, FRAMES_BURST_SECONDS = 512.0, 16.0
"""Frames that no bytes pay for: 2 % of a core. Of honest peers each message is one, twice the burst of a message budget."""

BYTES_OF_A_FRAME = 1 << 10

WINDOWS_OF_ONE = 2 * MAX_WINDOW_SIZE
WINDOWS_IN_ALL = 256 << 20
"""Bytes by which the windows of one connection, and of all of them, exceed the first ones: two streams at full speed on a
long line, and 4 MiB for each member of a full roster, as a line of 40 MB/s with 0.1 s to each of them fills."""

Spend = Callable[[PeerId, float], float]
"""Takes so many frames of a peer from a budget, and returns for how many seconds it has to wait."""

_grown: WeakSet[Any] = WeakSet()
"""The streams whose window has grown."""


class FrameMeter:
    """Counts the frames of one connection."""

    def __init__(self, peer: PeerId, spend: Spend) -> None:
        self._peer = peer
        self._spend = spend
        self._frames = 0
        self._num_bytes = 0

    def count(self, num_bytes: int) -> bool:
        """Count a frame with its body; returns whether it is time to `rest`."""
        self._frames += 1
        self._num_bytes += num_bytes
        return self._frames >= TURN

    async def rest(self) -> None:
        """Give other tasks a turn, and wait until the frames are within the budget."""
        unpaid = max(0.0, self._frames - self._num_bytes / BYTES_OF_A_FRAME)
        self._frames = self._num_bytes = 0
        await trio.sleep(self._spend(self._peer, unpaid))


def own_budget() -> Spend:
    """Return the budget of a connection that came through no gate."""
    rates = Rates(FRAMES_PER_SECOND, FRAMES_BURST_SECONDS)
    return lambda peer, frames: rates.spend(UNKNOWN, trio.current_time(), frames)


def carrier(conn: Any) -> Any:
    """Return the connection that a relayed one runs in; None for one with a socket of its own."""
    return getattr(getattr(conn.secured_conn.conn.read_writer.read_write_closer, "stream", None), "muxed_conn", None)


def window_room(stream: Any) -> int:
    """Return by how many bytes a stream's window may grow now. All circuits in one connection have together what one has."""
    grown = [one for one in _grown if not one.closed]
    around = carrier(stream.conn)
    alike = grown if around else stream.conn.streams.values()
    of_one = sum(one.target_recv_window - DEFAULT_WINDOW_SIZE for one in alike if carrier(one.conn) is around)
    in_all = sum(one.target_recv_window - DEFAULT_WINDOW_SIZE for one in grown)
    _grown.add(stream)
    room: int = min(MAX_WINDOW_SIZE - stream.target_recv_window, WINDOWS_OF_ONE - of_one, WINDOWS_IN_ALL - in_all)
    window: int = stream.target_recv_window
    return max(0, min(room, window))
