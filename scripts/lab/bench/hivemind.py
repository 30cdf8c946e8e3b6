"""Bench baseline: hivemind's `DecentralizedAverager`, a DHT and a daemon for each peer.

The bench runs it with the interpreter of `--hivemind`; it imports hivemind, torch and `worker`, nothing else.
The timing starts with a complete group: hivemind's matchmaking, several seconds, is not counted.
"""

import time
from typing import Any

import hivemind
import numpy as np
import torch
from hivemind.averaging.control import AveragingStage

from . import worker
from .worker import WorkerAnswer

CODECS = {
    "fp32": hivemind.compression.NoCompression,
    "fp16": hivemind.compression.Float16Compression,
    "uniform8": hivemind.compression.Uniform8BitQuantization,
}
MATCHMAKING = 3.0
"""Seconds for matchmaking: with less, four peers on a busy machine end up in two groups."""


class Hivemind:
    """One peer: this process with its averager, DHT and daemon."""

    def open(self, command: WorkerAnswer) -> WorkerAnswer:
        """Start a DHT node; all but the first join the first one's DHT."""
        if command["codec"].endswith("8") and np.lib.NumpyVersion(np.__version__) >= "2.4.0":
            raise RuntimeError("hivemind's 8-bit codecs need numpy<2.4: with a newer one they fail silently")
        torch.set_num_threads(1)
        self._index, self._peers = command["index"], command["peers"]
        first = command["first"]
        self._dht = hivemind.DHT(
            initial_peers=first["addresses"] if first else None, start=True, host_maddrs=["/ip4/127.0.0.1/tcp/0"]
        )
        self._codec = CODECS[command["codec"]]()
        self._vector = torch.empty(command["params"])
        return {"addresses": [str(address) for address in self._dht.get_visible_maddrs()]}

    def meet(self, command: WorkerAnswer) -> WorkerAnswer:
        """Start the averager."""
        self._averager = hivemind.DecentralizedAverager(
            [self._vector],
            dht=self._dht,
            prefix="bench",
            start=True,
            compression=self._codec,
            target_group_size=self._peers,
            min_matchmaking_time=MATCHMAKING,
            request_timeout=MATCHMAKING / 3,
        )
        del self._vector  # The averager holds a copy of its own in shared memory.
        return {}

    def fill(self, command: WorkerAnswer) -> WorkerAnswer:
        """Fill the vector, and run the matchmaking up to the trigger."""
        with self._averager.get_tensors() as (tensor,):
            worker.fill(tensor.numpy(), self._index)
        deadline = time.monotonic() + worker.OPENING_SECONDS
        self._step: Any = self._averager.step(
            wait=False,
            require_trigger=True,
            weight=float(worker.weight(self._index)),
            timeout=worker.OPENING_SECONDS,
        )
        while self._step.stage is not AveragingStage.AWAITING_TRIGGER:
            if self._step.done() or time.monotonic() > deadline:
                raise RuntimeError(f"hivemind found no group: {self._step.stage}")
            time.sleep(0.005)
        return {}

    def go(self, command: WorkerAnswer) -> WorkerAnswer:
        """Average with the group."""
        self._step.allow_allreduce()
        self._step.result(command["patience"])
        return {}

    def check(self, command: WorkerAnswer) -> WorkerAnswer:
        """Compare with the exact mean."""
        with self._averager.get_tensors() as (tensor,):
            return worker.compare(tensor.numpy(), self._peers)


def main() -> None:
    """Run the worker."""
    peer = Hivemind()
    worker.serve_worker({name: getattr(peer, name) for name in ("open", "meet", "fill", "go", "check")})
