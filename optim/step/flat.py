"""Flattening: parameters to one flat float32 vector with named tensors, and back. Pure.

Peers average and hash this vector. Its order is that of the parameters' names. Each tensor starts at a cell of the codec
and is padded with zeros to whole cells, so every peer that runs the same model has the same cells.

Parameters may have any dtype, lie on any devices, and be sharded over the processes of one peer (`DTensor`, as FSDP2
makes them). All processes then call the same functions: the first one with the vector, the others with None.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim.swa_utils import AveragedModel
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ...collectives.state.checkpoint_file import TensorAt
from ...collectives.vector.arrays import Floats
from ...collectives.vector.codec import CELL, MAX_CONTRIBUTED, FlatVector
from ...dht.run.layout import LayoutPin
from ...peer.base.digest import DIGEST_BYTES, keyed
from ...peer.base.errors import UsageError

HASHED_AT_ONCE = 1 << 22
"""Elements of a frozen parameter that are copied and hashed at a time: 16 MiB, since the whole may be gigabytes."""
COPIED_AT_ONCE = 1 << 20
"""Elements of Δ that are computed at a time, for the same reason; their temporaries stay in the processor's cache."""
PARALLEL = (DataParallel, DistributedDataParallel)
WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_forward_module")
"""Attributes that hold what a wrapper wraps: of torch.compile, of activation checkpointing, of Lightning's Fabric."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """One named tensor of the vector: its elements are `vector[start:stop]`, zeros follow up to the next tensor."""

    name: str
    shape: tuple[int, ...]
    start: int
    dtype: str
    """The parameter's dtype; the vector is float32."""

    @property
    def stop(self) -> int:
        """The index after its last element."""
        return self.start + prod(self.shape)


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """The mapping from parameters to elements of the flat vector."""

    tensors: tuple[Tensor, ...]
    num_cells: int

    @classmethod
    def of(cls, model: nn.Module, *, of_values: bool = True) -> "FlatLayout":
        """Return the layout of the trainable parameters; tied ones occur once, under the first of their sorted names.

        Buffers and frozen parameters are not averaged. Raises `UsageError` if nothing can be trained, for a scripted model,
        and for parameters without values: lazy ones, and those on meta unless `of_values` is False.
        """
        if isinstance(model, torch.jit.ScriptModule):
            raise UsageError("a scripted model hides its parameters", remedy="train the module that it was scripted from")
        if isinstance(unwrapped(model), AveragedModel):
            raise UsageError(
                "an AveragedModel holds an average of weights, which no optimizer trains",
                remedy="give Swarm the model that is trained, and keep its average beside it",
            )
        tensors: list[Tensor] = []
        cells = 0
        for name, parameter in _once(model):
            if not parameter.requires_grad:
                continue
            if (of_values or not parameter.is_meta) and (why_not := why_not_plain(parameter)):
                raise UsageError(f"parameter {name} {why_not}", remedy="load the model, and run it once, before it joins")
            if not parameter.is_floating_point():
                raise UsageError(f"parameter {name} has dtype {parameter.dtype}: only real numbers can be averaged")
            if any(size > 1 and not stride for size, stride in zip(parameter.shape, parameter.stride(), strict=True)):
                raise UsageError(f"parameter {name} is expanded: its elements share memory", remedy="clone it first")
            tensors.append(Tensor(name, tuple(parameter.shape), cells * CELL, _name_of(parameter.dtype)))
            cells += -(-parameter.numel() // CELL)
        if not tensors:
            raise UsageError("the model has no trainable parameter", remedy="set requires_grad on some of them")
        return cls(tuple(tensors), cells)

    @property
    def size(self) -> int:
        """The length of the flat vector, padding included."""
        return self.num_cells * CELL

    @torch.no_grad()
    def gather(self, model: nn.Module, out: Floats | None) -> None:
        """Write the parameters into `out` (float32, `size` elements), with zeros as padding."""
        parameters = parameters_of(model)
        for tensor, end in self._spans():
            local = _whole(parameters[tensor.name])
            if out is not None:
                flat = torch.from_numpy(out)
                flat[tensor.start : tensor.stop].view(tensor.shape).copy_(local)
                flat[tensor.stop : end].zero_()

    @torch.no_grad()
    def pseudo_gradient(
        self, start: Floats | None, model: nn.Module, out: FlatVector | None, span: slice | None = None
    ) -> None:
        """Write the pseudo-gradient Δ = W₀ - W into `out`, where W₀ is `start` rounded to the dtype of each parameter.

        For a bfloat16 parameter an unrounded `start` would be wrong: Δ would cancel the rounding of W, so that steps
        smaller than that could never accumulate in θ. `start` is float32 of `size` elements; `out` has those of `span`,
        if it is given, from its first element on.
        """
        ends, span, parameters = dict(self._spans()), span or slice(0, self.size), parameters_of(model)
        for tensor, inner, piece in self._pieces(span):
            local = _whole(parameters[tensor.name]).reshape(-1)[inner]
            if start is None or out is None:
                continue
            begun, flat = torch.from_numpy(start)[piece], _torch_of(out)
            at = piece.start - span.start
            for first in range(0, begun.numel(), COPIED_AT_ONCE):
                some = slice(first, min(first + COPIED_AT_ONCE, begun.numel()))
                moved = begun[some].to(local.dtype).float() - local[some].to("cpu", torch.float32)
                flat[at + some.start : at + some.stop].copy_(moved)
            if piece.stop == tensor.stop:
                flat[tensor.stop - span.start : ends[tensor] - span.start].zero_()

    @torch.no_grad()
    def capture(self, model: nn.Module, span: slice) -> list[torch.Tensor]:
        """Copy the parameters' elements of `span`, each piece on its device, for `rebase`."""
        parameters = parameters_of(model)
        return [_whole(parameters[tensor.name]).reshape(-1)[inner].clone() for tensor, inner, _ in self._pieces(span)]

    @contextmanager
    def holding(
        self, vector: Floats | None, model: nn.Module, share: Callable[[torch.Tensor], None] = lambda piece: None
    ) -> Iterator[nn.Module]:
        """Yield the model, unwrapped, with `vector` in its parameters and in evaluation mode; then both are as before.

        Bit for bit, at the price of a copy of the parameters. Of a model that is sharded all processes of the peer call
        it, with `share` (see `scatter`).
        """
        inner = unwrapped(model)
        modes = [(module, module.training) for module in inner.modules()]
        _reshard(inner)
        parameters = parameters_of(inner)
        mine = [parameters[tensor.name].detach().clone() for tensor in self.tensors]
        try:
            self.scatter(vector, inner, share)
            inner.eval()
            yield inner
        finally:
            for module, mode in modes:
                module.training = mode
            _reshard(inner)
            with torch.no_grad():
                parameters = parameters_of(inner)
                for tensor, values in zip(self.tensors, mine, strict=True):
                    parameters[tensor.name].copy_(values)

    @torch.no_grad()
    def rebase(
        self,
        vector: Floats | None,
        model: nn.Module,
        span: slice,
        captured: Sequence[torch.Tensor] | None,
        share: Callable[[torch.Tensor], None] = lambda piece: None,
    ) -> None:
        """Write W ← θ + (W − W at capture) into the parameters' elements of `span`; `vector` is θ, whole.

        So the inner steps since the capture are kept; None if there was none. Sums are rounded to float32
        before each parameter's dtype. `share` is called with each piece of θ, and fills it in if `vector` is None.
        """
        parameters = parameters_of(model)
        for index, (tensor, inner, piece) in enumerate(self._pieces(span)):
            theta = torch.empty(piece.stop - piece.start) if vector is None else torch.from_numpy(vector)[piece]
            share(theta)
            parameter = parameters[tensor.name]
            whole = _whole(parameter)
            flat = whole.view(-1) if whole.is_contiguous() else whole.reshape(-1)
            values = theta.to(flat.device)
            if captured is None:
                flat[inner].copy_(values)
            elif flat.dtype == torch.float32:  # In place: training waits for this.
                flat[inner].sub_(captured[index]).add_(values)
            else:
                flat[inner].copy_((flat[inner].float() - captured[index].float()).add_(values))
            if _is_sharded(parameter):
                parameter.copy_(_sharded_like(parameter, flat.view(tensor.shape)))
            elif not whole.is_contiguous():
                parameter.copy_(flat.view(tensor.shape))

    def _pieces(self, span: slice) -> Iterator[tuple[Tensor, slice, slice]]:
        """Yield each tensor with elements in `span`: the tensor, which of its elements, and where in the vector."""
        for tensor in self.tensors:
            start, stop = max(tensor.start, span.start), min(tensor.stop, span.stop)
            if start < stop:
                yield tensor, slice(start - tensor.start, stop - tensor.start), slice(start, stop)

    @torch.no_grad()
    def scatter(
        self, vector: Floats | None, model: nn.Module, share: Callable[[torch.Tensor], None] = lambda piece: None
    ) -> None:
        """Write `vector` into the parameters in place; each keeps its dtype, its device and its shards.

        `share` is called with each tensor's elements, and fills them in if `vector` is None.
        """
        parameters = parameters_of(model)
        for tensor in self.tensors:
            span = slice(tensor.start, tensor.stop)
            piece = torch.empty(prod(tensor.shape)) if vector is None else torch.from_numpy(vector)[span]
            share(piece)
            parameter, values = parameters[tensor.name], piece.view(tensor.shape)
            parameter.copy_(_sharded_like(parameter, values) if _is_sharded(parameter) else values)

    def check_unchanged(self, model: nn.Module) -> None:
        """Raise `UsageError` if the model has other trained parameters than at the join, which would part peer from peer."""
        then, now = ({tensor.name: tensor.shape for tensor in layout.tensors} for layout in (self, FlatLayout.of(model)))
        for name in sorted(then | now):
            if then.get(name) != now.get(name):
                was, is_ = (f"trained in shape {at[name]}" if name in at else "not trained" for at in (then, now))
                raise UsageError(
                    f"the model has changed since it joined: {name}, {was} then, is {is_}",
                    remedy="leave the run, and join anew with the model as it is: a run averages what it trained at the join",
                )

    def describe(self) -> tuple[TensorAt, ...]:
        """Return the tensors for a checkpoint's description. Raises `MalformedMessage` for an impossible shape."""
        return tuple(TensorAt(tensor.name, tensor.shape, tensor.dtype, tensor.start) for tensor in self.tensors)

    def pin(self) -> LayoutPin:
        """Return what a manifest says of this layout, which must be equal on all peers of a run."""
        return LayoutPin.of((tensor.name, tensor.shape) for tensor in self.tensors)

    def diverged(self, vector: FlatVector, span: slice | None = None) -> str | None:
        """Return the name of the first tensor of which no contribution can be made, None if there is none.

        It holds NaN, infinity, or more than `MAX_CONTRIBUTED`. `vector` has the elements of `span`, or all.
        """
        span, values = span or slice(0, self.size), _torch_of(vector)
        for tensor, _, piece in self._pieces(span):
            # NaN propagates through min and max, and neither needs a temporary.
            low, high = torch.aminmax(values[piece.start - span.start : piece.stop - span.start])
            if not (low >= -MAX_CONTRIBUTED and high <= MAX_CONTRIBUTED):  # Written so that NaN is not within.
                return tensor.name
        return None

    def _spans(self) -> list[tuple[Tensor, int]]:
        """Return every tensor with the index at which the next one starts."""
        ends = [tensor.start for tensor in self.tensors[1:]] + [self.size]
        return list(zip(self.tensors, ends, strict=True))


def frozen_fingerprint(model: nn.Module) -> bytes:
    """Return a 32-byte hash of the frozen parameters, such as the base of a LoRA run, which are never sent.

    It covers their values as float32, since peers may load the same bfloat16 weights as either; zeros if none is frozen.
    A layer that was quantized on this peer states those of its source.
    """
    hashes = {name: value_hashes(name, parameter) for name, parameter in _once(model) if not parameter.requires_grad}
    inner = unwrapped(model)
    plain = _plain_names(inner)
    for name, module in inner.named_modules():
        if (source := getattr(module, "source_hashes", None)) is not None:
            hashes[plain(f"{name}.weight")] = source
    return keyed("frozen", *(hash_ for name in sorted(hashes) for hash_ in hashes[name])) if hashes else bytes(DIGEST_BYTES)


@torch.no_grad()
def value_hashes(name: str, parameter: torch.Tensor) -> list[bytes]:
    """Return the name and shape of a frozen parameter, and the hashes of its values. Raises `UsageError` if it has none."""
    if why_not := why_not_plain(parameter):
        raise UsageError(f"frozen parameter {name} {why_not}, so peers cannot compare it", remedy="give it plain values")
    values = _whole(parameter).reshape(-1)
    hashes = [f"{name} {tuple(parameter.shape)}".encode()]
    for start in range(0, values.numel(), HASHED_AT_ONCE):
        piece = values[start : start + HASHED_AT_ONCE]
        piece = (piece.float() if piece.is_floating_point() else piece).to("cpu")
        hashes.append(keyed("frozen values", piece.numpy().tobytes()))
    return hashes


@torch.no_grad()
def whole_tensors(model: nn.Module, names: Collection[str] | None = None) -> dict[str, torch.Tensor]:
    """Return parameters and persistent buffers by name, all or `names`, unsharded on the CPU, if `why_not_kept` allows.

    A shared one is there under each of its names, as a strict `load_state_dict` wants it, with memory of its own.
    """
    whole: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in sorted(state_of(model).items()):
        if (names is None or name in names) and isinstance(tensor, torch.Tensor) and not why_not_kept(tensor):
            values = _whole(tensor).detach().to("cpu").resolve_conj().resolve_neg().contiguous()
            memory = values.untyped_storage().data_ptr()
            whole[name] = values.clone() if memory in seen else values
            seen.add(memory)
    return whole


def state_of(model: nn.Module) -> dict[str, object]:
    """Return the model's state by name, shared parts under each of their names, also what is no tensor."""
    inner = unwrapped(model)
    try:
        state: object = inner.state_dict(keep_vars=True)
    except TypeError:  # A class may define its own, without torch's arguments.
        state = inner.state_dict()
    plain = _plain_names(inner)
    return {plain(str(name)): value for name, value in (state.items() if isinstance(state, Mapping) else ())}


def why_not_plain(value: torch.Tensor) -> str:
    """Return why a tensor has no plain values in memory, which peers could average or compare; empty if it has."""
    if value.is_meta or is_lazy(value):
        return "has no values yet"
    if value.is_nested or value.is_quantized:
        return "is nested" if value.is_nested else "is quantized"
    if value.layout != torch.strided:
        return f"has the layout {_name_of(value.layout)}"
    return f"is a {type(value).__name__}" if is_traceable_wrapper_subclass(value) and not _is_sharded(value) else ""


def why_not_kept(value: object) -> str:
    """Return why a part of a model's state is not kept beside a checkpoint; empty if it is. Asked of each at the join."""
    if not isinstance(value, torch.Tensor):
        return f"is a {type(value).__name__}, not a tensor"
    odd = value.dtype in (torch.complex32, torch.complex128)  # Of those that safetensors does not know.
    return why_not_plain(value) or (f"has dtype {_name_of(value.dtype)}" if odd else "")


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside of what prefixes every name: `torch.compile`, data parallelism, Lightning's Fabric."""
    while True:
        names = ("module",) if isinstance(model, PARALLEL) else WRAPPERS
        if (inside := next((child for name, child in model.named_children() if name in names), None)) is None:
            return model
        model = inside


def _plain_names(model: nn.Module) -> Callable[[str], str]:
    """Return a function that takes the wrappers of a model's parts out of a name."""
    named = model.named_modules(remove_duplicate=False)
    parallel = [rf"(?<=^{re.escape(path)}\.)module\." for path, module in named if isinstance(module, PARALLEL)]
    return partial(re.compile("|".join((rf"(?<![^.])(?:{'|'.join(WRAPPERS)})\.", *parallel))).sub, "")


def parameters_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return all parameters by the names that they have without wrappers, shared ones under each of theirs."""
    inner = unwrapped(model)
    plain = _plain_names(inner)
    return {plain(name): parameter for name, parameter in inner.named_parameters(remove_duplicate=False)}


def _once(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield all parameters by name, shared storage once; a trainable one is preferred to a frozen one."""
    named = sorted(parameters_of(model).items())
    trainable = {storage_of(parameter) for _, parameter in named if parameter.requires_grad}
    seen: set[object] = set()
    for name, parameter in named:
        storage = storage_of(parameter)
        is_chosen = storage not in seen and (parameter.requires_grad or storage not in trainable)
        if is_chosen and (is_lazy(parameter) or parameter.numel()):
            seen.add(storage)
            yield name, parameter


def bytes_of(model: nn.Module) -> int:
    """Return the bytes of all parameters and buffers of a model."""
    return sum(tensor.numel() * tensor.element_size() for tensor in (*model.parameters(), *model.buffers()))


def storage_of(parameter: torch.Tensor) -> object:
    """Return an identity of a tensor's storage: its memory, or the object itself if it is sharded or without plain values."""
    if _is_sharded(parameter) or why_not_plain(parameter):
        return id(parameter)
    return parameter.device, parameter.data_ptr(), parameter.numel()


def _torch_of(vector: FlatVector) -> torch.Tensor:
    """Return a tensor on the memory of a vector."""
    if vector.dtype == np.float32:
        return torch.from_numpy(vector)
    return torch.from_numpy(vector.view(np.int16)).view(torch.bfloat16)


def _name_of(dtype: torch.dtype | torch.layout) -> str:
    return str(dtype).removeprefix("torch.")


def _whole(parameter: torch.Tensor) -> torch.Tensor:
    """Return a parameter with all values; a sharded one gathers them from the other processes of the peer."""
    whole: torch.Tensor = parameter.full_tensor() if _is_sharded(parameter) else parameter  # type: ignore[attr-defined]  # of DTensor
    return whole


def _sharded_like(parameter: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Shard the values, which every process holds, like a sharded parameter."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(parameter, DTensor)
    mesh = parameter.device_mesh
    return distribute_tensor(values.to(mesh.device_type), mesh, parameter.placements, src_data_rank=None)


def _reshard(model: nn.Module) -> None:
    """Free what the root of a sharded model (FSDP2) has gathered in a forward pass, and keeps until a backward pass."""
    if not (dist.is_available() and dist.is_initialized()):
        return
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def is_sharded(model: nn.Module) -> bool:
    """Return True for a model that is sharded over the processes of this peer."""
    return any(map(_is_sharded, model.parameters()))


def _is_sharded(parameter: torch.Tensor) -> bool:
    """Return True for a `DTensor`, by duck typing, since importing that class adds half a second to every start."""
    return hasattr(parameter, "device_mesh")
