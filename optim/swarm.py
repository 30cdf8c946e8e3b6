"""Swarm: the public API. Any training loop becomes one of many by `with Swarm(link, model, inner) as swarm:`.

Theory of operation (DESIGN §6, blocking mode). W, the model's parameters, trains with the inner optimizer. When the
pace ends the inner phase, Δ = θ − W goes into a round; a certified round gives g, the same bytes on every peer, the
outer step moves (θ, m) alike everywhere, and W starts again from θ. A round that is void or went on without me changes
nothing: the phase goes on from where it is, and Δ is measured again from the same θ at its next boundary.
"""

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from ..dht.runs import SignedManifest
from ..peer.bridge import Cancelled
from ..peer.config import PeerConfig
from ..peer.errors import UsageError
from ..peer.telemetry import Event, Telemetry, log_path
from .data import Batches, TokenSource, share_of
from .flat import FlatLayout
from .inner import schedule_of, set_lr_factor
from .network import Network
from .outer import OuterSettings, outer_step, pseudo_gradient
from .pace import Pace
from .progress import Progress
from .shards import Shares

RETRY_SHARE = 5
"""After a void round the next attempt comes when a fifth of a phase more is trained: others need not wait for a whole."""
JOIN_WARMUP = 10
"""Inner steps over which a newcomer's fresh optimizer state warms up (DESIGN §6)."""
LINGER_SECONDS = 15.0
"""How long who has finished still serves the last state to members that have not."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one call of `Swarm.step` did."""

    step: int
    """Inner steps of this peer so far."""
    round: int
    """Rounds that this peer's state has behind it."""
    loss: float | None
    """Mean training loss since the last report, None in between (reading a loss from a GPU makes it wait)."""
    averaged: bool
    """Whether this step ended in a certified round."""
    reason: str = ""
    """Where a round was tried: how it ended."""


