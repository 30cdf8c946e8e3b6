"""Baseline: `hivemind.Optimizer` with local steps and parameters averaged in the background.

The bench runs it with the interpreter of `--baseline-python`; beside hivemind and torch it imports only what needs no
package. `use_local_updates` is hivemind's local SGD: every peer steps on its own, and after an epoch, here H steps of each
peer, parameters are averaged. `delay_state_averaging` does that in the background, beside further steps: hivemind's
counterpart to streaming. Parameters travel as float16, its smallest codec that needs no other package.
"""

import time
from typing import Any

import hivemind
import torch

from ..bench import worker
from ..bench.worker import WorkerAnswer
from .figures import StepClock

NUM_TENSORS_OF_BASELINE = 16
"""As in our own synthetic model."""
BASELINE_STALL_SECONDS = 0.1
MATCHMAKING_SECONDS = 5.0
"""Seconds to find a group; averaging is prepared so long before the end of an epoch."""
AVERAGING_SECONDS = 600.0
"""The timeout of one averaging, far above what the slowest line of interest takes."""


class HivemindTrainer:
    """One peer: this process with its optimizer, DHT and daemon."""

    def open(self, command: WorkerAnswer) -> WorkerAnswer:
        """Start a DHT node; all but the first join the first one's DHT. Then start the optimizer."""
        torch.set_num_threads(1)
        first = command["first"]
        self._dht = hivemind.DHT(
            initial_peers=first["addresses"] if first else None,
            start=True,
            host_maddrs=[f"/ip4/{command['address']}/tcp/0"],
        )
        size = command["params"] // NUM_TENSORS_OF_BASELINE
        tensors = [torch.nn.Parameter(torch.zeros(size)) for _ in range(NUM_TENSORS_OF_BASELINE)]
        self._piece = max(1, size // command["steps"])
        self._tensors = tensors
        self._seconds: float = command["step_seconds"]
        self._optimizer = hivemind.Optimizer(
            dht=self._dht,
            run_id="bench-utilization",
            target_batch_size=command["peers"] * command["steps"],
            batch_size_per_step=1,
            optimizer=torch.optim.SGD(tensors, lr=0.0),
            use_local_updates=True,
            delay_state_averaging=True,
            matchmaking_time=MATCHMAKING_SECONDS,
            averaging_timeout=AVERAGING_SECONDS,
            state_averaging_compression=hivemind.compression.Float16Compression(),
            averager_opts={"request_timeout": MATCHMAKING_SECONDS / 3, "target_group_size": command["peers"]},
            verbose=True,
        )
        return {"addresses": [str(address) for address in self._dht.get_visible_maddrs()]}

    def train(self, command: WorkerAnswer) -> WorkerAnswer:
        """Train for so many epochs."""
        boundaries: list[tuple[float, float, int]] = []
        stalls: list[tuple[float, float]] = []
        trained, steps = 0.0, 0
        clock = StepClock(self._seconds, time.monotonic())
        while self._optimizer.local_epoch < command["rounds"]:
            time.sleep(clock.wait(time.monotonic()))
            trained += self._seconds
            self._move(steps)
            before, epoch = time.time(), self._optimizer.local_epoch
            self._optimizer.step()
            after = time.time()
            clock.blocked(after - before)
            steps += 1
            if after - before > BASELINE_STALL_SECONDS:
                stalls.append((before, after))
            if self._optimizer.local_epoch > epoch:
                boundaries.append((after, trained, self._optimizer.local_epoch))
        return {"boundaries": boundaries, "stalls": stalls, "steps": steps}

    @torch.no_grad()
    def _move(self, step: int) -> None:
        """Change one slice of every tensor, as our own synthetic optimizer does."""
        start = step * self._piece % self._tensors[0].numel()
        for tensor in self._tensors:
            tensor[start : start + self._piece] += 1e-3


def main() -> None:
    """Run the worker."""
    peer: Any = HivemindTrainer()
    worker.serve_worker({name: getattr(peer, name) for name in ("open", "train")})
