"""Swarm, the public API: `with Swarm(link, model, inner) as swarm:` makes any training loop one peer of a run.

Theory of operation. W, the model's parameters, trains with the inner optimizer. When the pace ends the inner
phase, the pseudo-gradient Δ = θ − W goes into a round. A certified round gives g, the same bytes on every peer; the outer
step moves (θ, m) alike everywhere, and W starts again from θ. A round that is void or went on without me changes nothing:
the phase continues, and Δ is measured again from the same θ at its next boundary.

In streaming mode (arXiv:2501.18512) a round averages one fragment of the vector, in turn, and W trains on while it runs.
Its result is taken after the inner step in which it arrives: W ← θ + (W − W at capture), so that no step is lost. What was
trained since the capture is a part of the next Δ. When a peer takes a result is nobody else's business: all that others
see of W is its next Δ, against the θ that the certificate before names, and that one the peer holds by then. So training
goes on however long a round takes, and the next fragment is captured once the last one's result is here. Only where that
is H steps old, when the same fragment would be due again, does training wait for it.

Later in a run several batches make one optimizer step (`ramp`): `step` lets their gradients accumulate. A phase has its
batches all the same, and before Δ is measured what has accumulated is stepped with.

The optimizer step is `step`'s, or the caller's own loop makes it, with its scaler, scheduler and closure, and says so
by `after_step`. What the run prescribes for it, a learning-rate schedule and clipping, applies to optimizers that are
built for the run; a caller's own keep what their loop does.

A peer may be several processes (`torchrun`): each of them runs the same loop around a `Swarm` of its own, and rank 0
decides for all (`ranks`, `client`).
"""

import contextlib
import math
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from types import NoneType, TracebackType
from typing import Any, Self, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from ...collectives.vector.arrays import Floats
from ...dht.run.layout import UNPINNED
from ...dht.run.manifest import SignedManifest
from ...dht.run.revision import open_revision, revised_by
from ...dht.run.succession import SUCCEEDED
from ...peer.base.config import PeerConfig
from ...peer.base.errors import LocalError, UsageError
from ...peer.log.metrics import EventFigures, shown_metrics
from ...peer.log.telemetry import Event, Telemetry, log_path
from ..member.border import RunOpened
from ..member.client import Act, CaughtUp, PeerClient, PeerStatus, PhaseEnd, PhaseOutcome, StepDecision, fragment_after
from ..member.progress import Losses, loss_of, tokens_of
from ..models.kept import keep_buffers, keep_model, parts_of, unkept_line
from ..models.machine import memory
from ..step.flat import FlatLayout, frozen_fingerprint, is_sharded
from ..step.inner import InnerOptimizers, check_optimizers, schedule_of
from .evaluating import HeldOutResult
from .fit import outlasts, pace_of, rate_of, remedy
from .lines import end_in_a_line, say_event
from .ranks import Ranks

_T = TypeVar("_T")

EVALUATION_SHARE = 0.1
"""The part of its last phase that a drawn peer may spend on an evaluation: the others wait for it no longer than for a peer
that is a tenth slower."""
EVALUATION_MOST_SECONDS = 60.0
"""However long the phase was: a peer that was alone for a day has had one of a day."""
JOIN_WARMUP = 10
"""Inner steps of learning-rate warm-up for a newcomer's fresh optimizer state."""
CLEARED = 2
"""Times in a row that accumulated gradients are found cleared before each batch is a step of its own. Once may be a device
whose memory ran out, since that batch is computed again; twice is a loop that clears them each time."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """The result of one call of `Swarm.step`."""

    step: int
    """Inner steps of this peer so far."""
    round: int
    """Rounds that this peer's state has behind it."""
    loss: float | None
    """Mean training loss since the last report, None in between (reading a loss from a GPU synchronizes with it)."""
    averaged: bool
    """Whether this step ended in a certified round."""
    reason: str = ""
    """How a round ended, if one was attempted."""


Inner: TypeAlias = (
    torch.optim.Optimizer
    | Sequence[torch.optim.Optimizer]
    | Callable[[nn.Module, SignedManifest], Sequence[torch.optim.Optimizer]]
)
"""Inner optimizers, or what builds them for a model and a run."""


