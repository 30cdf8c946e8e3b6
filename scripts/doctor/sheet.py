"""The sheet of `flockstep doctor`: each check passes, fails or is skipped, written at once."""

import json
import textwrap
from collections.abc import Callable

from ...peer.base.plain import plain_text
from ...peer.base.troubles import Trouble

DEADLINE = 14.0
"""Seconds; with the interpreter's start, 3 s on a busy computer, and the shutdown it ends in less than 20."""
MARKS = {True: "✓", False: "✗", None: "–"}

NAME_WIDTH = 21
"""The length of `bootstrap 1: TCP` and similar names, with some room."""
TEXT_COLUMN = NAME_WIDTH + 3


class Sheet:
    """The results so far; `expect` names checks to come, and `close` fails those without a result.

    `width` is the number of columns to wrap to; 0 leaves lines whole.
    """

    def __init__(self, write_line: Callable[[str], None], *, as_json: bool, width: int = 0) -> None:
        self.healthy = True
        self._write_line = write_line
        self._as_json = as_json
        self._width = width
        self._expected: dict[str, None] = {}

    def expect(self, *names: str) -> None:
        """Announce checks that are under way."""
        self._expected.update(dict.fromkeys(names))

    def passed(self, name: str, found: str) -> None:
        """Record a passed check, and what was found."""
        self._record(name, True, found, "")

    def failed(self, name: str, trouble: Trouble) -> None:
        """Record a failed check."""
        self.healthy = False
        self._record(name, False, trouble.cause, trouble.remedy)

    def skipped(self, name: str, why: str) -> None:
        """Record a check that does not apply."""
        self._record(name, None, why, "")

    def skip_rest(self, why: str, *, of: str = "") -> None:
        """Skip the expected checks whose names begin with `of`."""
        for name in [name for name in self._expected if name.startswith(of)]:
            self.skipped(name, why)

    def close(self) -> None:
        """Fail the checks that are still expected."""
        for name in list(self._expected):
            self.failed(name, Trouble(f"not known after {DEADLINE:g} s", "resolve the other failures, then try again"))

    def _record(self, name: str, ok: bool | None, cause: str, remedy: str) -> None:
        self._expected.pop(name, None)
        cause, remedy = plain_text(cause), plain_text(remedy)
        if self._as_json:
            self._write_line(json.dumps({"name": name, "ok": ok, "cause": cause, "remedy": remedy}, ensure_ascii=False))
        else:
            for line in self._row(f"{MARKS[ok]} {name:{NAME_WIDTH}} {Trouble(cause, remedy)}").split("\n"):
                self._write_line(line)

    def _row(self, text: str) -> str:
        """Wrap a row to the width, indented to the text column; leave it whole if the width is unknown or small."""
        if self._width <= 2 * TEXT_COLUMN:
            return text
        indent = " " * TEXT_COLUMN
        return textwrap.fill(text, self._width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
