"""Chooses the device to train on, and refuses a GPU for which this build of torch has no kernels."""

import re
from collections.abc import Sequence

import torch

from ...peer.base.errors import UsageError

_BUILT_FOR = re.compile(r"(sm|compute)_(\d+)(\d)([af]?)")
TURING = 7, 5
"""The oldest that CUDA 13 builds for, and so the wheels of PyPI since torch 2.11; those for CUDA 12.6 end with torch 2.14."""


def choose_device(name: str) -> torch.device:
    """Choose the device that a setting names; `auto` is cuda, else mps, else cpu. Raises `UsageError`."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        remedy = "use --device auto, cpu, or a device that torch finds here"
        raise UsageError(f"cannot train on {name}: {str(error).splitlines()[0]}", remedy=remedy) from error
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if lacks_kernels(capability, torch.cuda.get_arch_list()):
            what = f"{torch.cuda.get_device_name(device)} (compute capability {'.'.join(map(str, capability))})"
            raise UsageError(f"torch {torch.__version__} has no kernels for {what}", remedy=kernels_remedy(capability))
    return device


def lacks_kernels(capability: tuple[int, int], built_for: Sequence[str]) -> bool:
    """Return True if a build of torch for these architectures cannot run on a CUDA device of this capability.

    Machine code (`sm_75`) runs on its major version from its minor one on, intermediate code
    (`compute_90`) on all later devices, and code for one architecture or family alone (`sm_90a`,
    `sm_100f`) is left out. AMD's names are not judged.
    """
    found = [match.groups() for name in built_for if (match := _BUILT_FOR.fullmatch(name))]
    for kind, major, minor, alone in found:
        built = int(major), int(minor)
        if capability == built or (
            not alone and built < capability and (kind == "compute" or built[0] == capability[0])
        ):
            return False
    return bool(found)


def kernels_remedy(capability: tuple[int, int]) -> str:
    """Return what the owner of a GPU without kernels can do."""
    if capability < TURING:
        return (
            "pip install 'torch<2.15' --index-url https://download.pytorch.org/whl/cu126 has them for most older GPUs; "
            "or use --device cpu"
        )
    return "install a newer torch: pytorch.org names the command for this GPU; or use --device cpu"
