"""Bytes on their way here from their source, and the members that wait for them here.

Theory of operation. A member that has lost the source of some bytes asks those that may read them too, which may still be
fetching them: it waits then, in a task of this peer, until these bytes have arrived. So the waits of each member are
counted. An honest one waits in few places at a time, as many as it has streams to me; who asks for more is charged. Only
members of the attempt's roster may wait, 64 at most, which bounds the waits of all.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import trio

from ...peer.base.errors import ProtocolViolation
from ...peer.base.transport import PeerId
from ...peer.node.bulk import MAX_BULK_STREAMS

MAX_WAITS = 3 * MAX_BULK_STREAMS
"""Of one member: in its streams, and in those of two connections that it has lost or replaced, which I may not know yet."""


class Incoming:
    """The names of what one attempt fetches from its source, and who waits for it."""

    def __init__(self) -> None:
        self._ends: dict[bytes, trio.Event] = {}
        self._waits: Counter[PeerId] = Counter()

    def begin(self, name: bytes) -> None:
        """Record that these bytes are being fetched from their source."""
        self._ends.setdefault(name, trio.Event())

    def end(self, name: bytes) -> None:
        """Let those go on that wait for bytes that have arrived, or cannot be had from their source."""
        if (ended := self._ends.pop(name, None)) is not None:
            ended.set()

    @contextmanager
    def waiting(self, reader: PeerId) -> Iterator[None]:
        """Count what is done for a reader in here. Raises `ProtocolViolation` if it asks for too much at a time."""
        if self._waits[reader] >= MAX_WAITS:
            raise ProtocolViolation(f"it waits for more than {MAX_WAITS} things at a time that are still to come")
        self._waits[reader] += 1
        try:
            yield
        finally:
            self._waits[reader] -= 1

    async def ended(self, name: bytes) -> None:
        """Wait until nothing of this name is being fetched from its source."""
        while (ended := self._ends.get(name)) is not None:
            await ended.wait()
