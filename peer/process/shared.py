"""Maps flat float32 vectors into the training process and the network process: one file, no copies.

A file instead of `multiprocessing.shared_memory`: its resource tracker would be a third process, and in Python 3.11 it
removes segments that others still use. The name of the file is removed as soon as both processes have mapped it, so that
the death of either leaves nothing behind. Windows does not remove a mapped file: there it is removed at the end.
"""

import mmap
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ..arrays import Floats
from ..errors import LocalError

MEMORY_FOLDER = Path("/dev/shm")
"""Where it exists (Linux), a file here is memory and never written to a disk."""


class SharedVectors:
    """Named vectors of one length in a mapped file; `create` in one process, `attach` in the other."""

    def __init__(self, path: Path, names: Sequence[str], size: int, file: int) -> None:
        self.path = path
        self.names = tuple(names)
        self.size = size
        try:
            self._map = mmap.mmap(file, len(self.names) * size * 4)
        finally:
            os.close(file)
        whole = np.frombuffer(self._map, np.float32).reshape(len(self.names), size)
        self._vectors: dict[str, Floats] = {name: whole[row] for row, name in enumerate(self.names)}

    @classmethod
    def create(cls, names: Sequence[str], size: int) -> "SharedVectors":
        """Create vectors of zeros. Raises `LocalError` if there is no room for them."""
        num_bytes = len(names) * size * 4
        failure: OSError | None = None
        for folder in (MEMORY_FOLDER, Path(tempfile.gettempdir())):
            if not folder.is_dir():
                continue
            try:
                file, name = tempfile.mkstemp(prefix="flockstep-", dir=folder)
            except OSError as error:
                failure = error
                continue
            try:
                _reserve(file, num_bytes)
            except OSError as error:
                failure = error
                os.close(file)
                os.unlink(name)
                continue
            return cls(Path(name), names, size, file)
        raise LocalError(
            f"no room for {num_bytes / 1e6:.0f} MB of shared vectors: {failure}",
            remedy="free memory or disk, or name another temporary folder in $TMPDIR",
        )

    @classmethod
    def attach(cls, path: Path, names: Sequence[str], size: int) -> "SharedVectors":
        """Map the vectors that another process created. Raises `LocalError`."""
        try:
            return cls(path, names, size, os.open(path, os.O_RDWR))
        except (OSError, ValueError) as error:
            raise LocalError(f"cannot map the shared vectors {path}: {error}") from error

    def __getitem__(self, name: str) -> Floats:
        return self._vectors[name]

    def unlink(self) -> None:
        """Remove the file's name; processes that have mapped it keep the memory."""
        try:
            self.path.unlink(missing_ok=True)
        except PermissionError:
            return  # Windows, while it is mapped.


def _reserve(file: int, num_bytes: int) -> None:
    """Allocate the file's blocks, where the system can: writing to a sparse file on a full disk would kill us (SIGBUS)."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, num_bytes)
    else:
        os.truncate(file, num_bytes)
