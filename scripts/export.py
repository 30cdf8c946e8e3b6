"""`flockstep export`: writes the newest checkpoint of a run as a model for other programs.

A transformers model becomes a folder for `from_pretrained`, an adapter a folder for peft (or the merged model), and any
other model one safetensors file with its parameters by name. The folder may be uploaded to a bucket of S3 or of a
compatible service, or to a repository of the Hugging Face hub.

The one user of `boto3` and `huggingface_hub`. Both find the credentials by themselves; this program never reads them.
"""

import shutil
from collections.abc import Callable
from importlib.util import find_spec
from math import prod
from pathlib import Path
from urllib.parse import urlsplit

import torch
from torch import Tensor

from ..collectives.state.checkpoint_file import Checkpoint
from ..dht.run.manifest import SignedManifest
from ..optim.models.hf import DTYPES, merge_adapter, save_hf, save_tokenizer
from ..optim.models.kept import ADAPTER, BUFFERS, CONFIG, FOLDER, FROZEN, MODEL, load_tensors, save_tensors
from ..optim.models.registry import HF
from ..peer.arrays import Floats
from ..peer.disk import disk_errors
from ..peer.errors import LocalError, RemoteError, UsageError
from .newest import open_newest

ADAPTER_MODEL = "adapter_model.safetensors"


def export(
    source: Path,
    out: Path,
    write_line: Callable[[str], None],
    *,
    dtype: str = "",
    base: str = "",
    tokenizer: str = "",
    to: str = "",
) -> None:
    """Write the model of the checkpoint that `source` names (see `newest.find_checkpoint`) to the new folder `out`.

    `dtype` is that of the parameters, "" for each one's own. `base` is the model to merge an adapter into, a folder or a
    hub id. `tokenizer` is the file, folder or hub id of the tokenizer to save beside a transformers model, "" for that
    of its pretrained weights. `to` is the target of the upload. Raises `FlockstepError`.
    """
    if dtype and dtype not in DTYPES:
        raise UsageError(f"there is no dtype {dtype!r} to export", remedy=f"choose one of {', '.join(DTYPES)}")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} exists and is not empty", remedy="name a new folder")
    check_target(to)
    checkpoint, theta = open_newest(source)
    folder = checkpoint.folder.resolve()
    kept = folder.parent.parent / FOLDER
    adapter = (kept / ADAPTER).exists()
    if base and not adapter:
        raise UsageError(f"--merge {base}: this run trains no adapter", remedy="leave it out")
    tensors = parameters(checkpoint, theta, dtype)
    with disk_errors(f"write {out}"):
        out.mkdir(parents=True, exist_ok=True)
    metadata = {"round": str(checkpoint.place.round), "state_root": checkpoint.place.root.hex()}
    if adapter:
        with disk_errors(f"copy {kept / ADAPTER} to {out}"):
            shutil.copyfile(kept / ADAPTER, out / ADAPTER)
        save_tensors({_adapter_name(name): tensor for name, tensor in tensors.items()}, out / ADAPTER_MODEL, **metadata)
        if base:
            merge_adapter(base, out)
            save_tokenizer(tokenizer or base, out)
    else:
        for name in (FROZEN, BUFFERS):
            if (kept / name).exists():
                tensors |= {key: _in(value, dtype) for key, value in load_tensors(kept / name).items()}
        if (kept / CONFIG).exists():
            save_hf(kept, tensors, out)
            pretrained, revision = (tokenizer, None) if tokenizer else _pretrained(folder.parent.parent)
            save_tokenizer(pretrained, out, revision)
        else:
            save_tensors(tensors, out / MODEL, **metadata)
    write_line(f"{out} holds the model after round {checkpoint.place.round}, state root {checkpoint.place.root.hex()[:8]}")
    if to:
        upload(out, to)
        write_line(f"uploaded to {to}")


def parameters(checkpoint: Checkpoint, theta: Floats, dtype: str = "") -> dict[str, Tensor]:
    """Return the trained parameters of a checkpoint by name, in `dtype` or the dtype that its peer trained.

    Raises `LocalError` if its description names another thing than a dtype.
    """
    for item in checkpoint.tensors:
        if not isinstance(getattr(torch, dtype or item.dtype, None), torch.dtype):
            remedy = "name the right one by --dtype, or take another checkpoint of the run"
            raise LocalError(f"{checkpoint.folder} names no dtype, but {item.dtype[:40]!r}", remedy=remedy)
    return {
        item.name: torch.from_numpy(theta[item.offset : item.offset + prod(item.shape)].copy())
        .view(item.shape)
        .to(getattr(torch, dtype or item.dtype))
        for item in checkpoint.tensors
    }


def _in(tensor: Tensor, dtype: str) -> Tensor:
    return tensor.to(getattr(torch, dtype)) if dtype and tensor.is_floating_point() else tensor


def _adapter_name(name: str) -> str:
    """Return a parameter's name as peft writes it to a file: without the name of the adapter."""
    return name.replace(".modules_to_save.default.", ".").replace(".default.", ".")


def _pretrained(run_folder: Path) -> tuple[str, str | None]:
    """Return the pretrained weights that the run started from, and their commit if its manifest names one.

    The name is empty if there are none, or if the manifest is unreadable.
    """
    try:
        model = SignedManifest.decode((run_folder / "manifest").read_bytes()).manifest.model
    except (OSError, RemoteError):
        return "", None
    name, revision = model.name.removeprefix(HF), model.options.get("revision")
    return (name, revision if isinstance(revision, str) else None) if model.name != name and "/" in name else ("", None)


PACKAGES = {"s3": ("boto3", "pip install 'flockstep[s3]'"), "hf": ("huggingface_hub", "pip install 'flockstep[hf]'")}
"""By the scheme of the target: the required package, and how to install it."""


def check_target(to: str) -> None:
    """Raise `UsageError` for an invalid target, `LocalError` for a missing package; "" is no target."""
    if not to:
        return
    parts = urlsplit(to)
    if parts.scheme not in PACKAGES or not parts.netloc or (parts.scheme == "hf" and not parts.path.strip("/")):
        raise UsageError(f"cannot upload to {to!r}", remedy="write s3://bucket/prefix or hf://user/repository")
    package, remedy = PACKAGES[parts.scheme]
    if find_spec(package) is None:
        raise LocalError(f"{parts.scheme}:// needs the package {package}", remedy=remedy)


def upload(folder: Path, to: str) -> None:
    """Upload all files of a folder. Raises `LocalError`."""
    check_target(to)
    parts = urlsplit(to)
    path = parts.path.strip("/")
    try:
        if parts.scheme == "s3":
            _to_s3(folder, parts.netloc, path)
        else:
            _to_hub(folder, f"{parts.netloc}/{path}")
    except Exception as error:  # Either package has dozens of its own, all with a reason.
        raise LocalError(f"cannot upload to {to}: {error}", remedy="check its name and your credentials") from error


def _to_s3(folder: Path, bucket: str, prefix: str) -> None:
    import boto3

    client = boto3.client("s3")
    for path in sorted(folder.iterdir()):
        client.upload_file(str(path), bucket, f"{prefix}/{path.name}".lstrip("/"))


def _to_hub(folder: Path, repository: str) -> None:
    from huggingface_hub import HfApi

    hub = HfApi()
    hub.create_repo(repository, exist_ok=True)
    hub.upload_folder(repo_id=repository, folder_path=str(folder))
