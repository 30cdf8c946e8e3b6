"""One peer's membership in a run: when a phase ends, what becomes of Δ, whose state is taken. On the first rank only.

It owns the network process and the flat vectors θ, m and `exchange`. What it decides it returns as plain values, so that
every rank of the peer hears the same (`swarm`); the model is theirs.
"""

import contextlib
import math
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from ...peer.config import PeerConfig
from ...peer.process.bridge import Cancelled, Payload
from ...peer.telemetry import Telemetry
from ..flat import FlatLayout, Floats
from ..network import Network
from ..outer import OuterSettings, outer_step
from ..pace import Pace
from .progress import Progress
from .share import Shares

RETRY_SHARE = 5
"""After a void round the next attempt comes when a fifth of a phase more is trained: others need not wait for a whole."""
RAMP = (0.25, 0.5)
"""How much a newcomer's first contributions count (DESIGN §6): its fresh inner optimizer knows no curvature yet."""
LINGER_SECONDS = 15.0
"""How long who has finished still serves the last state to members that have not, and waits for it to be on disk."""


class Membership:
    """A peer in a run. Raises `FlockstepError` until it has joined; later the network raises nothing."""

    def __init__(self, link: str, config: PeerConfig, telemetry: Telemetry, stop: threading.Event) -> None:
        self._telemetry = telemetry
        self._stop = stop
        self._num_rounds = math.inf
        self._shares: Shares | None = None
        self._waiting = False
        self._network = Network(link, config, telemetry, stop.is_set)

    def open(self) -> Payload:
        """Reach the run: its signed manifest, in hex, and my peer id."""
        signed = self._network.open()
        self._manifest, self._run_id = signed.manifest, signed.run_id
        self._folder = self._network.config.home / "runs" / signed.run_id
        return {"manifest": signed.publishable.hex(), "peer": self._network.peer_id}

    def attach(self, layout: FlatLayout) -> None:
        """Make the vectors for a model's parameters."""
        manifest = self._manifest
        self._layout = layout
        self._num_rounds = manifest.outer.rounds
        self._outer = OuterSettings(lr=manifest.outer.lr, momentum=manifest.outer.momentum)
        self._pace = Pace(steps=manifest.inner.steps, floor=manifest.timing.floor, ceiling=manifest.timing.ceiling)
        self._network.attach(layout.num_cells, layout.describe())

    def join(self, *, device: str, version: str, frozen: bytes) -> Payload:
        """Become a member that holds the run's state; `theta` holds the start of a run that nobody has begun.

        `frozen` is the fingerprint of what is not trained. Raises `UsageError` where the others have another model.
        """
        layout = self._layout.fingerprint().hex()
        self._network.join(device=device, version=version, layout=layout, frozen=frozen.hex())
        self._telemetry.emit("run.joined", run=self._run_id, round=self.round, peers=self._network.pulse.active)
        self._shares = Shares(self._network, self._telemetry, self._folder, seed=self._manifest.seed)
        self._ramp: tuple[float, ...] = RAMP if self.round else ()
        self._progress = Progress(self._telemetry, self._network)
        self._begin_phase()
        return self.standing()

    def batches(self, dataset: Any, *, batch_size: int, workers: int) -> Iterator[Any]:
        """My share of a dataset, see `Shares.batches`."""
        assert self._shares is not None
        return self._shares.batches(dataset, batch_size=batch_size, workers=workers)

    @property
    def theta(self) -> Floats:
        """θ, the run's parameters."""
        return self._network.vector("theta")

    @property
    def exchange(self) -> Floats:
        """What goes into a round and comes out of it."""
        return self._network.vector("exchange")

    @property
    def round(self) -> int:
        """Rounds that this peer's state has behind it."""
        return self._network.round

    def standing(self) -> Payload:
        """What every rank knows of where the peer stands."""
        ended = self._stop.is_set() or self.round >= self._num_rounds
        return {"round": self.round, "root": self._network.root, "finished": ended}

    def look(self, tokens: int) -> Payload:
        """After an inner step of so many tokens: what to do next, `train`, `catch up` or `average`, and why."""
        self._progress.count(tokens)
        act, reason = self._next()
        report = act == "average" or self._progress.due
        return {"act": act, "reason": reason, "report": report, "phase_steps": self._progress.phase_steps, **self.standing()}

    def report(self, weighed: float, tokens: int) -> None:
        """Tell of the losses since the last report: their sum weighed by tokens, and the tokens."""
        self._progress.report(weighed, tokens)

    def _next(self) -> tuple[str, str]:
        if self._network.poll():
            return "catch up", "the network process was revived"
        now, pulse = time.monotonic(), self._network.pulse
        current = pulse.round == self.round + 1
        if current and pulse.behind:
            return "catch up", "others are further"
        for peer in pulse.ready if current else ():
            self._ready_at.setdefault(peer, now)
        ended, why = self._pace.ended(
            now=now,
            started=self._phase_started,
            step=self._progress.phase_steps - self._boundary + self._pace.steps,
            ready_at=list(self._ready_at.values()),
            num_active=pulse.active,
        )
        if ended and self._must_wait(pulse.hindrance):
            return "train", pulse.hindrance
        return ("average" if ended else "train"), why

    def _must_wait(self, hindrance: str) -> bool:
        """Whether a round cannot be tried, and training goes on instead: said once when it begins, once when it is over."""
        if bool(hindrance) != self._waiting:
            self._waiting = bool(hindrance)
            event, reason = ("awaited", hindrance) if hindrance else ("possible", "what was waited for is here")
            self._telemetry.emit(f"round.{event}", step="phase", reason=reason, round=self.round + 1)
        return self._waiting

    def average(self, reason: str) -> Payload:
        """Take Δ, which `exchange` holds, into a round. `kind` says how that ended: `done`: θ has moved; `behind`: the
        run is further than I; `abstained`: my training has broken down, start again from θ; `void`: train on.
        """
        progress, round_ = self._progress, self.round + 1
        seconds = time.monotonic() - self._phase_started
        steps, tokens, loss = progress.phase_steps, progress.phase_tokens, progress.phase_loss
        ramp = self._ramp[0] if self._ramp else 1.0
        figures: Payload = {"round": round_, "steps": steps, "tokens": tokens, "loss": loss, "ramp": ramp}
        self._telemetry.emit("phase.end", reason=reason, **figures)
        if (broken := self._layout.nonfinite(self.exchange)) is not None:
            reason = f"{broken} is not finite"
            self._telemetry.emit("round.abstained", round=round_, step="phase", reason=reason)
            self._begin_phase()
            return {"kind": "abstained", "reason": f"abstained: {reason}", **self.standing()}
        try:
            answer = self._network.average(
                tokens=tokens,
                steps=steps,
                loss=loss,
                grace=self._pace.grace(seconds),
                seconds=seconds,
                ramp=ramp,
            )
        except Cancelled:
            return {"kind": "void", "reason": "asked to stop", **self.standing()}
        if answer["kind"] == "done":
            self._apply()
        elif answer["kind"] != "behind":
            self._boundary = progress.phase_steps + max(1, self._pace.steps // RETRY_SHARE)
            self._ready_at.clear()
        return {"kind": answer["kind"], "reason": answer["reason"], **self.standing()}

    def _apply(self) -> None:
        """The outer step, with the g that `exchange` holds."""
        outer_step(self.theta, self._network.vector("momentum"), self.exchange, self._outer)
        with contextlib.suppress(Cancelled):
            if self._network.applied():
                self._network.sync()
        self._ramp = self._ramp[1:]
        self._begin_phase()

    def catch_up(self, reason: str) -> Payload:
        """Take the swarm's newer state and keep my progress of this phase: `exchange` holds Δ, and then θ_new − Δ."""
        before, changed = self.round, False
        with contextlib.suppress(Cancelled):
            changed = self._network.reenter() if self._network.poll() else self._network.sync()
        if changed:
            np.subtract(self.theta, self.exchange, out=self.exchange)
        self._telemetry.emit("state.rebased", step="catch up", reason=reason, before=before, round=self.round)
        self._ready_at.clear()
        return {"changed": changed, **self.standing()}

    def close(self, reason: str) -> None:
        """Leave; who has finished serves the last state until the others have it too."""
        if reason == "finished":
            until = time.monotonic() + LINGER_SECONDS
            while time.monotonic() < until and not self._stop.wait(0.1):
                self._network.poll()
                pulse = self._network.pulse
                if pulse.round == self.round + 1 and pulse.kept == self.round and not pulse.lagging:
                    break
            self._telemetry.emit("run.finished", round=self.round, root=self._network.root)
        if self._shares is not None:
            self._shares.hand_back()
        self._network.close(reason)
        self._telemetry.emit("peer.leave", reason=reason)

    def _begin_phase(self) -> None:
        self._phase_started = time.monotonic()
        self._progress.begin_phase()
        self._boundary = self._pace.steps
        self._ready_at: dict[str, float] = {}
