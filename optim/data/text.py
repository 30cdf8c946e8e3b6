"""The files of a place on this computer, and text from them; or from Python's standard library.

An existing path is literal, brackets and all, and so is what of a glob exists. Below a folder hidden files and those of
systems and editors are left out, and a file or folder that is linked is read once, under the first of its names, unless it
leads back above the folder. What is left out is counted and named.
"""

import os
import sysconfig
from collections.abc import Container, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from ...peer.base.disk import user_path
from ...peer.base.errors import UsageError
from .rows import Skips, form_of, wide_encoding

MAX_TEXT_BYTES = 2 << 30
"""Bytes of text are held in memory: beyond this, a memory-mapped `tokens:` file is the better way."""
MAX_STDLIB_BYTES = 32 << 20
"""Enough for any demonstration; keeps a distribution with unusual additions from growing it."""

STDLIB = "{stdlib}"
FEW = 1000
"""Bytes of a text for each zero in it, at least; what is no text has more of them."""
PROBE_BYTES = 4096
"""Of a file, by which UTF-16 without a mark is told from what is no text."""
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
            skips.add(str(folder), 0, f"cannot be read: {error.strerror}")
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
                skips.add(str(each), 0, "is a link to nothing, or no file")

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



def texts(place: str, skips: Skips | None = None) -> Iterator[bytes]:
    """The texts of `named_texts`."""
    return (text for _, text in named_texts(place, skips or Skips()))


def named_texts(place: str, skips: Skips) -> Iterator[tuple[Path, bytes]]:
    """One file with UTF-8 text after the other, in the order of their names, and its text; other files are skipped.

    `skips` takes those that hold text of another encoding. Raises `UsageError` where there is no such file, and where one
    cannot be read.
    """
    if place != STDLIB:
        yield from _read(listing("text", place, skips), skips)
        return
    left = MAX_STDLIB_BYTES
    for file, text in _read(_stdlib_files(), Skips()):
        yield file, text[:left]
        left -= len(text) + 1
        if left <= 0:
            return


def _stdlib_files() -> list[Path]:
    # Tests are a third of it and much of their text is data; site-packages differs from computer to computer.
    skipped = ("site-packages", "test", "tests", "idle_test")
    return [file for file in listing("text", sysconfig.get_path("stdlib"), Skips(), without=skipped) if file.suffix == ".py"]


def _read(files: Iterable[Path], skips: Skips) -> Iterator[tuple[Path, bytes]]:
    for file in files:
        try:
            if file.stat().st_size > MAX_TEXT_BYTES:  # It is read at once.
                raise UsageError(f"{file} has more than 2 GiB", remedy="split it, or use a tokens: file, which is not loaded")
            content = file.read_bytes()
        except OSError as error:
            raise UsageError(f"cannot read {file}: {error.strerror}", remedy="check its permissions") from error
        if _is_text(content, str(file), skips):
            yield file, content


def _is_text(content: bytes, file: str, skips: Skips) -> bool:
    """Return True for UTF-8; what holds text in another form is skipped, what is no text is left out."""
    if form := form_of(content[:8]):
        skips.add(file, 0, form)
        return False
    if encoding := wide_encoding(content[:PROBE_BYTES]):
        skips.add(file, 0, f"is {encoding}, not UTF-8", encoding)
        return False
    if content.count(0) * FEW >= len(content):
        skips.leave(file, "is no text")
        return False
    try:
        content.decode()
    except UnicodeDecodeError as error:
        if b"\0" in content:
            skips.leave(file, "is no text")
            return False
        line = content.count(b"\n", 0, error.start) + 1
        skips.add(file, line, f"is no UTF-8: byte {content[error.start]:#04x}", "LATIN1")
        return False
    if b"\0" in content:
        line = content.count(b"\n", 0, content.index(0)) + 1
        skips.add(file, line, "holds a zero byte, which ends a document: remove it")
        return False
    return True
