"""`flockstep eval`: the held-out loss of a checkpoint on this computer, and what its model continues prompts with.

It measures what drawn members measure while a run trains, on all held-out sequences that they would take with enough time.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from safetensors.torch import load_file
from torch import nn

from ..collectives.state.checkpoint_file import Checkpoint, load_checkpoint
from ..dht.run.manifest import MAX_PROMPT_BYTES, SignedManifest
from ..optim.data.sources import open_data
from ..optim.data.tokenizer import find_tokenizer
from ..optim.evaluating import HeldOutText
from ..optim.flat import FlatLayout
from ..optim.models.kept import BUFFERS, FOLDER, FROZEN
from ..optim.models.registry import HF, build_model
from ..optim.trainer import check_tokenizer, choose_device, loss_on
from ..peer.config import PeerConfig
from ..peer.errors import RemoteError, UsageError
from ..peer.identity import Identity, identity_path
from ..peer.plain import plain_text
from .export import find_checkpoint


def evaluate_checkpoint(
    source: Path, prompts: Sequence[str], config: PeerConfig, write_line: Callable[[str], None], *, as_json: bool
) -> None:
    """Measure the newest checkpoint that `source` names (`export.find_checkpoint`). Raises `FlockstepError`.

    Without `prompts` the model continues those of its run.
    """
    for size in (len(prompt.encode(errors="replace")) for prompt in prompts):
        if not 0 < size <= MAX_PROMPT_BYTES:
            raise UsageError(f"--prompt takes 1 to {MAX_PROMPT_BYTES} bytes of text, not {size}", remedy="shorten it")
    folder = find_checkpoint(source)
    signed = manifest_beside(folder)
    manifest, device = signed.manifest, choose_device(config.device)
    is_mine = manifest.owner == Identity.load_or_create(identity_path(config.home)).peer_id
    data = open_data(manifest.data, config, mine=is_mine)
    allowed = manifest.model.name if is_mine and manifest.model.name.startswith(HF) else config.allow_model
    model = build_model(manifest.model.name, manifest.model.options, seed=manifest.seed, allow_model=allowed)
    check_tokenizer(model, data)
    checkpoint = load_checkpoint(folder)
    fill_in(model, checkpoint, folder.resolve().parent.parent / FOLDER)
    asked = tuple(prompts) or manifest.eval.prompts
    tokenizer = find_tokenizer(manifest.data, config)
    text = HeldOutText(data, tokenizer, asked, device=device, loss_of=loss_on(device))
    found = text.evaluate(model.to(device).eval())
    samples = [{"prompt": prompt, "text": said} for prompt, said in zip(asked, found.samples, strict=False)]
    if as_json:
        about = {"round": checkpoint.place.round, "loss": found.loss, "tokens": found.tokens, "samples": samples}
        write_line(json.dumps(about))
        return
    write_line(f"round {checkpoint.place.round}: held-out loss {found.loss:.4f} nats per token, of {found.tokens:,} tokens")
    for sample in samples:
        write_line(plain_text(f"{sample['prompt']} → {sample['text']}"))


def manifest_beside(folder: Path) -> SignedManifest:
    """Return the manifest of the run whose checkpoint lies in a folder. Raises `UsageError`."""
    path = folder.resolve().parent.parent / "manifest"
    try:
        return SignedManifest.decode(path.read_bytes())
    except (OSError, RemoteError) as error:
        remedy = "name a home folder, or a checkpoint where its peer has left it, in runs/RUN/checkpoints"
        raise UsageError(f"the run of {folder} is not known: {path}: {error}", remedy=remedy) from error


def fill_in(model: nn.Module, checkpoint: Checkpoint, kept: Path) -> None:
    """Write a checkpoint into a model, and the buffers and frozen parameters that its peer has `kept`, if it has.

    Raises `UsageError` if they are those of another model.
    """
    layout = FlatLayout.of(model)
    if checkpoint.size != layout.size or checkpoint.tensors not in ((), layout.describe()):  # A keeper knows no tensors.
        raise UsageError("the checkpoint holds the parameters of another model than its run's manifest names")
    layout.scatter(checkpoint.theta.copy(), model)  # Torch warns of what is mapped from the disk, which nobody may write.
    for path in (kept / FROZEN, kept / BUFFERS):
        if path.exists():
            model.load_state_dict(load_file(path), strict=False)
