"""Checks of this computer with the standard library alone: Python, packages, home folder.

Each check returns a `Trouble`, or None if it passes.
"""

import os
import re
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path

from ...peer.base.troubles import DISK_SHORT, Trouble

OLDEST_PYTHON = (3, 11)
"""As `requires-python` of pyproject.toml, which pip enforces but a checkout on the path does not."""
MIN_FREE = 100_000_000
"""Bytes of disk for the key, the manifest and the event log of any run."""

_REQUIREMENT = re.compile(r"([\w.-]+)\s*(==|>=)\s*([\w.]+)$", re.ASCII)


def python_trouble(version: str) -> Trouble | None:
    """Check a version of Python."""
    if _numbers(version) >= OLDEST_PYTHON:
        return None
    wanted = ".".join(map(str, OLDEST_PYTHON))
    return Trouble(f"Python {version} is too old", f"install Python {wanted} or newer, and flockstep with it")


def packages_trouble() -> tuple[Trouble | None, str]:
    """Check the packages that flockstep requires; the second item is a summary, empty if flockstep is not installed."""
    try:
        needed = metadata.requires("flockstep") or []
    except metadata.PackageNotFoundError:
        return None, ""
    return judge_packages(needed, _installed)


def judge_packages(requirements: Iterable[str], installed: Callable[[str], str]) -> tuple[Trouble | None, str]:
    """Check a list of requirements; `installed` returns the version of a package, empty if it is missing."""
    plain = [match for text in requirements if ";" not in text and (match := _REQUIREMENT.match(text))]
    wrong, missing, versions = [], [], []
    for name, relation, wanted in (match.groups() for match in plain):
        version = installed(name)
        fits = version == wanted if relation == "==" else _numbers(version) >= _numbers(wanted)
        if not version:
            missing.append(f"{name} is missing")
        elif not fits:
            wrong.append(f"{name} {version} does not fit {relation}{wanted}")
        if not version or not fits:
            versions.append(f"'{name}{relation}{wanted}'")
    if not versions:
        return None, f"flockstep {installed('flockstep')}, {len(plain)} as needed, libp2p {installed('libp2p')}"
    return Trouble("; ".join(missing + wrong), f"pip install {' '.join(versions)}"), ""


def folder_trouble(home: Path, there: Path, free: int) -> Trouble | None:
    """Check the home folder with `free` bytes; `there` is its nearest existing parent."""
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        return Trouble(f"cannot write into {there}", "make the folder yours, or name another one with --home")
    if free < MIN_FREE:
        return DISK_SHORT.with_details(f"{home} has {free / 1e6:.1f} MB free, {MIN_FREE / 1e6:.0f} MB are the least")
    return None


def _installed(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: (2, 13, 0) of `2.13.0+cpu`."""
    return tuple(int(part) for part in re.findall(r"\d+", re.match(r"[\d.]*", version)[0]))  # type: ignore[index]  # always matches
