"""What a child of `Confined` does when it is asked for it."""

import os
import resource
from collections.abc import Callable

from flockstep.peer.process.confined import MOST_MEMORY


def open_answers(data: bytes) -> Callable[[bytes], bytes]:
    """Do what `data` names at once, or whatever is asked later."""
    do(data)
    return do


def do(request: bytes) -> bytes:
    """Answer with the request, or do what it names."""
    if request == b"environment":
        return " ".join(os.environ).encode()
    if request == b"memory":
        return bytes(2 * MOST_MEMORY)[:1]
    if request == b"abort":
        os.abort()
    if request == b"time":
        used = resource.getrusage(resource.RUSAGE_SELF)
        resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime) + 1, -1))
        while True:
            pass
    if request == b"refuse":
        raise ValueError("is none of ours")
    if request == b"raise":
        raise KeyError("key")
    os.write(1, b"what a library prints is no answer")
    return b"x" * 1000 if request == b"long" else request