class Swarm:
    """One model's membership in a run.

    `model` stays where it is (any device, any dtype); what requires grad is exchanged. `inner` is its optimizer, or
    several. `on_event` is called with every event (see `peer.telemetry`). `stop`, once set, ends waiting anywhere.
    Raises `FlockstepError` on entering if the run cannot be reached; later the network raises nothing.
    """

    def __init__(
        self,
        link: str,
        model: nn.Module | Callable[[SignedManifest], nn.Module],
        inner: torch.optim.Optimizer
        | Sequence[torch.optim.Optimizer]
        | Callable[[nn.Module, SignedManifest], Sequence[torch.optim.Optimizer]],
        *,
        config: PeerConfig | None = None,
        on_event: Callable[[Event], None] | None = None,
        stop: threading.Event | None = None,
    ) -> None:
        self._link = link
        self._make_model = model
        self._make_inner = inner
        self.config = config or PeerConfig()
        self._on_event = on_event
        self._stop = stop or threading.Event()
        self._num_rounds = math.inf
        self.reason = "left"
        """Why it ended, for whoever asks afterwards."""

    def __enter__(self) -> Self:
        self._telemetry = Telemetry(log_path(self.config.home))
        if self._on_event is not None:
            self._telemetry.subscribe(self._on_event)
        self._network = Network(self._link, self.config, self._telemetry, self._stop.is_set)
        try:
            self._enter()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _enter(self) -> None:
        signed = self._network.open()
        self.manifest = manifest = signed.manifest
        self.run_id = signed.run_id
        self._num_rounds = manifest.outer.rounds
        made = self._make_model
        self.model = made if isinstance(made, nn.Module) else made(signed)
        inner = self._make_inner
        if isinstance(inner, torch.optim.Optimizer):
            inner = [inner]
        self.optimizers = list(inner if isinstance(inner, Sequence) else inner(self.model, signed))
        self._lr_factor = schedule_of(manifest.inner, manifest.outer.rounds)
        self._layout = FlatLayout.of(self.model)
        self._outer = OuterSettings(lr=manifest.outer.lr, momentum=manifest.outer.momentum)
        self._pace = Pace(steps=manifest.inner.steps, floor=manifest.timing.floor, ceiling=manifest.timing.ceiling)
        device = str(next(self.model.parameters()).device)
        self._telemetry.emit("peer.start", peer=self._network.peer_id, device=device, version=version("flockstep"))
        _check_arithmetic()
        self._network.attach(self._layout.num_cells)
        self._theta, self._momentum = self._network.vector("theta"), self._network.vector("momentum")
        self._layout.gather(self.model, self._theta)
        self._network.join(device, version("flockstep"))
        self._layout.scatter(self._theta, self.model)
        self._telemetry.emit("run.joined", run=self.run_id, round=self.round, peers=self._network.pulse.active)
        self._since_join = 0
        self._progress = Progress(self._telemetry, self._network)
        self._begin_phase()
        self._batch_tokens = 0

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.finished and not self._stop.is_set():
            self.reason = "finished"
            self._linger()
            self._telemetry.emit("run.finished", round=self.round, root=self._network.root)
        elif error is not None:
            self.reason = type(error).__name__
        self._network.close(self.reason)
        self._telemetry.emit("peer.leave", reason=self.reason)
        self._telemetry.close()

    @property
    def round(self) -> int:
        """Rounds that this peer's state has behind it."""
        return self._network.round

    @property
    def root(self) -> str:
        """The state root of (θ, m), in hex."""
        return self._network.root

    @property
    def finished(self) -> bool:
        """Whether all rounds of the run are done, or a stop was asked for."""
        return self._stop.is_set() or self.round >= self._num_rounds

    def share_of(self, dataset: Any, *, batch_size: int) -> Iterator[Any]:
        """My share of a dataset, without end: batches of a `TokenSource` or of any map-style dataset.

        Every peer draws its own order from the run's seed and its id. Raises `UsageError` for what has no length.
        """
        seed, peer = self.manifest.seed, self._network.peer_id
        if isinstance(dataset, TokenSource):
            batches: Iterator[Any] = Batches(dataset, Shares(seed, peer, dataset.num_shards), batch_size=batch_size)
        elif hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"):
            batches = share_of(dataset, Shares(seed, peer, len(dataset)), batch_size=batch_size)
        else:
            raise UsageError(
                f"{type(dataset).__name__} has no length or cannot be indexed, so it has no shares",
                remedy="give share_of a map-style dataset, or draw batches of your own and pass tokens= to step",
            )
        for batch in batches:
            self._batch_tokens += _tokens_in(batch)
            yield batch

    def step(self, loss: Tensor, *, tokens: int | None = None) -> StepReport:
        """One inner step with the gradients that are there; where the pace ends the phase, a round as well.

        `loss` is for reports and the weight's record, `tokens` what this step was computed from (counted by `share_of`
        if not given). Never raises because of the network; raises `LocalError` for a bug of ours or of the caller.
        """
        self._inner_step()
        tokens = self._batch_tokens or 1 if tokens is None else tokens
        self._batch_tokens = 0
        mean = self._progress.count(loss, tokens)
        try:
            return self._look_around(mean)
        except Cancelled:
            return StepReport(self._progress.steps, self.round, mean, False, "asked to stop")

    def _inner_step(self) -> None:
        clip = self.manifest.inner.clip
        if clip:
            nn.utils.clip_grad_norm_((p for p in self.model.parameters() if p.grad is not None), clip)
        swarm_step = self.round * self._pace.steps + min(self._progress.phase_steps, self._pace.steps - 1)
        warm = min(1.0, (self._since_join + 1) / JOIN_WARMUP)
        set_lr_factor(self.optimizers, warm * self._lr_factor(swarm_step))
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self._since_join += 1

    def _look_around(self, loss: float | None) -> StepReport:
        """After an inner step: what the network says, and whether the phase ends here."""
        if self._network.poll():
            self._catch_up("the network process was revived", self._network.reenter)
        now, pulse = time.monotonic(), self._network.pulse
        current = pulse.round == self.round + 1
        if current and pulse.behind:
            self._catch_up("others are further", self._network.sync)
            return StepReport(self._progress.steps, self.round, loss, False, "caught up with the others")
        for peer in pulse.ready if current else ():
            self._ready_at.setdefault(peer, now)
        ended, why = self._pace.ended(
            now=now,
            started=self._phase_started,
            step=self._progress.phase_steps - self._boundary + self._pace.steps,
            ready_at=list(self._ready_at.values()),
            num_active=pulse.active,
        )
        if not ended:
            return StepReport(self._progress.steps, self.round, loss, False)
        return self._round(why)

    def _round(self, why: str) -> StepReport:
        self._progress.report()
        loss = self._progress.phase_loss
        duration = time.monotonic() - self._phase_started
        steps, tokens = self._progress.phase_steps, self._progress.phase_tokens
        self._telemetry.emit("phase.end", round=self.round + 1, steps=steps, tokens=tokens, loss=loss, reason=why)
        exchange = self._network.vector("exchange")
        self._layout.gather(self.model, exchange)
        pseudo_gradient(self._theta, exchange, exchange)
        if (broken := self._layout.nonfinite(exchange)) is not None:
            return self._abstain(loss, f"{broken} is not finite")
        grace = self._pace.grace(duration)
        answer = self._network.average(tokens=tokens, steps=steps, loss=loss, grace=grace, seconds=duration)
        if answer["kind"] == "done":
            outer_step(self._theta, self._momentum, exchange, self._outer)
            if self._network.applied():
                self._network.sync()
            self._layout.scatter(self._theta, self.model)
            self._begin_phase()
            return StepReport(self._progress.steps, self.round, loss, True, answer["reason"])
        if answer["kind"] == "behind":
            self._catch_up(answer["reason"], self._network.sync)
        else:
            self._boundary = self._progress.phase_steps + max(1, self._pace.steps // RETRY_SHARE)
            self._ready_at.clear()
        return StepReport(self._progress.steps, self.round, loss, False, answer["reason"])

    def _abstain(self, loss: float, reason: str) -> StepReport:
        """My own training has broken down: start again from the swarm's state rather than send it."""
        self._telemetry.emit("round.abstained", round=self.round + 1, step="phase", reason=reason)
        self._layout.scatter(self._theta, self.model)
        for optimizer in self.optimizers:
            optimizer.state.clear()
        self._since_join = 0
        self._begin_phase()
        return StepReport(self._progress.steps, self.round, loss, False, f"abstained: {reason}")

    def _catch_up(self, reason: str, take: Callable[[], bool]) -> None:
        """Take the swarm's newer state and keep my progress of this phase: W ← θ_new + (W − θ)."""
        progress = self._network.vector("exchange")
        self._layout.gather(self.model, progress)
        progress -= self._theta
        before = self.round
        changed = take()
        self._theta, self._momentum = self._network.vector("theta"), self._network.vector("momentum")
        if changed:
            progress = self._network.vector("exchange")
            progress += self._theta
            self._layout.scatter(progress, self.model)
        self._telemetry.emit("state.rebased", step="catch up", reason=reason, before=before, round=self.round)
        self._ready_at.clear()

    def _begin_phase(self) -> None:
        self._phase_started = time.monotonic()
        self._progress.begin_phase()
        self._boundary = self._pace.steps
        self._ready_at: dict[str, float] = {}

    def _linger(self) -> None:
        """Serve the last state until the others have it too."""
        until = time.monotonic() + LINGER_SECONDS
        while time.monotonic() < until and not self._stop.wait(0.1):
            self._network.poll()
            if self._network.pulse.round == self.round + 1 and not self._network.pulse.lagging:
                return


def _check_arithmetic() -> None:
    """The outer step must round alike everywhere: a process that flushes subnormals to zero would drift away."""
    smallest = torch.finfo(torch.float32).smallest_normal
    if not float(np.float32(smallest) * np.float32(0.5)):
        raise UsageError(
            "this process flushes subnormal numbers to zero, so its states would differ from those of the others",
            remedy="remove torch.set_flush_denormal(True)",
        )


def _tokens_in(batch: Any) -> int:
    """What a batch counts for: the targets of a batch of token sequences, else its number of samples."""
    first = batch
    while isinstance(first, (tuple, list)):
        first = first[0]
    if isinstance(first, dict):
        first = next(iter(first.values()))
    if not isinstance(first, Tensor) or first.ndim == 0:
        return 1
    if first.ndim == 2 and not first.is_floating_point():
        return first.shape[0] * max(1, first.shape[1] - 1)
    return first.shape[0]
