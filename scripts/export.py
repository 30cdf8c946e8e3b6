"""`flockstep export`: the newest checkpoint of a run as a model that other programs load.

What comes out depends on what the run trains: for a model of transformers a folder for `from_pretrained`, for an adapter
a folder for peft (or the merged model), for any other model one safetensors file with its parameters by name.
"""

import shutil
from collections.abc import Callable
from math import prod
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from ..collectives.state.checkpoint_file import DESCRIPTION, Checkpoint, load_checkpoint
from ..dht.run.manifest import SignedManifest
from ..optim.checkpoint import save_tensors
from ..optim.models.hf import DTYPES, merge_adapter, save_hf, save_tokenizer
from ..optim.models.kept import ADAPTER, BUFFERS, CONFIG, FOLDER, FROZEN
from ..optim.models.registry import HF
from ..peer.errors import RemoteError, UsageError
from .upload import check_target, upload

Say = Callable[[str], None]

MODEL, ADAPTER_MODEL = "model.safetensors", "adapter_model.safetensors"


def export(
    source: Path, out: Path, say: Say, *, dtype: str = "", base: str = "", tokenizer: str = "", to: str = ""
) -> None:
    """Write the model of the checkpoint that `source` names (see `find_checkpoint`) to the new folder `out`.

    `dtype` is that of the parameters, "" for each one's own; `base` the model to merge an adapter into, a folder or a
    hub id; `tokenizer` the file, folder or hub id of the one to put beside a model of transformers, "" for that of its
    pretrained weights; `to` where to upload the folder. Raises `FlockstepError`.
    """
    if dtype and dtype not in DTYPES:
        raise UsageError(f"there is no dtype {dtype!r} to export", remedy=f"choose one of {', '.join(DTYPES)}")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} is there already", remedy="name a new folder")
    check_target(to)
    folder = find_checkpoint(source)
    checkpoint = load_checkpoint(folder)
    kept = folder.parent.parent / FOLDER
    adapter = (kept / ADAPTER).exists()
    if base and not adapter:
        raise UsageError(f"--merge {base}: this run trains no adapter", remedy="leave it out")
    out.mkdir(parents=True, exist_ok=True)
    tensors = parameters(checkpoint, dtype)
    said = {"round": str(checkpoint.place.round), "state_root": checkpoint.place.root.hex()}
    if adapter:
        shutil.copyfile(kept / ADAPTER, out / ADAPTER)
        save_tensors({_adapter_name(name): tensor for name, tensor in tensors.items()}, out / ADAPTER_MODEL, **said)
        if base:
            merge_adapter(base, out)
            save_tokenizer(tokenizer or base, out)
    else:
        for name in (FROZEN, BUFFERS):
            if (kept / name).exists():
                tensors |= {key: _in(value, dtype) for key, value in load_file(kept / name).items()}
        if (kept / CONFIG).exists():
            save_hf(kept, tensors, out)
            save_tokenizer(tokenizer or _pretrained(folder.parent.parent), out)
        else:
            save_tensors(tensors, out / MODEL, **said)
    say(f"{out} holds the model after round {checkpoint.place.round}, state root {checkpoint.place.root.hex()[:8]}")
    if to:
        upload(out, to)
        say(f"uploaded to {to}")


def find_checkpoint(source: Path) -> Path:
    """The folder of the newest checkpoint in a home folder, in the folder of a run, or of what is one itself.

    Raises `UsageError` where there is none, or where there are several runs.
    """
    if (source / DESCRIPTION).exists():
        return source
    if (source / "checkpoints").is_dir():
        rounds = [path for path in (source / "checkpoints").iterdir() if path.name.isdigit()]
        if rounds:
            return max(rounds, key=lambda path: int(path.name))
    runs = sorted(path.parent for path in source.glob("runs/*/checkpoints") if any(path.glob("*/" + DESCRIPTION)))
    if len(runs) > 1:
        names = " ".join(str(run) for run in runs)
        raise UsageError(f"{source} holds {len(runs)} runs", remedy=f"name the folder of one: {names}")
    if not runs:
        raise UsageError(
            f"there is no checkpoint in {source}",
            remedy="name a home folder in which a peer has trained, or the folder of a checkpoint",
        )
    return find_checkpoint(runs[0])


def parameters(checkpoint: Checkpoint, dtype: str = "") -> dict[str, Tensor]:
    """The trained parameters of a checkpoint by name, each of `dtype` or of the one that its peer trained it in."""
    theta = checkpoint.theta
    return {
        item.name: torch.from_numpy(theta[item.offset : item.offset + prod(item.shape)].copy())
        .view(item.shape)
        .to(getattr(torch, dtype or item.dtype))
        for item in checkpoint.tensors
    }


def _in(tensor: Tensor, dtype: str) -> Tensor:
    return tensor.to(getattr(torch, dtype)) if dtype and tensor.is_floating_point() else tensor


def _adapter_name(name: str) -> str:
    """A parameter's name as peft writes it to a file: without the name that the adapter has in memory."""
    return name.replace(".modules_to_save.default.", ".").replace(".default.", ".")


def _pretrained(run_folder: Path) -> str:
    """The pretrained weights that the run started from; empty if it did not, or if nobody knows."""
    try:
        manifest = SignedManifest.decode((run_folder / "manifest").read_bytes()).manifest
    except (OSError, RemoteError):
        return ""
    name = manifest.model.name.removeprefix(HF)
    return name if manifest.model.name != name and "/" in name else ""
