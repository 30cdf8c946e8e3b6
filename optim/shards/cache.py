"""Shards on this computer: a folder of them, or a bounded cache that is filled ahead of the training.

Theory of operation. A shard is a file named by its hash. What is missing is read from its place into a *part*, which a
later process resumes, and takes its name only when its hash is right. Two threads, which live as long as something is
wanted, fetch first the shard that the trainer waits for, then those that its leases say come next. What the trainer has
read stays for the next epoch, until the bound of the disk is reached: then the shard whose last use is longest ago goes. A
second process of one home folder (an evaluation beside the training) has a cache of its own, which ends with it.
"""

import errno
import itertools
import os
import shutil
import tempfile
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ...peer.base.digest import RunningDigest
from ...peer.base.disk import DISK_RESERVE, disk_errors, rename
from ...peer.base.errors import FlockstepError, LocalError
from ...peer.base.home_lock import home_lock
from .index import Shard
from .members import Absent
from .places import Folder, Place, patiently
from .seeding import SHARD, shards_folder
from .web import NotThere

FETCHERS = 2
"""Shards that are fetched at once: one stream does not fill a line with a long round trip."""
PART = ".part"
PATIENCE = 1.0
"""A wait for a shard looks again so often: without a limit no signal would end it on Windows."""
READ_BYTES = 1 << 20

Tokens = npt.NDArray[Any]


class _Absent(LocalError):
    """No member that is here has a shard."""


