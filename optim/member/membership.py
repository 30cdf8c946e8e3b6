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
from pathlib import Path
from typing import Any

import numpy as np

from ...collectives.allreduce.actions import OutcomeKind
from ...collectives.chain.certificate import value_of
from ...collectives.codec import MAX_CONTRIBUTED
from ...collectives.evaluation.draw import DueEvaluation
from ...collectives.mixed import codecs_named
from ...collectives.partition import fragment_of
from ...dht.run.manifest import Manifest, SignedManifest
from ...dht.run.revision import describe_revision, kept_by, open_revision
from ...peer.arrays import Floats
from ...peer.config import PeerConfig
from ...peer.errors import LocalError
from ...peer.process.bridge import Cancelled
from ...peer.process.shared import SharedVectors, Vectors, bytes_of
from ...peer.telemetry import Telemetry
from ...peer.troubles import MEMORY_SHORT
from ..flat import FlatLayout
from ..pace import Pace
from .apply import elements_of
from .border import AverageDelta, PublishEvaluation, RunOpened, TrainingVectors, vectors_of
from .network import Network
from .progress import Progress
from .share import Shares

RETRY_SHARE = 5
"""After a void round the next attempt comes a fifth of a phase later, so that the others need not wait a whole one."""
RAMP = (0.25, 0.5)
"""The weights of a newcomer's first contributions: its fresh inner optimizer knows no curvature yet."""
LINGER_SECONDS = 15.0
"""How long a peer that has finished serves the last state to members that have not, and waits until it is on disk."""


FILE_RETRY_SECONDS = 2.0
"""Between two looks for a member that has a file of the run's data."""


class Act(StrEnum):
    """What a peer does after an inner step."""

    TRAIN = "train"
    AVERAGE = "average"
    """Begin a round."""
    SETTLE = "settle"
    """Take the result of the round that runs."""
    CATCH_UP = "catch up"


class PhaseEnd(StrEnum):
    """What became of Δ at the end of an inner phase."""

    BEGUN = "begun"
    """Its round runs."""
    DONE = "done"
    """Certified: θ has moved."""
    DRIFTED = "drifted"
    """Certified, but my outer step led elsewhere, and θ was taken from others: start again from it."""
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
    swarm_step: int = 0
    """The inner step of the swarm that comes next, which the learning rate follows."""
    revision: bytes = b""
    """The owner's revision of the run's settings that holds in the next round; empty while the manifest's do."""


@dataclass(frozen=True, slots=True)
class StepDecision:
    """What every rank does after an inner step."""

    status: PeerStatus
    act: Act
    reason: str
    report: bool
    """Whether the losses are due for a report."""


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


@dataclass(frozen=True, slots=True)
class Flight:
    """A round that runs while I train."""

    work: AverageDelta
    step: int
    """The inner step after which its Δ was captured."""
    phase_started: float


def fragment_after(rounds: int, layout: FlatLayout, manifest: Manifest) -> slice:
    """Return the elements that the round after so many rounds averages: all, or those of a fragment in streaming mode."""
    return elements_of(fragment_of(rounds + 1, layout.num_cells, manifest.outer.fragments))


