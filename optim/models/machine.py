"""Free memory and disk of this computer. One user of psutil, which does not know the limits of containers."""

import shutil
from pathlib import Path

import psutil

from .needs import Memory

CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)
"""A container's limit and its use, in version 2 and 1 of Linux's control groups, as its own file system shows them."""


def memory() -> Memory:
    """Return this computer's memory and swap, at most what a container may use."""
    main, swap = psutil.virtual_memory(), psutil.swap_memory()
    found = Memory(main.total + swap.total, main.available + swap.free)
    for limit_file, use_file in CGROUPS:
        try:
            limit, use = int(Path(limit_file).read_text()), int(Path(use_file).read_text())
        except (OSError, ValueError):  # No such file, or "max".
            continue
        found = Memory(min(found.total, limit), max(0, min(found.free, limit - use)))
    return found


def existing(folder: Path) -> Path:
    """Return the folder, or its nearest existing parent."""
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())


def disk_free(folder: Path) -> int:
    """Return the bytes free for this user on the disk of a folder, which need not exist. Raises `OSError`."""
    return shutil.disk_usage(existing(folder)).free


def size_on_disk(folder: Path) -> int:
    """Return the bytes of the files in a folder; 0 if it does not exist."""
    return sum(path.stat().st_size for path in folder.glob("**/*") if path.is_file())
