"""The bench's network: a bootstrap and peers in public, each on a line of its own, and its counters.

    public      a bridge, 44.0.0.1/16
    boot        44.0.0.10; its line has no limit
    peer i      44.0.<i + 1>.1, with the line of the case

The addresses count as public, so peers announce them; nothing leaves the namespaces. Every packet passes two lines, the
sender's and the receiver's: each has a quarter of the round trip as its delay, and its share of the loss.
"""

import threading
import time
from collections.abc import Sequence
from pathlib import Path

from ..namespaces import Namespaces, ShapedLine, check_compiler, check_namespaces
from .figures import LineSample, interface_counters

BOOTSTRAP = "boot"
DEVICE = "eth0"
SAMPLE_SECONDS = 0.05
"""Between two readings of the counters: 20 in each window of the peak rate."""


class SwarmLines(Namespaces):
    """The network of some peers, as a context."""

    def __init__(self, folder: Path, lines: Sequence[ShapedLine]) -> None:
        super().__init__(folder)
        self._lines = lines

    def build(self) -> None:
        """Build the bridge, the bootstrap's line and those of the peers."""
        self.add_bridge("public", "44.0.0.1/16")
        for name, address, line in (
            (BOOTSTRAP, "44.0.0.10/16", ShapedLine()),
            *((peer_name(index), f"{peer_address(index)}/16", line) for index, line in enumerate(self._lines)),
        ):
            self.add(name)
            self.connect(name, DEVICE, "public", f"to-{name}", line)
            self.address(name, DEVICE, address)


def peer_name(index: int) -> str:
    """Return the name of a peer's namespace."""
    return f"peer{index}"


def peer_address(index: int) -> str:
    """Return a peer's address."""
    return f"44.0.{index + 1}.1"


def shaped_line(rate: float, round_trip: float, loss: float) -> ShapedLine:
    """Return the line of each peer, so that two of them in a row have this round trip and loss."""
    return ShapedLine(rate, rate, round_trip / 4, 1 - (1 - loss) ** 0.5)


def check_lines(rate: float, round_trip: float, loss: float) -> None:
    """Raise `LocalError` if this machine cannot make such lines."""
    check_namespaces(("ip", "tc"))
    line = shaped_line(rate, round_trip, loss)
    if line.delay or line.loss:
        check_compiler()


class LineCounters:
    """Samples the interface's counters of some processes, each in a namespace of its own, in a thread; as a context."""

    def __init__(self, pids: Sequence[int]) -> None:
        self.samples: list[list[LineSample]] = [[] for _ in pids]
        self._pids = pids
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="line counters", daemon=True)

    def __enter__(self) -> "LineCounters":
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._over.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._over.wait(SAMPLE_SECONDS):
            for pid, samples in zip(self._pids, self.samples, strict=True):
                try:
                    table = Path(f"/proc/{pid}/net/dev").read_text()
                    samples.append(LineSample(time.time(), *interface_counters(table, DEVICE)))
                except (OSError, ValueError):  # A process that has just ended, or not yet entered its namespace.
                    continue
