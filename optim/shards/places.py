"""Where shards lie, such as a folder of this computer."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol, TypeVar

from .web import NotThere

TRIES = 5
"""With 1, 2, 4 and 8 s between them: a short outage of the network ends no training."""
READ_BYTES = 4 << 20
_T = TypeVar("_T")


class Place(Protocol):
    """A folder of files somewhere else."""

    name: str

    def open(self, file: str, start: int, end: int) -> tuple[int, Iterator[bytes]]:
        """Begin to read a file: return where, at `start` or at 0 if it knows no ranges, and its bytes from there to `end`.

        Raises `OSError`, as the iterator does; `NotThere` for what asking again does not change.
        """

    def whole(self, file: str, most: int) -> bytes:
        """Return a file, or the first `most` + 1 bytes of a longer one. Raises `OSError`."""


class Folder(Place):
    """A folder on this computer."""

    def __init__(self, path: Path) -> None:
        self.path, self.name = path, str(path)

    def open(self, file: str, start: int, end: int) -> tuple[int, Iterator[bytes]]:
        """See `Place`."""
        return start, self._pieces(file, start, end)

    def whole(self, file: str, most: int) -> bytes:
        """See `Place`."""
        return b"".join(self._pieces(file, 0, most + 1))

    def _pieces(self, name: str, start: int, end: int) -> Iterator[bytes]:
        try:
            with (self.path / name).open("rb") as file:
                file.seek(start)
                while piece := file.read(min(end - file.tell(), READ_BYTES)):
                    yield piece
        except OSError as error:
            raise NotThere(f"{self.path / name}: {error.strerror}") from error


def patiently(do: Callable[[], _T]) -> _T:
    """Return what `do` returns, which is tried again while it raises an `OSError` that may pass. Raises the last one."""
    for left in reversed(range(TRIES)):
        try:
            return do()
        except NotThere:
            raise
        except OSError:
            if not left:
                raise
        time.sleep(2.0 ** (TRIES - 2 - left))
    raise AssertionError("unreachable")
