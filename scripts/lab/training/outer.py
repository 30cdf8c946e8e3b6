"""A swarm in one process for `bench outer`: blocking or streaming rounds, or data parallel, no network.

Theory of operation. The flat vector is cut into F fragments, equal runs of cells. H inner steps are a round, in which
every fragment is captured once: fragment f after step t where t ≡ ⌊fH/F⌋ mod H. Its pseudo-gradients θ_f - W_f go with
error feedback through the codec, and their mean through the codec of results. `delay` inner steps later it makes its outer
step, and every peer goes on by rebase: W_f ← θ_f + (W_f - W_f at the capture). So no work is lost, and what a peer did
after the capture is part of its next contribution. Blocking is one fragment without delay.

At the end what is under way is applied, and each fragment is captured once more where peers have trained it since: one more
exchange than blocking, so that θ has all of the work. The loss is θ's.

Data parallel makes a step of the same inner optimizer with the mean of all peers' gradients, on the same batches. The
models of all peers are one stack (`stack`).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import torch

from ....collectives.vector.arrays import Floats
from ....collectives.vector.codec import CELL, codec_named, feedback, weighted_mean
from ....optim.step.outer import OuterSettings, outer_step
from ....optim.step.ramp import batches_a_step, is_step
from ....peer.base.errors import LocalError, UsageError
from .learner import TINY, Batches, TrainingSize, domains_of, heldout_loss
from .stack import Stack, drawn

OUTER_MODES = ("blocking", "streaming", "parallel")
"""`parallel` is the baseline: synchronous data parallel."""
EVALUATIONS = 8
"""Of a training: enough to see how the gap to data parallel closes, for a few per cent of its time."""
OUTER_SIZES = {
    "tiny": TINY,
    "micro": TrainingSize(
        model={"layers": 2, "heads": 2, "width": 32, "context": 32}, length=32, batch=6, steps=30, rounds=100
    ),
    "small": TrainingSize(
        model={"layers": 3, "heads": 4, "width": 96, "context": 128}, length=64, batch=4, steps=25, rounds=24
    ),
    "1m": TrainingSize(model={"size": "1m"}, length=64, batch=4, steps=25, rounds=20),
    "10m": TrainingSize(model={"size": "10m"}, length=256, batch=16, steps=50, rounds=30),
    "51m": TrainingSize(
        model={"layers": 16, "heads": 8, "width": 512, "context": 512}, length=512, batch=8, steps=100, rounds=120
    ),
}
"""Sizes by name. 8 peers take 10 s of one core (tiny), 80 (micro), 2 minutes (small: 0.35M) or 5 (1m); others want a GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterTraining:
    """One training to measure. Raises `UsageError` for what cannot be trained."""

    size: TrainingSize
    mode: str = "blocking"
    contribution: str = "fp32"
    """The codec of contributions."""
    result: str = "fp32"
    """The codec of their mean."""
    fragments: int = 1
    delay: int = 0
    """Inner steps from a fragment's capture to its outer step."""
    outer: OuterSettings = field(default_factory=lambda: OuterSettings(lr=0.9, momentum=0.8, warmup=10))
    ramp: int = 1
    """The most batches of one optimizer step."""
    peers: int = 8
    seed: int = 0
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.mode not in OUTER_MODES:
            raise UsageError(f"there is no mode {self.mode!r}", remedy=f"choose one of {', '.join(OUTER_MODES)}")
        for codec in (self.contribution, self.result):
            codec_named(codec)
        if not 1 <= self.peers <= 64:
            raise UsageError(f"a training cannot have {self.peers} peers", remedy="choose 1 to 64")
        if min(self.size.steps, self.size.rounds) < 1:
            raise UsageError("a training has at least one round of one inner step", remedy="raise --steps or --rounds")
        if not 1 <= self.fragments <= self.size.steps:
            raise UsageError(
                f"{self.fragments} fragments in a round of {self.size.steps} inner steps",
                remedy=f"choose 1 to {self.size.steps}",
            )
        if not 0 <= self.delay < self.size.steps:
            raise UsageError(
                f"a delay of {self.delay} in a round of {self.size.steps} inner steps",
                remedy=f"choose 0 to {self.size.steps - 1}: a fragment is on its way only once",
            )
        if self.mode != "streaming" and (self.fragments, self.delay) != (1, 0):
            raise UsageError(f"{self.mode} has neither fragments nor a delay", remedy="choose the mode streaming")

    def batches_a_step(self, step: int) -> int:
        """Return how many batches make the optimizer step that follows inner step `step`, from 1 on."""
        return batches_a_step(self.ramp, 1 + (step - 1) // self.size.steps, self.size.rounds)

    @property
    def tokens(self) -> int:
        """Return the tokens that all peers train together."""
        size = self.size
        return self.peers * size.rounds * size.steps * size.batch * size.length


@dataclass(frozen=True, slots=True)
class OuterResult:
    """What a training came to."""

    curve: tuple[tuple[int, float], ...]
    """Rounds, and the held-out loss after them in nats per token: at the end and before it; infinite if it diverged."""
    params: int

    @property
    def loss(self) -> float:
        """The loss at the end."""
        return self.curve[-1][1]


Watch: TypeAlias = Callable[[int, Floats], None]
"""Called with the number of rounds that are over and the flat vector after them."""


def train_outer(training: OuterTraining) -> OuterResult:
    """Train, and return the held-out loss over the rounds."""
    torch.set_num_threads(1)
    swarm = ParallelSwarm(training) if training.mode == "parallel" else OuterSwarm(training)
    rounds, model, curve = training.size.rounds, swarm.stack.model, []
    shown = {-(-rounds * part // EVALUATIONS) for part in range(1, EVALUATIONS + 1)}

    def watch(round_: int, weights: Floats) -> None:
        if round_ in shown:
            swarm.stack.layout.scatter(weights, model)
            loss = heldout_loss(model, swarm.domains, training.size.length, training.device)
            curve.append((round_, loss if math.isfinite(loss) else math.inf))

    swarm.run(watch)
    return OuterResult(tuple(curve), sum(parameter.numel() for parameter in model.parameters()))


def spans_of(num_cells: int, fragments: int) -> list[slice]:
    """Return the elements of each fragment: runs of cells, as equal as they can be."""
    bounds = [num_cells * fragment // fragments * CELL for fragment in range(fragments + 1)]
    return [slice(low, high) for low, high in pairwise(bounds)]


class ParallelSwarm:
    """Synchronous data parallel: one model, the mean of all peers' gradients."""

    def __init__(self, training: OuterTraining) -> None:
        self.training = training
        self.domains = domains_of(training.peers)
        self.batches = _batches_of(training, self.domains)
        self.stack = Stack(training.size, 1, training.seed, training.device)

    def run(self, watch: Watch) -> None:
        """Train all rounds."""
        size = self.training.size
        for step in range(1, size.rounds * size.steps + 1):
            # The mean over the rows of all peers has the mean of their gradients.
            n = self.training.batches_a_step(step)
            self.stack.step(drawn(self.batches).flatten(0, 1)[None], step - 1, n, is_step=is_step(step, n, size.steps))
            if step % size.steps == 0:
                watch(step // size.steps, self.stack.weights[0].numpy(force=True))


@dataclass(slots=True)
class _Flight:
    """A fragment on its way."""

    fragment: int
    due: int
    """The step after which it is applied."""
    g: Floats
    captured: torch.Tensor
    """All peers' W of the fragment when it was captured."""


class OuterSwarm:
    """All peers of a training and their shared state."""

    def __init__(self, training: OuterTraining) -> None:
        self.training = training
        self.domains = domains_of(training.peers)
        self.batches = _batches_of(training, self.domains)
        self.stack = Stack(training.size, training.peers, training.seed, training.device)
        self.weights, self.layout = self.stack.weights.detach(), self.stack.layout
        self.codecs = codec_named(training.contribution), codec_named(training.result)
        self.theta: Floats = self.weights[0].numpy(force=True).copy()
        self.momentum = np.zeros_like(self.theta)
        self.spans = spans_of(self.layout.num_cells, training.fragments)
        self.residuals: Floats = np.zeros((training.peers, self.layout.size), np.float32)
        self.flights: list[_Flight] = []
        self.landed = [0] * training.fragments
        """Outer steps that each fragment has made."""
        self.failed = False
        """True once a peer had nothing finite to send."""

    def run(self, watch: Watch) -> None:
        """Train all rounds."""
        steps = self.training.size.steps
        last = steps * self.training.size.rounds
        captured = [0] * len(self.spans)
        phase, begun = steps // len(self.spans), 0
        for step in range(1, last + 1):
            n, ending = self.training.batches_a_step(step), list(self.due(step))
            is_due = bool(ending) or is_step(step - begun, n, phase)
            self.stack.step(drawn(self.batches), step - 1, n, is_step=is_due)
            begun = step if ending else begun
            self.land(step)
            for fragment in ending:
                captured[fragment] = step
                self.launch(fragment, step + self.training.delay)
            self.land(step)
            if step % steps == 0 and step < last:
                watch(step // steps, self.theta)
        self.land(last + self.training.delay)
        for fragment, step in enumerate(captured):
            if step < last:
                self.launch(fragment, last)
                self.land(last)
        watch(self.training.size.rounds, self.theta if not self.failed else np.full_like(self.theta, np.nan))

    def due(self, step: int) -> Iterator[int]:
        """Yield the fragments that are captured after a step."""
        steps, fragments = self.training.size.steps, len(self.spans)
        return (fragment for fragment in range(fragments) if step % steps == fragment * steps // fragments)

    def launch(self, fragment: int, due: int) -> None:
        """Capture a fragment on every peer and average it; it is applied after step `due`."""
        span = self.spans[fragment]
        captured = self.weights[:, span].clone()
        deltas = self.theta[span] - captured.numpy(force=True)
        try:
            parts = [self.sent(delta, residual[span]) for delta, residual in zip(deltas, self.residuals, strict=True)]
            g = self.averaged(parts, (span.stop - span.start) // CELL)
        except LocalError:  # A number that is not finite: this training has diverged.
            self.failed, g = True, np.zeros_like(self.theta[span])
        self.flights.append(_Flight(fragment, due, g, captured))

    def sent(self, delta: Floats, residual: Floats) -> memoryview:
        """Return a contribution's bytes; `residual` becomes what they do not carry."""
        delta += residual
        data = self.codecs[0].encode(delta)
        feedback(delta, self.codecs[0], data, residual)
        return data

    def averaged(self, parts: Sequence[memoryview], num_cells: int) -> Floats:
        """Return the decoded output of the owners."""
        mean = weighted_mean(self.codecs[0], parts, [1.0] * len(parts), num_cells)
        self.codecs[1].decode(self.codecs[1].encode(mean), mean)
        return mean

    def land(self, step: int) -> None:
        """Apply the fragments that are due after a step: the outer step, then the rebase of every peer."""
        landing = [flight for flight in self.flights if flight.due <= step]
        self.flights = [flight for flight in self.flights if flight.due > step]
        for flight in landing:
            span = self.spans[flight.fragment]
            self.landed[flight.fragment] += 1
            settings = self.training.outer.at(self.landed[flight.fragment])
            outer_step(self.theta[span], self.momentum[span], flight.g, settings)
            theta = torch.from_numpy(self.theta[span]).to(self.weights.device)
            self.weights[:, span] += theta - flight.captured


def _batches_of(training: OuterTraining, domains: Sequence[torch.Tensor]) -> list[Batches]:
    return [Batches(training.size, domains, index, training.seed) for index in range(training.peers)]
