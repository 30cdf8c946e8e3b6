"""`gpt`: the built-in decoder, as nanochat and modded-nanogpt build it.

Rotary embeddings, RMSNorm without gains before every layer and on queries and keys, ReLU² (arXiv:2109.08668), no
biases, tied embedding. Without gains and biases nearly every parameter is a hidden matrix, which is what Muon optimizes.
"""

from math import sqrt
from pathlib import Path
from typing import Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ...peer.base.errors import UsageError
from .gpt_config import GPTConfig, gpt_config
from .head import head_loss
from .kept import GPT_CONFIG, MODEL, load_json, load_tensors


class Attention(nn.Module):
    """Causal self-attention with rotary embeddings and normed queries and keys."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        # Three matrices, not one: Muon orthogonalizes a matrix as a whole, and these are not one map.
        self.query = nn.Linear(config.width, config.width, bias=False)
        self.key = nn.Linear(config.width, config.width, bias=False)
        self.value = nn.Linear(config.width, config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        """`x`: (batch, time, width); `cos`, `sin`: (time, width / heads / 2); `mask`: see `_mask_of`."""
        q, k, v = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        q, k = _rotate(_norm(q), cos, sin), _rotate(_norm(k), cos, sin)  # (batch, heads, time, width / heads)
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None)
        out: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    """Attention, then an MLP, each on the normed residual stream and added to it."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.up = nn.Linear(config.width, 4 * config.width, bias=False)
        self.down = nn.Linear(4 * config.width, config.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        """`x`: (batch, time, width)."""
        x = x + self.attention(_norm(x), cos, sin, mask)
        out: Tensor = x + self.down(F.relu(self.up(_norm(x))).square())
        return out


class GPT(nn.Module):
    """A decoder over `vocab_size` tokens."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.recomputes = False
        """Whether activations inside of the blocks are computed again in the backward pass instead of kept."""
        self.embed = nn.Embedding(config.vocab_size, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        pairs = config.width // config.heads // 2
        frequencies = 10_000.0 ** (-torch.arange(pairs) / pairs)
        angles = torch.outer(torch.arange(config.context), frequencies)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    @classmethod
    def load(cls, folder: Path | str) -> Self:
        """Open a folder that `flockstep export` has written. Raises `UsageError` where it is of another model."""
        config, tensors = gpt_config(load_json(Path(folder, GPT_CONFIG))), load_tensors(Path(folder, MODEL))
        if config.num_parameters != sum(tensor.numel() for tensor in tensors.values()):  # Before memory is taken.
            raise UsageError(f"{folder} is not of a gpt as its {GPT_CONFIG} says", remedy="export it again")
        model = cls(config)
        model.load_state_dict(tensors)
        return model

    def forward(self, tokens: Tensor, targets: Tensor | None = None, examples: Tensor | None = None) -> Tensor:
        """Return float32 logits (batch, time, vocab) of `tokens` (batch, time), or with `targets` the mean loss.

        `examples` (batch, time) are the numbers of the examples that the tokens belong to, which do not see each other.
        """
        time, mask = tokens.shape[1], None if examples is None else _mask_of(examples)
        x = _norm(self.embed(tokens))
        for block in self.blocks:
            inputs = x, self.cos[:time], self.sin[:time], mask
            x = checkpoint(block, *inputs, use_reentrant=False) if self.recomputes and self.training else block(*inputs)
        if targets is None:
            return F.linear(_norm(x), self.embed.weight).float()
        return head_loss(_norm(x).flatten(0, 1), self.embed.weight, targets.flatten())

    @torch.no_grad()
    def generate(
        self, prompt: Tensor, num_tokens: int, *, temperature: float = 1.0, generator: torch.Generator | None = None
    ) -> Tensor:
        """Sample `num_tokens` tokens (int64) after a `prompt` (time,) of at least one; temperature 0 is greedy."""
        tokens = prompt
        for _ in range(num_tokens):
            logits = self(tokens[None, -self.config.context :])[0, -1]
            if temperature == 0:
                token = logits.argmax(keepdim=True)
            else:
                token = torch.multinomial(F.softmax(logits / temperature, dim=-1), 1, generator=generator)
            tokens = torch.cat([tokens, token])
        return tokens[len(prompt) :]

    @torch.no_grad()
    def initialize(self, seed: int) -> None:
        """Set every parameter, to the same bits on every processor.

        Peers that compute the same initial state need not fetch it. torch's own `normal_` does not serve, since its
        result depends on the vector instructions. PCG64's 24-bit uniforms and one product are exact. The layers that
        write to the residual stream start at zero, so every block starts as the identity (arXiv:2203.03466).
        """
        random = np.random.Generator(np.random.PCG64(seed))
        for name, parameter in self.named_parameters():
            if name.endswith(("out.weight", "down.weight")):
                parameter.zero_()
                continue
            # Uniform of standard deviation 0.02 for the embedding, as GPT-2's, and 1 / sqrt(width) for the others.
            bound = np.float32(sqrt(3) * (0.02 if name == "embed.weight" else self.config.width**-0.5))
            draws = random.random(parameter.shape, np.float32)
            parameter.copy_(torch.from_numpy((draws * 2 - 1) * bound))


def _norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],))


def _mask_of(examples: Tensor) -> Tensor:
    """Return which tokens each one sees, bool (batch, 1, time, time): the earlier ones of its example, and itself.

    Rotary embeddings tell distances alone, so the positions need not begin anew.
    """
    return (examples[:, :, None] == examples[:, None, :]).tril()[:, None]


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (first half, second half) of the last axis by their position's angles (arXiv:2104.09864)."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1).to(x.dtype)
