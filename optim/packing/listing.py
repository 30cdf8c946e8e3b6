"""The files of a place on this computer, and those of Python's standard library.

An existing path is literal, brackets and all, and so is what of a glob exists. Below a folder hidden files and those of
systems and editors are left out, and a file or folder that is linked is read once, under the first of its names, unless it
leads back above the folder. What is left out is counted and named.
"""

import os
import sysconfig
from collections.abc import Container, Iterator, Sequence
from fnmatch import fnmatchcase
from itertools import accumulate
from pathlib import Path

from ...peer.base.disk import user_path
from ...peer.base.errors import UsageError
from .skips import Flaw, Skips

MAX_STDLIB_BYTES = 32 << 20
"""Enough for any demonstration; keeps a distribution with unusual additions from growing it."""
SYSTEM_NAMES = ("__MACOSX", "Thumbs.db", "desktop.ini", "lost+found", "$RECYCLE.BIN", "System Volume Information")
"""What systems put beside the files of users."""
ANY_DEPTH = "**"


def listing(kind: str, place: str, skips: Skips, *, without: Container[str] = ()) -> list[Path]:
    """Return the files of a path or a glob, in the order of their names; folders `without` are not entered.

    `skips` takes those that are left out. Raises `UsageError` where nothing is there.
    """
    path = user_path(place)
    root = next(each for each in (path, *path.parents) if os.path.exists(each))
    pattern = path.relative_to(root).parts or (ANY_DEPTH,)
    real_root = Path(os.path.realpath(root))
    seen = {str(each) for each in (real_root, *real_root.parents)}

    def below(folder: Path, parts: tuple[str, ...]) -> Iterator[Path]:
        try:
            inside = sorted(folder.iterdir())
        except OSError as error:
            skips.add(str(folder), 0, Flaw(f"cannot be read: {error.strerror}"))
            return
        for each in inside:
            names, real, is_folder = (*parts, each.name), os.path.realpath(each), os.path.isdir(each)
            if each.name in without or not (_enters if is_folder else _matches)(names, pattern):
                continue
            if each.name.startswith((".", "~$")) or each.name.endswith("~") or each.name in SYSTEM_NAMES:
                skips.leave(str(each), "is hidden, or a system's or an editor's")
            elif real in seen:
                skips.leave(str(each), "is a link to what is read, or to a folder around it")
            elif is_folder or os.path.isfile(each):
                seen.add(real)
                yield from below(each, names) if is_folder else (each,)
            else:
                skips.add(str(each), 0, Flaw("is a link to nothing, or no file"))

    found = [path] if os.path.isfile(path) else list(below(root, ()))
    if not found and root != path:
        raise UsageError(f"{kind}:{place}: there is no such file or folder", remedy="check the path")
    return found


def _enters(names: Sequence[str], pattern: Sequence[str]) -> bool:
    """Return True for a folder below which a file may match."""
    return ANY_DEPTH in pattern[: len(names)] or (len(names) < len(pattern) and all(map(fnmatchcase, names, pattern)))


def _matches(names: Sequence[str], pattern: Sequence[str]) -> bool:
    if ANY_DEPTH in pattern[:1]:
        return any(_matches(names[start:], pattern[1:]) for start in range(len(names) + 1))
    if not names or not pattern:
        return not names and not pattern
    return fnmatchcase(names[0], pattern[0]) and _matches(names[1:], pattern[1:])


def stdlib_files() -> list[Path]:
    """Return the sources of Python's standard library, in the order of their names, up to `MAX_STDLIB_BYTES`."""
    # Tests are a third of it and much of their text is data; site-packages differs from computer to computer.
    skipped = ("site-packages", "test", "tests", "idle_test")
    files = [file for file in listing("text", sysconfig.get_path("stdlib"), Skips(), without=skipped) if file.suffix == ".py"]
    ends = accumulate(file.stat().st_size for file in files)
    return [file for file, end in zip(files, ends, strict=True) if end <= MAX_STDLIB_BYTES]
