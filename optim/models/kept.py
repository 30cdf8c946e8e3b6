"""What a checkpoint lacks of a model, kept beside it, so that `flockstep export` can make a whole model of both.

A checkpoint holds what the swarm agrees on: the trained parameters by name. In `<home>/runs/<run id>/model/` the trainer
adds what is this peer's own: buffers such as the running statistics of BatchNorm, the frozen parameters (of an adapter
only its description, since its base is a model that everybody has), and the config of a model of transformers.
"""

import json
from pathlib import Path
from typing import Any

from torch import nn

from ...dht.run.manifest import write_whole
from ...peer.errors import LocalError
from ...peer.telemetry import Telemetry
from ..checkpoint import save_tensors
from ..flat import unwrapped, whole_tensors

FOLDER = "model"
BUFFERS, FROZEN = "buffers.safetensors", "frozen.safetensors"
CONFIG, ADAPTER = "config.json", "adapter_config.json"


def keep_model(model: nn.Module, run_folder: Path | None, telemetry: Telemetry) -> None:
    """Write down what stays as it is while the model trains. What cannot be written is told as an event.

    To be called on all ranks, since frozen parameters may be sharded; only the first one names a folder.
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
            # FSDP2 puts a class of its own before that of the library.
            names = [kind.__name__ for kind in type(base).__mro__ if kind.__module__.startswith("transformers.")]
            fields |= {"architectures": names[:1], "use_cache": True}
            write_whole(folder / CONFIG, json.dumps(fields, indent=1).encode())
        if tensors:
            save_tensors(tensors, folder / FROZEN)
    except (OSError, LocalError) as error:
        telemetry.emit("model.not_kept", step="keep the model", reason=str(error))


def keep_buffers(model: nn.Module, run_folder: Path, telemetry: Telemetry) -> None:
    """Write down the lasting buffers as they are now. What cannot be written is told as an event."""
    inner = unwrapped(model)
    tensors = whole_tensors(inner, [name for name, _ in inner.named_buffers()])
    try:
        if tensors:
            save_tensors(tensors, run_folder / FOLDER / BUFFERS)
    except LocalError as error:
        telemetry.emit("model.not_kept", step="keep the buffers", reason=str(error))
