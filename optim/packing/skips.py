"""What of a source is left out, and why: all of it is counted, and the first of it named."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...peer.base.plain import plain_text, shortened

GZIP = b"\x1f\x8b"
"""What a file packed by gzip begins with (RFC 1952)."""
FORMS = {
    GZIP: "packed by gzip: unpack it",
    b"BZh": "packed by bzip2: unpack it",
    b"\xfd7zXZ\0": "packed by xz: unpack it",
    b"\x28\xb5\x2f\xfd": "packed by zstd: unpack it",
    b"PK\x03\x04": "a zip, as documents of an office are: unpack it, or save it as text",
    b"%PDF": "a PDF: save it as text",
    b"PAR1": "parquet: name it by parquet:PATH",
    b"ARROW1": "Arrow: write it as parquet",
}
"""What files begin with that may hold text, but not as their bytes, and what to do with them."""
MAX_REASON = 500
"""Characters of what is wrong: a file may have a million columns."""
MAX_LEFT = 5
"""Files that are left out and named in a line."""


@dataclass(frozen=True, slots=True)
class Flaw:
    """Stands for a row or a file that cannot be read, and says why."""

    reason: str
    encoding: str = ""
    """Of a text that is no UTF-8: what it may be."""


@dataclass(frozen=True, slots=True)
class Skip:
    """A row that nobody trains on. With row 0 it is a whole file."""

    file: str
    row: int
    reason: str
    encoding: str = ""

    @property
    def remedy(self) -> str:
        """What makes a text of another encoding readable; empty for any other row."""
        if not self.encoding:
            return ""
        file = shlex.quote(self.file)
        return f"convert it: iconv -f {self.encoding} -t UTF-8 {file} > NEW, and name NEW"

    def __str__(self) -> str:
        place = f"row {self.row:,} " if self.row else ""
        return plain_text(shortened(f"{self.file}: {place}{self.reason}", MAX_REASON))


@dataclass(slots=True)
class Skips:
    """What of a source is left out."""

    count: int = 0
    """Rows and files that cannot be read."""
    first: Skip | None = None
    num_left: int = 0
    """Files of a folder that are left out for their names or as no text, which is mostly meant."""
    left: list[str] = field(default_factory=list)
    """The first of them, and why."""

    def add(self, file: str, row: int, flaw: Flaw) -> None:
        """Count a row that cannot be read."""
        self.count += 1
        self.first = self.first or Skip(file, row, shortened(flaw.reason, MAX_REASON), flaw.encoding)

    def leave(self, file: str, reason: str) -> None:
        """Count a file that is left out for its name, or as no text."""
        self.num_left += 1
        self.left += [str(Skip(file, 0, reason))] if len(self.left) < MAX_LEFT else []

    def merge(self, found: Mapping[str, Any]) -> None:
        """Count those of another part of the source, as `dataclasses.asdict` has written them."""
        self.count += found["count"]
        self.first = self.first or (Skip(**found["first"]) if found["first"] else None)
        self.num_left += found["num_left"]
        self.left = (self.left + found["left"])[:MAX_LEFT]


def form_of(start: bytes) -> Flaw | None:
    """Return what a file is by its first bytes, where it holds text in another form; None for all else."""
    if form := next((form for mark, form in FORMS.items() if start.startswith(mark)), ""):
        return Flaw(f"is {form}")
    encoding = _wide_encoding(start)
    return Flaw(f"is {encoding}, not UTF-8", encoding) if encoding else None


def _wide_encoding(start: bytes) -> str:
    """Return the name of an encoding of two or four bytes a character, by the first bytes of a text; empty for others."""
    if start[:4] in (b"\xff\xfe\0\0", b"\0\0\xfe\xff"):
        return "UTF-32"
    if start[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return "UTF-16"
    start = start[: len(start) & ~1]
    zeros = [start[half::2].count(0) * 2 / max(len(start), 4) for half in (0, 1)]
    if max(zeros) < 0.5 or min(zeros) > 0.1:  # Where a text is of Latin letters; what is no text has zeros anywhere.
        return ""
    encoding = "UTF-16BE" if zeros[0] > zeros[1] else "UTF-16LE"
    text = start.decode(encoding, "replace")
    return encoding if sum(char.isprintable() or char.isspace() for char in text) > 0.95 * len(text) else ""
