"""Models on disk: safetensors files, written atomically, and the parts beside a checkpoint.

A checkpoint holds what the swarm agrees on: the trained parameters by name. In `<home>/runs/<run id>/model/` the trainer
adds what is local to this peer, so that `flockstep export` can build the whole model: buffers such as the running
statistics of BatchNorm, the frozen parameters (of an adapter only its description, since every peer has its base), the
names of tied parameters, and the config of a transformers model or of a `gpt`.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ...peer.base.disk import draft_of, write_whole
from ...peer.base.errors import LocalError, UsageError
from ...peer.log.telemetry import Telemetry
from ..step.flat import FlatLayout, parameters_of, state_of, storage_of, unwrapped, whole_tensors, why_not_kept
from .gpt_config import GPTConfig
from .hf import AdapterFile, adapter_of

FOLDER = "model"
MODEL = "model.safetensors"
BUFFERS, FROZEN = "buffers.safetensors", "frozen.safetensors"
CONFIG, ADAPTER, GENERATION = "config.json", "adapter_config.json", "generation_config.json"
GPT_CONFIG = "gpt.json"
"""Not `config.json`, by which other programs take a folder for one of transformers."""
ADAPTER_NAMES, ADAPTER_REST = "adapter_names.json", "adapter_rest.safetensors"
"""Of an adapter: the name of each trained parameter in peft's file, and what else that file holds."""
ALIASES = "aliases.json"
"""Further names of tensors, such as that of a tied head."""
NOT_KEPT = "not_kept.json"
"""The parts of the state that no file holds, each with the reason (`why_not_kept`)."""
MAX_NAMED = 5
"""Such parts that a line names."""


def save_tensors(tensors: Mapping[str, Tensor], path: Path, **metadata: str) -> None:
    """Write tensors by name, with metadata such as the round and the state root, atomically.

    Raises `LocalError`; a previous file at `path` is then unchanged.
    """
    try:
        with draft_of(path) as draft:
            save_file(dict(tensors), draft, {"format": "pt", **metadata})
    except SafetensorError as error:  # The library raises no `OSError` for a full disk.
        remedy = "free some space on its disk, or name another folder"
        raise LocalError(f"cannot write {path}: {error}", remedy=remedy) from error


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a safetensors file by name. Raises `UsageError`."""
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise UsageError(f"cannot read {path}: {error}", remedy="name a whole file of safetensors") from error


@dataclass(frozen=True, slots=True)
class Parts:
    """What of a model a checkpoint does not hold, by the names of its state."""

    frozen: frozenset[str]
    """Parameters that are not trained, and those without elements; of an adapter none, since every peer has its base."""
    buffers: frozenset[str]
    known: frozenset[str]
    """All names but those of buffers, and of what is made later."""
    unkept: dict[str, str]
    """What is not kept, and why."""
    aliases: dict[str, dict[str, Any]]
    """Further names of what is trained or stored: which tensor each is, and its shape and strides."""
    adapter: AdapterFile | None


def parts_of(model: nn.Module) -> Parts:
    """Return what of a model is kept beside its checkpoints. Raises `UsageError` for an adapter that peft does not save."""
    inner = unwrapped(model)
    parameters = parameters_of(inner)
    trained = {tensor.name: parameters[tensor.name] for tensor in FlatLayout.of(inner).tensors}
    adapter = adapter_of(inner, trained)
    state = state_of(inner)
    kept = {name: value for name, value in state.items() if isinstance(value, Tensor) and not why_not_kept(value)}
    stored, tensors = {storage_of(parameter): name for name, parameter in trained.items()}, kept | trained
    frozen, buffers, aliases = set[str](), set[str](), dict[str, dict[str, Any]]()
    for name, tensor in sorted(kept.items(), key=lambda item: (item[0] not in parameters, item[0])):
        known = stored.setdefault(storage_of(tensor), name)
        if known != name:
            strides = {"stride": list(tensor.stride()), "of_stride": list(tensors[known].stride())}
            aliases[name] = {"of": known, "shape": list(tensor.shape), **strides}
        elif name not in trained:
            (frozen if name in parameters else buffers).add(name)
    unkept = {name: why for name, value in state.items() if name not in trained and (why := why_not_kept(value))}
    others = frozenset(kept) - buffers
    if adapter is not None:
        frozen, aliases, unkept, others = set(), {}, {}, frozenset(state) - buffers
    return Parts(frozenset(frozen), frozenset(buffers), others, unkept, aliases, adapter)


def keep_model(model: nn.Module, parts: Parts, run_folder: Path | None, telemetry: Telemetry) -> None:
    """Write the parts of a model that do not change in training. A failure is an event.

    All ranks must call it, since frozen parameters may be sharded; only the first one passes a folder.
    """
    inner, adapter = unwrapped(model), parts.adapter
    config: Any = getattr(inner, "config", None)
    tensors = whole_tensors(inner, parts.frozen)
    if run_folder is None:
        return
    folder = run_folder / FOLDER
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if adapter is not None:
            adapter.config.save_pretrained(folder)
            save_tensors(adapter.rest, folder / ADAPTER_REST)
            write_whole(folder / ADAPTER_NAMES, json.dumps(adapter.names).encode())
        elif hasattr(config, "to_json_string"):
            fields = json.loads(config.to_json_string(use_diff=False))
            fields |= {"architectures": class_of(inner), "use_cache": True}
            write_whole(folder / CONFIG, json.dumps(fields, indent=1).encode())
            generation: Any = getattr(inner, "generation_config", None)
            if not getattr(generation, "_from_model_config", True):  # Else `save_hf` derives the same.
                write_whole(folder / GENERATION, generation.to_json_string().encode())
        elif isinstance(config, GPTConfig):
            write_whole(folder / GPT_CONFIG, json.dumps(asdict(config), indent=1).encode())
        write_whole(folder / ALIASES, json.dumps(parts.aliases).encode())
        write_whole(folder / NOT_KEPT, json.dumps(parts.unkept).encode())
        if tensors:
            save_tensors(tensors, folder / FROZEN)
    except (OSError, LocalError) as error:
        telemetry.emit("model.not_kept", step="keep the model", reason=str(error))


def unkept_line(unkept: Mapping[str, object]) -> str:
    """Return the parts of a model's state that are not kept, with the reasons, in a line; empty if there are none."""
    named = ", ".join(f"{name}, which {why}" for name, why in sorted(unkept.items())[:MAX_NAMED])
    return f"{len(unkept)} of the model's state: {named}{', …' if len(unkept) > MAX_NAMED else ''}" if unkept else ""


