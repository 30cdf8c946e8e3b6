"""The shapes of the built-in decoder `gpt`, without torch, for code that only needs sizes. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from ...peer.base.errors import UsageError, did_you_mean

MAX_SHAPE = 1 << 31
"""Of each figure: far more than any computer holds, and little enough that sizes stay figures that a float can hold."""
MAX_LAYERS = 10_000
"""A layer costs milliseconds and kilobytes however narrow it is, and a manifest may ask for any number of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTConfig:
    """The shape of a `gpt`. Raises `UsageError` if it is impossible."""

    vocab_size: int = 256
    """Token values; 256 for bytes."""

    layers: int = 6
    """Blocks of attention and MLP."""

    heads: int = 6
    """Attention heads; `width / heads` is even, as rotary embeddings turn pairs."""

    width: int = 384
    """Width of the residual stream."""

    context: int = 512
    """Maximum tokens of one sequence."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            most = MAX_LAYERS if field.name == "layers" else MAX_SHAPE
            if type(value) is not int or not 1 <= value <= most:
                raise UsageError(f"gpt: {field.name} must be a positive integer up to {most}")
        if self.width % (2 * self.heads):
            raise UsageError(
                f"gpt: width {self.width} does not split into {self.heads} heads of an even size",
                remedy="make the width a multiple of twice the heads",
            )

    @property
    def num_parameters(self) -> int:
        """The number of parameters: the tied embedding, and per block four matrices of attention and two of the MLP."""
        return self.vocab_size * self.width + self.layers * (4 + 2 * 4) * self.width**2

    @property
    def num_angles(self) -> int:
        """The number of cosines and sines: for each position those of the pairs of a head."""
        return 2 * self.context * (self.width // self.heads // 2)


GPT_SIZES: dict[str, GPTConfig] = {
    "0.2m": GPTConfig(layers=4, heads=4, width=64, context=256),
    "1m": GPTConfig(layers=5, heads=4, width=128, context=256),
    "10m": GPTConfig(layers=6, heads=6, width=384),
    "25m": GPTConfig(layers=8, heads=8, width=512),
    "124m": GPTConfig(layers=10, heads=8, width=1024, context=1024),
}


def gpt_config(options: Mapping[str, Any]) -> GPTConfig:
    """Build the shape of a manifest's options: `size`, a key of `GPT_SIZES`, and fields of `GPTConfig` that override it.

    Raises `UsageError` for an unknown option.
    """
    overrides = dict(options)
    size = overrides.pop("size", "10m")
    if not isinstance(size, str) or size not in GPT_SIZES:
        raise UsageError(
            f"gpt: there is no size {size!r}{did_you_mean(str(size), GPT_SIZES)}",
            remedy=f"choose one of {', '.join(GPT_SIZES)}",
        )
    known = [field.name for field in fields(GPTConfig)]
    for option in overrides:
        if option.startswith("lora_"):
            raise UsageError(
                f"gpt: {option} is for pretrained weights, which adapters leave frozen; a gpt begins from the seed",
                remedy="train the whole gpt, or an hf: model with adapters",
            )
        if option not in known:
            raise UsageError(
                f"gpt: there is no option {option!r}{did_you_mean(option, known)}",
                remedy=f"the options are size, {', '.join(known)}",
            )
    return replace(GPT_SIZES[size], **overrides)
