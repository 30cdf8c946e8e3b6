"""Models on disk: safetensors files, written atomically, and the parts beside a checkpoint.

A checkpoint holds what the swarm agrees on: the trained parameters by name. In `<home>/runs/<run id>/model/` the trainer
adds what is local to this peer, so that `flockstep export` can build the whole model: buffers such as the running
statistics of BatchNorm, the frozen parameters (of an adapter only its description, since every peer has its base), and
the config of a transformers model.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ...peer.disk import draft_of, write_whole
from ...peer.errors import LocalError, UsageError
from ...peer.telemetry import Telemetry
from ..flat import unwrapped, whole_tensors

FOLDER = "model"
MODEL = "model.safetensors"
BUFFERS, FROZEN = "buffers.safetensors", "frozen.safetensors"
CONFIG, ADAPTER = "config.json", "adapter_config.json"


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


def keep_model(model: nn.Module, run_folder: Path | None, telemetry: Telemetry) -> None:
    """Write the parts of a model that do not change in training. A failure is an event.

    All ranks must call it, since frozen parameters may be sharded; only the first one passes a folder.
    """
    inner = unwrapped(model)
    adapters: dict[str, Any] = getattr(inner, "peft_config", {})
    base = inner.get_base_model() if adapters else inner  # type: ignore[operator]  # it is peft's
    config: Any = getattr(base, "config", None)
    frozen = [name for name, parameter in inner.named_parameters() if not (parameter.requires_grad or adapters)]
    tensors = whole_tensors(inner, frozen)
    if run_folder is None:
        return
    folder = run_folder / FOLDER
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for adapter in adapters.values():
            adapter.save_pretrained(folder)
        if hasattr(config, "to_json_string"):
            fields = json.loads(config.to_json_string(use_diff=False))
            # FSDP2 inserts a class of its own before that of the library.
            names = [kind.__name__ for kind in type(base).__mro__ if kind.__module__.startswith("transformers.")]
            fields |= {"architectures": names[:1], "use_cache": True}
            write_whole(folder / CONFIG, json.dumps(fields, indent=1).encode())
        if tensors:
            save_tensors(tensors, folder / FROZEN)
    except (OSError, LocalError) as error:
        telemetry.emit("model.not_kept", step="keep the model", reason=str(error))


def keep_buffers(model: nn.Module, run_folder: Path, telemetry: Telemetry) -> None:
    """Write the current values of the persistent buffers. A failure is an event."""
    inner = unwrapped(model)
    tensors = whole_tensors(inner, [name for name, _ in inner.named_buffers()])
    try:
        if tensors:
            save_tensors(tensors, run_folder / FOLDER / BUFFERS)
    except LocalError as error:
        telemetry.emit("model.not_kept", step="keep the buffers", reason=str(error))
