"""Micro-batches: equal gradients, the best size found in training, and out-of-memory errors."""

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from flockstep.optim.step.micro_batches import MicroBatches, memory_of, out_of_memory
from flockstep.peer.log.telemetry import Event, Telemetry
from torch import Tensor, nn


class Device:
    """A model whose passes take the time and the memory that a table tells for each number of samples."""

    def __init__(self, seconds: Callable[[int], float], *, fits: int = 1 << 20) -> None:
        self.model = nn.Embedding(8, 1)
        self.seconds, self.fits = seconds, fits
        self.now = 0.0
        self.passes: list[int] = []
        self.events: list[Event] = []
        telemetry = Telemetry()
        telemetry.subscribe(self.events.append)
        self.pieces = MicroBatches(self.model, self.loss_of, telemetry, batch_size=8, clock=lambda: self.now)

    def loss_of(self, model: nn.Module, tokens: Tensor) -> Tensor:
        if len(tokens) > self.fits:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        self.now += self.seconds(len(tokens))
        self.passes.append(len(tokens))
        loss: Tensor = model(tokens).square().mean()
        return loss

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.pieces.backward(torch.randint(8, (8, 5)))

    def named(self, name: str) -> list[Event]:
        return [event for event in self.events if event["event"] == name]


def test_pieces_of_any_size_give_the_gradients_and_the_loss_of_the_whole_batch() -> None:
    batch = torch.randint(8, (8, 5), generator=torch.Generator().manual_seed(0))
    device = Device(len_seconds)
    whole = device.loss_of(device.model, batch)
    whole.backward()  # type: ignore[no-untyped-call]  # of torch
    assert device.model.weight.grad is not None
    expected = device.model.weight.grad.clone()
    for size in (8, 4, 3, 1):
        device.model.zero_grad()
        device.pieces.size = size
        torch.testing.assert_close(device.pieces.backward(batch), whole.detach())
        torch.testing.assert_close(device.model.weight.grad, expected)


def len_seconds(samples: int) -> float:
    return float(samples)


def test_the_whole_batch_is_kept_where_pieces_are_not_faster() -> None:
    device = Device(len_seconds)
    device.steps(6)
    assert device.passes == [8, 8, 4, 4, 4, 4, 8, 8]  # Each size once to warm up and once measured; then for good.
    (bench,) = device.named("device.bench")
    assert (bench["micro_batch"], bench["batch_size"], bench["tokens_per_s"]) == (8, 8, 4.0)


def test_pieces_are_halved_as_long_as_that_is_faster() -> None:
    device = Device(lambda samples: samples**2)  # As where more than two samples no longer fit a cache.
    device.steps(12)
    assert device.passes[-8:] == [1] * 8
    (bench,) = device.named("device.bench")
    assert bench["micro_batch"] == 1


def test_where_memory_runs_out_pieces_are_halved_and_the_step_is_done_again() -> None:
    device = Device(len_seconds, fits=2)
    device.steps(1)
    assert device.passes == [2, 2, 2, 2]
    assert [event["micro_batch"] for event in device.named("device.out_of_memory")] == [4, 2]
    assert "out of memory" in str(device.named("device.out_of_memory")[0]["reason"])

    device.fits = 8
    device.steps(4)
    device.fits = 1  # Somebody else takes memory, later.
    device.steps(1)
    assert device.passes[-8:] == [1] * 8


def test_a_step_that_ran_out_of_memory_half_way_leaves_no_gradients_behind() -> None:
    device = Device(len_seconds)
    batch = torch.randint(8, (8, 5), generator=torch.Generator().manual_seed(0))
    device.loss_of(device.model, batch).backward()  # type: ignore[no-untyped-call]  # of torch
    assert device.model.weight.grad is not None
    expected = device.model.weight.grad.clone()
    device.model.zero_grad()
    device.pieces.size = 4
    fails = iter([False, True])
    device.seconds = lambda samples: 0.0 if not next(fails, False) else run_out()
    device.pieces.backward(batch)
    torch.testing.assert_close(device.model.weight.grad, expected)


def test_a_step_whose_result_nobody_needs_any_more_ends_between_two_pieces() -> None:
    device = Device(len_seconds)
    device.pieces = MicroBatches(
        *(device.model, device.loss_of, Telemetry()), batch_size=8, size=2, stopped=lambda: len(device.passes) == 2
    )
    assert device.pieces.backward(torch.randint(8, (8, 5))) is None
    assert device.passes == [2, 2]


def run_out() -> float:
    raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")


def test_a_size_that_the_user_sets_is_kept_until_memory_runs_out() -> None:
    device = Device(len_seconds)
    device.pieces = MicroBatches(device.model, device.loss_of, Telemetry(), batch_size=8, size=4)
    device.steps(6)
    assert device.passes == [4] * 12
    device.fits = 3
    device.steps(1)
    assert device.passes[12:] == [2] * 4
    assert MicroBatches(device.model, device.loss_of, Telemetry(), batch_size=8, size=100).size == 8


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[enforce fail] DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes."),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
)
def test_each_way_to_run_out_of_memory_halves_the_size(error: Exception) -> None:
    device = Device(len_seconds)

    def full(samples: int) -> float:
        if samples > 4:
            raise error
        return 1.0

    device.seconds = full
    device.steps(1)
    assert device.passes == [4, 4]
    assert device.named("device.out_of_memory")[0]["reason"]


EXHAUST = """
import resource, torch
from flockstep.optim.step.micro_batches import MicroBatches
from flockstep.peer.log.telemetry import Telemetry
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Embedding(8, 512), torch.nn.Tanh())
telemetry = Telemetry()
telemetry.subscribe(lambda event: print(event["event"], event["micro_batch"], flush=True))
pieces = MicroBatches(model, lambda model, tokens: model(tokens).square().mean(), telemetry, batch_size=64, size=64)
batch = torch.randint(8, (64, 1025))
model(batch[:1]).sum().backward()
whole = model(batch[:1]).square().mean()
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 200_000_000,) * 2)
loss = pieces.backward(batch)
print("loss", torch.isfinite(loss).item(), pieces.size)
"""
"""A batch of 64 needs at least 0.4 GB here, and 0.2 GB are left."""


@pytest.mark.skipif(sys.platform != "linux", reason="limits of the address space are Linux's")
def test_the_allocator_of_the_cpu_really_runs_out_and_the_step_is_made_in_pieces() -> None:
    result = subprocess.run([sys.executable, "-c", EXHAUST], capture_output=True, text=True, check=False, timeout=100)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0] == "device.out_of_memory 32"
    assert lines[-1].startswith("loss True")
    assert int(lines[-1].split()[-1]) < 64


def test_one_sample_that_does_not_fit_and_other_errors_are_raised() -> None:
    with pytest.raises(torch.OutOfMemoryError):
        Device(len_seconds, fits=0).steps(1)
    assert not out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert memory_of(torch.device("cpu")) == (0, 0)
