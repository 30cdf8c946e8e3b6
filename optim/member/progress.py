"""What a peer tells of its own training: losses and rates, about once a second, and the sums of an inner phase."""

import time

import torch
from torch import Tensor

from ...peer.telemetry import Telemetry
from ...peer.transport import Rung
from ..network import Network

REPORT_SECONDS = 1.0
"""Between two `step` events: what a person can follow; reading a loss also makes a GPU wait, so not more often."""


class Losses:
    """The losses of one process since they were last taken; they stay on their device until then."""

    def __init__(self) -> None:
        self._weighed: Tensor = torch.zeros(())
        self._tokens = 0

    def add(self, loss: Tensor, tokens: int) -> None:
        """One inner step."""
        self._weighed = self._weighed.to(loss.device) + loss.detach().float() * tokens
        self._tokens += tokens

    def take(self) -> tuple[float, int]:
        """The sum of losses weighed by tokens, and the tokens, since the last time."""
        taken = float(self._weighed), self._tokens
        self._weighed, self._tokens = torch.zeros(()), 0
        return taken


class Progress:
    """Counts inner steps, tokens and losses of one peer, all of its processes together."""

    def __init__(self, telemetry: Telemetry, network: Network) -> None:
        self.steps = 0
        """Inner steps since the start."""
        self.tokens = 0
        """Tokens trained since the start."""
        self._telemetry = telemetry
        self._network = network
        self._reported = time.monotonic()
        self.begin_phase()

    def begin_phase(self) -> None:
        """Start the sums of a new inner phase."""
        self.phase_steps = 0
        self.phase_tokens = 0
        self._phase_weighed = 0.0

    @property
    def phase_loss(self) -> float:
        """Mean training loss of the phase, weighted by tokens, as far as it has been reported."""
        return self._phase_weighed / max(self.phase_tokens, 1)

    def count(self, tokens: int) -> None:
        """Count one inner step."""
        self.steps += 1
        self.phase_steps += 1
        self.tokens += tokens
        self.phase_tokens += tokens

    @property
    def due(self) -> bool:
        """Whether it is time for a report; the first step's tells that the training has begun."""
        return self.steps == 1 or time.monotonic() - self._reported >= REPORT_SECONDS

    def report(self, weighed: float, tokens: int) -> None:
        """Tell everybody how it goes: the sum of losses weighed by tokens, and the tokens, since the last time."""
        now = time.monotonic()
        loss = weighed / max(tokens, 1)
        rate = tokens / max(now - self._reported, 1e-9)
        self._phase_weighed += weighed
        self._reported = now
        pulse = self._network.pulse
        self._telemetry.emit(
            "step",
            step=self.steps,
            tokens=self._network.tokens + self.phase_tokens,
            loss=loss,
            tokens_per_s=round(rate, 1),
            round=self._network.round,
            sent=pulse.sent,
            received=pulse.received,
            rung=max(pulse.rungs.values(), key=[rung.value for rung in Rung].index, default=None),
        )
        self._network.progress(step=self.steps, tokens=self.tokens, tokens_per_s=rate, loss=loss)
