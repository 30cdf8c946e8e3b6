"""Gradient accumulation: one inner step from micro-batches of the size that suits the device.

Theory of operation. The manifest sets the batch of a step for every device. Where it does not fit, or where smaller
pieces are faster, it is cut into *micro-batches* whose gradients add up to the same sum. The first steps measure the
best size, so that no work is wasted: one step to warm up and one to measure for the whole batch, then for half of it,
and so on as long as training gets faster; a size that the user has set is not measured. If memory runs out, at the start
or later, the size is halved and the step is repeated from its beginning, with the same samples.
"""

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ...peer.log.telemetry import Telemetry

FASTER = 1.1
"""The speed-up that a halved size must reach: less is within the noise of two measurements."""

EXHAUSTED = ("out of memory", "can't allocate memory", "not enough memory", "STATUS_ALLOC_FAILED")
"""How CUDA and MPS, torch's CPU allocator on Linux and elsewhere, and cuBLAS and cuDNN say that memory has run out."""


class MicroBatches:
    """Backward passes over batches of `batch_size` samples, `size` samples at a time; 0 finds the fastest size.

    `adaptive=False` keeps the size, as sharded models require, whose ranks must do the same number of passes.
    `about` gives more fields for the event of what was measured, from the tokens/s.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_of: Callable[[nn.Module, Tensor], Tensor],
        telemetry: Telemetry,
        *,
        batch_size: int,
        size: int = 0,
        stopped: Callable[[], bool] = lambda: False,
        about: Callable[[float], Mapping[str, Any]] = lambda tokens_per_s: {},
        adaptive: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.size = min(size or batch_size, batch_size)
        self._model = model
        self._loss_of = loss_of
        self._telemetry = telemetry
        self._clock = clock
        self._stopped = stopped
        self._about = about
        self._adaptive = adaptive
        self.is_measuring = adaptive and not size
        """Whether the size of the next step is still to be found."""
        self._warm: set[int] = set()
        self._best = (0, 0.0)
        """The fastest size so far, and its tokens/s."""

    def backward(self, batch: Tensor, scale: float = 1.0) -> Tensor | None:
        """Add `scale` times the gradients of the mean loss over `batch`, int64 (samples, length + 1); return that loss.

        Returns None if `stopped` says between two micro-batches that nobody needs it any more.
        Raises the device's error if not even one sample fits.
        """
        began = self._now(batch.device)
        while (loss := self._passes(batch, scale)) is None:
            if self._stopped():
                return None
            began = self._now(batch.device)
        if self.is_measuring:
            self._judge(batch, self._now(batch.device) - began)
        return loss

    def _passes(self, batch: Tensor, scale: float) -> Tensor | None:
        """Run one pass over each micro-batch; return None if memory ran out, after halving the size, or if stopped."""
        loss = torch.zeros((), device=batch.device)
        pieces: Sequence[Tensor] = batch.split(self.size)  # type: ignore[no-untyped-call]  # of torch
        model = self._model
        try:
            for number, piece in enumerate(pieces, 1):
                if self._stopped():
                    return None
                later = number < len(pieces)
                with model.no_sync() if later and isinstance(model, DistributedDataParallel) else contextlib.nullcontext():
                    part = self._loss_of(model, piece) * (_targets(piece) / _targets(batch).clamp(min=1))
                    (part * scale).backward()  # type: ignore[no-untyped-call]  # of torch
                loss += part.detach()
            return loss
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error) or self.size == 1 or not self._adaptive:
                raise
            reason = (str(error) or type(error).__name__).splitlines()[0]
        # Outside of the handler, whose traceback holds the tensors that fill the memory.
        model.zero_grad(set_to_none=True)
        if batch.device.type == "cuda":
            torch.cuda.empty_cache()
        self.size //= 2
        self._telemetry.emit("device.out_of_memory", step="backward", reason=reason, micro_batch=self.size)
        return None

    def _judge(self, batch: Tensor, seconds: float) -> None:
        """Record the time of a step, and choose the size of the next one."""
        if self.size not in self._warm:
            self._warm.add(self.size)
            return
        tokens_per_s = batch[:, 1:].numel() / max(seconds, 1e-9)
        if tokens_per_s > FASTER * self._best[1]:
            self._best = (self.size, tokens_per_s)
            if self.size > 1:
                self.size //= 2
                return
        self.is_measuring = False
        self.size, tokens_per_s = self._best
        used, total = memory_of(batch.device)
        self._telemetry.emit(
            "device.bench",
            tokens_per_s=round(tokens_per_s, 1),
            micro_batch=self.size,
            batch_size=len(batch),
            memory_used=used,
            memory_total=total,
            **self._about(tokens_per_s),
        )

    def _now(self, device: torch.device) -> float:
        if self.is_measuring and device.type == "cuda":
            torch.cuda.synchronize(device)
        return self._clock()


def target_share(batch: Tensor) -> float:
    """Return the part of a batch's tokens that have a loss; scaled by it, the batches of one step count by their targets."""
    return float(_targets(batch)) / batch[:, 1:].numel()


def _targets(batch: Tensor) -> Tensor:
    """Return how many tokens of a batch have a loss, all but those below zero; on its device, which is not waited for."""
    return (batch[:, 1:] >= 0).sum()


def out_of_memory(error: Exception) -> bool:
    """Return True if a device has run out of memory: CUDA has an exception for it, MPS and the CPU only a message."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(text in str(error) for text in EXHAUSTED)


def memory_of(device: torch.device) -> tuple[int, int]:
    """Return the peak and the total memory in bytes; zeros for a CPU, which shares its memory with other programs."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device), torch.cuda.get_device_properties(device).total_memory
    if device.type == "mps":
        return torch.mps.driver_allocated_memory(), torch.mps.recommended_max_memory()
    return 0, 0
