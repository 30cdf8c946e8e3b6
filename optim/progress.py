"""What a peer tells of its own training: losses and rates, about once a second, and the sums of an inner phase."""

import time

from torch import Tensor

from ..peer.telemetry import Telemetry
from ..peer.transport import Rung
from .network import Network

REPORT_SECONDS = 1.0
"""Between two `step` events: what a person can follow; reading a loss also makes a GPU wait, so not more often."""


class Progress:
    """Counts inner steps, tokens and losses of one peer."""

    def __init__(self, telemetry: Telemetry, network: Network) -> None:
        self.steps = 0
        """Inner steps since the start."""
        self.tokens = 0
        """Tokens trained since the start."""
        self._telemetry = telemetry
        self._network = network
        self._reported = time.monotonic()
        self._unreported: list[tuple[Tensor, int]] = []
        self.begin_phase()

    def begin_phase(self) -> None:
        """Start the sums of a new inner phase."""
        self.phase_steps = 0
        self.phase_tokens = 0
        self._phase_loss: Tensor | float = 0.0

    @property
    def phase_loss(self) -> float:
        """Mean training loss of the phase, weighted by tokens."""
        return float(self._phase_loss) / max(self.phase_tokens, 1)

    def count(self, loss: Tensor, tokens: int) -> float | None:
        """Count one inner step; the mean loss since the last report where it is time for one, else None."""
        self.steps += 1
        self.phase_steps += 1
        self.tokens += tokens
        self.phase_tokens += tokens
        weighed = loss.detach().float() * tokens
        self._phase_loss = self._phase_loss + weighed
        self._unreported.append((weighed, tokens))
        return self.report() if time.monotonic() - self._reported >= REPORT_SECONDS else None

    def report(self) -> float | None:
        """Tell everybody how it goes; the mean loss since the last time, None where there was no step."""
        if not self._unreported:
            return None
        now = time.monotonic()
        tokens = sum(count for _, count in self._unreported)
        loss = float(sum(weighed for weighed, _ in self._unreported)) / max(tokens, 1)
        rate = tokens / max(now - self._reported, 1e-9)
        self._unreported.clear()
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
        return loss
