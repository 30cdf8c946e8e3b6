"""Bytes in, frames out: a four-byte big-endian length, then that many bytes, never more than a stated limit."""

from ..errors import LocalError, MalformedMessage

HEADER_BYTES = 4
MAX_FRAME_BYTES = 1 << 20
"""The largest control frame. Anything bigger is bulk: addressed by its hash and fetched by who wants it."""


def frame(payload: bytes, *, limit: int = MAX_FRAME_BYTES) -> bytes:
    """`payload` with its length before it. Raises `LocalError` past the limit."""
    if len(payload) > limit:
        raise LocalError(f"a frame of {len(payload)} bytes exceeds the limit of {limit}")
    return len(payload).to_bytes(HEADER_BYTES, "big") + payload


class FrameBuffer:
    """Collects received bytes; `feed` them in whatever pieces they come and take out whole frames with `next_frame`."""

    def __init__(self, *, limit: int = MAX_FRAME_BYTES) -> None:
        self._limit = limit
        self._bytes = bytearray()

    @property
    def empty(self) -> bool:
        """Whether nothing is left of what was fed."""
        return not self._bytes

    def feed(self, data: bytes) -> None:
        """Append what was received."""
        self._bytes += data

    def next_frame(self) -> bytes | None:
        """The next whole frame, None while it is incomplete. Raises `MalformedMessage` as soon as a length is too great."""
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
        """Take out everything that is left: the raw bytes that follow a header frame, or a torn frame at the end."""
        left = bytes(self._bytes)
        self._bytes.clear()
        return left
