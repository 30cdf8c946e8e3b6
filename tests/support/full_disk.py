"""A disk that takes no more, for as long as a test needs it."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """Let the system refuse what makes a file longer than `size` bytes, in the middle of a write, as a full disk does.

    Python is to cache no module meanwhile: it would keep as much of it as fits, and every later process would fail there.
    """
    resource = pytest.importorskip("resource", reason="limits of a process are a matter of POSIX")
    before, is_uncached = resource.getrlimit(resource.RLIMIT_FSIZE), sys.dont_write_bytecode
    sys.dont_write_bytecode = True
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        sys.dont_write_bytecode = is_uncached
