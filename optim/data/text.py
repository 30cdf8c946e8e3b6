"""Text from files: of a folder, a glob, or Python's standard library."""

import fnmatch
import glob
import os
import sysconfig
from collections.abc import Iterable, Iterator
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


def texts(place: str, skips: Skips | None = None) -> Iterator[bytes]:
    """The texts of `named_texts`."""
    return (text for _, text in named_texts(place, skips or Skips()))


def named_texts(place: str, skips: Skips) -> Iterator[tuple[Path, bytes]]:
    """One file with UTF-8 text after the other, in the order of their names, and its text; other files are skipped.

    `skips` takes those that hold text of another encoding. Raises `UsageError` where there is no such file, and where one
    cannot be read.
    """
    if place != STDLIB:
        yield from _read(_text_files(place), skips)
        return
    left = MAX_STDLIB_BYTES
    for file, text in _read(_stdlib_files(), Skips()):
        yield file, text[:left]
        left -= len(text) + 1
        if left <= 0:
            return


def _text_files(place: str) -> list[Path]:
    """The files of a path or glob, in the order of their names; hidden ones below a folder are left out."""
    path = user_path(place)
    if path.is_dir():
        return _below(path, "*", skip=())
    return files_of(place, "text")


def files_of(place: str, kind: str) -> list[Path]:
    """The files that a path or a glob names. Raises `UsageError` if there is none."""
    path = user_path(place)
    files = [path] if path.is_file() else sorted(Path(found) for found in glob.glob(str(path), recursive=True))
    if not files:
        raise UsageError(f"{kind}:{place}: there is no such file or folder", remedy="check the path")
    return [file for file in files if file.is_file()]


def _stdlib_files() -> list[Path]:
    # Tests are a third of it and much of their text is data; site-packages differs from computer to computer.
    return _below(Path(sysconfig.get_path("stdlib")), "*.py", skip=("site-packages", "test", "tests", "idle_test"))


def _below(folder: Path, pattern: str, *, skip: tuple[str, ...]) -> list[Path]:
    """The files below a folder in the order of their names; folders to skip are not entered, since they may be large."""

    def is_wanted(name: str) -> bool:
        return name not in skip and not name.startswith(".")

    found: list[tuple[tuple[str, ...], Path]] = []
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if is_wanted(name)]
        files = [Path(place, name) for name in fnmatch.filter(names, pattern) if is_wanted(name)]
        found += [(file.relative_to(folder).parts, file) for file in files if file.is_file()]
    return [file for _, file in sorted(found)]


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
    """Return True for UTF-8; what holds text in another form is skipped, what is no text is passed over."""
    if form := form_of(content[:8]):
        skips.add(file, 0, form)
        return False
    if encoding := wide_encoding(content[:PROBE_BYTES]):
        skips.add(file, 0, f"is {encoding}, not UTF-8", encoding)
        return False
    if content.count(0) * FEW >= len(content):
        return False
    try:
        content.decode()
    except UnicodeDecodeError as error:
        if b"\0" in content:
            return False
        line = content.count(b"\n", 0, error.start) + 1
        skips.add(file, line, f"is no UTF-8: byte {content[error.start]:#04x}", "LATIN1")
        return False
    if b"\0" in content:
        line = content.count(b"\n", 0, content.index(0)) + 1
        skips.add(file, line, "holds a zero byte, which ends a document: remove it")
        return False
    return True
