"""Versions of flockstep, as manifests and members state them. Pure."""

import re
from importlib.metadata import version

from ...peer.errors import UsageError

VERSION = version("flockstep")
_VERSION = re.compile(r"\d{1,4}(\.\d{1,4}){1,2}", re.ASCII)


def is_version(text: str) -> bool:
    """Return True for a version as a manifest names it, such as 0.3 or 0.3.1."""
    return _VERSION.fullmatch(text) is not None


def check_version(needed: str) -> None:
    """Raise `UsageError` if a run needs a later flockstep than this one; empty: it needs none."""
    if needed and is_later(needed):
        raise UsageError(
            f"this run needs flockstep {needed} or later, this is {VERSION}",
            remedy="install it: pip install -U flockstep",
        )


def is_later(needed: str) -> bool:
    """Return True if a version is later than this one; of mine only the leading numbers count."""
    return numbers_of(needed) > numbers_of(VERSION) > []


def numbers_of(text: str) -> list[int]:
    """Return the leading numbers of a version of flockstep, without zeros at the end; empty for a text that is none."""
    found = _VERSION.match(text)
    numbers = [*map(int, found[0].split("."))] if found else []
    while numbers and not numbers[-1]:
        numbers.pop()
    return numbers
