"""Bulk bytes that lie in a file: read when they are asked for, and hashed before anybody gets them.

What a disk has changed or cut off is found here, by who serves it, instead of by who would have to fetch it anew.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..digest import RunningDigest

PIECE_BYTES = 1 << 18
"""Read, hashed and sent at a time: a peer that serves many holds little, and a slow upload still shows signs of life."""


@dataclass(frozen=True, slots=True)
class FileBlob:
    """`size` bytes of a file from `start` on."""

    path: Path
    start: int
    size: int

    def __len__(self) -> int:
        return self.size

    def pieces(self, offset: int = 0) -> Iterator[bytes]:
        """The bytes from `offset` on, in order; fewer where the file is shorter. Raises `OSError`."""
        with self.path.open("rb", buffering=0) as file:
            file.seek(self.start + offset)
            left = self.size - offset
            while left and (piece := file.read(min(left, PIECE_BYTES))):
                left -= len(piece)
                yield piece

    def is_sound(self, key: bytes) -> bool:
        """Whether the file still holds the bytes whose hash is `key`."""
        hashed = RunningDigest()
        try:
            for piece in self.pieces():
                hashed.add(piece)
        except OSError:
            return False
        return hashed.value() == key

    def read(self, key: bytes) -> bytes | None:
        """All of the bytes, if they are still those whose hash is `key`."""
        hashed, pieces = RunningDigest(), list[bytes]()
        try:
            for piece in self.pieces():
                hashed.add(piece)
                pieces.append(piece)
        except OSError:
            return None
        return b"".join(pieces) if hashed.value() == key else None
