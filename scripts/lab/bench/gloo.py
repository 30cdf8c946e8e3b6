"""Bench baseline: `torch.distributed` all-reduce over gloo, plaintext, not fault-tolerant.

The bench runs it with the interpreter of `--baseline-python`; it imports torch and `worker`, nothing else.
"""

import os

import torch
import torch.distributed as dist

from . import worker
from .worker import WorkerAnswer


class Gloo:
    """One rank."""

    def open(self, command: WorkerAnswer) -> WorkerAnswer:
        """Allocate the vector."""
        torch.set_num_threads(1)
        self._index, self._peers = command["index"], command["peers"]
        self._vector = torch.empty(command["params"])
        return {}

    def meet(self, command: WorkerAnswer) -> WorkerAnswer:
        """Build the full mesh, over loopback."""
        os.environ["GLOO_SOCKET_IFNAME"] = command["interface"]
        store = "file://" + command["folder"] + "/gloo-store"
        dist.init_process_group("gloo", init_method=store, rank=self._index, world_size=self._peers)
        return {}

    def fill(self, command: WorkerAnswer) -> WorkerAnswer:
        """Fill my vector."""
        worker.fill(self._vector.numpy(), self._index)
        return {}

    def gather(self, command: WorkerAnswer) -> WorkerAnswer:
        """Do nothing: the group is fixed."""
        return {}

    def go(self, command: WorkerAnswer) -> WorkerAnswer:
        """Compute the weighted mean, as a sum of weighted vectors."""
        total = sum(worker.weight(index) for index in range(self._peers))
        self._vector *= worker.weight(self._index) / total
        dist.all_reduce(self._vector)
        return {"outcome": "done", "contributors": list(range(self._peers))}

    def check(self, command: WorkerAnswer) -> WorkerAnswer:
        """Compare with the exact mean."""
        return worker.compare(self._vector.numpy(), command["groups"])


def main() -> None:
    """Run the worker."""
    gloo = Gloo()
    worker.serve_worker({name: getattr(gloo, name) for name in ("open", "meet", "fill", "gather", "go", "check")})
