"""A libp2p stream as a `transport.Stream`; translates the library's errors to ours."""

from contextlib import suppress
from typing import Any

import trio
from libp2p.exceptions import BaseLibp2pError
from libp2p.stream_muxer.exceptions import MuxedStreamEOF

from ..base.errors import StreamClosed
from ..base.transport import PeerId

CONNECTION_ERRORS = (BaseLibp2pError, OSError, EOFError, ValueError, trio.BrokenResourceError, trio.ClosedResourceError)
"""The library's exceptions for a broken connection; ValueError comes from its Noise code."""

STREAM_WRITE_BYTES = 1 << 20
"""The size of one write: measured up to three times faster than 64 kB."""


class Libp2pStream:
    """Implements `transport.Stream`."""

    def __init__(self, raw: Any) -> None:
        self.remote: PeerId = str(raw.muxed_conn.peer_id)
        self._raw = raw
        self._muxed = raw.muxed_stream  # Read here, since `raw` refuses all reads once the connection has ended.

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Send all bytes, waiting for the other side's window. Raises `StreamClosed`."""
        view = memoryview(data)
        try:
            for start in range(0, len(view), STREAM_WRITE_BYTES):
                await self._muxed.write(view[start : start + STREAM_WRITE_BYTES])
        except CONNECTION_ERRORS as error:
            raise StreamClosed(f"the stream to {self.remote} is closed: {error}") from error

    async def receive_some(self, max_bytes: int) -> bytes:
        """Receive 1 to `max_bytes` bytes; `b""` once the other side has closed. Raises `StreamClosed`."""
        try:
            data: bytes = await self._muxed.read(max_bytes)
        except MuxedStreamEOF:
            return b""
        except CONNECTION_ERRORS as error:
            raise StreamClosed(f"the stream from {self.remote} is closed: {error}") from error
        return data

    async def aclose(self) -> None:
        """Close in order: what was sent still arrives."""
        with suppress(*CONNECTION_ERRORS):
            await self._raw.close()

    async def reset(self) -> None:
        """Drop the stream at once, in both directions."""
        await self._raw.reset()

    def hold_at_most(self, num_bytes: int) -> None:
        """Reset the stream once it has more unread bytes than that."""
        self._muxed.hold_at_most(num_bytes)

    def remote_socket(self) -> tuple[str, int]:
        """Return the source IP address and port of the connection; a relayed one has the relay's."""
        found: tuple[str, int] | None = self._raw.get_remote_address()
        if found is None:
            raise StreamClosed(f"the connection to {self.remote} is gone")
        return found
