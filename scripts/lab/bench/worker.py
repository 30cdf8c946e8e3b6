"""A bench's worker of any system: commands as JSON lines, seeded vectors with a known exact mean.

It needs NumPy alone, since baselines may run under an interpreter without any of flockstep's dependencies.

Theory of operation. The bench writes one command a line to a worker's stdin and reads one answer a line from its
stdout; the output of libraries goes to stderr, which is a log file. The commands: `open` (start up; the answer is sent
to the others), `meet` (find each other), then for every round `fill` (all of a system's work before it is ready), `go`
(average; the only timed one) and `check`. A vector is one block of seeded normal numbers, repeated: so a worker knows the
exact mean without ever holding the others' vectors.
"""

import hashlib
import json
import os
import sys
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ....collectives.vector.arrays import Floats

FILL_BLOCK = 1 << 20
"""Elements of a block: many times the blocks of any codec, and one is made in milliseconds."""
OPENING_SECONDS = 120
"""The timeout of a system's start and introductions: hivemind's matchmaking takes several seconds on a busy machine."""

WorkerAnswer: TypeAlias = dict[str, Any]


class WorkerLine:
    """The worker's end of the pipe to the bench."""

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)

    def read(self) -> WorkerAnswer | None:
        """Receive the next command; None when the bench has ended."""
        line = sys.stdin.readline()
        if not line:
            return None
        command: WorkerAnswer = json.loads(line)
        return command

    def write(self, answer: WorkerAnswer) -> None:
        """Answer the command."""
        self._answers.write(json.dumps(answer) + "\n")


def serve_worker(commands: dict[str, Callable[[WorkerAnswer], WorkerAnswer]]) -> None:
    """Run commands until the bench ends; an error is the command's answer, for the bench to report."""
    line = WorkerLine()
    while (command := line.read()) is not None:
        try:
            answer = commands[command["op"]](command)
        except Exception as error:  # noqa: BLE001  The boundary of one measured system.
            answer = failed(error)
        line.write(answer)
    os._exit(0)  # Skips the clean-up of libraries, which may wait for lost peers.


def failed(error: BaseException) -> WorkerAnswer:
    """Return the answer to a command that raised."""
    return {"outcome": "failed", "reason": " ".join(f"{type(error).__name__}: {error}".split())[:300]}


def weight(index: int) -> int:
    """Return the weight of a worker's vector. Unequal, to expose an average without weights; far below any cap."""
    return 1000 + 10 * index


def block(index: int) -> Floats:
    """Return the block that worker `index` repeats. [BLOCK] float32."""
    return np.random.default_rng(index).standard_normal(FILL_BLOCK, dtype=np.float32)


def fill(vector: Floats, index: int) -> None:
    """Write the vector of worker `index`."""
    one = block(index)
    for start in range(0, vector.size, FILL_BLOCK):
        piece = vector[start : start + FILL_BLOCK]
        piece[:] = one[: piece.size]


def exact_mean(peers: int) -> npt.NDArray[np.float64]:
    """Return the weighted mean of the blocks of all workers. [BLOCK] float64."""
    total = np.zeros(FILL_BLOCK)
    for index in range(peers):
        total += weight(index) * block(index).astype(np.float64)
    return total / sum(map(weight, range(peers)))


def compare(vector: Floats, peers: int) -> WorkerAnswer:
    """Return the distance of `vector` from the exact mean, and a hash of its bytes."""
    mean = exact_mean(peers)
    off = norm = 0.0
    for start in range(0, vector.size, FILL_BLOCK):
        piece = vector[start : start + FILL_BLOCK]
        off += float(np.square(piece - mean[: piece.size]).sum())
        norm += float(np.square(mean[: piece.size]).sum())
    return {"rel_l2": (off / norm) ** 0.5, "digest": hashlib.sha256(vector.data).hexdigest()}
