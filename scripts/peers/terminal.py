"""The terminal of a process: the signals that end it in order, and an output that may be lost before it ends."""

import errno
import io
import signal
import sys
from typing import Any


def ending_signals() -> tuple[signal.Signals, ...]:
    """Return SIGINT, SIGTERM and SIGHUP, which a closed terminal sends; without the last where `nohup` ignores it."""
    if sys.platform == "win32" or signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        return signal.SIGINT, signal.SIGTERM
    return signal.SIGINT, signal.SIGTERM, signal.SIGHUP


def outlive_terminal() -> None:
    """Let stdout and stderr take what is written to a closed terminal, so that the process can still leave in order.

    What a terminal cannot show it shows as an escape: a name that others wrote must not end this peer either.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if not isinstance(stream, io.TextIOWrapper):
            continue
        stream.reconfigure(errors="backslashreplace")
        if stream.isatty():
            raw = _Terminal(stream.fileno(), "w", closefd=False)
            setattr(
                sys, name, io.TextIOWrapper(io.BufferedWriter(raw), stream.encoding, stream.errors, line_buffering=True)
            )


class _Terminal(io.FileIO):
    """Writes to a terminal, and to nowhere once that is closed."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return memoryview(data).nbytes
