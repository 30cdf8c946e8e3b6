"""Locks between processes: on a home folder, under whose identity one at a time acts, and on a file that several append to.

Theory of operation. Two processes with one key would sign against each other and be banned for the run, and would write
the same files. The lock is the operating system's, on an open file (flock(2); on Windows a locked byte), so the end of
the process releases it, however it ends. The file holds a process id, for the message alone.
"""

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from .disk import disk_errors, private_folder
from .errors import LocalError

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

HOME_LOCK = "lock"
APPEND_PATIENCE = 10.0
APPEND_POLL = 0.01
"""Seconds: a write with its sync takes some milliseconds, a second on a slow disk."""
LOCKED_BYTE = 1 << 20
"""Windows lets nobody read a locked byte, so it is one behind the process id."""


@contextlib.contextmanager
def home_lock(home: Path, *, pid: int, name: str = HOME_LOCK) -> Iterator[None]:
    """Hold the lock `name` of a home folder, which is made, for the process `pid` that a person would end.

    Raises `LocalError` if another process holds it, and where files cannot be locked.
    """
    path = home / name
    with disk_errors(f"write {path}"):
        private_folder(home)
        file = path.open("a+")
    with file:
        if not _try_lock(file):
            file.seek(0)
            holder = file.read(20).strip()
            raise LocalError(
                f"another process{f' (pid {holder})' if holder.isdigit() else ''} uses the home folder {home}",
                remedy="end it first, or name another folder with --home, which makes this a peer of its own",
            )
        with disk_errors(f"write {path}"):
            file.truncate(0)
            os.write(file.fileno(), f"{pid}\n".encode())  # Not buffered: closing the file would fail a second time.
        yield


def is_locked(path: Path) -> bool:
    """Return True while a process holds the lock of this file. Raises `LocalError` where files cannot be locked."""
    try:
        file = path.open("a+")
    except OSError:
        return False
    with file:
        return not _try_lock(file)


@contextlib.contextmanager
def append_lock(path: Path) -> Iterator[None]:
    """Hold the lock of an empty file at `path`, whose folder is made, while reading and writing what it stands for.

    Waits for another process that holds it: for the short time of a write. Raises `LocalError` if it cannot be locked.
    """
    with disk_errors(f"lock {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a+")
    with file:
        deadline = time.monotonic() + APPEND_PATIENCE
        while not _try_lock(file):
            if time.monotonic() > deadline:
                raise LocalError(f"cannot lock {path}: another process has held it for {APPEND_PATIENCE:.0f} s")
            time.sleep(APPEND_POLL)
        yield


def _try_lock(file: IO[str]) -> bool:
    """Lock an open file; returns False if another process holds it. Raises `LocalError` where files cannot be locked."""
    try:
        if sys.platform == "win32":
            file.seek(LOCKED_BYTE)
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if sys.platform == "win32" and isinstance(error, PermissionError):  # Its answer where another process holds it.
            return False
        raise LocalError(
            f"cannot lock {file.name}: {error.strerror}",
            remedy="its file system locks no files: name a folder on a local disk with --home",
        ) from error
    return True
