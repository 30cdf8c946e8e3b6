"""Maps flat vectors into the training process and the network process: one piece of memory, no copies.

On Linux it is a file without a name (memfd_create(2)): the other process opens it by its number in /proc, nothing is left
behind whatever dies, and no mount limits its size, as /dev/shm does in a container (64 MB). Elsewhere, and where the
memory is too small, it is a file in a folder, whose name is removed as soon as both processes have mapped it; Windows
does not remove a mapped file: there it is removed at the end. `multiprocessing.shared_memory` is neither: its resource
tracker would be a third process, and in Python 3.11 it removes segments that others still use.
"""

import mmap
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ..base.errors import LocalError


@dataclass(frozen=True, slots=True)
class VectorShape:
    """The length of one vector, and the type of its elements."""

    size: int
    dtype: type[np.float32] | type[np.uint16]

    @property
    def num_bytes(self) -> int:
        """Its bytes."""
        return self.size * np.dtype(self.dtype).itemsize


Vectors: TypeAlias = Mapping[str, VectorShape]
"""The vectors of a file by name, in their order."""


class SharedVectors:
    """Named vectors in one piece of memory; `create` in one process, `attach` in the other."""

    def __init__(self, name: Path | None, shapes: Vectors, file: int) -> None:
        self._name = name
        self._file = file
        self._shapes = shapes
        self._map = mmap.mmap(file, bytes_of(shapes))
        self._vectors: dict[str, npt.NDArray[Any]] = {}
        start = 0
        for key, shape in shapes.items():
            self._vectors[key] = np.frombuffer(self._map, shape.dtype, shape.size, start)
            start += shape.num_bytes

    @classmethod
    def create(cls, shapes: Vectors, folder: Path | None = None) -> "SharedVectors":
        """Create vectors of zeros: in memory, or in a file in `folder`. Raises `LocalError` if there is no room."""
        name: Path | None = None
        try:
            if folder is None and hasattr(os, "memfd_create"):
                file = os.memfd_create("flockstep vectors")
            else:
                if folder is not None:
                    folder.mkdir(parents=True, exist_ok=True)
                file, text = tempfile.mkstemp(prefix="flockstep-", dir=folder)
                name = Path(text)
            try:
                _reserve(file, bytes_of(shapes))
                return cls(name, shapes, file)
            except BaseException:
                os.close(file)
                if name is not None:
                    name.unlink()
                raise
        except OSError as error:
            raise LocalError(
                f"no room for {bytes_of(shapes) / 1e6:.0f} MB of shared vectors{f' in {folder}' if folder else ''}: {error}",
                remedy="free memory or disk, or name another temporary folder in $TMPDIR",
            ) from error

    @classmethod
    def attach(cls, path: Path, shapes: Vectors) -> "SharedVectors":
        """Map the vectors that another process created. Raises `LocalError`."""
        try:
            file = os.open(path, os.O_RDWR)
            try:
                return cls(path, shapes, file)
            finally:
                os.close(file)
        except (OSError, ValueError) as error:
            raise LocalError(f"cannot map the shared vectors {path}: {error}") from error

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        return self._vectors[name]

    @property
    def path(self) -> Path:
        """Where the other process may open the file, until its name is removed."""
        return self._name if self._name is not None else Path(f"/proc/{os.getpid()}/fd/{self._file}")

    def unlink(self) -> None:
        """Remove the file's name; processes that have mapped it keep the memory."""
        try:
            if self._name is not None:
                self._name.unlink(missing_ok=True)
        except PermissionError:
            return  # Windows, while it is mapped.


def bytes_of(shapes: Vectors) -> int:
    """Return the bytes of all vectors."""
    return sum(shape.num_bytes for shape in shapes.values())


def _reserve(file: int, num_bytes: int) -> None:
    """Allocate the file's blocks, where the system can: writing to a sparse file on a full disk would kill us (SIGBUS)."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, num_bytes)
    else:
        os.truncate(file, num_bytes)
