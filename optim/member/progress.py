"""Reports the progress of a peer's training: losses and rates about once a second, sums over an inner phase."""

import contextlib
import math
import operator
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, SupportsFloat

import numpy as np
import torch
from torch import Tensor

from ...peer.base.errors import UsageError
from ...peer.base.transport import Rung
from ...peer.log.telemetry import Telemetry
from .border import ReportProgress

if TYPE_CHECKING:
    from .client import PeerClient

REPORT_SECONDS = 1.0
"""Between two `step` events: what a person can follow; reading a loss also makes a GPU wait, so not more often."""

MAX_STEP_TOKENS = 1 << 40
"""Tokens of an inner step: more than any batch has, and the sum of a run's is below the limit of a message (2^62)."""


def loss_of(given: object) -> Tensor | None:
    """Return the loss that a loop gives, as a tensor without dimensions; None for None.

    It takes numbers, tensors and arrays of one real element, and outputs or mappings that have one of these as `loss`.
    Raises `UsageError` for anything else.
    """
    loss = given.get("loss", given) if isinstance(given, Mapping) else getattr(given, "loss", given)
    if loss is None:
        return None
    found = loss.item() if isinstance(loss, np.ndarray | np.generic) and loss.size == 1 else loss
    if isinstance(found, SupportsFloat) and not isinstance(found, bool | np.ndarray | Tensor):
        found = torch.tensor(float(found))
    if isinstance(found, Tensor) and found.numel() == 1 and not (found.is_sparse or found.is_complex() or found.is_meta):
        return found.detach().reshape(())
    kind = f"{type(loss).__name__} of shape {tuple(loss.shape)}" if hasattr(loss, "shape") else type(loss).__name__
    raise UsageError(
        f"the loss is a {kind}", remedy="pass a number or a tensor of one element, such as loss.mean(), or leave it out"
    )


def tokens_of(given: object) -> int | None:
    """Return the tokens that a loop says a step had; None for None. Raises `UsageError` for what is no such number."""
    if given is None:
        return None
    with contextlib.suppress(TypeError, ValueError):  # A fraction, or a tensor of several elements.
        if 0 <= (tokens := operator.index(given)) <= MAX_STEP_TOKENS:  # type: ignore[arg-type]  # checked by the call
            return tokens
    raise UsageError(
        f"a step cannot have {given!r} tokens",
        remedy=f"pass a whole number from 0 to {MAX_STEP_TOKENS}, or leave it out",
    )


class Losses:
    """Sums the losses of one rank on their device, until they are taken."""

    def __init__(self) -> None:
        self._weighed: Tensor = torch.zeros(())
        self._tokens = 0

    def add(self, loss: Tensor | None, tokens: int) -> None:
        """Add the loss of one inner step; None makes the sum unknown (NaN). One without tokens, a skipped one, has none."""
        if not tokens:
            return
        if loss is None:
            loss = torch.full((), torch.nan)
        self._weighed = self._weighed.to(loss.device) + loss.float() * tokens
        self._tokens += tokens

    def take(self) -> tuple[float, int]:
        """Return the sum of losses weighted by tokens, and the tokens, since the last call."""
        taken = float(self._weighed), self._tokens
        self._weighed, self._tokens = torch.zeros(()), 0
        return taken


class Progress:
    """Counts inner steps, tokens and losses of one peer, summed over its ranks."""

    def __init__(self, telemetry: Telemetry, client: "PeerClient") -> None:
        self.steps = 0
        """Inner steps since the start."""
        self.tokens = 0
        """Tokens trained since the start."""
        self._telemetry = telemetry
        self._client = client
        self._reported = self._stepped = time.monotonic()
        self.step_seconds = 0.0
        """What an inner step takes: the last one, with what the caller did beside it, and without waits for a round. Of
        several that were counted together, all."""
        self.begin_phase()

    def begin_phase(self) -> None:
        """Start the sums of a new inner phase."""
        self.phase_steps = 0
        self.phase_tokens = 0
        self.phase_seconds = 0.0
        self._phase_weighed = 0.0

    def waited(self) -> None:
        """Training has waited: the time since the last inner step is no part of the next one."""
        self._stepped = time.monotonic()

    def resume_phase(self, steps: int, tokens: int, loss: float, seconds: float) -> None:
        """Count an earlier phase, whose round was void, as a part of this one; `loss` is its mean."""
        self.phase_seconds += seconds
        self.phase_steps += steps
        self.phase_tokens += tokens
        self._phase_weighed += loss * tokens

    @property
    def phase_loss(self) -> float:
        """Mean training loss of the phase, weighted by tokens, as far as it has been reported."""
        return self._phase_weighed / max(self.phase_tokens, 1)

    def count(self, tokens: int, steps: int = 1) -> None:
        """Count inner steps that were made of so many tokens together."""
        now = time.monotonic()
        self.step_seconds, self._stepped = now - self._stepped, now
        self.phase_seconds += self.step_seconds
        self.steps += steps
        self.phase_steps += steps
        self.tokens += tokens
        self.phase_tokens += tokens

    @property
    def due(self) -> bool:
        """Whether a report is due; the first step's shows that the training has begun."""
        return self.steps == 1 or time.monotonic() - self._reported >= REPORT_SECONDS

    def report(self, weighed: float, tokens: int) -> None:
        """Report the sum of losses weighted by tokens, and the tokens, since the last report."""
        now = time.monotonic()
        mean = weighed / max(tokens, 1)
        loss = mean if math.isfinite(mean) else None
        rate = tokens / max(now - self._reported, 1e-9)
        self._phase_weighed += weighed
        self._reported = now
        pulse = self._client.pulse
        self._telemetry.emit(
            "step",
            step=self.steps,
            tokens=self._client.position.tokens + self.phase_tokens,
            loss=loss,
            tokens_per_s=round(rate, 1),
            round=self._client.position.round,
            peers=pulse.active,
            sent=pulse.sent,
            received=pulse.received,
            rung=max(pulse.rungs.values(), key=list(Rung).index, default=None),
        )
        self._client.report_progress(ReportProgress(self.steps, self.tokens, rate, loss))
