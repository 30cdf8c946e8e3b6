"""Loads modules without garbage collections: what they make stays, and each collection walks over all of it again.

An eighth of the CPU seconds that a peer takes to start; and later collections need not walk over it either.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Collect no garbage inside of the block, and never what is there at its end (gc.freeze)."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
