"""One peer of a run, as its trainer drives it: when a phase ends, what becomes of Δ, whose state is taken.

It runs the network process and owns the flat vectors, on the first rank only. What it decides it returns as plain
dataclasses, so that every rank of the peer receives the same (`ranks`, `swarm`); the model is theirs.

Training never stops because of other peers: once this peer is a member, a command that the network process cannot carry out
raises nothing here, since what others send can be the cause. The death of the network process ends this peer
(`NetworkDied`): whoever starts it again goes on from its last checkpoint, and one phase is lost.
"""

import contextlib
import math
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ...collectives.allreduce.actions import OutcomeKind
from ...collectives.chain.certificate import value_of
from ...collectives.evaluation.draw import DueEvaluation
from ...collectives.vector.arrays import Floats
from ...collectives.vector.codec import MAX_CONTRIBUTED
from ...collectives.vector.mixed import codecs_named
from ...collectives.vector.partition import fragment_of
from ...dht.run.manifest import Manifest, SignedManifest
from ...dht.run.revision import describe_revision, open_revision, revised_by
from ...peer.base.config import PeerConfig
from ...peer.base.errors import FlockstepError, LocalError, UsageError
from ...peer.base.transport import PeerId
from ...peer.base.troubles import MEMORY_SHORT
from ...peer.log.telemetry import Telemetry
from ...peer.process.bridge import Cancelled, Command, NetworkDied, NetworkProcess, PendingAnswer
from ...peer.process.shared import SharedVectors, Vectors, bytes_of
from ..data.leases import Ranking, Share, View
from ..step.flat import FlatLayout
from ..step.pace import Pace
from ..step.ramp import batches_a_step, is_step
from .apply import elements_of
from .border import (
    BLANK,
    NO_PULSE,
    AttachVectors,
    AverageDelta,
    FetchFile,
    JoinRun,
    LeaveRun,
    OpenRun,
    PublishEvaluation,
    PublishLeases,
    Pulse,
    ReportProgress,
    RoundEnded,
    RunOpened,
    SyncState,
    TelemetryNotice,
    TrainingVectors,
    vectors_of,
)
from .progress import Progress
from .share import Shares

_A = TypeVar("_A")

ENTRY = "flockstep.optim.member.participant:main"
GOODBYE_SECONDS = 2.0
NETWORK_LEAVE_SECONDS = 0.9
"""For the process to exit once it has sent its goodbyes. Together: Ctrl-C is over in less than three seconds."""
RETRY_SHARE = 5
"""After a void round the next attempt comes a fifth of a phase later, so that the others need not wait a whole one."""
MOST_SKIPPED = 20
"""Inner steps without tokens that prolong a phase: a loss scale of fp16 finds its value in 16 (`precision`)."""
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
    """Whether all rounds are done, the run goes on as another one, or a stop was asked for."""
    swarm_step: int = 0
    """The inner step of the swarm that comes next, which the learning rate follows."""
    revision: bytes = b""
    """The owner's revision of the run's settings that holds in the next round; empty while the manifest's do."""
    accumulate: int = 1
    """Batches that make one optimizer step in the round that is trained for, n."""
    is_due: bool = True
    """Whether an optimizer step follows the next batch."""
    successor: str = ""
    """The run that this one goes on as, by its owner's statement; empty while it goes on itself."""


@dataclass(frozen=True, slots=True)
class StepDecision:
    """What every rank does after an inner step."""

    status: PeerStatus
    act: Act
    reason: str
    report: bool
    """Whether the losses are due for a report."""


@dataclass(frozen=True, slots=True)
class Pacing:
    """What a round took that nobody waited for, beside the phase after which the next one is due, in seconds."""

    round: float
    phase: float
    step: float
    """An inner step."""
    peers: int


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
    began: float
    phase_started: float


def fragment_after(rounds: int, layout: FlatLayout, manifest: Manifest) -> slice:
    """Return the elements that the round after so many rounds averages: all, or those of a fragment in streaming mode."""
    return elements_of(fragment_of(rounds + 1, layout.num_cells, manifest.outer.fragments))


