"""Parameters to one flat float32 vector with named tensors, and back.

The vector is what peers average and hash. Its order is that of the parameters' names, each tensor starts at a cell of
the codec and is padded with zeros to whole cells, so every peer that runs the same model sees the same cells.
"""

from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from ..collectives.codec import CELL
from ..peer.digest import keyed
from ..peer.errors import UsageError

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Tensor:
    """One named tensor of the vector: its elements are `vector[start:stop]`, zeros follow up to the next tensor."""

    name: str
    shape: tuple[int, ...]
    start: int

    @property
    def stop(self) -> int:
        """One past its last element."""
        return self.start + prod(self.shape)


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """Which elements of the flat vector belong to which parameter."""

    tensors: tuple[Tensor, ...]
    num_cells: int

    @classmethod
    def of(cls, model: nn.Module) -> "FlatLayout":
        """The layout of the trainable parameters; tied ones stand once, under the first of their names in order.

        Buffers and frozen parameters are not averaged. Raises `UsageError` where nothing can be trained.
        """
        tensors: list[Tensor] = []
        storages: set[tuple[torch.device, int, int]] = set()
        cells = 0
        for name, parameter in sorted(model.named_parameters(remove_duplicate=False)):
            storage = (parameter.device, parameter.data_ptr(), parameter.numel())
            if not parameter.requires_grad or parameter.numel() == 0 or storage in storages:
                continue
            if not parameter.is_floating_point():
                raise UsageError(f"parameter {name} is of {parameter.dtype}: only real numbers can be averaged")
            storages.add(storage)
            tensors.append(Tensor(name, tuple(parameter.shape), cells * CELL))
            cells += -(-parameter.numel() // CELL)
        if not tensors:
            raise UsageError("the model has no trainable parameter", remedy="set requires_grad on some of them")
        return cls(tuple(tensors), cells)

    @property
    def size(self) -> int:
        """Elements of the flat vector, padding included."""
        return self.num_cells * CELL

    @torch.no_grad()
    def gather(self, model: nn.Module, out: Floats) -> None:
        """Write the parameters, of any dtype and device, into `out` (float32, `size` elements), zeros between them."""
        flat = torch.from_numpy(out)
        for tensor, end in self._spans():
            flat[tensor.start : tensor.stop].view(tensor.shape).copy_(model.get_parameter(tensor.name))
            flat[tensor.stop : end].zero_()

    @torch.no_grad()
    def scatter(self, vector: Floats, model: nn.Module) -> None:
        """Write `vector` into the parameters in place; each keeps its dtype and device."""
        flat = torch.from_numpy(vector)
        for tensor in self.tensors:
            model.get_parameter(tensor.name).copy_(flat[tensor.start : tensor.stop].view(tensor.shape))

    def fingerprint(self) -> bytes:
        """A hash of all names and shapes: peers of one run must agree on it. 32 bytes."""
        return keyed("layout", *(f"{tensor.name} {tensor.shape}".encode() for tensor in self.tensors))

    def nonfinite(self, vector: Floats) -> str | None:
        """The name of the first tensor that holds NaN or infinity, None if there is none."""
        for tensor in self.tensors:
            values = vector[tensor.start : tensor.stop]
            # NaN propagates through min and max, and neither needs a temporary.
            if not (np.isfinite(values.min()) and np.isfinite(values.max())):
                return tensor.name
        return None

    def _spans(self) -> list[tuple[Tensor, int]]:
        """Every tensor with the element at which the next one starts."""
        ends = [tensor.start for tensor in self.tensors[1:]] + [self.size]
        return list(zip(self.tensors, ends, strict=True))
