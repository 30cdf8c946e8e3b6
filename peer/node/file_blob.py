"""Bulk bytes in a file, read on demand, and verified by their hash before they are sent.

So the provider finds what its disk has corrupted or truncated, instead of a receiver that would have to fetch it again.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..base.digest import RunningDigest

BLOB_PIECE_BYTES = 1 << 18
"""Bytes read, hashed and sent at a time: little memory for many uploads, and a slow upload still shows progress."""


@dataclass(frozen=True, slots=True)
class FileBlob:
    """`size` bytes of a file from `start` on."""

    path: Path
    start: int
    size: int

    def __len__(self) -> int:
        return self.size

    def pieces(self, offset: int = 0) -> Iterator[bytes]:
        """Yield the bytes from `offset` on, in order; fewer if the file is shorter. Raises `OSError`."""
        with self.path.open("rb", buffering=0) as file:
            file.seek(self.start + offset)
            left = self.size - offset
            while left and (piece := file.read(min(left, BLOB_PIECE_BYTES))):
                left -= len(piece)
                yield piece

    def is_sound(self, key: bytes) -> bool:
        """Return True if the file still holds the bytes whose hash is `key`."""
        hashed = RunningDigest()
        try:
            for piece in self.pieces():
                hashed.add(piece)
        except OSError:
            return False
        return hashed.value() == key

    def read(self, key: bytes) -> bytes | None:
        """Read all bytes; None if their hash is not `key`."""
        hashed, pieces = RunningDigest(), list[bytes]()
        try:
            for piece in self.pieces():
                hashed.add(piece)
                pieces.append(piece)
        except OSError:
            return None
        return b"".join(pieces) if hashed.value() == key else None