class PeerClient:
    """One peer of a run, as its trainer drives it from one thread.

    Raises `FlockstepError` until it has joined; later of what concerns the network only `NetworkDied`, in any method.
    """

    def __init__(self, link: str, config: PeerConfig, telemetry: Telemetry, stop: threading.Event) -> None:
        self.config = config
        self.pulse = NO_PULSE
        self.position = BLANK
        """Where this peer's state stands in the run."""
        self._link = link
        self._telemetry = telemetry
        self._stop = stop
        self._num_rounds = math.inf
        self._revision = b""
        self._shares: Shares | None = None
        self._waiting_for = ""
        self._flight: Flight | None = None
        self._shared: SharedVectors | None = None
        self._joined = False
        self._num_leases = 0
        """How often leases were published."""
        self._round: PendingAnswer[RoundEnded] | None = None
        self._round_ended_at = time.monotonic()
        """When the last round that I began ended, by the monotonic clock."""
        self._ready_at: dict[PeerId, float] = {}
        """When the members that are ready for the pulse's round became so, by the monotonic clock."""
        self._process = NetworkProcess(ENTRY, (TelemetryNotice, Pulse))
        self.pacing: Pacing | None = None
        """Of the last certified round; None in blocking mode."""

    def open(self) -> RunOpened:
        """Reach the run."""
        try:
            config = replace(self.config, home=self.config.home.absolute())
            opened = self._process.call(OpenRun(self._link, config), cancel=self._stop.is_set)
        finally:
            self._drain()
        self.peer_id = opened.peer_id
        signed = SignedManifest.decode(opened.manifest)
        self._signed, self._manifest, self._run_id = signed, signed.manifest, signed.run_id
        self._folder = self.config.home / "runs" / signed.run_id
        return opened

    def attach(self, layout: FlatLayout, memory: int | None) -> None:
        """Create the vectors for a model's parameters: on disk, if they are more than so many bytes of memory, if known."""
        manifest = self._manifest
        self._layout = layout
        self._num_rounds = manifest.num_rounds
        self._streams = manifest.outer.mode == "streaming"
        self._pace = Pace(
            steps=manifest.phase_steps,
            seconds=manifest.inner.seconds / manifest.outer.fragments,
            floor=manifest.timing.floor,
            ceiling=manifest.timing.ceiling,
        )
        codec = codecs_named(manifest.codec.contributions)
        shapes = vectors_of(layout.num_cells, manifest.outer.fragments, codec)
        self._shared = self._shared_vectors(shapes, memory)
        self._process.call(AttachVectors(self._shared.path, layout.num_cells, layout.describe()))
        self._shared.unlink()

    def _shared_vectors(self, shapes: Vectors, memory: int | None) -> SharedVectors:
        """Create the shared vectors in memory; in a file where they do not fit. Raises `LocalError`."""
        try:
            if memory is not None and (needed := bytes_of(shapes)) > memory:
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
        self._call(JoinRun(device, version, self._layout.pin().hash, frozen))
        self._sync()
        self._joined = True
        rounds, peers = self._manifest.num_rounds, self.pulse.active
        self._telemetry.emit("run.joined", run=self._run_id, round=self.round, rounds=rounds, peers=peers)
        self._shares = Shares(
            self, self._telemetry, self._folder, seed=self._manifest.seed, stop=self._stop
        )
        fragments = self._manifest.outer.fragments
        self._ramp = tuple(weight for weight in RAMP for _ in range(fragments)) if self.round else ()
        self._progress = Progress(self._telemetry, self)
        self._begin_phase()
        return self.status()

    def batches(self, dataset: Any, **options: Any) -> Iterator[Any]:
        """My share of a dataset as batches, see `Shares.batches`."""
        assert self._shares is not None
        return self._shares.batches(dataset, **options)

    def fetch_file(self, hash_: bytes, size: int, path: Path) -> None:
        """Write a file of the run's data, which members provide, to a path. From any thread. Raises `FlockstepError`."""
        self._process.call(FetchFile(hash_, size, path), cancel=self._stop.is_set)

    def await_file(self) -> bool:
        """Wait a moment for a member that has a file; returns False where this peer is to leave."""
        self._drain()
        return not self._stop.wait(FILE_RETRY_SECONDS)

    @property
    def vectors(self) -> TrainingVectors:
        """θ, m and Δ."""
        assert self._shared is not None
        return TrainingVectors.of(self._shared)

    @property
    def round(self) -> int:
        """Rounds that this peer's state has behind it."""
        return self.position.round

    def status(self) -> PeerStatus:
        """What every rank knows of the peer."""
        self._follow_revision()
        successor = self.pulse.successor
        ended = self._stop.is_set() or self.round >= self._num_rounds or bool(successor)
        trained_for = self._swarm_step // self._pace.steps + 1
        n = batches_a_step(self._manifest.inner.ramp, trained_for, self._manifest.schedule_rounds)
        is_due = is_step(self._progress.phase_steps + 1, n, n if self._pace.seconds else self._pace.steps)
        root, step = self.position.root.hex(), self._swarm_step
        return PeerStatus(self.round, root, ended, step, self._revision, n, is_due, successor)

    def _follow_revision(self) -> None:
        """Take over the settings that the certificate of my state names."""
        certificate = self.position.certificate
        revision = b"" if certificate is None else value_of(certificate).revision
        if revision != self._revision:
            self._manifest = revised_by(self._signed, revision)
            self._revision, self._num_rounds = revision, self._manifest.num_rounds
            opened = open_revision(revision, self._run_id, self._manifest.owner)
            reason = "; ".join(describe_revision(self._signed.manifest, opened)) or "as the manifest says"
            rounds = self._manifest.num_rounds
            self._telemetry.emit("run.revised", step="settings", reason=reason, round=self.round + 1, rounds=rounds)

    def decide(self, tokens: int, batches: int) -> StepDecision:
        """Decide what to do after so many batches, of so many tokens together."""
        self._progress.count(tokens, batches)
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
            if self._round_is_over:
                return Act.SETTLE, ""
            if not self._is_overdue(flight):
                return Act.TRAIN, ""
            steps = self._progress.steps - flight.step
            reason = f"no result {steps} inner steps after the capture: training waits for it"
            self._telemetry.emit("round.overdue", step="train", reason=reason, round=self.round + 1)
            return Act.SETTLE, reason
        self._drain()
        if self._process.died:
            raise NetworkDied
        pulse = self.pulse
        current = pulse.round == self.round + 1
        if current and pulse.behind:
            return Act.CATCH_UP, "others are further"
        ended, why = self._pace.ended(
            now=time.monotonic(),
            started=self._phase_started,
            step=self._progress.phase_steps - self._boundary + self._pace.steps,
            ready_at=[at for peer, at in self._ready_at.items() if current and peer in pulse.ready],
            num_active=pulse.active,
            step_seconds=self._progress.step_seconds if self._pace.seconds else 0.0,
        )
        if ended and not self._progress.phase_tokens:
            if self._progress.phase_steps > MOST_SKIPPED:
                raise UsageError(
                    f"none of the phase's {self._progress.phase_steps} steps had tokens, by which a round weighs it",
                    remedy="pass as tokens= what each step was computed from, or leave it out",
                )
            return Act.TRAIN, "no step of the phase had tokens"
        if ended and self._must_wait(pulse.why_not_average):
            return Act.TRAIN, pulse.why_not_average
        return (Act.AVERAGE if ended else Act.TRAIN), why

    def _is_overdue(self, flight: Flight) -> bool:
        """Whether the fragment that is on its way would be captured again by now: each of the others had a phase."""
        inner = self._manifest.inner
        if inner.seconds:
            return time.monotonic() - flight.began >= inner.seconds
        return self._progress.steps - flight.step >= inner.steps

    def _must_wait(self, why_not_average: str) -> bool:
        """Whether no round can be attempted, so that training goes on; one event for each reason, one when it ends."""
        if why_not_average != self._waiting_for:
            self._waiting_for = why_not_average
            event = "round.awaited" if why_not_average else "round.possible"
            reason = why_not_average or "what was missing is here"
            self._telemetry.emit(event, step="phase", reason=reason, round=self.round + 1)
        return bool(why_not_average)

    def is_drawn(self, prompts: tuple[str, ...]) -> bool:
        """Return True if I am to evaluate the state that θ holds now, with these prompts: they may be about to change."""
        due = DueEvaluation.after(self.position.certificate, self._manifest.eval)
        return due is not None and self.peer_id in due.evaluators and due.prompts == prompts

    def publish_evaluation(self, loss: float, tokens: int, samples: tuple[str, ...]) -> None:
        """Publish what was measured of that state."""
        self._process.post(PublishEvaluation(self.round, loss, tokens, samples))

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
            patience=min(seconds, self._pace.steps * progress.step_seconds) if self._streams else 0.0,
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
        self._flight = Flight(work, progress.steps, time.monotonic(), self._phase_started)
        self._begin_phase()
        self._round = self._process.start(work)
        return PhaseOutcome(self.status(), PhaseEnd.BEGUN, reason)

    def settle(self) -> PhaseOutcome:
        """End the round that runs: wait for its result, if that is not here."""
        flight, self._flight = self._flight, None
        assert flight is not None
        try:
            ended = self._end_round()
            if ended.drifted:
                self._sync()
        except Cancelled:
            return PhaseOutcome(self.status(), PhaseEnd.VOID, "asked to stop")
        self._progress.waited()
        if ended.kind is OutcomeKind.DONE:
            self._ramp = self._ramp[1:]
            if self._streams:
                taken, step = self._round_ended_at - flight.began, self._progress.step_seconds
                self.pacing = Pacing(taken, flight.work.patience, step, self.pulse.active)
            if self._pace.seconds or not self._streams:
                self._phase_started = self._round_ended_at
            return PhaseOutcome(self.status(), PhaseEnd.DRIFTED if ended.drifted else PhaseEnd.DONE, ended.reason)
        work = flight.work
        self._progress.resume_phase(work.steps, work.tokens, work.loss, work.seconds)
        if ended.kind is OutcomeKind.BEHIND:
            return PhaseOutcome(self.status(), PhaseEnd.BEHIND, ended.reason)
        self._boundary = self._progress.phase_steps + max(1, self._pace.steps // RETRY_SHARE)
        self._phase_started = flight.phase_started
        if self._pace.seconds:
            self._phase_started = time.monotonic() - self._pace.seconds * (1 - 1 / RETRY_SHARE)
        self._ready_at.clear()
        return PhaseOutcome(self.status(), PhaseEnd.VOID, ended.reason)

    def catch_up(self, reason: str, delta: Floats | None) -> CaughtUp:
        """Take the run's newer state and keep my progress of this phase: `delta` holds Δ of all cells, then W = θ_new − Δ."""
        assert delta is not None
        before, changed = self.round, False
        with contextlib.suppress(Cancelled):
            changed = self._sync()
        if changed:
            np.subtract(self.vectors.theta, delta, out=delta)
        self._progress.waited()
        self._telemetry.emit("state.rebased", step="catch up", reason=reason, before=before, round=self.round)
        self._ready_at.clear()
        return CaughtUp(self.status(), changed)

    def close(self, reason: str) -> None:
        """Leave; a peer that has finished serves the last state until the others have it too."""
        if reason == "finished":
            until = time.monotonic() + LINGER_SECONDS
            while time.monotonic() < until and not self._stop.wait(0.1) and not self._process.died:
                self._drain()
                pulse = self.pulse
                if pulse.round == self.round + 1 and pulse.kept == self.round and not pulse.lagging:
                    break
            self._telemetry.emit("run.finished", round=self.round, root=self.position.root.hex())
        if self._shares is not None:
            self._shares.hand_back()
        self._end(reason)
        self._telemetry.emit("peer.leave", reason=reason)

    def _begin_phase(self) -> None:
        self._phase_started = time.monotonic()
        self._progress.begin_phase()
        self._boundary = self._pace.steps
        self._ready_at.clear()

    @property
    def _swarm_step(self) -> int:
        """The inner step of the swarm that comes next: all full phases, those of runs before too, and my part of this one."""
        pace, phases = self._pace, self._manifest.follows.rounds + self.round + (self._flight is not None)
        step = self._progress.phase_steps
        if pace.seconds:
            step = int(pace.steps * (time.monotonic() - self._phase_started) / pace.seconds)
        return phases * pace.steps + min(step, pace.steps - 1)

    def report_progress(self, progress: ReportProgress) -> None:
        """Publish what was trained so far."""
        self._process.post(progress)

    def publish_first(self, share: Share, ranking: Ranking) -> View | None:
        """Publish which units of the data I lease. Returns what is known of the others', None without the network."""
        try:
            return self._call(self._next_leases(share, ranking, urgent=True))
        except Cancelled:
            return None  # A peer that leaves needs no view.
        except FlockstepError as error:
            self._fail("publish leases", error)
            return None

    def publish_leases(self, share: Share, ranking: Ranking, *, urgent: bool) -> None:
        """Publish which units of the data I lease now; unless `urgent`, with the next news."""
        self._process.post(self._next_leases(share, ranking, urgent=urgent))

    def _next_leases(self, share: Share, ranking: Ranking, *, urgent: bool) -> PublishLeases:
        self._num_leases += 1
        return PublishLeases(share, ranking, self._num_leases, urgent)

    def _sync(self) -> bool:
        """Take the run's newest state, unless mine is it. Returns whether (θ, m) changed."""
        try:
            synced = self._call(SyncState())
        except FlockstepError as error:
            self._fail("take the run's state", error)
            return False
        self.position = synced.position
        return synced.changed

    @property
    def _round_is_over(self) -> bool:
        """Whether `_end_round` would not wait."""
        self._drain()
        assert self._round is not None
        return self._round.is_here

    def _end_round(self) -> RoundEnded:
        """Wait for the end of the round that I began."""
        pending, self._round = self._round, None
        assert pending is not None
        try:
            ended = pending.wait(cancel=self._waiting)
        except FlockstepError as error:
            self._fail("average", error)
            return RoundEnded(self.position, OutcomeKind.VOID, str(error))
        self._drain()
        self._round_ended_at = pending.arrived
        self.position = ended.position
        return ended

    def _end(self, reason: str) -> None:
        """Send a goodbye and end the process; in less than three seconds."""
        try:
            self._process.call(LeaveRun(reason), timeout=GOODBYE_SECONDS)
        except NetworkDied as error:
            self._telemetry.emit("network.died", step="network process", reason=str(error))
        except FlockstepError as error:
            self._telemetry.emit("peer.leave_failed", step="send goodbye", reason=str(error))
        self._process.stop(NETWORK_LEAVE_SECONDS)
        self._drain()
        if self._shared is not None:
            self._shared.unlink()

    def _call(self, command: Command[_A]) -> _A:
        answer = self._process.call(command, cancel=self._waiting)
        self._drain()
        return answer

    def _waiting(self) -> bool:
        """Process notices while a command runs. Returns whether to give it up."""
        self._drain()
        return self._stop.is_set()

    def _drain(self) -> None:
        notices = self._process.notices
        while not notices.empty():
            arrived, notice = notices.get()
            match notice:
                case TelemetryNotice(event):
                    self._telemetry.take(event)
                case Pulse() as pulse:
                    if pulse.round != self.pulse.round:
                        self._ready_at.clear()
                    self._ready_at |= {peer: arrived for peer in pulse.ready if peer not in self._ready_at}
                    self.pulse = pulse

    def _fail(self, step: str, error: FlockstepError) -> None:
        """Emit why a command failed. Raises what a newcomer or one who leaves must know, and `NetworkDied`."""
        if isinstance(error, Cancelled | NetworkDied) or not self._joined:
            raise error
        self._telemetry.emit("network.failed", step=step, reason=str(error))
