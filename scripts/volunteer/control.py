"""`flockstep pause` and `flockstep resume`: the word of a user to the peer with this home folder.

The word is a file in the home folder, `paused`, which the peer looks for twice a second. So it survives a restart: a
computer that was paused and boots again does not train until its user lets it.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from ...peer.base.disk import disk_errors, write_whole
from ...peer.base.errors import LocalError
from ...peer.base.home_lock import home_lock, is_locked

TRAINING_LOCK = "training.lock"
"""Held by `flockstep join` for as long as it runs, paused or not."""


def pause_file(home: Path) -> Path:
    """Return the path of the file that means: paused."""
    return home / "paused"


@contextlib.contextmanager
def training_here(home: Path) -> Iterator[None]:
    """Be the peer that `pause` and `resume` of this home folder speak to. Raises `LocalError` if there is another."""
    with home_lock(home, pid=os.getpid(), name=TRAINING_LOCK):
        yield


def pause(home: Path, say: Callable[[str], None]) -> None:
    """Pause the peer with this home folder. Raises `LocalError` if none runs."""
    if not is_locked(home / TRAINING_LOCK):
        remedy = "name its folder with --home; a peer that is not started needs no pause"
        raise LocalError(f"no peer that trains runs with the home folder {home}", remedy=remedy)
    if pause_file(home).exists():
        say("It is paused already; `flockstep resume` lets it go on.")
        return
    write_whole(pause_file(home), b"paused\n")
    say("Paused: the peer leaves its run in order, and waits. `flockstep resume` lets it go on, also after a restart.")


def resume(home: Path, say: Callable[[str], None]) -> None:
    """Let the peer with this home folder go on, or one that is started later. Raises `LocalError` if none is paused."""
    if not pause_file(home).exists():
        raise LocalError(f"no peer is paused in the home folder {home}", remedy="name its folder with --home")
    with disk_errors(f"remove {pause_file(home)}"):
        pause_file(home).unlink(missing_ok=True)
    if is_locked(home / TRAINING_LOCK):
        say("The peer goes on.")
    else:
        say("No peer runs now; the next `flockstep join` is not paused.")
