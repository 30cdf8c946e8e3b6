"""Length-prefixed framing: a four-byte big-endian length, then so many bytes. Pure."""

from ..base.errors import LocalError, MalformedMessage

HEADER_BYTES = 4
MAX_FRAME_BYTES = 1 << 20
"""The largest control frame. Anything bigger is bulk: addressed by its hash and fetched on demand."""


def frame(payload: bytes, *, limit: int = MAX_FRAME_BYTES) -> bytes:
    """Prefix `payload` with its length. Raises `LocalError` beyond the limit."""
    if len(payload) > limit:
        raise LocalError(f"a frame of {len(payload)} bytes exceeds the limit of {limit}")
    return len(payload).to_bytes(HEADER_BYTES, "big") + payload


class FrameBuffer:
    """Reassembles frames: `feed` received bytes in any pieces, and take out whole frames with `next_frame`."""

    def __init__(self, *, limit: int = MAX_FRAME_BYTES) -> None:
        self._limit = limit
        self._bytes = bytearray()

    @property
    def empty(self) -> bool:
        """True if no fed bytes are left."""
        return not self._bytes

    def feed(self, data: bytes) -> None:
        """Append received bytes."""
        self._bytes += data

    def next_frame(self) -> bytes | None:
        """Return the next whole frame; None while it is incomplete. Raises `MalformedMessage` if its length is too great."""
        if len(self._bytes) < HEADER_BYTES:
            return None
        length = int.from_bytes(self._bytes[:HEADER_BYTES], "big")
        if length > self._limit:
            raise MalformedMessage(f"a frame announces {length} bytes, at most {self._limit} are allowed")
        if len(self._bytes) < HEADER_BYTES + length:
            return None
        payload = bytes(self._bytes[HEADER_BYTES : HEADER_BYTES + length])
        del self._bytes[: HEADER_BYTES + length]
        return payload

    def rest(self) -> bytes:
        """Take out the remaining bytes: the raw bytes after a header frame, or a truncated frame at the end."""
        left = bytes(self._bytes)
        self._bytes.clear()
        return left