class Swarm:
    """One model's membership in a run.

    `model` stays where it is (any device, any dtype); parameters that require grad are averaged. `inner` is its
    optimizer, or several, or a function that builds them for the run's manifest. Without a model entering only reaches the
    run, whose manifest is then `signed`, and `join` takes part in it. `follow_run` says whether the run's
    learning-rate schedule, a newcomer's warm-up and the run's gradient clipping apply in `step`; by default they apply
    to optimizers that were built for the run, and the caller's own keep their learning rates.
    `on_event` is called with every event (see `peer.log.telemetry`); without it a few lines go to stderr, and an error of
    flockstep or Ctrl-C ends the program without a traceback (`lines`). `stop`, once set, ends every wait. `metrics` is the
    HOST:PORT of a page for Prometheus.
    If torch.distributed is in use, all ranks are one peer; events and `stop` are those of rank 0.
    Raises `FlockstepError` on entering if the run cannot be reached; later other peers raise nothing, and `step` raises
    `NetworkDied` (a `LocalError`) where the network process of this peer was killed: start the program again.
    """

    def __init__(
        self,
        link: str,
        model: nn.Module | Callable[[SignedManifest], nn.Module] | None = None,
        inner: Inner = (),
        *,
        follow_run: bool | None = None,
        config: PeerConfig | None = None,
        on_event: Callable[[Event], None] | None = None,
        stop: threading.Event | None = None,
        metrics: str = "",
    ) -> None:
        self._link = link
        self._make_model = model
        self._make_inner = inner
        self._follow_run = follow_run
        self.config = config or PeerConfig()
        self._on_event = on_event
        self._stop = stop or threading.Event()
        self._metrics = metrics
        self._page = contextlib.ExitStack()
        self._folder: Path | None = None
        self._inner = InnerOptimizers(())
        self._evaluator: Callable[[nn.Module, float], HeldOutResult | None] | None = None
        self._settled_at = time.monotonic()
        self._is_thin = False
        self._status = PeerStatus(round=0, root="", finished=False)
        self.begun = 0
        """The certified round from which a newcomer starts, as link or bootstraps name it; 0 where none does."""
        self.reason = "left"
        """Why the membership ended: `left`, `finished`, `SUCCEEDED`, or the name of an error."""

    @staticmethod
    def layout_of(model: nn.Module) -> str:
        """Return what `layout` of a `run.toml` says of a model of one's own, so that no other one begins its run."""
        return str(FlatLayout.of(model).pin())

    def __enter__(self) -> Self:
        if sys.excepthook is sys.__excepthook__:
            sys.excepthook = end_in_a_line
        self._ranks = Ranks()
        self._client: PeerClient | None = None
        if self._ranks.first:
            self.telemetry = Telemetry(log_path(self.config.home))
            self.telemetry.subscribe(self._on_event or say_event)
            self._show_metrics()
            self._client = PeerClient(self._link, self.config, self.telemetry, self._stop)
        else:
            self.telemetry = Telemetry()
        try:
            self._open()
            made = self._make_model
            if made is not None:
                self.join(made if isinstance(made, nn.Module) else made(self.signed), self._make_inner)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _show_metrics(self) -> None:
        if self._metrics:
            figures = EventFigures()
            self.telemetry.subscribe(figures.take)
            telemetry = self.telemetry

            def notice(reason: str) -> None:
                telemetry.emit("metrics.refused", step="metrics", reason=reason)

            port = self._page.enter_context(shown_metrics(self._metrics, figures.figures, notice))
            self.telemetry.emit("metrics.ready", port=port)

    def _open(self) -> None:
        """Reach the run."""
        opened = self._ranks.from_first(RunOpened, lambda: self._first.open())
        self.peer_id = opened.peer_id
        signed = SignedManifest.decode(opened.manifest)
        # By the owner's newest revision, also before the chain names it: a run that nobody can train under the one before
        # gets no round by which to name it. The outer step follows the chain alone (`client`).
        self._signed, self._revision, self.begun = signed, opened.revision, opened.round
        self.manifest = revised_by(signed, opened.revision)
        self.run_id = signed.run_id

    @property
    def signed(self) -> SignedManifest:
        """The run, with its manifest as its owner has revised it."""
        return replace(self._signed, manifest=self.manifest)

    def join(self, model: nn.Module, inner: Inner) -> None:
        """Become a member of the run with this model. Raises `FlockstepError`."""
        ranks, manifest = self._ranks, self.manifest
        self.model = model
        self._follows_run = callable(inner) if self._follow_run is None else self._follow_run
        if not isinstance(inner, Iterable) and not callable(inner):
            inner = [inner]
        self.optimizers = list(inner(model, self.signed) if callable(inner) else inner)
        check_optimizers(self.optimizers)
        self._inner = InnerOptimizers(self.optimizers)
        self._lr_factor = schedule_of(manifest.inner, manifest.schedule_rounds * manifest.phase_steps)
        self._layout = FlatLayout.of(self.model)
        self._layout.pin().check(manifest.pin)  # Before anybody hears of this peer.
        self._parts = parts_of(self.model)
        frozen = frozen_fingerprint(self.model)
        device = str(next(self.model.parameters()).device)
        self.telemetry.emit("peer.start", peer=self.peer_id, device=device, version=version("flockstep"))
        if manifest.pin is None:
            self.telemetry.emit("layout.unpinned", step="join", reason=UNPINNED)
        if lost := unkept_line(self._parts.unkept):
            reason = f"neither kept on this disk nor exported, {lost}"
            self.telemetry.emit("model.not_kept", step="join", reason=reason)
        if not callable(inner):
            self._report_own_optimizer()
        _check_arithmetic()
        free = None if (found := memory()) is None else found.free
        ranks.from_first(NoneType, lambda: self._first.attach(self._layout, free))
        self._layout.gather(self.model, self._theta)
        self._status = ranks.from_first(
            PeerStatus, lambda: self._first.join(device=device, version=version("flockstep"), frozen=frozen)
        )
        self._take(self._theta)
        self._steps, self._since_join = 0, 0
        self._span = slice(0, 0)
        self._captured: list[Tensor] | None = None
        self._losses = Losses()
        self._batch_tokens = 0
        self._scales: list[float] = []
        self._held: list[tuple[nn.Parameter, Tensor | None]] = []
        self._num_cleared = 0
        self._folder = self.config.home / "runs" / self.run_id if ranks.first else None
        keep_model(self.model, self._parts, self._folder, self.telemetry)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.reason = type(error).__name__
        elif self.finished and not self._stop.is_set():
            self.reason = SUCCEEDED if self._status.successor else "finished"
        self._keep_buffers()
        self._inner.close()
        if self._client is not None:
            self._client.close(self.reason)
        self._page.close()
        self.telemetry.close()

    @property
    def round(self) -> int:
        """Rounds that this peer's state has behind it."""
        return self._status.round

    def _number(self, revision: bytes) -> int:
        return open_revision(revision, self.run_id, self._signed.manifest.owner).number

    @property
    def root(self) -> str:
        """The state root of (θ, m), in hex."""
        return self._status.root

    @property
    def speaks(self) -> bool:
        """Whether this process is rank 0 of the peer, which alone is connected to the run."""
        return self._ranks.first

    def from_first(self, ask: Callable[[], str]) -> str:
        """Run `ask` on rank 0, and return its answer on every rank; what it raises there is raised on every rank."""
        return self._ranks.from_first(str, ask)

    @property
    def accumulate(self) -> int:
        """How many batches make one optimizer step now, n, which `[inner] ramp` has rise to 8 by quarters of the run.

        `step` follows it where it follows the run's recipe. A loop that makes its own steps may: it accumulates the mean
        gradient of n batches, multiplies its learning rates by √n, and says `after_step(loss, batches=n)`.
        """
        return 1 if self._num_cleared >= CLEARED else self._status.accumulate

    @property
    def num_ranks(self) -> int:
        """How many processes (ranks) this peer has."""
        return self._ranks.size

    @property
    def finished(self) -> bool:
        """Whether all rounds of the run are done, it goes on as another run, or a stop was asked for.

        It is the same on all ranks after each step. Whoever enters again with the same link takes part in the other run.
        """
        return self._status.finished or (self._ranks.size == 1 and self._stop.is_set())

    def share_of(
        self,
        dataset: Any,
        *,
        batch_size: int,
        workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> Iterator[Any]:
        """Yield my share of a dataset until a stop, as batches of samples collated as torch's DataLoader does.

        `collate_fn` makes a batch of a list of samples, as a DataLoader's does.

        Peers with the same data split it among themselves by leases: as long as no peer dies, no sample comes twice in an
        epoch (`data.leases`). `dataset` is map-style (`dataset[i]`, loaded by `workers` processes), or any iterable that
        can be iterated again: then each peer skips what the others take. Each rank gets an equal piece of every batch.
        Of several datasets the first is split.
        Raises `UsageError` for a dataset that is empty or can be read only once, for a DataLoader, for samples that make no
        batch, and for a batch that ranks cannot split.
        """
        if batch_size % self._ranks.size:
            raise UsageError(
                f"a batch of {batch_size} does not split among {self._ranks.size} ranks",
                remedy="start a number of processes that divides the batch size",
            )
        first = self._ranks.first
        batches: Iterator[Any] = iter(())
        if first:
            batches = self._first.batches(dataset, batch_size=batch_size, workers=workers, collate_fn=collate_fn)
        for batch in self._ranks.deal(batches):
            self._batch_tokens += tokens_in(batch)
            yield batch

    def fetch_file(self, hash_: bytes, size: int, path: Path) -> None:
        """Write a file of the run's data, which its members provide, to a path. On rank 0 alone. Raises `FlockstepError`."""
        self._first.fetch_file(hash_, size, path)

    def await_file(self) -> bool:
        """Wait a moment for a member that has such a file; returns False where this peer is to leave."""
        return self._first.await_file()

    def in_turn(self, do: Callable[[], _T]) -> _T:
        """Return what `do` returns: rank 0 runs it first, then the others."""
        done: list[_T] = []
        self._ranks.from_first(NoneType, lambda: done.append(do()))
        return done[0] if done else do()

    def evaluate_with(self, evaluator: Callable[[nn.Module, float], HeldOutResult | None] | None) -> None:
        """Measure the shared model by `evaluator(model, seconds)` whenever this peer is drawn for it (`[eval]`).

        The model then holds the run's state instead of this peer's weights and is in evaluation mode; both are as before
        afterwards. `seconds` is a tenth of the last phase, and a minute at most. What it raises is an event. None: never.
        Of a model that is sharded over ranks all of them call this, and rank 0 alone returns a result.
        """
        self._evaluator = evaluator

    def step(self, loss: Any = None, *, tokens: int | None = None, scale: float = 1.0) -> StepReport:
        """Make one inner step with the gradients that are there, and attempt a round if the phase ends.

        Gradients accumulate between two calls, as in any loop. By the run's recipe only the last of `accumulate` calls steps
        the optimizers, with the mean gradient, and clears it; a caller's own step at each call. `loss` is for reports and
        records, `tokens` is what this step was computed from (counted by `share_of` if not given), both of this rank. A loss
        is a number, a tensor or array of one element, or an output that has one as `loss`. `scale` is the factor of the loss
        in `backward`, such as a loss scale; a call counts in the mean in proportion to it.

        Never raises because of the network. Raises `UsageError` before anything is stepped if there are no gradients, if the
        caller's loop has stepped an optimizer itself, and for another loss or other tokens; at the end of a phase, if none of
        its steps had tokens or other parameters are trained than at the join. Raises `LocalError` for a bug of ours or of the
        caller, and if another rank has died.
        """
        loss, tokens = loss_of(loss), tokens_of(tokens)
        self._gather(scale)
        if self._status.is_due or self.accumulate == 1 or not self._follows_run:
            self._inner_step(self.accumulate)
        return self.after_step(loss, tokens=tokens)

    def after_step(self, loss: Any = None, *, tokens: int | None = None, batches: int = 1) -> StepReport:
        """Count an inner step that the caller's loop has made, and attempt a round if the phase ends; else as `step`.

        For loops that step the optimizer themselves: with a `GradScaler`, a closure, or inside of a trainer's library.
        Gradients and learning rates are left alone. Call it after each step, also one that a scaler has skipped. A step of
        several `batches` counts as so many inner steps of the phase.
        """
        loss, tokens = loss_of(loss), tokens_of(tokens)
        self._inner.num_own_steps = 0
        self._steps += batches
        tokens = self._batch_tokens or 1 if tokens is None else tokens
        self._batch_tokens = 0
        self._losses.add(loss, tokens)
        (total,) = self._ranks.sum(tokens)
        first = self._ranks.from_first
        decision = first(StepDecision, lambda: self._first.decide(int(total), batches))
        self._status = decision.status
        mean = self._report() if decision.report else None
        reason, averaged = "", False
        if decision.act is not Act.TRAIN:
            self._layout.check_unchanged(self.model)
        if decision.act in (Act.SETTLE, Act.CATCH_UP):
            if decision.act is Act.SETTLE:
                averaged, reason = self._settle()
            else:
                self._catch_up(decision.reason)
                reason = "caught up with the others"
            if self._status.finished:
                return StepReport(self._steps, self.round, mean, averaged, reason)
            # Whoever makes one step while the others make a phase would be behind again after the next one.
            decision = first(StepDecision, lambda: self._first.decide_again())
            self._status = decision.status
            mean = self._report() if decision.report else mean
        if decision.act is Act.AVERAGE:
            done, reason = self._round(decision.reason)
            averaged = averaged or done
        return StepReport(self._steps, self.round, mean, averaged, reason)

    def _report_own_optimizer(self) -> None:
        inner = self.manifest.inner
        clip = f"clips gradients at a norm of {inner.clip:g}" if inner.clip else "clips no gradients"
        if self._follows_run:
            reason = (
                f"the caller's optimizer trains, not the run's {inner.optimizer}; the run schedules its learning rates "
                f"({inner.schedule}, {inner.warmup_steps} steps of warm-up) until they are set from outside, and {clip}"
            )
        else:
            reason = (
                f"the caller's optimizer trains with its own learning rates, not the run's {inner.optimizer}: the run's "
                f"schedule ({inner.schedule}, {inner.warmup_steps} steps of warm-up), its clipping and its ramp "
                f"(to {inner.ramp}, see swarm.accumulate) do not apply"
            )
        self.telemetry.emit("inner.own_optimizer", step="join", reason=reason)

    def _revise(self) -> None:
        """Take over the settings that the owner has revised; optimizers that were made for the run are set anew."""
        manifest = revised_by(self._signed, self._status.revision)
        self.manifest, self._revision = manifest, self._status.revision
        self._lr_factor = schedule_of(manifest.inner, manifest.schedule_rounds * manifest.phase_steps)
        if callable(self._make_inner):
            self._inner.take_settings(self._make_inner(self.model, replace(self._signed, manifest=manifest)))

    def _gather(self, scale: float) -> None:
        """Count one more batch of which the gradients are there. Raises `UsageError`."""
        if self._status.revision != self._revision and self._number(self._status.revision) >= self._number(self._revision):
            self._revise()
        if self._inner.num_own_steps:
            raise UsageError(
                "an optimizer was stepped by the loop itself, and swarm.step would step it again",
                remedy="remove optimizer.step(), or call swarm.after_step(loss) instead of swarm.step(loss)",
            )
        graded = [parameter for parameter in self.model.parameters() if parameter.grad is not None]
        if not graded:
            raise UsageError(
                "swarm.step found no gradients",
                remedy="call loss.backward() before it; a loop that calls optimizer.step() itself ends each step with "
                "swarm.after_step(loss)",
            )
        for parameter, left in self._held:
            # Found by any rank, since all must step at the same batch.
            self._num_cleared = self._num_cleared + 1 if any(self._ranks.sum(parameter.grad is not left)) else 0
            self._scales = [] if self._num_cleared else self._scales
            if self._num_cleared == CLEARED:
                reason = "the loop clears gradients that accumulate for one step: from now on each batch is a step of its own"
                self.telemetry.emit("inner.cleared", step="inner step", reason=reason)
        # The smallest one, since its memory is held even if it is cleared.
        self._held = [(parameter, parameter.grad) for parameter in sorted(graded, key=Tensor.numel)[:1]]
        self._scales.append(scale)

    def _inner_step(self, n: int) -> None:
        """Step the optimizers with the mean gradient of all batches since the last time, as one step of n of them."""
        batches = len(self._scales)
        (scale,) = self._ranks.sum(sum(self._scales) / self._ranks.size)
        self._scales, self._held = [], []
        gradients = (parameter.grad for parameter in self.model.parameters() if parameter.grad is not None)
        for gradient in gradients if scale not in (0.0, 1.0) else ():
            gradient.mul_(1 / scale)
        if not self._follows_run:
            self._inner.step()
            return
        if clip := self.manifest.inner.clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), clip)
        warm = min(1.0, (self._since_join + batches) / JOIN_WARMUP)
        had_own_rates = self._inner.have_own_rates
        self._inner.step(self._lr_factor(self._status.swarm_step), warm * math.sqrt(n))
        if self._inner.have_own_rates and not had_own_rates:
            reason = "the learning rates were set from outside: the run's schedule does not apply any more"
            self.telemetry.emit("inner.own_rates", step="inner step", reason=reason)
        self._since_join += batches

    def _report(self) -> float | None:
        """Report the mean loss of all ranks since the last report, and return it; None if it is not known."""
        weighed, tokens = self._ranks.sum(*self._losses.take())
        if self._client is not None:
            self._client.report(weighed, int(tokens))
        mean = weighed / max(tokens, 1)
        return None if math.isnan(mean) else mean

    def _round(self, why: str) -> tuple[bool, str]:
        """Take Δ into a round. Returns whether it was certified, and how it ended; in streaming mode it only begins."""
        if self._scales:
            self._inner_step(min(self.accumulate, len(self._scales)))
        span = self._span = fragment_after(self.round, self._layout, self.manifest)
        delta = None if self._client is None else self._client.vectors.delta
        self._layout.pseudo_gradient(self._theta, self.model, delta, span)
        outcome = self._ranks.from_first(PhaseOutcome, lambda: self._first.begin_round(why, span))
        self._status = outcome.status
        if outcome.end is PhaseEnd.ABSTAINED:
            self._take(self._theta)
            self._inner.forget()
            self._since_join = 0
            return False, outcome.reason
        if self.manifest.outer.mode == "blocking":
            return self._settle()
        self._captured = self._layout.capture(self.model, span)
        return False, ""

    def _settle(self) -> tuple[bool, str]:
        """Take the result of the round that runs. Returns whether it was certified, and how it ended."""
        outcome = self._ranks.from_first(PhaseOutcome, lambda: self._first.settle())
        self._status = outcome.status
        if outcome.end is PhaseEnd.BEHIND:
            self._catch_up(outcome.reason)
        elif outcome.end in (PhaseEnd.DONE, PhaseEnd.DRIFTED):
            if self._status.finished or outcome.end is PhaseEnd.DRIFTED:
                self._take(self._theta)
            else:
                self._layout.rebase(self._theta, self.model, self._span, self._captured, self._ranks.share)
            if outcome.end is PhaseEnd.DONE:
                self._evaluate()
                self._compare_pace()
            if self.round % self.manifest.checkpoint_rounds == 0:
                self._keep_buffers()
        self._captured = None
        return outcome.end in (PhaseEnd.DONE, PhaseEnd.DRIFTED), outcome.reason

    def _evaluate(self) -> None:
        """Measure the state of the round that has just ended, if this peer was drawn for it: no other round runs now."""
        began = time.monotonic()
        seconds = min(EVALUATION_SHARE * (began - self._settled_at), EVALUATION_MOST_SECONDS)
        self._settled_at = began
        evaluator, client = self._evaluator, self._client
        is_drawn = evaluator is not None and client is not None and client.is_drawn(self.manifest.eval.prompts)
        together = self._ranks.size > 1 and is_sharded(self.model)
        if together and self.manifest.eval.every:
            is_drawn = self._ranks.from_first(bool, lambda: is_drawn)
        if evaluator is None or not is_drawn:
            return
        try:
            share = {"share": self._ranks.share} if together else {}
            with self._layout.holding(self._theta, self.model, **share) as model:
                found = evaluator(model, seconds)
        except Exception as error:
            if together and not isinstance(error, LocalError):
                raise  # Other ranks may still compute.
            reason = f"{type(error).__name__}: {error}"
            self.telemetry.emit("eval.failed", step="evaluate", reason=reason, round=self.round)
            return
        if client is None or found is None:
            return
        client.publish_evaluation(found.loss, found.tokens, found.samples)
        took = round(time.monotonic() - began, 3)
        self.telemetry.emit("eval.measured", round=self.round, loss=found.loss, tokens=found.tokens, seconds=took)

    def _compare_pace(self) -> None:
        """Say when rounds begin to outlast the phases between them, with what would help, and when they fit again."""
        pacing = None if self._client is None else self._client.pacing
        if pacing is None or not pacing.phase:
            return
        is_thin, manifest = outlasts(pacing.round, pacing.phase, self._is_thin), self.manifest
        if is_thin == self._is_thin:
            return
        self._is_thin = is_thin
        took = f"a round takes {pacing.round:.1f} s, the phase after which the next one is due {pacing.phase:.1f} s"
        if not is_thin:
            self.telemetry.emit("line.enough", step="settle", reason=took, round=self.round)
            return
        size, peers = self._layout.size, max(2, pacing.peers)
        rate = rate_of(manifest, size, peers, pacing.round)
        hint = remedy(
            manifest,
            lambda other: pace_of(other, size, peers, rate, pacing.step * other.data.batch_size / manifest.data.batch_size),
        )
        reason = f"{took}: training goes on, and H becomes {pacing.round / pacing.phase:.2g} times what it should be"
        hint = f"what its owner can do: {hint}"
        self.telemetry.emit("line.thin", step="settle", reason=reason, remedy=hint, round=self.round)

    def _catch_up(self, reason: str) -> None:
        """Take the run's newer state and keep my progress of this phase: W ← θ_new + (W − θ)."""
        delta = None if self._client is None else np.empty(self._layout.size, np.float32)
        self._layout.pseudo_gradient(self._theta, self.model, delta)
        caught_up = self._ranks.from_first(CaughtUp, lambda: self._first.catch_up(reason, delta))
        self._status = caught_up.status
        if caught_up.changed:
            self._take(delta)

    def _keep_buffers(self) -> None:
        if self._folder is not None:
            keep_buffers(self.model, self._parts, self._folder, self.telemetry)

    def _take(self, vector: Floats | None) -> None:
        self._layout.scatter(vector, self.model, self._ranks.share)

    @property
    def _first(self) -> PeerClient:
        """The client, which only rank 0 has."""
        assert self._client is not None
        return self._client

    @property
    def _theta(self) -> Floats | None:
        return None if self._client is None else self._client.vectors.theta


def _check_arithmetic() -> None:
    """Raise `UsageError` if this process flushes subnormals to zero: its outer steps would round differently and drift."""
    smallest = torch.finfo(torch.float32).smallest_normal
    if not float(np.float32(smallest) * np.float32(0.5)):
        raise UsageError(
            "this process flushes subnormal numbers to zero, so its states would differ from those of the others",
            remedy="remove torch.set_flush_denormal(True)",
        )


def tokens_in(batch: Any) -> int:
    """Count the targets of a batch of token sequences, or the samples of any other batch."""
    first = batch
    while isinstance(first, (tuple, list, Mapping)):
        first = next(iter(first.values() if isinstance(first, Mapping) else first), None)
    if not isinstance(first, Tensor) or first.ndim == 0:
        return 1
    if first.ndim == 2 and not first.is_floating_point():
        return first.shape[0] * max(1, first.shape[1] - 1)
    return first.shape[0]
