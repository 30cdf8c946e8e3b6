"""What of a source is left out, and why: all of it is counted, and the first of it named."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...peer.base.plain import plain_text, shortened

MAX_REASON = 500
"""Characters of what is wrong: a file may have a million columns."""
MAX_LEFT = 5
"""Files that are left out and named in a line."""


@dataclass(frozen=True, slots=True)
class Flaw:
    """Stands for a row or a file that cannot be read, and says why."""

    reason: str


@dataclass(frozen=True, slots=True)
class Skip:
    """A row that nobody trains on. With row 0 it is a whole file."""

    file: str
    row: int
    reason: str

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
        self.first = self.first or Skip(file, row, shortened(flaw.reason, MAX_REASON))

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
