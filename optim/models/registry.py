"""Models by their name in a manifest, and the loss of a batch of tokens under any of them.

    gpt                     the built-in decoder (`gpt`)
    hf:llama                an architecture of transformers, fresh from the seed; the options are its config's fields
    hf:FOLDER, hf:org/name  pretrained weights, in safetensors, as the initial state (`hf`)
    pkg.module:function     custom code, only if the volunteer allows this exact name
"""

import importlib
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...peer.base.errors import LocalError, UsageError, did_you_mean
from ..step.examples import ids_of, numbers_of, positions_of
from ..step.flat import bytes_of, unwrapped
from ..step.micro_batches import out_of_memory
from .gpt import GPT
from .gpt_config import gpt_config
from .head import evaluating, loss_of_head
from .needs import ModelSize, size_of_gpt

IGNORED = -100
"""A target without a loss."""
GIVES_LOSS = "let forward(inputs, targets) return the mean loss, or forward(input_ids, labels) an object with .loss"
HF = "hf:"
"""The prefix of transformers' models."""


def build_model(name: str, options: Mapping[str, Any], *, seed: int, allow_model: str = "") -> nn.Module:
    """Build the model of a manifest, freshly initialized from `seed`; the caller's random state is unchanged.

    A name `pkg.module:function` is imported and called with the options only if it equals `allow_model`, since that
    runs code. A model `hf:…` that is neither an architecture nor a public model of the hub is opened under the same
    condition, since it is on this computer or behind this user's token. Raises `UsageError` for an unknown name or option,
    and `LocalError` where memory cannot hold it.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        try:
            if name.startswith(HF):
                from .hf import build_hf

                return build_hf(name.removeprefix(HF), options, trusted=name == allow_model)
            if ":" in name:
                return _own_model(name, options, allow_model)
            if name != "gpt":
                hint = did_you_mean(name, ["gpt"])
                raise UsageError(f"there is no model {name!r}{hint}", remedy="use gpt, or an architecture such as hf:llama")
            model = GPT(gpt_config(options))
            model.initialize(seed)
            return model
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            remedy = "free its memory, or choose a smaller model"
            raise LocalError(f"this computer has no memory for the model {name}", remedy=remedy) from error


def size_of_model(name: str, options: Mapping[str, Any]) -> ModelSize | None:
    """Return the size of a model without building it; None for pretrained weights and custom code.

    Raises `FlockstepError` as `build_model` does.
    """
    if name == "gpt":
        return size_of_gpt(options)
    model = outline_of(name, options)
    if model is None:
        return None
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return ModelSize(trained, bytes_of(model))


def outline_of(name: str, options: Mapping[str, Any]) -> nn.Module | None:
    """Return a model without values, which takes no memory however large it is; None for pretrained weights and custom code.

    Raises `FlockstepError` as `build_model` does.
    """
    architecture = name.removeprefix(HF)
    if name != "gpt" and (architecture == name or "/" in architecture or Path(architecture).is_dir()):
        return None
    with torch.device("meta"):
        if name == "gpt":
            return GPT(gpt_config(options))
        from .hf import build_hf

        return build_hf(architecture, options, trusted=False)


def training_loss(model: nn.Module, tokens: Tensor, *, separate: bool = False) -> Tensor:
    """Return the mean loss of next-token prediction; `tokens` is int64 (batch, length + 1), see `optim.step.examples`.

    Context is no target (-100, as torch's `cross_entropy` ignores it). With `separate` the examples of a sequence do not see
    each other, which `separates` says that this model can.

    A model whose `forward` takes `labels` is called like a transformers model, which shifts them itself; any other one
    is called with inputs and targets. The loss is the result, or its `.loss`. Raises `UsageError`.
    """
    inputs = ids_of(tokens)
    targets = torch.where(tokens < 0, IGNORED, inputs)
    # The mean of nothing would be no number: such a batch has one target, and no weight in its step (`micro_batches`).
    targets[0, -1] = torch.where((targets[:, 1:] >= 0).any(), targets[0, -1], inputs[0, -1])
    base = _base_of(model)
    if "labels" in inspect.signature(base.forward).parameters:
        more = {"position_ids": positions_of(tokens)} if separate else {}
        if (loss := loss_of_head(model, base, inputs, targets, more)) is not None:
            return loss
        output = model(input_ids=inputs, labels=targets, **more)
    else:
        more = {"examples": numbers_of(tokens[:, :-1])} if separate else {}
        output = model(inputs[:, :-1], targets[:, 1:], **more)
    loss = getattr(output, "loss", output)
    if not isinstance(loss, Tensor) or loss.ndim:
        what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise UsageError(f"the model returned {what} instead of its loss", remedy=GIVES_LOSS)
    return loss


def check_forward(model: nn.Module) -> None:
    """Raise `UsageError` for a model that cannot be asked for its loss (`training_loss`)."""
    base = _base_of(model)
    signature = inspect.signature(base.forward)
    try:
        if "labels" not in signature.parameters:
            signature.bind("inputs", "targets")
    except TypeError as error:
        what = f"{type(base).__name__}.forward{signature} takes no inputs and targets"
        raise UsageError(what, remedy=GIVES_LOSS) from error


@torch.no_grad()
def separates(model: nn.Module) -> bool:
    """Return True if a model can keep the examples of a sequence apart.

    One that is called with inputs and targets says so by a parameter `examples` of its `forward`. A model of transformers is
    tried, since not every one that takes `position_ids` sees by them where an example begins.
    """
    base = _base_of(model)
    parameters = inspect.signature(base.forward).parameters
    if "labels" not in parameters:
        return "examples" in parameters
    if "position_ids" not in parameters or any(isinstance(module, nn.Conv1d) for module in base.modules()):
        return False  # A convolution over time sees the tokens before an example, by weights that begin near zero.
    device = next(base.parameters()).device
    texts = torch.tensor([[[0, 1, 0, 0, 1, 1]], [[1, 0, 1, 0, 1, 1]]], device=device)  # Two that end alike.
    positions = {"position_ids": torch.arange(3, device=device).repeat(2)[None]}
    with evaluating(base):
        one, other = (base(input_ids=text, **positions).logits[:, 3:] for text in texts)
    rounding = torch.finfo(one.dtype).eps * one.abs().max()  # Experts are computed together with their neighbours.
    return bool((one - other).abs().max() <= 8 * rounding)


def recompute_activations(model: nn.Module) -> None:
    """Let a model compute its activations again in the backward pass instead of keeping them (arXiv:1604.06174).

    Raises `UsageError` for a model without a switch for that.
    """
    base = unwrapped(model)
    if isinstance(base, GPT):
        base.recomputes = True
        return
    # Of transformers' models, and of those made like them: first by its name from 5.20 on, where the other one warns.
    kinds = ("activation_checkpointing", "gradient_checkpointing")
    kind = next((kind for kind in kinds if hasattr(base, f"{kind}_enable")), "")
    remedy = "train without --checkpoint-activations, with a smaller --micro-batch"
    if not kind:
        raise UsageError(f"{type(base).__name__} has no switch to checkpoint its activations", remedy=remedy)
    try:
        getattr(base, f"{kind}_enable")(**{f"{kind}_kwargs": {"use_reentrant": False}})
    except ValueError as error:  # Of an architecture that does not support it.
        raise UsageError(f"{type(base).__name__} cannot checkpoint its activations: {error}", remedy=remedy) from error


def _base_of(model: nn.Module) -> nn.Module:
    """Return the model inside of wrappers, and of peft's, whose own `forward` accepts any argument."""
    base = unwrapped(model)
    adapted = getattr(base, "get_base_model", None)
    found: nn.Module = adapted() if callable(adapted) else base
    return found


def vocabulary_of(model: nn.Module) -> int | None:
    """Return the size of a model's vocabulary; None if its config lacks it."""
    return _config_number(model, "vocab_size")


def longest_of(model: nn.Module) -> int | None:
    """Return the most inputs of a sequence which fit a model together with their last target; None if its config lacks it."""
    own, hf = _config_number(model, "context"), _config_number(model, "max_position_embeddings")
    return own if own is not None or hf is None else hf - 1


def _config_number(model: nn.Module, name: str) -> int | None:
    """Return a number of a model's `config`; of a multimodal transformers model, of its text config."""
    config = getattr(unwrapped(model), "config", None)
    text_config = getattr(config, "get_text_config", None)
    value = getattr(text_config() if callable(text_config) else config, name, None)
    return value if isinstance(value, int) else None


def _own_model(name: str, options: Mapping[str, Any], allow_model: str) -> nn.Module:
    if name != allow_model:
        raise UsageError(
            f"the run's model {name} is custom code", remedy=f"if you trust it, pass --allow-model {name}"
        )
    module_name, _, function_name = name.partition(":")
    try:
        build: Callable[..., object] = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"cannot import {name}: {error}", remedy="install the package that the run names") from error
    model = build(**options)
    if not isinstance(model, nn.Module):
        raise UsageError(f"{name} returned {type(model).__name__}, not a torch.nn.Module")
    return model
