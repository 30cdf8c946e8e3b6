"""Baseline of the bench: `torch.distributed` all-reduce over gloo. Plaintext, and it cannot lose anybody.

Run by the bench with the interpreter of `--baseline-python`; imports torch and `bench_worker`, nothing else.
"""

import os

import torch
import torch.distributed as dist

from . import worker as bench_worker
from .worker import Answer


class Gloo:
    """One rank."""

    def open(self, command: Answer) -> Answer:
        """Make the vector."""
        torch.set_num_threads(1)
        self._index, self._peers = command["index"], command["peers"]
        self._vector = torch.empty(command["params"])
        return {}

    def meet(self, command: Answer) -> Answer:
        """Build the full mesh, over loopback."""
        os.environ["GLOO_SOCKET_IFNAME"] = command["interface"]
        store = "file://" + command["folder"] + "/gloo-store"
        dist.init_process_group("gloo", init_method=store, rank=self._index, world_size=self._peers)
        return {}

    def fill(self, command: Answer) -> Answer:
        """Write my vector."""
        bench_worker.fill(self._vector.numpy(), self._index)
        return {}

    def gather(self, command: Answer) -> Answer:
        """The group is fixed."""
        return {}

    def go(self, command: Answer) -> Answer:
        """The weighted mean, as a sum of shares."""
        total = sum(bench_worker.weight(index) for index in range(self._peers))
        self._vector *= bench_worker.weight(self._index) / total
        dist.all_reduce(self._vector)
        return {"outcome": "done", "contributors": list(range(self._peers))}

    def check(self, command: Answer) -> Answer:
        """Compare with the exact mean."""
        return bench_worker.compare(self._vector.numpy(), command["groups"])


def main() -> None:
    """Serve the bench."""
    gloo = Gloo()
    bench_worker.serve({name: getattr(gloo, name) for name in ("open", "meet", "fill", "gather", "go", "check")})
