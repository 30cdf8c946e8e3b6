"""Memory, disk, load and battery of this computer. One user of psutil, which does not know the limits of containers."""

import contextlib
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


def on_battery() -> bool:
    """Return True if this computer runs on its battery, as far as its system says so."""
    battery = psutil.sensors_battery() if hasattr(psutil, "sensors_battery") else None  # Not on each of the BSDs.
    return battery is not None and battery.power_plugged is False


class OthersLoad:
    """The share of all processors, 0 to 1, that programs other than this peer had since the last call; 0 at the first."""

    def __init__(self) -> None:
        self._last: tuple[float, float, float] | None = None

    def __call__(self) -> float:
        """Return the share."""
        total, busy, own = now = (*_processor_seconds(), _own_seconds())
        last, self._last = self._last, now
        if last is None or total <= last[0]:
            return 0.0
        return min(1.0, max(0.0, (busy - last[1]) - (own - last[2])) / (total - last[0]))


def _processor_seconds() -> tuple[float, float]:
    """Return the seconds of all processors since the start, and those in which they were busy."""
    times = psutil.cpu_times()._asdict()
    for guest in ("guest", "guest_nice"):  # Linux counts them as user time, too.
        times.pop(guest, None)
    total = sum(times.values())
    return total, total - times["idle"] - times.get("iowait", 0.0)


def _own_seconds() -> float:
    """Return the processor seconds of this process and of all that it has started."""
    me = psutil.Process()
    seconds = 0.0
    for process in (me, *me.children(recursive=True)):
        with contextlib.suppress(psutil.Error):  # It has just ended: then its parent's time contains its own.
            seconds += sum(process.cpu_times()[:4])
    return seconds
