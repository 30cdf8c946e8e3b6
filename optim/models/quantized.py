"""What bitsandbytes makes smaller on one peer: the frozen base of a LoRA run in 4 bits, AdamW's states in 8.

Both are this peer's own. The base is quantized after it was hashed, so that peers with a quantized
base and peers with the whole one compare the same source weights; nothing of it is sent or saved.
NF4 with quantized scales takes 4.13 bits a weight (arXiv:2305.14314), AdamW's states 2 bytes a
parameter in place of 8 (arXiv:2110.02861).
"""

import importlib
import logging
import sys
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...peer.base.errors import LocalError, UsageError
from ...peer.base.install import how_to_install
from ..step.flat import value_hashes


@cache
def load_bitsandbytes() -> Any:
    """Import the library. Raises `LocalError` if it is not installed.

    On some CPUs its import fetches code from the hub by the package `kernels`, which is hidden meanwhile.
    """
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # It would advise to install that package.
    hidden = sys.modules.get("kernels")
    sys.modules["kernels"] = None  # type: ignore[assignment]  # as importlib has it
    try:
        return importlib.import_module("bitsandbytes")
    except ImportError as error:
        remedy = how_to_install("gpu")
        raise LocalError(f"--load-in-4bit and --optimizer-8bit need bitsandbytes: {error}", remedy=remedy) from error
    finally:
        del sys.modules["kernels"]
        if hidden is not None:
            sys.modules["kernels"] = hidden


def adamw_8bit(*arguments: Any, **settings: Any) -> torch.optim.Optimizer:
    """Make an AdamW whose states have 8 bits, but for parameters of fewer than 4,096 elements."""
    made: torch.optim.Optimizer = load_bitsandbytes().optim.AdamW8bit(*arguments, **settings)
    return made


def quantize_base(model: nn.Module, device: torch.device) -> None:
    """Replace the frozen linear layers of a model, but for its head, by layers of 4 bits a weight on `device`.

    Raises `UsageError` if it has none.
    """
    head_of = getattr(model, "get_output_embeddings", None)
    head = head_of() if callable(head_of) else None
    frozen = [
        (name, layer)
        for name, layer in model.named_modules()
        if type(layer) is nn.Linear and layer is not head and not layer.weight.requires_grad
    ]
    if not frozen:
        remedy = "join without it: it is for a run with [model] lora_rank"
        raise UsageError("--load-in-4bit: this run trains all linear layers of its model", remedy=remedy)
    for name, layer in frozen:
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, FourBitLinear(layer, name, device))


class FourBitLinear(nn.Module):
    """A frozen linear layer in 4 bits a weight, which no optimizer, state or hash of the model contains."""

    source_hashes: list[bytes]
    """What `flat.frozen_fingerprint` has of the source weights."""

    def __init__(self, source: nn.Linear, name: str, device: torch.device) -> None:
        super().__init__()
        self.in_features, self.out_features, self.bias = source.in_features, source.out_features, source.bias
        self.source_hashes = value_hashes(f"{name}.weight", source.weight)
        weight = source.weight.detach().to(device).contiguous()
        # No buffer: a replica's would be broadcast at each step (DDP).
        self._packed: tuple[Tensor, Any] = load_bitsandbytes().functional.quantize_4bit(
            weight, quant_type="nf4", compress_statistics=True
        )

    def forward(self, x: Tensor) -> Tensor:
        """`x`: (…, in_features), computed in autocast's dtype, if it is on."""
        kind = x.device.type
        x = x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x
        out: Tensor = _FourBitProduct.apply(x, self._packed)  # type: ignore[no-untyped-call]  # of torch
        return out if self.bias is None else out + self.bias.to(out.dtype)


class _FourBitProduct(torch.autograd.Function):
    """x times the weights, which are made whole in each direction and not kept between them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: tuple[Tensor, Any]) -> Tensor:
        ctx.packed = packed
        return F.linear(x, _whole(packed, x.dtype))

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Any:
        return slope @ _whole(ctx.packed, slope.dtype), None


def _whole(packed: tuple[Tensor, Any], dtype: torch.dtype) -> Tensor:
    whole: Tensor = load_bitsandbytes().functional.dequantize_4bit(*packed)
    return whole.to(dtype)
