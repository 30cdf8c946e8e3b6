"""Checks of this computer with the standard library alone: Python, home folder.

Each check returns a `Trouble`, or None if it passes.
"""

import os
import re
from pathlib import Path

from ...peer.base.troubles import DISK_SHORT, Trouble

OLDEST_PYTHON = (3, 11)
"""As `requires-python` of pyproject.toml, which pip enforces but a checkout on the path does not."""
MIN_FREE = 100_000_000
"""Bytes of disk for the key, the manifest and the event log of any run."""


def python_trouble(version: str) -> Trouble | None:
    """Check a version of Python."""
    if _numbers(version) >= OLDEST_PYTHON:
        return None
    wanted = ".".join(map(str, OLDEST_PYTHON))
    return Trouble(f"Python {version} is too old", f"install Python {wanted} or newer, and flockstep with it")


def folder_trouble(home: Path, there: Path, free: int) -> Trouble | None:
    """Check the home folder with `free` bytes; `there` is its nearest existing parent."""
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        return Trouble(f"cannot write into {there}", "make the folder yours, or name another one with --home")
    if free < MIN_FREE:
        return DISK_SHORT.with_details(f"{home} has {free / 1e6:.1f} MB free, {MIN_FREE / 1e6:.0f} MB are the least")
    return None


def _numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: (2, 13, 0) of `2.13.0+cpu`."""
    return tuple(int(part) for part in re.findall(r"\d+", re.match(r"[\d.]*", version)[0]))  # type: ignore[index]  # always matches
