"""Evaluates a language model on the run's held-out text: its loss, and what it continues a few prompts with.

The held-out sequences are the same for everybody with the same data, and everybody takes them in the same order, so the
losses of several peers are of the same tokens as far as their time reached. Samples are drawn
with a seed that all peers share (Gumbel noise on the logits), so the same weights give the same text but for the rounding of
their processors. Greedy ones repeat a small model's most frequent words: `def is not the string and the the the`.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from ...dht.members.evaluation import MAX_SAMPLE_BYTES, MAX_STATED_LOSS
from ...peer.base.errors import LocalError, UsageError
from ..data.tokenizer import Tokenizer
from ..models.registry import vocabulary_of
from ..shards.reader import TokenShards, heldout_batches

HELDOUT_BATCH, HELDOUT_BATCHES, TOLD_BATCHES = 4, 32, 4
"""128 sequences: the standard error of their mean is about 1 %. Small batches, since the memory is full of the training.
`TOLD_BATCHES` of them make a line of progress."""
CONTINUED_TOKENS = 64
"""After each prompt: a sentence, which 300 bytes of 1,200 hold where a token is a byte."""


TEMPERATURE = 0.9
"""A little below 1, since the tail of a small model's distribution is noise; at 0.8 and below it repeats indents."""


@dataclass(frozen=True, slots=True)
class HeldOutResult:
    """What was measured of a model."""

    loss: float
    """Nats per token."""
    tokens: int
    samples: tuple[str, ...]
    """What follows each prompt, as far as the time reached."""


class HeldOutText:
    """The held-out sequences of a run's data, and its prompts as tokens.

    `loss_of` is that of the training, `logits_of` gives the logits (vocabulary,) of the token after some (1, time).
    """

    def __init__(
        self,
        source: TokenShards,
        tokenizer: Tokenizer,
        prompts: Sequence[str],
        *,
        device: torch.device,
        loss_of: Callable[[nn.Module, Tensor], Tensor],
        logits_of: Callable[[nn.Module, Tensor], Tensor] | None = None,
    ) -> None:
        self._batches = list(heldout_batches(source, batch_size=HELDOUT_BATCH, num_batches=HELDOUT_BATCHES))
        if not self._batches:
            raise UsageError(f"{source.name} holds nothing out to evaluate on", remedy="use more data, or leave [eval] out")
        self._context = self._batches[0].shape[1] - 1
        self._tokenizer = tokenizer
        self._prompts = [tokenizer.prompt(prompt) for prompt in prompts]
        self._device = device
        self._loss_of, self._logits_of = loss_of, logits_of or last_logits

    @torch.no_grad()
    def evaluate(
        self,
        model: nn.Module,
        seconds: float = math.inf,
        tell: Callable[[str], object] = lambda step: None,
        judge: Callable[[float], object] = lambda seconds: None,
    ) -> HeldOutResult:
        """Measure a model in evaluation mode, in about so many seconds: one batch at least, and then fewer samples.

        Progress is told in words; `judge` is given the seconds of each batch (`Threads.judge`).
        Raises `LocalError` for a model that has diverged or gives no logits.
        """
        began, losses, tokens = time.monotonic(), list[float](), 0
        for number, batch in enumerate(self._batches, 1):
            if number % TOLD_BATCHES == 1:
                tell(f"measuring held-out batch {number} of {len(self._batches)}")
            started = time.monotonic()
            losses.append(float(self._loss_of(model, batch.to(self._device))))
            tokens += batch.shape[0] * (batch.shape[1] - 1)
            judge(time.monotonic() - started)
            if time.monotonic() - began > seconds / 2:
                break
        loss = sum(losses) / len(losses)
        if not 0 <= loss <= MAX_STATED_LOSS:
            raise LocalError(f"the held-out loss is {loss}", remedy="look at the run's learning rates")
        samples: list[str] = []
        for number, prompt in enumerate(self._prompts, 1):
            if time.monotonic() - began > seconds:
                break
            tell(f"continuing prompt {number} of {len(self._prompts)}")
            samples.append(self._continue(model, prompt, number, began + seconds))
        return HeldOutResult(loss, tokens, tuple(samples))

    def _continue(self, model: nn.Module, prompt: Sequence[int], seed: int, deadline: float) -> str:
        """Sample the continuation of a prompt, until its end, a token that closes a document, or the deadline."""
        random = np.random.Generator(np.random.PCG64(seed))
        tokens, size = list(prompt), vocabulary_of(model)
        if size is not None and max(tokens) >= size:
            raise LocalError(f"a prompt holds token {max(tokens)}, the model knows {size}", remedy="check its tokenizer")
        for _ in range(CONTINUED_TOKENS):
            logits = self._logits_of(model, torch.tensor([tokens[-self._context :]], device=self._device)).cpu().numpy()
            noise = -np.log(-np.log(1 - random.random(logits.size)))  # Its argmax with logits is a sample of their softmax.
            token = int((logits / TEMPERATURE + noise).argmax())
            tokens.append(token)
            if token == self._tokenizer.end or time.monotonic() > deadline:
                break
        text = self._tokenizer.decode(np.array(tokens[len(prompt) :]))
        return text.encode(errors="replace")[:MAX_SAMPLE_BYTES].decode(errors="ignore")


def last_logits(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the logits (vocabulary,) of the token after `tokens` (1, time). Raises `LocalError` if the model gives none."""
    output = model(tokens)
    logits = getattr(output, "logits", output)
    if not isinstance(logits, Tensor) or logits.ndim != 3:
        raise LocalError("the model gives no logits, so it continues no prompt", remedy="leave [eval] prompts out")
    last: Tensor = logits[0, -1].float()
    return last
