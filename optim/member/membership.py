"""Decides for one peer of a run: when a phase ends, what becomes of Δ, whose state is taken. On the first rank only.

It owns the network process and the flat vectors. What it decides it returns as plain dataclasses, so that every rank of
the peer receives the same (`ranks`, `swarm`); the model is theirs.
"""

import contextlib
import math
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from ...collectives.round.actions import OutcomeKind
from ...dht.run.manifest import SignedManifest
from ...peer.config import PeerConfig
from ...peer.process.bridge import Cancelled
from ...peer.telemetry import Telemetry
from ..flat import FlatLayout
from ..outer import OuterSettings, outer_step
from ..pace import Pace
from .border import AverageDelta, RunOpened, TrainingVectors
from .network import Network
from .progress import Progress
from .share import Shares

RETRY_SHARE = 5
"""After a void round the next attempt comes a fifth of a phase later, so that the others need not wait a whole one."""
RAMP = (0.25, 0.5)
"""The weights of a newcomer's first contributions (DESIGN §6): its fresh inner optimizer knows no curvature yet."""
LINGER_SECONDS = 15.0
"""How long a peer that has finished serves the last state to members that have not, and waits until it is on disk."""


class Act(StrEnum):
    """What a peer does after an inner step."""

    TRAIN = "train"
    AVERAGE = "average"
    CATCH_UP = "catch up"


class PhaseEnd(StrEnum):
    """What became of Δ at the end of an inner phase."""

    DONE = "done"
    """Certified: θ has moved."""
    BEHIND = "behind"
    """The run is further than I: catch up."""
    ABSTAINED = "abstained"
    """My training has diverged: start again from θ."""
    VOID = "void"
    """Without effect: train on."""


@dataclass(frozen=True, slots=True)
class PeerStatus:
    """What every rank knows of its peer."""

    round: int
    """Rounds that its state has behind it."""
    root: str
    """The state root of (θ, m), in hex."""
    finished: bool
    """Whether all rounds are done, or a stop was asked for."""


@dataclass(frozen=True, slots=True)
class StepDecision:
    """What every rank does after an inner step."""

    status: PeerStatus
    act: Act
    reason: str
    report: bool
    """Whether the losses are due for a report."""
    phase_steps: int
    """Inner steps of this phase so far."""


@dataclass(frozen=True, slots=True)
class PhaseOutcome:
    """How an inner phase ended, and why."""

    status: PeerStatus
    end: PhaseEnd
    reason: str


@dataclass(frozen=True, slots=True)
class CaughtUp:
    """Whether catching up changed (θ, m)."""

    status: PeerStatus
    changed: bool


