"""The precision of the passes: what a device computes fast, and the loss scale that fp16 needs.

Each peer chooses for its own device, since weights, their optimizer and what peers average stay
float32. bf16 has the range of float32. fp16, all that GPUs before Ampere have, ends at 65,504 and
loses gradients below 6e-8: the loss is multiplied by a power of two and the gradients are divided
by it (arXiv:1710.03740, section 3.2). A step in which they overflow is skipped, and the scale is
halved. The scale belongs to one membership of one peer: nobody compares it.
"""

from functools import cache

import torch
from torch import nn

from ...peer.log.telemetry import Telemetry

FIRST_SCALE, CLEAN_STEPS = 2.0**16, 2000
"""As in torch's `GradScaler`: what it starts with, and after how many steps without an overflow it doubles."""
AMPERE = 8, 0
"""The first of NVIDIA's with bf16. All of AMD's that torch supports have it."""


def fast_half(kind: str, capability: tuple[int, int], *, bf16: bool) -> torch.dtype | None:
    """Return the 16-bit dtype in which a kind of device computes faster than in float32; None if it has none.

    `capability` is CUDA's, `bf16` whether the device has it in hardware. fp16 is twice as fast on a
    P100 (6.0), eight times on a T4 (7.5), and 64 times slower on a GTX 10xx (6.1). CPUs and MPS are
    left at float32.
    """
    if kind != "cuda":
        return None
    if bf16:
        return torch.bfloat16
    return torch.float16 if capability == (6, 0) or capability >= (7, 0) else None


@cache
def half_on(device: torch.device) -> torch.dtype | None:
    """Return the `fast_half` of a device."""
    if device.type != "cuda":
        return None
    capability = torch.cuda.get_device_capability(device)
    return fast_half(device.type, capability, bf16=capability >= AMPERE or torch.version.hip is not None)


def pass_dtype(precision: str, device: torch.device) -> torch.dtype | None:
    """Return the dtype of autocast under a setting of `PeerConfig.precision`; None for float32."""
    return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": None, "auto": half_on(device)}[precision]


def name_of(dtype: torch.dtype | None) -> str:
    """Return the setting's name of a dtype."""
    return {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype, "fp32") if dtype is not None else "fp32"


class LossScale:
    """The factor of an fp16 loss: `value` for the backward pass, then `is_clean` of the gradients."""

    def __init__(self, telemetry: Telemetry) -> None:
        self.value = FIRST_SCALE
        self._telemetry = telemetry
        self._clean = self._skipped = 0

    def is_clean(self, model: nn.Module) -> bool:
        """Return False if the gradients have overflowed, after clearing them; whoever steps divides them by the scale.

        At a scale of 1 they are what they are: like a loss that diverges in float32, they go into
        the step, and the peer abstains from the round. The same on all ranks: gradients of replicas
        are averaged, the norm is of all shards. After a doubling the gradients that still wait for
        their step count half beside the next ones.
        """
        norm = nn.utils.get_total_norm([it.grad for it in model.parameters() if it.grad is not None])
        whole: torch.Tensor = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        if self.value > 1 and not bool(torch.isfinite(whole)):
            self.value, self._clean, self._skipped = self.value / 2, 0, self._skipped + 1
            model.zero_grad(set_to_none=True)
            reason = f"a gradient overflowed in fp16; the loss is scaled by {self.value:g} from now on"
            self._telemetry.emit(
                "step.skipped", step="backward", reason=reason, scale=self.value, skipped=self._skipped
            )
            return False
        self._clean += 1
        if self._clean % CLEAN_STEPS == 0:
            self.value *= 2
        return True
