"""Atomic file replacement: a file is written whole or not at all, and a disk that refuses is one clear error.

Theory of operation. A writer fills a *draft* beside the target, syncs it, renames it to the target, and syncs the folder.
A rename is atomic within a file system (rename(2)), so a reader finds the old bytes or the new ones, also after a crash;
the two syncs make that hold after a power failure (Pillai et al., OSDI 2014). A write that fails removes its draft. What
a killed process leaves is removed by a later write of the same file.
"""

import contextlib
import errno
import glob
import mmap
import os
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from .errors import LocalError, UsageError

_SUFFIX = ".draft"
STALE_SECONDS = 3600.0
"""A draft that nobody has written to for so long is that of a dead process: the longest pause in a write is a minute."""

DISK_RESERVE = 1 << 30
"""Bytes that contributions of others leave free: checkpoints and what a peer has signed need the disk more."""

_FULL = "free some space on its disk, or name a folder on another one with --home (or --out)"
_FORBIDDEN = "make its folder readable and writable for you, or name another one with --home (or --out)"
_REMEDIES = {
    errno.ENOSPC: _FULL,
    getattr(errno, "EDQUOT", errno.ENOSPC): _FULL,  # Windows has no quotas of this name.
    errno.EFBIG: "name a folder whose file system takes files of this size with --home (or --out)",  # FAT: 4 GiB.
    errno.EROFS: "its disk is read-only: name a folder on another one with --home (or --out)",
    errno.EIO: "check this disk, it may be failing, or name a folder on another one with --home (or --out)",
}


@contextlib.contextmanager
def disk_errors(what: str) -> Iterator[None]:
    """Raise `LocalError`, "cannot `what`", the system's reason and a remedy, in place of an `OSError`."""
    try:
        yield
    except OSError as error:
        remedy = _REMEDIES.get(error.errno or 0, _FORBIDDEN)
        raise LocalError(f"cannot {what}: {error.strerror or error}", remedy=remedy) from error


def user_path(text: str) -> Path:
    """Return the path that a person or a run's settings name, `~` replaced. Raises `UsageError` if none can be."""
    path = Path(os.path.expanduser(text))  # Unlike `Path.expanduser` it leaves the folder of an unknown user as it is.
    try:
        path.lstat()
    except ValueError:
        raise UsageError(f"no file is called {text!r}: it contains a zero byte", remedy="check the path") from None
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise UsageError(f"no file is called {text[:80]!r}…: {error.strerror}", remedy="check the path") from None
    return path


def private_folder(folder: Path, *, holds: str = "") -> None:
    """Make a folder that only its user may enter (0700), as a home folder is, with its key and its log. Raises `OSError`.

    One that is there becomes so if it has a file `holds`: any folder can be named by --home, and others' are left alone.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if holds and (folder / holds).is_file():
        found = folder.stat()
        shared = found.st_mode & stat.S_ISVTX or (hasattr(os, "geteuid") and found.st_uid != os.geteuid())
        if stat.S_IMODE(found.st_mode) & 0o077 and not shared:
            with contextlib.suppress(OSError):  # Of a file system without modes.
                folder.chmod(0o700)


def write_whole(path: Path, data: bytes, *, private: bool = False, replace: bool = True) -> None:
    """Make `path` hold `data`; options and errors are those of `draft_of`."""
    with draft_of(path, private=private, replace=replace) as draft:
        draft.write_bytes(data)


@contextlib.contextmanager
def draft_of(path: Path, *, private: bool = False, replace: bool = True, sync: bool = True) -> Iterator[Path]:
    """Yield a new empty file that becomes `path`, whose folders are made, when the block ends without an exception.

    `private`: nobody else may ever read it (mode 0600). Without `replace` a file that is there by then stays: of racing
    writers the first one counts. Without `sync` a power failure may lose it. Raises `LocalError`.
    """
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}{_SUFFIX}")
    with disk_errors(f"write {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(path)
        try:
            os.close(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o666))
            yield draft
            if sync:
                _sync(draft)
            if replace:
                os.replace(draft, path)
            else:
                _link(draft, path)
        finally:
            with contextlib.suppress(OSError):  # Else it would hide why the write failed.
                draft.unlink(missing_ok=True)
        if sync:
            sync_folder(path.parent)


@contextlib.contextmanager
def folder_draft_of(path: Path) -> Iterator[Path]:
    """Yield a new empty folder that becomes `path`, where nothing is, when the block ends without an exception.

    Else it is removed; what a killed process leaves is removed by a later one of the same target. Raises `LocalError`.
    """
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}{_SUFFIX}")
    with disk_errors(f"write {path}"):
        _remove_stale(path)
        draft.mkdir(parents=True)
    try:
        yield draft
        with disk_errors(f"write {path}"):
            for file in draft.iterdir():
                _sync(file)
            sync_folder(draft)
        rename(draft, path)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def room_on_disk(folder: Path, size: int) -> memoryview:
    """Return `size` bytes of memory that lie in a file without a name, so that the system may take the memory back.

    The file ends with the last use of the bytes. Raises `LocalError`, also where less than `DISK_RESERVE` would be left.
    """
    with disk_errors(f"write {size / 1e6:.0f} MB in {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(folder).free < size + DISK_RESERVE:
            raise OSError(errno.ENOSPC, f"less than {DISK_RESERVE >> 20} MiB would be left")
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, size)  # A full disk is an error now, not a signal at the first write.
            else:
                file.truncate(size)
            return memoryview(mmap.mmap(file.fileno(), size))


def rename(draft: Path, path: Path) -> None:
    """Give a finished file or folder its name, also after a power failure. Raises `LocalError`."""
    with disk_errors(f"write {path}"):
        os.replace(draft, path)
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make new names in a folder outlast a power failure, on systems where a folder can be synced. Raises `OSError`."""
    if hasattr(os, "O_DIRECTORY"):
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOSYS):  # As some network folders answer: they cannot.
                raise
        finally:
            os.close(fd)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDWR)  # Opened anew: safetensors puts a file of its own in the place of the one it is given.
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _link(draft: Path, path: Path) -> None:
    """Name a file `path` unless something has that name: unlike a rename, link(2) fails then."""
    try:
        os.link(draft, path)
    except FileExistsError:
        return
    except OSError:  # exFAT and some network folders have no hard links.
        os.replace(draft, path)


def _remove_stale(path: Path) -> None:
    for draft in path.parent.glob(f".{glob.escape(path.name)}.*{_SUFFIX}"):
        with contextlib.suppress(OSError):  # Its writer has just ended; what cannot be removed harms nobody.
            newest = max((file.stat().st_mtime for file in draft.glob("*")), default=draft.stat().st_mtime)
            if newest < time.time() - STALE_SECONDS:
                shutil.rmtree(draft) if draft.is_dir() else draft.unlink()
