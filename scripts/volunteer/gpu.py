"""Reads an NVIDIA GPU through NVML (the package `nvidia-ml-py`): who uses it, its temperature and its power."""

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...peer.base.errors import LocalError

if TYPE_CHECKING:
    import torch

REMEDY = "pip install nvidia-ml-py; GPUs that are not NVIDIA's cannot be looked at"


@dataclass(frozen=True, slots=True)
class GpuReading:
    """One look at a GPU; None for what it does not tell."""

    others: float | None
    """The share of its time, 0 to 1, that other processes had since the last look."""
    celsius: float | None
    watts: float | None


class Gpu:
    """A GPU as the driver sees it. `nvml` is the library, `uuid` the one that CUDA has for it, `pid` this process's id."""

    def __init__(self, nvml: Any, uuid: str, pid: int) -> None:
        """Raises `LocalError` if the driver does not show this GPU."""
        self._nvml, self._pid = nvml, pid
        self._seen = 0
        """The time of the newest sample, in µs of the driver's clock."""
        try:
            nvml.nvmlInit()
            self._handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        except nvml.NVMLError as error:
            raise LocalError(f"the driver does not show this GPU: {error}", remedy=REMEDY) from error
        self._others(holds_memory=False)  # What was before is in the driver's buffer.

    def read(self, *, holds_memory: bool) -> GpuReading:
        """Look at it. `holds_memory`: whether this process has memory there, so that the driver must list it."""
        nvml, handle = self._nvml, self._handle
        celsius = self._ask(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU)
        milliwatts = self._ask(nvml.nvmlDeviceGetPowerUsage, handle)
        watts = None if milliwatts is None else milliwatts / 1000
        return GpuReading(self._others(holds_memory=holds_memory), celsius, watts)

    def _others(self, *, holds_memory: bool) -> float | None:
        nvml = self._nvml
        if holds_memory:
            listed = self._ask(nvml.nvmlDeviceGetComputeRunningProcesses, self._handle)
            if listed is None or self._pid not in {process.pid for process in listed}:
                return None  # In a container the driver's process ids are not ours: this peer's own use looks like another's.
        try:
            samples = nvml.nvmlDeviceGetProcessUtilization(self._handle, self._seen)
        except nvml.NVMLError as error:  # Without a sample the package raises an error of the value "success", too.
            nobody = error.value in (nvml.NVML_SUCCESS, nvml.NVML_ERROR_NOT_FOUND)
            return 0.0 if nobody else None
        samples = sorted(samples, key=lambda sample: sample.timeStamp)
        self._seen = samples[-1].timeStamp if samples else self._seen
        newest: dict[int, int] = {sample.pid: sample.smUtil for sample in samples}
        return min(100, sum(share for pid, share in newest.items() if pid != self._pid)) / 100

    def _ask(self, question: Any, *arguments: Any) -> Any:
        try:
            return question(*arguments)
        except self._nvml.NVMLError:
            return None


def gpu_of(device: "torch.device") -> Gpu:
    """Return the GPU of a device of torch. Raises `LocalError` if it cannot be looked at."""
    import torch

    if device.type != "cuda":
        raise LocalError(f"{device} is no GPU of NVIDIA", remedy="use --device cuda")
    try:
        import pynvml
    except ImportError as error:
        raise LocalError(f"cannot look at the GPU: {error}", remedy=REMEDY) from error
    return Gpu(pynvml, str(torch.cuda.get_device_properties(device).uuid), os.getpid())
