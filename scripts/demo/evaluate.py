"""The held-out loss of a run's model before and after it, and what it then continues the run's prompts with."""

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_model

from ...dht.run.manifest import Manifest
from ...optim.models.registry import build_model
from ...optim.shards.opening import open_tokens, tokenizer_of
from ...optim.train.evaluating import HeldOutResult, HeldOutText
from ...optim.train.trainer import loss_on
from ...peer.base.config import PeerConfig
from ...peer.base.errors import LocalError


def evaluate_saved(manifest: Manifest, path: Path, owner: Path) -> tuple[HeldOutResult, HeldOutResult]:
    """Measure the run's model as its seed makes it, and with the parameters that a peer saved, on the data of its owner.

    Raises `LocalError` if they do not fit it. It sets torch to one thread for the whole process: two threads spin while they
    wait for each other, and beside one busy process they were 25 times slower than one (docs/log.md).
    """
    torch.set_num_threads(1)
    device = torch.device("cpu")
    model = build_model(manifest.model.name, manifest.model.options, seed=manifest.seed).eval()
    source = open_tokens(manifest.data, PeerConfig(home=owner))
    tokenizer = tokenizer_of(source, owner)
    text = HeldOutText(source, tokenizer, manifest.eval.prompts, device=device, loss_of=loss_on(device))
    before = text.evaluate(model)
    try:
        load_model(model, path)
    except (OSError, SafetensorError, RuntimeError) as error:
        raise LocalError(f"{path} does not hold the run's model: {error}") from error
    return before, text.evaluate(model)