class Shards:
    """The shards of one index, as arrays of uint16 or uint32; `place` is where they come from."""

    def __init__(
        self, place: Place, dtype: str, home: Path, limit: int, awaits: Callable[[], bool] | None = None
    ) -> None:
        self._place, self._dtype = place, np.dtype(dtype).newbyteorder("<")
        self._folder, self._limit = shards_folder(home), limit
        self._awaits = awaits
        """Waits a moment for a shard that nobody has; returns False to give up."""
        self._lock = threading.Condition()
        self._wanted: list[Shard] = []
        self._spare: list[Shard] = []
        """What is fetched for other members as long as there is room."""
        self._expected: frozenset[bytes] = frozenset()
        """What is read next, and so stays, also where it is here from an earlier epoch."""
        self._loading: dict[bytes, int] = {}
        """What is being fetched, and its bytes."""
        self._failed: dict[bytes, FlockstepError] = {}
        self._sound: set[bytes] = set()
        """Shards whose hash was found right by this process."""
        self._threads = 0
        self._open = ExitStack()
        self._locked = False

    def take(self, shard: Shard) -> Tokens:
        """Return the tokens of a shard, fetching it if it is not here. Raises `LocalError`."""
        if isinstance(self._place, Folder):
            path = self._place.path / shard.name
            if (tokens := self._read(path, shard)) is None:
                raise LocalError(f"{path} is not what its index says", remedy="pack it anew, or copy it once more")
            return tokens
        while True:
            try:
                return self._take(shard)
            except _Absent as error:
                if self._awaits is None or not self._awaits():
                    raise LocalError(str(error), remedy=error.remedy) from error

    def _take(self, shard: Shard) -> Tokens:
        with self._lock:
            self._lock_folder()
            while True:
                while shard.hash in self._loading:
                    self._lock.wait(PATIENCE)
                if (tokens := self._read(self._path(shard), shard)) is not None:
                    return tokens
                self._failed.pop(shard.hash, None)
                with disk_errors(f"write in {self._folder}"):
                    self._path(shard).unlink(missing_ok=True)  # The disk has damaged it.
                self._want([shard], first=True)
                while shard.hash in self._loading or shard in self._wanted:
                    self._lock.wait(PATIENCE)
                if (error := self._failed.pop(shard.hash, None)) is not None:
                    raise error

    def fill(self, shards: Sequence[Shard]) -> None:
        """Fetch these, too, while nothing else is wanted and none has to go for them: so that other members find them."""
        with self._lock:
            self._lock_folder()
            self._spare = list(shards)
            self._start_threads(1)

    def expect(self, shards: Sequence[Shard]) -> None:
        """Fetch these in turn while the trainer reads another one, as far as they fit; what was expected before is not."""
        if isinstance(self._place, Folder):
            return
        room = self._limit - max((each.num_bytes for each in shards), default=0)
        sums = itertools.accumulate(each.num_bytes for each in shards)
        fitting = [each for each, size in zip(shards, sums, strict=True) if size <= room]
        with self._lock:
            self._lock_folder()
            self._wanted, self._expected = [], frozenset(each.hash for each in fitting)
            for shard in fitting:
                self._want([shard], first=False)

    def _want(self, shards: Sequence[Shard], *, first: bool) -> None:
        missing = [each for each in shards if each.hash not in self._loading and not self._path(each).is_file()]
        others = [each for each in self._wanted if each not in missing]
        self._wanted = [*missing, *others] if first else [*others, *missing]
        self._start_threads(min(FETCHERS, len(self._wanted) + len(self._loading)))

    def _start_threads(self, number: int) -> None:
        while self._threads < number:
            self._threads += 1
            threading.Thread(target=self._fetch_all, daemon=True, name="shards").start()

    def _fetch_all(self) -> None:
        """Fetch what is wanted until nothing is."""
        while True:
            with self._lock:
                if (shard := self._next()) is None:
                    self._threads -= 1
                    return
                self._loading[shard.hash] = shard.num_bytes
            error: FlockstepError | None = None
            try:
                with disk_errors(f"keep shards in {self._folder}"), self._lock:
                    self._make_room(shard)
                self._fetch(shard)
            except FlockstepError as failure:
                error = failure
            except Exception as failure:  # noqa: BLE001  The boundary of a thread: whoever waits is told.
                error = LocalError(f"cannot fetch {shard.name}: {type(failure).__name__}: {failure}")
            with self._lock:
                del self._loading[shard.hash]
                if error is not None:
                    self._failed[shard.hash] = error
                self._lock.notify_all()

    def _next(self) -> Shard | None:
        if self._wanted:
            return self._wanted.pop(0)
        while self._spare:
            shard = self._spare.pop()
            if shard.hash not in self._loading and not self._path(shard).is_file():
                if self._room(self._kept()) >= shard.num_bytes:
                    return shard
                self._spare = []
        return None

    def _fetch(self, shard: Shard) -> None:
        part = self._path(shard).with_suffix(PART)
        try:
            patiently(lambda: self._go_on(shard, part))
        except Absent as error:
            raise _Absent(f"cannot read {shard.name}: {error}", remedy="wait until a member that has it is here") from error
        except NotThere as error:
            remedy = "tell the run's owner, or train on a copy of yours with --data FOLDER"
            raise LocalError(f"cannot read {shard.name} of {self._place.name}: {error}", remedy=remedy) from error
        except OSError as error:
            remedy = "check the disk or the network"
            raise LocalError(f"cannot read {shard.name} of {self._place.name}: {error}", remedy=remedy) from error

    def _go_on(self, shard: Shard, part: Path) -> None:
        """Read the rest of a shard into its part, which takes its name if its hash is right."""
        done = part.stat().st_size if part.exists() else 0
        if done < shard.num_bytes:
            done, pieces = self._place.open(shard.name, done, shard.num_bytes)
            with disk_errors(f"write {part}"):
                file = part.open("r+b" if done else "wb", buffering=0)
            with file:
                file.seek(done)
                for piece in pieces:
                    with disk_errors(f"write {part}"):
                        file.write(piece)
                    done += len(piece)
        if done < shard.num_bytes:
            raise OSError(f"it ends after {done:,} of {shard.num_bytes:,} bytes")
        if _hash_of(part) != shard.hash:
            part.unlink()
            raise NotThere("its hash is not the one that the run pins")
        self._sound.add(shard.hash)
        rename(part, self._path(shard))

    def _read(self, path: Path, shard: Shard) -> Tokens | None:
        """Return the tokens in a file, None if they are not there or others. Raises `LocalError` if it cannot be read."""
        with disk_errors(f"read {path}"):
            try:
                if shard.hash not in self._sound and _hash_of(path) != shard.hash:
                    return None
                tokens: Tokens = np.fromfile(path, self._dtype, shard.num_tokens)
            except FileNotFoundError:
                return None
            if not isinstance(self._place, Folder):
                os.utime(path)  # Its last use.
        self._sound.add(shard.hash)
        return tokens if len(tokens) == shard.num_tokens else None

    def _make_room(self, shard: Shard) -> None:
        """Delete the shards whose last use is longest ago, until one that is being fetched fits. Hold the lock.

        Raises `OSError` if the disk is full.
        """
        keys = {each.hex() for each in (*self._expected, *(each.hash for each in self._wanted))}
        sizes = self._kept()
        room = self._room(sizes)
        free = shutil.disk_usage(self._folder).free - shard.num_bytes - DISK_RESERVE
        for path in sorted(sizes, key=lambda path: sizes[path].st_mtime):
            if min(room, free) >= 0:
                return
            if path.stem not in keys:
                room, free = room + sizes[path].st_size, free + sizes[path].st_size
                path.unlink(missing_ok=True)
        if free < 0:
            raise OSError(errno.ENOSPC, f"less than {DISK_RESERVE >> 20} MiB would be left")

    def _room(self, kept: Mapping[Path, os.stat_result]) -> int:
        """Return the bytes that are left of the bound, beside what is kept and what is being fetched. Hold the lock."""
        return self._limit - sum(self._loading.values()) - sum(found.st_size for found in kept.values())

    def _kept(self) -> dict[Path, os.stat_result]:
        """Return what is in the cache and is not being fetched; files may go meanwhile. Hold the lock. Raises `OSError`."""
        found = {}
        loading = {key.hex() for key in self._loading}
        for path in self._folder.iterdir():
            if path.suffix in (SHARD, PART) and path.stem not in loading:
                with suppress(FileNotFoundError):
                    found[path] = path.stat()
        return found

    def _lock_folder(self) -> None:
        """Hold this cache for this process, or make one of its own."""
        if self._locked:
            return
        self._locked = True
        try:
            self._open.enter_context(home_lock(self._folder, pid=os.getpid()))
        except LocalError:
            with disk_errors(f"write in {self._folder}"):
                self._folder = Path(tempfile.mkdtemp(dir=self._folder.parent))
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)

    def _path(self, shard: Shard) -> Path:
        return self._folder / f"{shard.hash.hex()}{SHARD}"


def _hash_of(path: Path) -> bytes:
    hashed = RunningDigest()
    with path.open("rb", buffering=0) as file:
        while piece := file.read(READ_BYTES):
            hashed.add(piece)
    return hashed.value()
