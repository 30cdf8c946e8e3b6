"""`flockstep doctor`: what on this computer, its network or the run keeps a peer from taking part, and what to do.

Theory of operation. A *sheet* collects checks: each is passed, failed or does not apply, and is said as soon as it is
known. This computer is looked at first, by the standard library alone, so that even an installation without its packages
gets an answer; then the network as `join` would use it (`doctor_network`), while a process of its own loads torch, which
takes longest and may crash (`doctor_torch`). What is not known by `DEADLINE` has failed. Causes and remedies are those
of `join` (`peer.troubles`). Nothing is written, and nothing stays behind.
"""

import json
import platform
import shutil
import sys
import textwrap
import time
from collections.abc import Callable

from ...peer.config import PeerConfig
from ...peer.troubles import Trouble
from .machine import packages_trouble, python_trouble

Say = Callable[[str], None]

DEADLINE = 14.0
"""Seconds; with the interpreter's start, 3 s on a busy computer, and the goodbyes it is over in less than 20."""
MARKS = {True: "✓", False: "✗", None: "–"}
NAME_WIDTH = 21
"""As long as `bootstrap 1: TCP` and its like, with some room."""


TEXT_COLUMN = NAME_WIDTH + 3


class Sheet:
    """The checks so far; `expect` names those to come, which `close` fails if they never did.

    `width`: columns of the screen on which it is shown, 0 where its lines are to stay whole.
    """

    def __init__(self, say: Say, *, as_json: bool, width: int = 0) -> None:
        self.healthy = True
        self._say = say
        self._as_json = as_json
        self._width = width
        self._expected: dict[str, None] = {}

    def expect(self, *names: str) -> None:
        """These checks are under way."""
        self._expected.update(dict.fromkeys(names))

    def passed(self, name: str, found: str) -> None:
        """All is well; what was found."""
        self._tell(name, True, found, "")

    def failed(self, name: str, trouble: Trouble) -> None:
        """Something is wrong."""
        self.healthy = False
        self._tell(name, False, trouble.cause, trouble.remedy)

    def skipped(self, name: str, why: str) -> None:
        """It does not apply."""
        self._tell(name, None, why, "")

    def skip_rest(self, why: str, *, of: str = "") -> None:
        """Nothing will be known of what is still expected, or of those whose names begin with `of`."""
        for name in [name for name in self._expected if name.startswith(of)]:
            self.skipped(name, why)

    def close(self) -> None:
        """Whatever is still expected did not become known."""
        for name in list(self._expected):
            self.failed(name, Trouble(f"not known after {DEADLINE:g} s", "see what else is wrong, then try again"))

    def _tell(self, name: str, ok: bool | None, cause: str, remedy: str) -> None:
        self._expected.pop(name, None)
        if self._as_json:
            self._say(json.dumps({"name": name, "ok": ok, "cause": cause, "remedy": remedy}, ensure_ascii=False))
        else:
            self._say(self._row(f"{MARKS[ok]} {name:{NAME_WIDTH}} {Trouble(cause, remedy)}"))

    def _row(self, text: str) -> str:
        """One line, or where the screen is known to be narrower, several whose later ones leave the left column free."""
        if self._width <= 2 * TEXT_COLUMN:
            return text
        indent = " " * TEXT_COLUMN
        return textwrap.fill(text, self._width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def doctor(link: str | None, config: PeerConfig, say: Say, *, as_json: bool) -> bool:
    """Examine this computer, and with a link the way to its run; whether nothing is wrong. Raises `UsageError`."""
    deadline = time.monotonic() + DEADLINE
    sheet = Sheet(say, as_json=as_json, width=shutil.get_terminal_size().columns if sys.stdout.isatty() else 0)
    version = platform.python_version()
    if trouble := python_trouble(version):
        sheet.failed("python", trouble)
    else:
        sheet.passed("python", f"{version} on {platform.platform()}")
    trouble, found = packages_trouble()
    if trouble is not None:
        sheet.failed("packages", trouble)
    elif found:
        sheet.passed("packages", found)
    else:
        sheet.skipped("packages", "flockstep is not installed as a package: what it needs is not known")
    try:
        from .visit import visit
    except ImportError as error:
        sheet.failed("flockstep", Trouble(f"cannot be loaded: {error}", "install its packages anew: pip install flockstep"))
        return False
    visit(link, config, sheet, deadline - time.monotonic())
    return sheet.healthy
