"""`flockstep export`: writes the newest checkpoint of a run as a model for other programs.

A transformers model becomes a folder for `from_pretrained`, an adapter a folder for peft (or the merged model), a `gpt`
a folder for `GPT.load`, and any other model one safetensors file with its parameters by name. What was written is
compared with what was trained. The folder may be uploaded to a bucket of S3 or of a compatible service, or to a repository
of the Hugging Face hub.
"""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from ...collectives.state.checkpoint_file import Checkpoint
from ...collectives.vector.arrays import Floats
from ...dht.run.manifest import SignedManifest
from ...optim.data.tokenizer import files_folder
from ...optim.models.hf import DTYPES, end_generation, load_saved, merge_adapter, save_hf, save_tokenizer
from ...optim.models.kept import (
    ADAPTER,
    ADAPTER_NAMES,
    ADAPTER_REST,
    CONFIG,
    FOLDER,
    GENERATION,
    GPT_CONFIG,
    MODEL,
    NOT_KEPT,
    beside,
    keep_buffers,
    keep_model,
    load_json,
    load_tensors,
    parts_of,
    save_tensors,
    unkept_line,
)
from ...optim.models.registry import HF, build_model
from ...optim.shards.index import TOKENIZER
from ...optim.shards.packed import Pin, open_index, seed_folder
from ...optim.shards.reader import tokenizer_files
from ...optim.shards.tokenizer_config import CONFIG_NAME, TEMPLATE, decode_config, encode_config
from ...optim.step.flat import FlatLayout
from ...optim.train.pin import importable
from ...peer.base.config import PeerConfig
from ...peer.base.disk import disk_errors, write_whole
from ...peer.base.errors import LocalError, RemoteError, UsageError
from ...peer.identity import Identity, identity_path
from ...peer.log.telemetry import Telemetry
from .newest import manifest_beside, open_newest
from .upload import check_target, open_target

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
    model: str = "",
) -> None:
    """Write the model of the checkpoint that `source` names (see `newest.find_checkpoint`) to the new folder `out`.

    `dtype` is that of the parameters, "" for each one's own. `base` is the model to merge an adapter into, a folder or a
    hub id. `tokenizer` is the file, folder or hub id of the tokenizer to save beside a transformers model, "" for that
    of its pretrained weights. `to` is the target of the upload. `model` is the function, `module:function`, that makes the
    model of a keeper's checkpoint, whose run does not name it. Raises `FlockstepError`, also where something that was
    trained is not in what was written.
    """
    if dtype and dtype not in DTYPES:
        raise UsageError(f"there is no dtype {dtype!r} to export", remedy=f"choose one of {', '.join(DTYPES)}")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} exists and is not empty", remedy="name a new folder")
    check_target(to)
    checkpoint, theta = open_newest(source)
    run_folder = checkpoint.folder.resolve().parent.parent
    with described(checkpoint, model, write_line) as (checkpoint, kept):
        adapter = (kept / ADAPTER).exists()
        if base and not adapter:
            raise UsageError(f"--merge {base}: this run trains no adapter", remedy="leave it out")
        tensors = parameters(checkpoint, theta, dtype)
        with disk_errors(f"write {out}"):
            out.mkdir(parents=True, exist_ok=True)
        metadata = {"round": str(checkpoint.place.round), "state_root": checkpoint.place.root.hex()}
        if adapter:
            _write_adapter(kept, tensors, out, metadata)
            if base:
                merge_adapter(base, out)
            _write_tokenizer(kept, out, tokenizer or base, given=bool(tokenizer))
        else:
            whole = tensors | {
                name: tensor.to(getattr(torch, dtype)) if dtype and tensor.is_floating_point() else tensor
                for name, tensor in beside(kept, tensors).items()
            }
            why = save_hf(kept, whole, out) if (kept / CONFIG).exists() else ""
            if why or not (kept / CONFIG).exists():
                save_tensors(whole, out / MODEL, **metadata)
            for name in (*((CONFIG,) if why else ()), GPT_CONFIG, GENERATION):
                if (kept / name).exists():
                    with disk_errors(f"copy {kept / name} to {out}"):
                        shutil.copyfile(kept / name, out / name)
            if why:
                write_line(f"{why}: {out / MODEL} holds all by name, for from_pretrained of the class that was trained")
            is_hf = (kept / CONFIG).exists()
            check_written(out, tensors, partial(load_saved, out) if is_hf and not why else dict)
            pretrained, revision = (tokenizer, None) if tokenizer or not is_hf else _pretrained(run_folder)
            _write_tokenizer(kept, out, pretrained, revision, given=bool(tokenizer))
        if lost := unkept_line(load_json(kept / NOT_KEPT)):
            write_line(f"not in {out}: {lost}")
    write_line(f"{out} holds the model after round {checkpoint.place.round}, state root {checkpoint.place.root.hex()[:8]}")
    if to:
        open_target(to).put(out)
        write_line(f"uploaded to {to}")