class Membership:
    """One peer's membership in a run. Raises `FlockstepError` until it has joined; later the network raises nothing."""

    def __init__(self, link: str, config: PeerConfig, telemetry: Telemetry, stop: threading.Event) -> None:
        self._telemetry = telemetry
        self._stop = stop
        self._num_rounds = math.inf
        self._shares: Shares | None = None
        self._waiting = False
        self._network = Network(link, config, telemetry, stop.is_set)

    def open(self) -> RunOpened:
        """Reach the run."""
        opened = self._network.open()
        signed = SignedManifest.decode(opened.manifest)
        self._manifest, self._run_id = signed.manifest, signed.run_id
        self._folder = self._network.config.home / "runs" / signed.run_id
        return opened

    def attach(self, layout: FlatLayout) -> None:
        """Create the vectors for a model's parameters."""
        manifest = self._manifest
        self._layout = layout
        self._num_rounds = manifest.outer.rounds
        self._outer = OuterSettings(lr=manifest.outer.lr, momentum=manifest.outer.momentum)
        self._pace = Pace(steps=manifest.inner.steps, floor=manifest.timing.floor, ceiling=manifest.timing.ceiling)
        self._network.attach(layout.num_cells, layout.describe())

    def join(self, *, device: str, version: str, frozen: bytes) -> PeerStatus:
        """Become a member that holds the run's state; `theta` holds the start of a run that nobody has begun.

        `frozen` is the fingerprint of what is not trained. Raises `UsageError` where the others have another model.
        """
        self._network.join(device=device, version=version, layout=self._layout.fingerprint(), frozen=frozen)
        self._telemetry.emit("run.joined", run=self._run_id, round=self.round, peers=self._network.pulse.active)
        self._shares = Shares(self._network, self._telemetry, self._folder, seed=self._manifest.seed)
        self._ramp: tuple[float, ...] = RAMP if self.round else ()
        self._progress = Progress(self._telemetry, self._network)
        self._begin_phase()
        return self.status()

    def batches(self, dataset: Any, *, batch_size: int, workers: int) -> Iterator[Any]:
        """My share of a dataset as endless batches, see `Shares.batches`."""
        assert self._shares is not None
        return self._shares.batches(dataset, batch_size=batch_size, workers=workers)

    @property
    def vectors(self) -> TrainingVectors:
        """θ, m, Δ and g."""
        return self._network.vectors

    @property
    def round(self) -> int:
        """Rounds that this peer's state has behind it."""
        return self._network.position.round

    def status(self) -> PeerStatus:
        """What every rank knows of the peer."""
        ended = self._stop.is_set() or self.round >= self._num_rounds
        return PeerStatus(self.round, self._network.position.root.hex(), ended)

    def decide(self, tokens: int) -> StepDecision:
        """Decide what to do after an inner step of so many tokens."""
        self._progress.count(tokens)
        act, reason = self._next()
        report = act is Act.AVERAGE or self._progress.due
        return StepDecision(self.status(), act, reason, report, self._progress.phase_steps)

    def report(self, weighed: float, tokens: int) -> None:
        """Report the losses since the last time: their sum weighted by tokens, and the tokens."""
        self._progress.report(weighed, tokens)

    def _next(self) -> tuple[Act, str]:
        if self._network.poll():
            return Act.CATCH_UP, "the network process was restarted"
        now, pulse = time.monotonic(), self._network.pulse
        current = pulse.round == self.round + 1
        if current and pulse.behind:
            return Act.CATCH_UP, "others are further"
        for peer in pulse.ready if current else ():
            self._ready_at.setdefault(peer, now)
        ended, why = self._pace.ended(
            now=now,
            started=self._phase_started,
            step=self._progress.phase_steps - self._boundary + self._pace.steps,
            ready_at=list(self._ready_at.values()),
            num_active=pulse.active,
        )
        if ended and self._must_wait(pulse.why_not_average):
            return Act.TRAIN, pulse.why_not_average
        return (Act.AVERAGE if ended else Act.TRAIN), why

    def _must_wait(self, why_not_average: str) -> bool:
        """Whether no round can be attempted, so that training goes on; one event when that begins, one when it ends."""
        if bool(why_not_average) != self._waiting:
            self._waiting = bool(why_not_average)
            event = "round.awaited" if why_not_average else "round.possible"
            reason = why_not_average or "what was missing is here"
            self._telemetry.emit(event, step="phase", reason=reason, round=self.round + 1)
        return self._waiting

    def end_phase(self, reason: str) -> PhaseOutcome:
        """End the inner phase: take Δ, which `delta` holds, into a round, and make the outer step if it is certified."""
        progress, round_ = self._progress, self.round + 1
        seconds = time.monotonic() - self._phase_started
        work = AverageDelta(
            tokens=progress.phase_tokens,
            steps=progress.phase_steps,
            loss=progress.phase_loss,
            grace=self._pace.grace(seconds),
            seconds=seconds,
            ramp=self._ramp[0] if self._ramp else 1.0,
        )
        self._telemetry.emit(
            "phase.end",
            reason=reason,
            round=round_,
            steps=work.steps,
            tokens=work.tokens,
            loss=work.loss,
            ramp=work.ramp,
        )
        if (broken := self._layout.nonfinite(self.vectors.delta)) is not None:
            reason = f"{broken} is not finite"
            self._telemetry.emit("round.abstained", round=round_, step="phase", reason=reason)
            self._begin_phase()
            return PhaseOutcome(self.status(), PhaseEnd.ABSTAINED, f"abstained: {reason}")
        try:
            ended = self._network.attempt_round(work)
        except Cancelled:
            return PhaseOutcome(self.status(), PhaseEnd.VOID, "asked to stop")
        if ended.kind is OutcomeKind.DONE:
            self._apply()
            return PhaseOutcome(self.status(), PhaseEnd.DONE, ended.reason)
        if ended.kind is OutcomeKind.BEHIND:
            return PhaseOutcome(self.status(), PhaseEnd.BEHIND, ended.reason)
        self._boundary = progress.phase_steps + max(1, self._pace.steps // RETRY_SHARE)
        self._ready_at.clear()
        return PhaseOutcome(self.status(), PhaseEnd.VOID, ended.reason)

    def _apply(self) -> None:
        """Make the outer step with the g that `gradient` holds."""
        vectors = self.vectors
        outer_step(vectors.theta, vectors.momentum, vectors.gradient, self._outer)
        with contextlib.suppress(Cancelled):
            if self._network.verify_step():
                self._network.sync()
        self._ramp = self._ramp[1:]
        self._begin_phase()

    def catch_up(self, reason: str) -> CaughtUp:
        """Take the run's newer state and keep my progress of this phase: `delta` holds Δ, and then W = θ_new − Δ."""
        before, changed = self.round, False
        with contextlib.suppress(Cancelled):
            changed = self._network.reenter() if self._network.poll() else self._network.sync()
        if changed:
            np.subtract(self.vectors.theta, self.vectors.delta, out=self.vectors.delta)
        self._telemetry.emit("state.rebased", step="catch up", reason=reason, before=before, round=self.round)
        self._ready_at.clear()
        return CaughtUp(self.status(), changed)

    def close(self, reason: str) -> None:
        """Leave; a peer that has finished serves the last state until the others have it too."""
        if reason == "finished":
            until = time.monotonic() + LINGER_SECONDS
            while time.monotonic() < until and not self._stop.wait(0.1):
                self._network.poll()
                pulse = self._network.pulse
                if pulse.round == self.round + 1 and pulse.kept == self.round and not pulse.lagging:
                    break
            self._telemetry.emit("run.finished", round=self.round, root=self._network.position.root.hex())
        if self._shares is not None:
            self._shares.hand_back()
        self._network.close(reason)
        self._telemetry.emit("peer.leave", reason=reason)

    def _begin_phase(self) -> None:
        self._phase_started = time.monotonic()
        self._progress.begin_phase()
        self._boundary = self._pace.steps
        self._ready_at: dict[str, float] = {}
