"""Memory, disk, load and battery of this computer; what the system does not tell is unknown, and no error.

One user of psutil, which does not know the limits of containers, and raises many errors where /proc is closed.
"""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import psutil

from .needs import Memory

UNTOLD = (OSError, LookupError, ValueError, RuntimeError, psutil.Error)
"""What psutil raises where the system's files are closed, empty or of another form."""
CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")
"""Names the control groups of this process, one a line: `0::/path` of version 2, `4:memory:/path` of version 1."""
LIMITS, USES = ("max", "high", "limit_in_bytes"), ("current", "usage_in_bytes")
"""Files of a group, `memory.max` and so on: of version 2 and of version 1."""
CACHE = ("active_file", "inactive_file")
"""The page cache in a group's use, which the system takes back when it needs memory."""


def memory() -> Memory | None:
    """Return this computer's memory and swap, at most what its control groups allow; None if nothing tells."""
    found = [_of_group(folder) for folder in _groups()]
    with contextlib.suppress(*UNTOLD):
        main, swap = psutil.virtual_memory(), psutil.swap_memory()
        found.append(Memory(main.total + swap.total, main.available + swap.free))
    told = [one for one in found if one is not None]
    return Memory(min(one.total for one in told), min(one.free for one in told)) if told else None


def _groups() -> Iterator[Path]:
    """Yield the folders of the memory's control groups of this process: its own, and all above it, whose limits hold too.

    In a container its own may be the top of what it sees, whatever path the system names.
    """
    own = [line.split(":", 2) for line in _text(OWN_CGROUPS).splitlines() if line.count(":") > 1]
    for top, controller in ((CGROUPS, ""), (CGROUPS / "memory", "memory")):
        paths = [path for _, names, path in own if controller in names.split(",")] or ["/"]
        group = top / paths[0].strip("/")
        yield from (folder for folder in (group, *group.parents) if folder.is_relative_to(top))


def _of_group(folder: Path) -> Memory | None:
    limits, uses = (
        [int(text) for name in names if (text := _text(folder / f"memory.{name}").strip()).isdigit()]
        for names in (LIMITS, USES)
    )
    if not limits or not uses:
        return None
    counts = dict(line.split(maxsplit=1) for line in _text(Path(f"{folder}/memory.stat")).splitlines() if " " in line)
    cache = sum(int(counts.get(f"total_{name}", counts.get(name, "0"))) for name in CACHE)  # Version 1: with all below.
    return Memory(min(limits), max(0, min(limits) - max(0, uses[0] - cache)))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""


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
    with contextlib.suppress(*UNTOLD, AttributeError):  # Not on each of the BSDs.
        battery = psutil.sensors_battery()
        return battery is not None and battery.power_plugged is False
    return False


class OthersLoad:
    """The share of all processors, 0 to 1, that programs other than this peer had since the last call.

    0 at the first call, and where the system does not tell.
    """

    def __init__(self) -> None:
        self._last: tuple[float, float, float] | None = None

    def __call__(self) -> float:
        """Return the share."""
        try:
            total, busy, own = now = (*_processor_seconds(), _own_seconds())
        except UNTOLD:
            return 0.0
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