@contextlib.contextmanager
def described(
    checkpoint: Checkpoint, model: str, write_line: Callable[[str], None]
) -> Iterator[tuple[Checkpoint, Path]]:
    """Yield a checkpoint whose tensors have names, and the folder of what is kept beside it.

    A keeper knows no names. They are those of the model that its run names, or of the function `model`. Raises
    `FlockstepError`.
    """
    run_folder = checkpoint.folder.resolve().parent.parent
    if checkpoint.tensors:
        yield checkpoint, run_folder / FOLDER
        return
    signed, home = manifest_beside(checkpoint.folder), run_folder.parent.parent
    spec, key = signed.manifest.model, identity_path(home)
    if not model and (signed.manifest.is_own or (":" in spec.name and not spec.name.startswith(HF))):
        raise UsageError(
            f"{checkpoint.folder} is of a keeper, which holds θ but no names and shapes, and its run's model is custom code",
            remedy="name it by --model MODULE:FUNCTION, or export from the home folder of a peer that trains",
        )
    is_mine = key.exists() and Identity.load_or_create(key).peer_id == signed.manifest.owner
    name, options = (model or spec.name), ({} if signed.manifest.is_own else spec.options)
    with importable(os.getcwd() if model else ""):
        built = build_model(name, options, seed=signed.manifest.seed, allow_model=name if model or is_mine else "")
    layout = FlatLayout.of(built)
    layout.pin().check(signed.manifest.pin, name)
    if layout.size != checkpoint.size:
        raise UsageError(f"{checkpoint.folder} holds {checkpoint.size:,} elements, {name} has {layout.size:,}")
    parts, failures = parts_of(built), Telemetry()
    with tempfile.TemporaryDirectory(prefix="flockstep-") as folder, contextlib.closing(failures):
        failures.subscribe(lambda event: write_line(str(event.get("reason"))))
        keep_model(built, parts, Path(folder), failures)
        keep_buffers(built, parts, Path(folder), failures)
        _bring_tokenizer(signed, run_folder, Path(folder) / FOLDER)
        if parts.buffers:
            write_line(f"a keeper holds no buffers: {min(parts.buffers)} and the others are as the model begins")
        yield replace(checkpoint, tensors=layout.describe()), Path(folder) / FOLDER


def _bring_tokenizer(signed: SignedManifest, run_folder: Path, kept: Path) -> None:
    """Put the tokenizer of data that the owner of the run provides beside the other parts. Raises `FlockstepError`."""
    home, pin = run_folder.parent.parent, Pin.of(signed.manifest.data.source)
    if pin is not None and seed_folder(home, pin.index) is not None:
        place, index = open_index(signed.manifest.data, PeerConfig(home=home))
        for name, content in tokenizer_files(index, place, files_folder(home)).items():
            write_whole(kept / name, content)


def check_written(out: Path, trained: Mapping[str, Tensor], load: Callable[[], Mapping[str, Tensor]]) -> None:
    """Raise `LocalError` unless all that was trained is in the safetensors files of a folder, bit for bit.

    A tensor may have another name there, as a tied head has; where it has another form, as experts have that a library
    saves one by one, it is compared in what `load` reads.
    """
    places: dict[str, Path] = {}
    for path in sorted(out.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            places |= dict.fromkeys(file.keys(), path)

    def written(name: str) -> Tensor:
        with safe_open(places[name], "pt") as file:
            found: Tensor = file.get_tensor(name)
        return found

    missing = {name: tensor for name, tensor in trained.items() if name not in places or not _alike(written(name), tensor)}
    for other in places.keys() - trained.keys() if missing else ():
        tensor = written(other)
        missing = {name: wanted for name, wanted in missing.items() if name in places or not _alike(tensor, wanted)}
    if missing:
        loaded = load()
        missing = {
            name: wanted for name, wanted in missing.items() if name not in loaded or not _alike(loaded[name], wanted)
        }
    if missing:
        what = f"{len(missing)} of {len(trained)} trained tensors are not in {out}, such as {min(missing)}"
        raise LocalError(what, remedy="do not use it; the checkpoint is whole: train with Swarm and save swarm.model there")


def _alike(one: Tensor, other: Tensor) -> bool:
    """Return True for the same shape, dtype and bits, those of NaN too."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    flat = [tensor.detach().reshape(-1).contiguous().view(torch.uint8) for tensor in (one, other)]
    return torch.equal(*flat)


def _write_adapter(kept: Path, tensors: Mapping[str, Tensor], out: Path, metadata: Mapping[str, str]) -> None:
    """Write an adapter as peft does. Raises `UsageError` where a trained tensor has no name in peft's file."""
    names, rest = load_json(kept / ADAPTER_NAMES), load_tensors(kept / ADAPTER_REST)
    if unknown := sorted(tensors.keys() - names.keys()):
        raise UsageError(f"{kept / ADAPTER_NAMES} names no {unknown[0]}", remedy="train a round here again, which writes it")
    with disk_errors(f"copy {kept / ADAPTER} to {out}"):
        shutil.copyfile(kept / ADAPTER, out / ADAPTER)
    trained = {str(names[name]): tensor for name, tensor in tensors.items()}
    save_tensors(rest | trained, out / ADAPTER_MODEL, **metadata)
    check_written(out, trained, dict)


def _write_tokenizer(kept: Path, out: Path, source: str, revision: str | None = None, *, given: bool = False) -> None:
    """Write the tokenizer beside a model: that of the run's data, or of `source` if it is `given` or theirs has no template.

    Of what came with the data texts alone are written, and no template runs here. Raises `FlockstepError`.
    """
    config = decode_config(kept / CONFIG_NAME)
    if given or (source and TEMPLATE not in config) or not (kept / TOKENIZER).exists():
        save_tokenizer(source, out, revision)
        return
    with disk_errors(f"write {out}"):
        shutil.copyfile(kept / TOKENIZER, out / TOKENIZER)
        (out / CONFIG_NAME).write_bytes(encode_config(config))
    if not (kept / GENERATION).exists():
        end_generation(out)


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