def class_of(model: nn.Module) -> list[str]:
    """Return the class of a model of transformers, as its config names it; empty for a class of one's own."""
    for kind in type(model).__mro__:
        if kind.__module__.startswith("transformers.models."):
            return [kind.__name__]
        if not kind.__module__.startswith("torch."):  # FSDP2 inserts a class of its own before that of the library.
            return []
    return []


def keep_buffers(model: nn.Module, parts: Parts, run_folder: Path, telemetry: Telemetry) -> None:
    """Write the current values of the persistent buffers, also of those made since the join. A failure is an event."""
    names = {name: why_not_kept(value) for name, value in state_of(model).items() if name not in parts.known}
    tensors = whole_tensors(model, names)
    try:
        if tensors:
            save_tensors(tensors, run_folder / FOLDER / BUFFERS)
        if names:
            unkept = {name: why for name, why in names.items() if why}
            write_whole(run_folder / FOLDER / NOT_KEPT, json.dumps(unkept).encode())
    except LocalError as error:
        telemetry.emit("model.not_kept", step="keep the buffers", reason=str(error))


def beside(kept: Path, trained: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the frozen parameters, the buffers and the further names of tensors of a model whose parts lie in `kept`.

    Raises `UsageError` for a file that is damaged.
    """
    tensors: dict[str, Tensor] = {}
    for name in (FROZEN, BUFFERS):
        if (kept / name).exists():
            tensors |= load_tensors(kept / name)
    known = {**tensors, **trained}
    for alias, about in load_json(kept / ALIASES).items():
        try:
            source = known[about["of"]]
            memory = torch.empty(source.numel(), dtype=source.dtype)
            memory.as_strided(source.shape, about["of_stride"]).copy_(source)
            tensors[alias] = memory.as_strided(about["shape"], about["stride"]).clone(memory_format=torch.contiguous_format)
        except (KeyError, TypeError, RuntimeError) as error:
            raise UsageError(f"{kept / ALIASES} is damaged at {alias}: {error}", remedy="train a round here again") from error
    return tensors


def load_json(path: Path) -> dict[str, Any]:
    """Read a JSON object, empty if there is no such file. Raises `UsageError`."""
    try:
        found = json.loads(path.read_bytes()) if path.exists() else {}
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"cannot read {path}: {error}", remedy="train a round here again, which writes it") from error
    return found if isinstance(found, dict) else {}
