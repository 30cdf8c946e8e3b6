"""Yamux frames of strangers: turns for other tasks, a rate for each address, and a bound on windows. Pure.

Theory of operation. A frame without a body has 12 bytes and takes some 5 µs to handle, so that one slow line could take a
whole core. So frames are counted. After `TURN` of them other tasks have a turn, and what is beyond the budget waits: nothing
is dropped, the sender's line fills. A KiB of bodies pays for a frame, so that bulk and rounds are never held up. The budget
is that of the address that the connection came from (see `gate`), or its own.

A window is memory that is promised. It grows while it is read, and a handler that stops reading then holds all of it:
`WindowBudget` bounds what the windows of one connection, and of all, grow to. A connection inside of another one takes from
what that one has for all that run in it. First windows are the protocol's promise, 256 KiB of every stream, so that many
connections could hold more than a computer has: beyond `UNREAD_IN_ALL` the one that holds most gives way (`UnreadBudget`).
"""

from collections.abc import Callable
from typing import Any
from weakref import WeakSet

from ..base.transport import PeerId
from ..quota.origins import UNKNOWN, Rates

TURN = 64
"""Frames after which other tasks have a turn: some 2 ms."""

FRAMES_PER_SECOND, FRAMES_BURST_SECONDS = 512.0, 16.0
"""Frames that no bytes pay for: 2 % of a core. Of honest peers each message is one, twice the burst of a message budget."""

BYTES_OF_A_FRAME = 1 << 10

FIRST_WINDOW = 256 << 10
"""The protocol's."""
MAX_WINDOW = 16 << 20
"""As in go-yamux: a line of 100 MB/s and 160 ms."""

WINDOWS_OF_ONE = 2 * MAX_WINDOW
WINDOWS_IN_ALL = 256 << 20
"""Bytes by which the windows of one connection, and of all of them, exceed the first ones: two streams at full speed on a
long line, and 4 MiB for each member of a full roster, as a line of 40 MB/s with 0.1 s to each of them fills."""

UNREAD_IN_ALL = 2 * WINDOWS_IN_ALL
"""Bytes that have arrived and were not read: those of all grown windows, and of 1,024 first ones."""

LOOK_BYTES = 16 << 20
"""Bytes that arrive between two looks at what is unread: a look takes as long as some frames."""

Spend = Callable[[PeerId, float], float]
"""Takes so many frames of a peer from a budget, and returns for how many seconds it has to wait."""


class FrameMeter:
    """Counts the frames of one connection."""

    def __init__(self) -> None:
        self._frames = 0
        self._num_bytes = 0

    def count(self, num_bytes: int) -> None:
        """Count a frame with its body."""
        self._frames += 1
        self._num_bytes += num_bytes

    @property
    def is_due(self) -> bool:
        """True once others should have a turn, and the frames be billed."""
        return self._frames >= TURN

    def bill(self) -> float:
        """Return how many frames no bytes have paid for since the last bill."""
        unpaid = max(0.0, self._frames - self._num_bytes / BYTES_OF_A_FRAME)
        self._frames = self._num_bytes = 0
        return unpaid


def own_budget(clock: Callable[[], float]) -> Spend:
    """Return the budget of a connection that came through no gate."""
    rates = Rates(FRAMES_PER_SECOND, FRAMES_BURST_SECONDS)
    return lambda peer, frames: rates.spend(UNKNOWN, clock(), frames)


class WindowBudget:
    """What the windows of some streams may grow by together, `most` bytes, and within `outer`.

    A stream has a `window`, which only this changes, a `FIRST_WINDOW` of it at first; `unread`, which has a length; and
    `is_over`.
    """

    def __init__(self, most: int, outer: "WindowBudget | None" = None) -> None:
        self._most = most
        self._outer = outer
        self._grown: WeakSet[Any] = WeakSet()
        """A stream that nobody holds any more takes nothing, however it ended."""

    def grow(self, stream: Any) -> int:
        """Double the window of a stream, as far as there is room; returns by how many bytes it has grown."""
        growth: int = max(0, min(stream.window, MAX_WINDOW - stream.window, self._room()))
        if growth:
            stream.window += growth
            self._add(stream)
        return growth

    def _room(self) -> int:
        room = self._most - sum(map(_held, self._grown))
        return room if self._outer is None else min(room, self._outer._room())

    def _add(self, stream: Any) -> None:
        self._grown.add(stream)
        if self._outer is not None:
            self._outer._add(stream)


ALL_WINDOWS = WindowBudget(WINDOWS_IN_ALL)
"""That of this process."""


class UnreadBudget:
    """The bytes that arrived and were not read, of all connections of this process."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._connections: WeakSet[Any] = WeakSet()
        self._arrived = 0

    def add(self, connection: Any) -> None:
        """Count its `unread_bytes`, too."""
        self._connections.add(connection)

    def arrive(self, num_bytes: int) -> Any | None:
        """Count bytes that arrive; returns the connection that has to give way, if any."""
        self._arrived += num_bytes
        if self._arrived < LOOK_BYTES:
            return None
        self._arrived = 0
        unread = {connection: connection.unread_bytes for connection in self._connections}
        return max(unread, key=unread.__getitem__) if sum(unread.values()) > self._most else None


ALL_UNREAD = UnreadBudget(UNREAD_IN_ALL)


def _held(stream: Any) -> int:
    """What a stream takes of its budget: what its window has grown by, or what is still unread of that."""
    return max(0, (len(stream.unread) if stream.is_over else stream.window) - FIRST_WINDOW)


def carrier(muxer: Any) -> Any:
    """Return the connection that a relayed one runs in; None for one with a socket of its own."""
    return getattr(getattr(muxer.secured_conn.conn.read_writer.read_write_closer, "stream", None), "muxed_conn", None)
