"""Models on disk: safetensors, written whole or not at all."""

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from ..peer.errors import LocalError


def save_tensors(tensors: Mapping[str, Tensor], path: Path, **metadata: str) -> None:
    """Write tensors by name, and what the file is to say of them, such as the round and the state root.

    Raises `LocalError`; whatever was at `path` before is then still there.
    """
    try:
        file, draft = tempfile.mkstemp(dir=path.absolute().parent, prefix=f".{path.name}.")
        os.close(file)
        try:
            save_file(dict(tensors), draft, {"format": "pt", **metadata})
            os.replace(draft, path)
        except BaseException:
            os.unlink(draft)
            raise
    except OSError as error:
        raise LocalError(f"cannot write {path}: {error}", remedy="choose a folder that can be written") from error
