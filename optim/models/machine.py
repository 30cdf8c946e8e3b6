"""How much memory and disk this computer has left, as far as its system tells."""

import ctypes
import os
import shutil
import sys
from pathlib import Path

from .needs import Memory

CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)
"""A container's limit and its use, in version 2 and 1 of Linux's control groups, as its own file system shows them."""


class _MemoryStatus(ctypes.Structure):
    """Windows' MEMORYSTATUSEX."""

    _fields_ = (
        ("length", ctypes.c_ulong),
        ("load", ctypes.c_ulong),
        *((name, ctypes.c_ulonglong) for name in ("total", "free", "page", "page_free", "virtual", "virtual_free", "more")),
    )


def memory() -> Memory | None:
    """This computer's memory; None where the system does not tell. What is free on macOS is not told: all counts as free."""
    if sys.platform == "linux":
        return _linux_memory()
    if sys.platform == "win32":
        status = _MemoryStatus(length=ctypes.sizeof(_MemoryStatus))
        told = ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status))
        return Memory(status.total, status.free) if told else None
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None
    return Memory(total, total)


def _linux_memory() -> Memory | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        figures = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}
        swap = figures.get("SwapTotal", 0), figures.get("SwapFree", 0)
        found = Memory(figures["MemTotal"] + swap[0], figures["MemAvailable"] + swap[1])
    except (OSError, ValueError, LookupError):
        return None
    for limit_file, use_file in CGROUPS:
        try:
            limit, use = int(Path(limit_file).read_text()), int(Path(use_file).read_text())
        except (OSError, ValueError):  # No such file, or "max".
            continue
        found = Memory(min(found.total, limit), max(0, min(found.free, limit - use)))
    return found


def existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there."""
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())


def disk_free(folder: Path) -> int:
    """Bytes free for me on the disk of a folder that need not exist. Raises `OSError`."""
    return shutil.disk_usage(existing(folder)).free


def size_on_disk(folder: Path) -> int:
    """Bytes of the files in a folder; 0 where there is none."""
    return sum(path.stat().st_size for path in folder.glob("**/*") if path.is_file())
