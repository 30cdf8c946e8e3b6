"""`flockstep eval`: the held-out loss of a checkpoint on this computer, and what its model continues prompts with.

It measures what drawn members measure while a run trains, on all held-out sequences that they would take with enough time.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from safetensors.torch import load_file
from torch import nn

from ...collectives.chain.certificate import settings_after
from ...collectives.state.checkpoint_file import Checkpoint
from ...collectives.vector.arrays import Floats
from ...dht.run.manifest import MAX_PROMPT_BYTES, SignedManifest
from ...optim.models.kept import BUFFERS, FOLDER, FROZEN
from ...optim.models.registry import HF, build_model, check_forward, separates
from ...optim.shards.opening import open_tokens, tokenizer_of
from ...optim.step.flat import FlatLayout
from ...optim.train.device import choose_device
from ...optim.train.evaluating import HeldOutResult, HeldOutText
from ...optim.train.threads import Threads, all_threads
from ...optim.train.trainer import check_tokenizer, loss_on
from ...peer.base.config import PeerConfig
from ...peer.base.errors import UsageError
from ...peer.base.plain import plain_text
from ...peer.identity import Identity, identity_path
from ...peer.log.telemetry import Telemetry
from .newest import find_checkpoint, manifest_beside, open_newest


def evaluate_checkpoint(
    source: Path,
    prompts: Sequence[str],
    config: PeerConfig,
    write_line: Callable[[str], None],
    tell: Callable[[str], None],
    *,
    as_json: bool,
) -> None:
    """Measure the newest checkpoint that `source` names (`newest.find_checkpoint`). Raises `FlockstepError`.

    `tell` is given the progress, a line at a time. Without `prompts` the model continues those of its run.
    """
    for size in (len(prompt.encode(errors="replace")) for prompt in prompts):
        if not 0 < size <= MAX_PROMPT_BYTES:
            raise UsageError(f"--prompt takes 1 to {MAX_PROMPT_BYTES} bytes of text, not {size}", remedy="shorten it")
    signed = manifest_beside(find_checkpoint(source))
    found, asked, round_ = _measure(source, signed, prompts, config, tell)
    samples = [{"prompt": prompt, "text": said} for prompt, said in zip(asked, found.samples, strict=False)]
    if as_json:
        about = {"round": round_, "loss": found.loss, "tokens": found.tokens, "samples": samples}
        write_line(json.dumps(about))
        return
    write_line(f"round {round_}: held-out loss {found.loss:.4f} nats per token, of {found.tokens:,} tokens")
    for sample in samples:
        write_line(plain_text(f"{sample['prompt']} → {sample['text']}"))


def _measure(
    source: Path, signed: SignedManifest, prompts: Sequence[str], config: PeerConfig, tell: Callable[[str], object]
) -> tuple[HeldOutResult, Sequence[str], int]:
    """Return what was measured of a checkpoint, the prompts, and its round. Raises `FlockstepError`."""
    checkpoint, theta = open_newest(source)
    manifest, device = settings_after(checkpoint.place.certificate, signed), choose_device(config.device)
    is_mine = manifest.owner == Identity.load_or_create(identity_path(config.home)).peer_id
    tell(f"opening {plain_text(manifest.data.source)}")
    data = open_tokens(manifest.data, config)
    tell("building the model")
    allowed = manifest.model.name if is_mine and manifest.model.name.startswith(HF) else config.allow_model
    model = build_model(manifest.model.name, manifest.model.options, seed=manifest.seed, allow_model=allowed)
    check_forward(model)
    check_tokenizer(model, data)
    fill_in(model, checkpoint, theta)
    asked = tuple(prompts) or manifest.eval.prompts
    tokenizer = tokenizer_of(data, config.home)
    model = model.to(device).eval()
    loss_of = loss_on(device, separate=data.has_examples and separates(model))
    text = HeldOutText(data, tokenizer, asked, device=device, loss_of=loss_of)
    threads = Threads(Telemetry(), most=all_threads() if device.type == "cpu" else 1)
    return text.evaluate(model, tell=tell, judge=threads.judge), asked, checkpoint.place.round


def fill_in(model: nn.Module, checkpoint: Checkpoint, theta: Floats) -> None:
    """Write a checkpoint with this θ into a model, and the buffers and frozen parameters beside it, if there are some.

    Raises `UsageError` if they are those of another model.
    """
    layout = FlatLayout.of(model)
    if checkpoint.size != layout.size or checkpoint.tensors not in ((), layout.describe()):  # A keeper knows no tensors.
        raise UsageError("the checkpoint holds the parameters of another model than its run's manifest names")
    layout.scatter(theta, model)
    kept = checkpoint.folder.resolve().parent.parent / FOLDER
    for path in (kept / FROZEN, kept / BUFFERS):
        if path.exists():
            model.load_state_dict(load_file(path), strict=False)
