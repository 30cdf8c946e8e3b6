"""Where shards lie: a folder, a web server, a dataset of the hub."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol, TypeVar

from ...peer.base.errors import UsageError
from ..consent import HUB_DATASET, HUB_DATASETS
from ..data.hub import MAX_READ_BYTES, Hub, HubFile, token_of_user
from .web import NotThere

TRIES = 5
"""With 1, 2, 4 and 8 s between them, as for other files of the hub: a short outage of the network ends no training."""
READ_BYTES = min(4 << 20, MAX_READ_BYTES)
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


class HubFolder(Place):
    """A folder of a dataset of the hub at a commit, `hf://datasets/org/name@commit[/folder]`. Raises `UsageError`."""

    def __init__(self, place: str, *, trusted: bool) -> None:
        match = HUB_DATASET.fullmatch(place.removeprefix(HUB_DATASETS))
        if match is None or not match["commit"]:
            remedy = f"write {HUB_DATASETS}org/name@commit/folder"
            raise UsageError(f"{place} is no folder of the hub at a commit", remedy=remedy)
        self.name = place
        self._repository, self._commit = match["repository"], match["commit"]
        self._folder = f"{match['folder']}/" if match["folder"] else ""
        self._hub = Hub(token_of_user() if trusted else "")
        self._files: dict[str, HubFile] = {}

    def open(self, file: str, start: int, end: int) -> tuple[int, Iterator[bytes]]:
        """See `Place`."""
        return start, self._pieces(file, start, end)

    def whole(self, file: str, most: int) -> bytes:
        """See `Place`."""
        return b"".join(self._pieces(file, 0, most + 1))

    def _pieces(self, name: str, start: int, end: int) -> Iterator[bytes]:
        try:
            file = self._file(name)
            end = min(end, file.size)
            for at in range(start, end, READ_BYTES):
                yield self._hub.read(file.url, at, min(READ_BYTES, end - at))
        except OSError as error:
            raise NotThere(str(error)) from error  # It was asked for half a minute by then.

    def _file(self, name: str) -> HubFile:
        if not self._files:
            self._files = {file.name: file for file in self._hub.files(self._repository, self._commit)}
        if (found := self._files.get(self._folder + name)) is None:
            raise NotThere(f"{self.name} has no {name}")
        return found


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
