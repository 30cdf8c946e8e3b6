"""A secured connection as py-libp2p's upgrader hands it to a multiplexer, in memory."""

import math
from types import SimpleNamespace
from typing import Any

import trio
from libp2p.io.exceptions import IncompleteReadError


class Secured:
    """One end: gives what is put into `arriving`, then the end; `wrote` keeps every write, or hands it to `other`.

    `below` is what it runs on: a socket, or a stream of another connection.
    """

    frame_bytes = 1 << 20

    def __init__(self, *, is_initiator: bool = False, below: Any = None) -> None:
        self.is_initiator = is_initiator
        self.other: Secured | None = None
        self.wrote: list[bytes] = []
        self.closed = False
        self.broken = False
        self.seconds = 0.0
        """Of a write."""
        self.arriving, self._arrived = trio.open_memory_channel[bytes](math.inf)
        self.stream = below

    @property
    def conn(self) -> "Secured":
        """The channel of the cipher."""
        return self

    @property
    def read_writer(self) -> Any:
        """What the channel writes to."""
        return SimpleNamespace(read_write_closer=self)

    def sealed(self, pieces: list[bytes]) -> bytes:
        """There is no cipher."""
        return b"".join(pieces)

    async def read(self) -> bytes:
        """Receive the next packet."""
        try:
            return await self._arrived.receive()
        except trio.EndOfChannel:
            raise IncompleteReadError("the connection was closed", 4, 0) from None

    async def write(self, data: bytes) -> None:
        """Send one."""
        await trio.sleep(self.seconds)
        if self.broken:
            raise OSError("the cable is cut")
        self.wrote.append(data)
        if self.other is not None:
            self.other.arriving.send_nowait(data)

    async def close(self) -> None:
        """End both directions."""
        self.closed = True
        self.arriving.close()
        if self.other is not None:
            self.other.arriving.close()


def joined() -> tuple[Secured, Secured]:
    """The two ends of one connection; the first one has opened it."""
    one, other = Secured(is_initiator=True), Secured()
    one.other, other.other = other, one
    return one, other
