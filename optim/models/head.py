"""The loss at the head of a language model, without keeping the logits of a large vocabulary.

Theory of operation. With 150,000 tokens in the vocabulary the logits of one sequence of 2,048 take
1.2 GB in float32, and their gradient as much again. Where they are larger than `CHUNK_BYTES`, loss
and gradient are computed some rows at a time: the gradient of each row's loss with respect to its
logits is known as soon as they are (softmax minus one-hot), so both products of the backward pass
follow at once, and no logits are kept or computed twice (as in arXiv:2410.10989, section 3.2). Loss
and gradient of the weights add up in float32. Smaller logits take torch's own way, to the same bits
as ever.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._compile import _disable_dynamo

CHUNK_BYTES = 1 << 27
"""Float32 logits that are there at once: 220 rows of 150,000 tokens, enough that reading the weights costs little more."""
CHECKED_TOKENS = 32
"""The length of the sequence on which a model's own loss is compared."""
SAME_LOSS = 1e-4
"""Relative: rounding is a hundred times smaller, and the least term that a model adds, of its experts' balance, larger."""


def head_loss(hidden: Tensor, weight: Tensor, targets: Tensor, chunk_bytes: int = CHUNK_BYTES) -> Tensor:
    """Return the mean cross-entropy of `hidden` (rows, width) times `weight` (vocabulary, width) to `targets` (rows,).

    Targets below zero have no loss. The products are computed in autocast's dtype, if it is on.
    """
    if 4 * hidden.shape[0] * weight.shape[0] <= chunk_bytes:
        return F.cross_entropy(F.linear(hidden, weight).float(), targets)
    if not torch.is_grad_enabled():
        hidden, weight = hidden.detach(), weight.detach()
    loss: Tensor = _in_chunks(hidden, weight, targets, max(1, chunk_bytes // (4 * weight.shape[0])))
    return loss


@_disable_dynamo  # As `torch.compiler.disable`, which would import the compiler here: 2.6 s more for whoever loads a model.
def _in_chunks(hidden: Tensor, weight: Tensor, targets: Tensor, rows: int) -> Tensor:
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    with torch.autocast(kind, enabled=False):
        loss: Tensor = _ChunkedLoss.apply(hidden, weight, targets, rows, dtype)  # type: ignore[no-untyped-call]  # of torch
    return loss


class _ChunkedLoss(torch.autograd.Function):
    """Mean cross-entropy, some rows at a time; its gradient is made in the forward pass."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
        of_hidden, of_weight = ctx.needs_input_grad[:2]
        cast = weight.to(dtype)
        total = torch.zeros((), device=hidden.device)
        by_hidden = torch.empty_like(hidden) if of_hidden else None
        by_weight = torch.zeros_like(weight, dtype=torch.float32) if of_weight else None
        for start in range(0, len(hidden), rows):
            span = slice(start, start + rows)
            inputs, chosen = hidden[span].to(dtype), targets[span].clamp(min=0)[:, None]
            counts = (targets[span] >= 0)[:, None]
            scores = F.linear(inputs, cast).float()  # (rows, vocabulary)
            largest = scores.logsumexp(-1, keepdim=True)
            total += ((largest - scores.gather(1, chosen)) * counts).sum()
            if not (of_hidden or of_weight):
                continue
            # Of the sum, not of the mean: divided by thousands of rows, fp16 would lose it.
            slope = (
                scores.sub_(largest).exp_().scatter_add_(1, chosen, torch.full_like(largest, -1)).mul_(counts).to(dtype)
            )
            if by_hidden is not None:
                by_hidden[span] = slope @ cast
            if by_weight is not None:
                by_weight += slope.T @ inputs
        number = (targets >= 0).sum()
        ctx.save_for_backward(number, by_hidden, by_weight)
        ctx.weight_dtype = weight.dtype
        return total / number

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Any:
        number, by_hidden, by_weight = ctx.saved_tensors
        factor = slope / number
        mine = None if by_hidden is None else by_hidden.mul_(factor)
        return mine, None if by_weight is None else by_weight.mul_(factor).to(ctx.weight_dtype), None, None, None


def loss_of_head(
    model: nn.Module, base: nn.Module, inputs: Tensor, labels: Tensor, more: Mapping[str, Tensor]
) -> Tensor | None:
    """Return the loss of a transformers model, in chunks; None where it computes its own, which then is not this one.

    `base` is the model inside of wrappers and adapters. `inputs` and `labels` are int64 (batch,
    length), as it takes them, `more` are further arguments. Its head must be a plain matrix.
    Whether its loss is the mean cross-entropy of the head's output alone, without caps, scales or
    further terms, is tried once, on a few tokens.
    """
    head_of = getattr(base, "get_output_embeddings", None)
    head = head_of() if callable(head_of) else None
    if type(head) is not nn.Linear or head.bias is not None or hasattr(model, "_orig_mod"):
        return None
    if 4 * inputs.numel() * head.out_features <= CHUNK_BYTES:
        return None
    if base not in _PLAIN:
        _PLAIN[base] = _is_plain(base, head, inputs[:1, :CHECKED_TOKENS])
    return _loss_at(model, head, inputs, labels, CHUNK_BYTES, more) if _PLAIN[base] else None


_PLAIN: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
"""Whether the loss of a model is plain, as far as that was tried."""


@torch.no_grad()
def _is_plain(base: nn.Module, head: nn.Linear, inputs: Tensor) -> bool:
    with evaluating(base):
        own = float(base(input_ids=inputs, labels=inputs).loss)
        mine = float(_loss_at(base, head, inputs, inputs, 0, {}))
    return abs(own - mine) <= SAME_LOSS * abs(own)


def _loss_at(
    model: nn.Module, head: nn.Linear, inputs: Tensor, labels: Tensor, chunk_bytes: int, more: Mapping[str, Tensor]
) -> Tensor:
    """Return the loss that the head computes in place of its logits, within the model's forward pass.

    Within, since wrappers that spread a model over devices gather its weights only there.
    """

    def forward(hidden: Tensor) -> Tensor:
        rows, targets = hidden[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        return head_loss(rows, head.weight, targets, chunk_bytes).reshape(1, 1, 1).clone()  # FSDP2 wants no view.

    vars(head)["forward"] = forward  # Before that of its class, for this pass.
    try:
        loss: Tensor = model(input_ids=inputs, **more).logits.reshape(())
    finally:
        del vars(head)["forward"]
    return loss


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode for a while."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
