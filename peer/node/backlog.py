"""The streams that a node serves to each peer, and the bytes on them that nobody has read yet, within limits.

Theory of operation. An answer takes its memory until the asker has read it, and a peer that asks without reading costs
itself nothing. So these bytes are counted: a stream whose peer has more than `per_peer` unread is reset. Beyond `in_all`
the streams of the peer that has most of them are reset, strangers before members, since ids cost nothing: otherwise a
few of them could use up what is there for all. Each stream also buffers what its peer sends, so that their number is
limited too; of too many the oldest is reset, since an honest peer has opened the others in its place.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import trio

from ..base.errors import StreamClosed
from ..base.transport import PeerId


class Backlog:
    """The served streams of one protocol."""

    def __init__(self, *, streams: int, per_peer: int, in_all: int, is_member: Callable[[PeerId], bool]) -> None:
        self.total = 0
        """Bytes that are unread now."""
        self._max_streams = streams
        self._per_peer = per_peer
        self._in_all = in_all
        self._is_member = is_member
        self._unread: Counter[PeerId] = Counter()
        self._streams: dict[PeerId, dict[trio.CancelScope, str]] = {}
        """The scope of each stream, and why it must end; the oldest first."""

    @contextmanager
    def stream(self, peer: PeerId) -> Iterator[None]:
        """Serve a stream of a peer in here. Raises `StreamClosed` if it has to be reset."""
        streams = self._streams.setdefault(peer, {})
        with trio.CancelScope() as scope:
            streams[scope] = ""
            if len(streams) > self._max_streams:
                self._end(peer, next(iter(streams)), f"{peer} has opened more than {self._max_streams} such streams")
            try:
                yield
            finally:
                reason = streams.pop(scope)
                if not streams:
                    del self._streams[peer]
        if scope.cancelled_caught:
            raise StreamClosed(reason)

    @contextmanager
    def unread(self, peer: PeerId, num_bytes: int) -> Iterator[None]:
        """Count bytes that wait until a peer reads them."""
        self._unread[peer] += num_bytes
        self.total += num_bytes
        try:
            self._keep_limits(peer)
            yield
        finally:
            self.total -= num_bytes
            self._unread[peer] -= num_bytes
            if not self._unread[peer]:
                del self._unread[peer]

    def _keep_limits(self, peer: PeerId) -> None:
        if self._unread[peer] > self._per_peer:
            raise StreamClosed(f"{peer} leaves more than {self._per_peer} bytes unread")
        if self.total > self._in_all:
            worst = max(self._unread, key=lambda one: (not self._is_member(one), self._unread[one]))
            for scope in self._streams.get(worst, {}):
                self._end(worst, scope, f"{worst} leaves {self._unread[worst]} bytes unread, most of {self.total}")

    def _end(self, peer: PeerId, scope: trio.CancelScope, reason: str) -> None:
        self._streams[peer][scope] = reason
        scope.cancel()
