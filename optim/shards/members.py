"""The trainer's side of data from members: a place whose files the network process fetches by their hash."""

from collections.abc import Callable, Iterator
from pathlib import Path

from ...peer.base.digest import digest
from ...peer.base.disk import disk_errors, write_whole
from ...peer.base.errors import LocalError, NetworkError
from ..data.tokenizer import files_folder
from .index import INDEX, ShardIndex
from .web import NotThere

READ_BYTES = 4 << 20

Bring = Callable[[bytes, int, Path], None]
"""Fetches the file of a hash and a length to a path. Raises `NetworkError` if nobody that is here has it."""


class Members:
    """The members of a run, of whose data the index has this hash and length; a `Place`."""

    name = "the members of the run"

    def __init__(self, index: bytes, size: int, home: Path, bring: Bring | None) -> None:
        self._files = {INDEX: (index, size)}
        self._folder, self._bring = files_folder(home), bring

    def learn(self, index: ShardIndex) -> None:
        """Take the hashes of the other files from the index."""
        self._files |= {name: (hash_, size) for name, hash_, size in index.files}

    def open(self, file: str, start: int, end: int) -> tuple[int, Iterator[bytes]]:
        """See `Place`. A file comes whole."""
        hash_, size = self._of(file)
        path = self._folder / f"{hash_.hex()}.part"
        self._fetch(hash_, size, path)
        return start, _pieces(path, start)

    def whole(self, file: str, most: int) -> bytes:
        """See `Place`. What was fetched once is kept, for other members, too."""
        hash_, size = self._of(file)
        path = self._folder / hash_.hex()
        with disk_errors(f"read {path}"):
            if path.is_file() and digest(found := path.read_bytes()) == hash_:
                return found
        part = path.with_suffix(".part")
        self._fetch(hash_, size, part)
        found = b"".join(_pieces(part, 0))
        if digest(found) == hash_:
            write_whole(path, found)
        return found

    def _of(self, file: str) -> tuple[bytes, int]:
        if (found := self._files.get(file)) is None:
            raise NotThere(f"the run's data have no {file}")
        return found

    def _fetch(self, hash_: bytes, size: int, path: Path) -> None:
        if self._bring is None:
            raise NotThere("they are asked by `flockstep join` alone; name a copy with --data FOLDER")
        try:
            self._bring(hash_, size, path)
        except (NetworkError, LocalError) as error:
            raise Absent(str(error)) from error


class Absent(NotThere):
    """No member that is here has a file: one may come."""


def _pieces(path: Path, start: int) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            file.seek(start)
            while piece := file.read(READ_BYTES):
                yield piece
    finally:
        path.unlink(missing_ok=True)