class Membership:
    """One peer's membership in a run. Raises `FlockstepError` until it has joined; later the network raises nothing."""

    def __init__(self, link: str, config: PeerConfig, telemetry: Telemetry, stop: threading.Event) -> None:
        self._telemetry = telemetry
        self._stop = stop
        self._num_rounds = math.inf
        self._revision = b""
        self._shares: Shares | None = None
        self._waiting = ""
        self._flight: Flight | None = None
        self._network = Network(link, config, telemetry, stop.is_set)

    def open(self) -> RunOpened:
        """Reach the run."""
        opened = self._network.open()
        signed = SignedManifest.decode(opened.manifest)
        self._signed, self._manifest, self._run_id = signed, signed.manifest, signed.run_id
        self._folder = self._network.config.home / "runs" / signed.run_id
        return opened

    def attach(self, layout: FlatLayout, memory: int) -> None:
        """Create the vectors for a model's parameters: on disk, if they are more than so many bytes of memory."""
        manifest = self._manifest
        self._layout = layout
        self._num_rounds = manifest.num_rounds
        self._delay = manifest.outer.delay
        self._pace = Pace(
            steps=manifest.phase_steps,
            seconds=manifest.inner.seconds / manifest.outer.fragments,
            floor=manifest.timing.floor,
            ceiling=manifest.timing.ceiling,
        )
        codec = codecs_named(manifest.codec.contributions)
        shapes = vectors_of(layout.num_cells, manifest.outer.fragments, codec)
        self._network.attach(self._shared_vectors(shapes, memory), layout.describe())

    def _shared_vectors(self, shapes: Vectors, memory: int) -> SharedVectors:
        """Create the shared vectors in memory; in a file where they do not fit. Raises `LocalError`."""
        try:
            if (needed := bytes_of(shapes)) > memory:
                raise LocalError(f"{memory / 1e6:.0f} MB of memory are free, they need {needed / 1e6:.0f} MB")
            return SharedVectors.create(shapes)
        except LocalError as error:  # A container's limit may be below the memory that is free.
            reason = f"{error}: rounds wait for the disk"
            self._telemetry.emit("vectors.on_disk", step="attach", reason=reason, remedy=MEMORY_SHORT.remedy)
            return SharedVectors.create(shapes, self._folder)

    def join(self, *, device: str, version: str, frozen: bytes) -> PeerStatus:
        """Become a member that holds the run's state; `theta` holds the start of a run that nobody has begun.

        `frozen` is the fingerprint of what is not trained. Raises `UsageError` where the others have another model.
        """
        self._network.join(device=device, version=version, layout=self._layout.pin().hash, frozen=frozen)
        rounds, peers = self._manifest.num_rounds, self._network.pulse.active
        self._telemetry.emit("run.joined", run=self._run_id, round=self.round, rounds=rounds, peers=peers)
        self._shares = Shares(
            self._network, self._telemetry, self._folder, seed=self._manifest.seed, stop=self._stop
        )
        fragments = self._manifest.outer.fragments
        self._ramp = tuple(weight for weight in RAMP for _ in range(fragments)) if self.round else ()
        self._progress = Progress(self._telemetry, self._network)
        self._begin_phase()
        return self.status()

    def batches(self, dataset: Any, **options: Any) -> Iterator[Any]:
        """My share of a dataset as batches, see `Shares.batches`."""
        assert self._shares is not None
        return self._shares.batches(dataset, **options)

    def fetch_file(self, hash_: bytes, size: int, path: Path) -> None:
        """Write a file of the run's data, which members provide, to a path. From any thread. Raises `FlockstepError`."""
        self._network.fetch_file(hash_, size, path)

    def await_file(self) -> bool:
        """Wait a moment for a member that has a file; returns False where this peer is to leave."""
        self._network.await_file()
        return not self._stop.wait(FILE_RETRY_SECONDS)

    @property
    def vectors(self) -> TrainingVectors:
        """θ, m and Δ."""
        return self._network.vectors

    @property
    def round(self) -> int:
        """Rounds that this peer's state has behind it."""
        return self._network.position.round

    def status(self) -> PeerStatus:
        """What every rank knows of the peer. Raises `CannotFollow` where this version cannot make the outer steps."""
        self._follow_revision()
        ended = self._stop.is_set() or self.round >= self._num_rounds
        return PeerStatus(self.round, self._network.position.root.hex(), ended, self._swarm_step, self._revision)

    def _follow_revision(self) -> None:
        """Take over the settings that the certificate of my state names."""
        certificate = self._network.position.certificate
        revision = b"" if certificate is None else value_of(certificate).revision
        if revision != self._revision:
            self._manifest = kept_by(self._signed, revision)
            self._revision, self._num_rounds = revision, self._manifest.num_rounds
            opened = open_revision(revision, self._run_id, self._manifest.owner)
            reason = "; ".join(describe_revision(self._signed.manifest, opened)) or "as the manifest says"
            rounds = self._manifest.num_rounds
            self._telemetry.emit("run.revised", step="settings", reason=reason, round=self.round + 1, rounds=rounds)

    def decide(self, tokens: int) -> StepDecision:
        """Decide what to do after an inner step of so many tokens."""
        self._progress.count(tokens)
        act, reason = self._next()
        report = act is Act.AVERAGE or self._progress.due
        return StepDecision(self.status(), act, reason, report)

    def decide_again(self) -> StepDecision:
        """Decide what else to do after the same inner step, now that a round has been settled."""
        act, reason = self._next()
        return StepDecision(self.status(), act, reason, act is Act.AVERAGE)

    def report(self, weighed: float, tokens: int) -> None:
        """Report the losses since the last time: their sum weighted by tokens, and the tokens."""
        self._progress.report(weighed, tokens)

    def _next(self) -> tuple[Act, str]:
        flight = self._flight
        if flight is not None:
            late = self._progress.steps - flight.step - 2 * self._delay
            if self._network.round_is_over:
                return Act.SETTLE, ""
            if late < 0:
                return Act.TRAIN, ""
            reason = f"no result {2 * self._delay + late} inner steps after the capture: training waits for it"
            self._telemetry.emit("round.overdue", step="train", reason=reason, round=self.round + 1)
            return Act.SETTLE, reason
        if self._network.poll():
            return Act.CATCH_UP, "the network process was restarted"
        pulse = self._network.pulse
        current = pulse.round == self.round + 1
        if current and pulse.behind:
            return Act.CATCH_UP, "others are further"
        ended, why = self._pace.ended(
            now=time.monotonic(),
            started=self._phase_started,
            step=self._progress.phase_steps - self._boundary + self._pace.steps,
            ready_at=[at for peer, at in self._network.ready_at.items() if current and peer in pulse.ready],
            num_active=pulse.active,
            step_seconds=self._progress.step_seconds if self._pace.seconds else 0.0,
        )
        if ended and self._must_wait(pulse.why_not_average):
            return Act.TRAIN, pulse.why_not_average
        return (Act.AVERAGE if ended else Act.TRAIN), why

    def _must_wait(self, why_not_average: str) -> bool:
        """Whether no round can be attempted, so that training goes on; one event for each reason, one when it ends."""
        if why_not_average != self._waiting:
            self._waiting = why_not_average
            event = "round.awaited" if why_not_average else "round.possible"
            reason = why_not_average or "what was missing is here"
            self._telemetry.emit(event, step="phase", reason=reason, round=self.round + 1)
        return bool(why_not_average)

    def is_drawn(self, prompts: tuple[str, ...]) -> bool:
        """Return True if I am to evaluate the state that θ holds now, with these prompts: they may be about to change."""
        due = DueEvaluation.after(self._network.position.certificate, self._manifest.eval)
        return due is not None and self._network.peer_id in due.evaluators and due.prompts == prompts

    def publish_evaluation(self, loss: float, tokens: int, samples: tuple[str, ...]) -> None:
        """Publish what was measured of that state."""
        self._network.publish_evaluation(PublishEvaluation(self.round, loss, tokens, samples))

    def begin_round(self, reason: str, span: slice) -> PhaseOutcome:
        """End the inner phase: take Δ of the elements `span`, which `delta` holds, into a round."""
        progress, round_ = self._progress, self.round + 1
        seconds = progress.phase_seconds
        work = AverageDelta(
            tokens=progress.phase_tokens,
            steps=progress.phase_steps,
            loss=progress.phase_loss,
            grace=self._pace.grace(seconds),
            seconds=seconds,
            ramp=self._ramp[0] if self._ramp else 1.0,
            # Of the faster: a phase may have lasted for hours while a round was impossible, a step of a laptop for a minute.
            patience=self._delay * min(seconds / self._pace.steps, progress.step_seconds),
        )
        self._telemetry.emit(
            "phase.end",
            reason=reason,
            round=round_,
            steps=work.steps,
            tokens=work.tokens,
            loss=work.loss if math.isfinite(work.loss) else None,
            ramp=work.ramp,
        )
        if (broken := self._layout.diverged(self.vectors.delta, span)) is not None:
            reason = f"{broken} is not finite, or beyond {MAX_CONTRIBUTED:.0e}"
            self._telemetry.emit("round.abstained", round=round_, step="phase", reason=reason)
            self._begin_phase()
            return PhaseOutcome(self.status(), PhaseEnd.ABSTAINED, f"abstained: {reason}")
        self._flight = Flight(work, progress.steps, self._phase_started)
        self._begin_phase()
        self._network.begin_round(work)
        return PhaseOutcome(self.status(), PhaseEnd.BEGUN, reason)

    def settle(self) -> PhaseOutcome:
        """End the round that runs: wait for its result, if that is not here."""
        flight, self._flight = self._flight, None
        assert flight is not None
        try:
            ended = self._network.end_round()
            if ended.drifted:
                self._network.sync()
        except Cancelled:
            return PhaseOutcome(self.status(), PhaseEnd.VOID, "asked to stop")
        self._progress.waited()
        if ended.kind is OutcomeKind.DONE:
            self._ramp = self._ramp[1:]
            if self._pace.seconds or not self._delay:
                self._phase_started = self._network.round_ended_at
            return PhaseOutcome(self.status(), PhaseEnd.DRIFTED if ended.drifted else PhaseEnd.DONE, ended.reason)
        work = flight.work
        self._progress.resume_phase(work.steps, work.tokens, work.loss, work.seconds)
        if ended.kind is OutcomeKind.BEHIND:
            return PhaseOutcome(self.status(), PhaseEnd.BEHIND, ended.reason)
        self._boundary = self._progress.phase_steps + max(1, self._pace.steps // RETRY_SHARE)
        self._phase_started = flight.phase_started
        if self._pace.seconds:
            self._phase_started = time.monotonic() - self._pace.seconds * (1 - 1 / RETRY_SHARE)
        self._network.ready_at.clear()
        return PhaseOutcome(self.status(), PhaseEnd.VOID, ended.reason)

    def catch_up(self, reason: str, delta: Floats | None) -> CaughtUp:
        """Take the run's newer state and keep my progress of this phase: `delta` holds Δ of all cells, then W = θ_new − Δ.

        Where Δ may be none, since θ was torn when it was measured, W = θ_new.
        """
        assert delta is not None
        before, changed, torn = self.round, False, self._network.is_torn
        with contextlib.suppress(Cancelled):
            changed = self._network.reenter() if self._network.poll() else self._network.sync()
            self._network.is_torn = False
        if torn:
            delta.fill(0)
            self._telemetry.emit("phase.lost", step="catch up", reason=reason, round=self.round)
        if changed or torn:
            np.subtract(self.vectors.theta, delta, out=delta)
        self._progress.waited()
        self._telemetry.emit("state.rebased", step="catch up", reason=reason, before=before, round=self.round)
        self._network.ready_at.clear()
        return CaughtUp(self.status(), changed or torn)

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
        self._network.ready_at.clear()

    @property
    def _swarm_step(self) -> int:
        """The inner step of the swarm that comes next: full phases behind it, and my part of this one."""
        pace, phases = self._pace, self.round + (self._flight is not None)
        step = self._progress.phase_steps
        if pace.seconds:
            step = int(pace.steps * (time.monotonic() - self._phase_started) / pace.seconds)
        return phases * pace.steps + min(step, pace.steps - 1)
