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
from ..step.flat import FlatLayout, state_of, storage_of, unwrapped, whole_tensors
from .gpt_config import GPTConfig
from .hf import AdapterFile, adapter_of

FOLDER = "model"
MODEL = "model.safetensors"
BUFFERS, FROZEN = "buffers.safetensors", "frozen.safetensors"
CONFIG, ADAPTER = "config.json", "adapter_config.json"
GPT_CONFIG = "gpt.json"
"""Not `config.json`, by which other programs take a folder for one of transformers."""
ADAPTER_NAMES, ADAPTER_REST = "adapter_names.json", "adapter_rest.safetensors"
"""Of an adapter: the name of each trained parameter in peft's file, and what else that file holds."""
ALIASES = "aliases.json"
"""Further names of tensors, such as that of a tied head."""


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
    aliases: dict[str, dict[str, Any]]
    """Further names of what is trained or stored: which tensor each is, and its shape and strides."""
    adapter: AdapterFile | None


def parts_of(model: nn.Module) -> Parts:
    """Return what of a model is kept beside its checkpoints. Raises `UsageError` for an adapter that peft does not save."""
    inner = unwrapped(model)
    trained = [tensor.name for tensor in FlatLayout.of(inner).tensors]
    adapter = adapter_of(inner, trained)
    state, parameters = state_of(inner), {name for name, _ in inner.named_parameters(remove_duplicate=False)}
    stored = {storage_of(inner.get_parameter(name)): name for name in trained}
    frozen, buffers, aliases = set[str](), set[str](), dict[str, dict[str, Any]]()
    for name, tensor in sorted(state.items(), key=lambda item: (item[0] not in parameters, item[0])):
        known = stored.setdefault(storage_of(tensor), name)
        if known != name:
            shapes = {"shape": list(tensor.shape), "stride": list(tensor.stride()), "of_stride": list(state[known].stride())}
            aliases[name] = {"of": known, **shapes}
        elif name not in trained:
            (frozen if name in parameters else buffers).add(name)
    if adapter is not None:
        frozen, aliases = set(), {}
    return Parts(frozenset(frozen), frozenset(buffers), aliases, adapter)


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
        elif isinstance(config, GPTConfig):
            write_whole(folder / GPT_CONFIG, json.dumps(asdict(config), indent=1).encode())
        write_whole(folder / ALIASES, json.dumps(parts.aliases).encode())
        if tensors:
            save_tensors(tensors, folder / FROZEN)
    except (OSError, LocalError) as error:
        telemetry.emit("model.not_kept", step="keep the model", reason=str(error))


def class_of(model: nn.Module) -> list[str]:
    """Return the class of a model of transformers, as its config names it; empty for a class of one's own."""
    for kind in type(model).__mro__:
        if kind.__module__.startswith("transformers.models."):
            return [kind.__name__]
        if not kind.__module__.startswith("torch."):  # FSDP2 inserts a class of its own before that of the library.
            return []
    return []


def keep_buffers(model: nn.Module, parts: Parts, run_folder: Path, telemetry: Telemetry) -> None:
    """Write the current values of the persistent buffers. A failure is an event."""
    tensors = whole_tensors(model, parts.buffers)
    try:
        if tensors:
            save_tensors(tensors, run_folder / FOLDER / BUFFERS)
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
