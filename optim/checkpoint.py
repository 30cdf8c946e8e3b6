"""Models on disk: safetensors, written whole or not at all."""

import os
import tempfile
from pathlib import Path

from safetensors.torch import save_model as write_model
from torch import nn

from ..peer.errors import LocalError


def save_model(model: nn.Module, path: Path, *, round_: int, root: str) -> None:
    """Write a model's tensors (tied ones once) with the round and the state root that they stand for.

    Raises `LocalError`; whatever was at `path` before is then still there.
    """
    metadata = {"format": "pt", "round": str(round_), "state_root": root}
    try:
        file, draft = tempfile.mkstemp(dir=path.absolute().parent, prefix=f".{path.name}.")
        os.close(file)
        try:
            write_model(model, draft, metadata)
            os.replace(draft, path)
        except BaseException:
            os.unlink(draft)
            raise
    except OSError as error:
        raise LocalError(f"cannot write {path}: {error}", remedy="choose a folder that can be written") from error
