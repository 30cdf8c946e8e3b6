"""Versions of flockstep, as manifests and members state them. Pure."""

import re
from importlib.metadata import version

from ...peer.base.errors import OtherVersion, UsageError
from ...peer.base.install import NEWER

VERSION = version("flockstep")
FORM = 2
"""The form of all that the members of a run sign and keep. Its manifest and its checkpoints state it. A version that signs or
reads any of that otherwise has the next number, so no run is ever of two forms, and a peer refuses a run of another form
before it writes anything."""
FORMER = 1
"""The form of what states none."""
_VERSION = re.compile(r"\d{1,4}(\.\d{1,4}){1,2}", re.ASCII)


def is_version(text: str) -> bool:
    """Return True for a version as a manifest names it, such as 0.3 or 0.3.1."""
    return _VERSION.fullmatch(text) is not None


def other_form(what: str, form: int, remedy: str) -> OtherVersion:
    """Return the error for something of another form than `FORM`; `remedy` is for an earlier one."""
    which = "an earlier" if form < FORM else "a later"
    remedy = remedy if form < FORM else NEWER
    return OtherVersion(f"{what} of {which} version of flockstep (form {form}; {VERSION} reads form {FORM})", remedy=remedy)


def check_version(needed: str) -> None:
    """Raise `UsageError` if a run needs a later flockstep than this one; empty: it needs none."""
    if needed and is_later(needed):
        raise UsageError(
            f"this run needs flockstep {needed} or later, this is {VERSION}",
            remedy=NEWER,
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
