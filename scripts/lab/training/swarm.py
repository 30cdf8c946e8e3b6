"""A swarm in one process: blocking or streaming rounds, honest or under attack, or data parallel, no network.

Theory of operation. The flat vector is cut into F fragments, equal runs of cells. H inner steps are a round, in which
every fragment is captured once: fragment f after step t where t ≡ ⌊fH/F⌋ mod H. A capture goes through the arithmetic of a
run: pseudo-gradients θ_f - W_f with error feedback through the codec, their sketches under a fresh seed, the rule's weights,
and a weighted sum for each part through the codec of results. Then the fragment makes its outer step, and every peer goes on
from there. Blocking is one fragment. A run makes the outer step some inner steps later, by rebase; here it is made at once.

At the end each fragment is captured once more where peers have trained it since: one more exchange than blocking, so that θ
has all of the work. The loss is θ's.

The last peers may attack: they replace their contributions, or learn inverted targets. The oracle is the mean of the honest
peers alone, which also draw from the attackers' domains.

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

from ....collectives.robust import sketch
from ....collectives.robust.rule import Floats64, Weighting
from ....collectives.robust.rules import rule_named
from ....collectives.vector.arrays import Floats
from ....collectives.vector.codec import CELL, Encoded, codec_named, feedback
from ....collectives.vector.partition import split
from ....optim.step.outer import OuterSettings, outer_step
from ....optim.step.ramp import batches_a_step, is_step
from ....peer.base.digest import keyed
from ....peer.base.errors import LocalError, UsageError
from ..attacks.gradients import Attackers
from .batches import Batches, TrainingSize, domains_of, drawn, heldout_loss
from .stack import Stack

MODES = ("blocking", "streaming", "parallel")
"""`parallel` is the baseline: synchronous data parallel."""
EVALUATIONS = 8
"""Of a training: enough to see how the gap to data parallel closes, for a few per cent of its time."""


NOBODY = Attackers("nan", 0)
"""No attackers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """One training to measure. Raises `UsageError` for what cannot be trained."""

    size: TrainingSize
    mode: str = "blocking"
    contribution: str = "fp32"
    """The codec of contributions."""
    result: str = "fp32"
    """The codec of what the rule makes of them."""
    rule: str = "mean"
    fragments: int = 1
    outer: OuterSettings = field(default_factory=lambda: OuterSettings(lr=0.9, momentum=0.8, warmup=10))
    ramp: int = 1
    """The most batches of one optimizer step."""
    peers: int = 8
    """Honest peers, then attackers."""
    attackers: Attackers = NOBODY
    oracle: bool = False
    """True without the attackers."""
    seed: int = 0
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise UsageError(f"there is no mode {self.mode!r}", remedy=f"choose one of {', '.join(MODES)}")
        for codec in (self.contribution, self.result):
            codec_named(codec)
        rule_named(self.rule)
        if not 1 <= self.peers <= 64:
            raise UsageError(f"a training cannot have {self.peers} peers", remedy="choose 1 to 64")
        if self.attackers.count >= self.peers:
            remedy = "lower the count, or raise --peers"
            raise UsageError(f"{self.attackers}: none of {self.peers} peers is honest", remedy=remedy)
        if min(self.size.steps, self.size.rounds) < 1:
            raise UsageError("a training has at least one round of one inner step", remedy="raise --steps or --rounds")
        if not 1 <= self.fragments <= (self.size.steps if self.mode == "streaming" else 1):
            raise UsageError(f"{self.fragments} fragments in {self.size.steps} steps of {self.mode}", remedy="raise --steps")

    @property
    def num_honest(self) -> int:
        """The number of honest peers."""
        return self.peers - self.attackers.count

    @property
    def num_present(self) -> int:
        """The number of peers that contribute."""
        return self.num_honest if self.oracle else self.peers

    @property
    def tokens(self) -> int:
        """Return the tokens that all peers train together."""
        size = self.size
        return self.peers * size.rounds * size.steps * size.batch * size.length


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """The curve of one training."""

    curve: tuple[tuple[int, float], ...]
    """Rounds, and the held-out loss after them in nats per token: at the end and before it; infinite if it diverged."""
    params: int

    @property
    def loss(self) -> float:
        """The loss at the end."""
        return self.curve[-1][1]


Parts: TypeAlias = Sequence[tuple[int, int]]
"""The first cell of each part of a fragment, and the one after its last."""
Watch: TypeAlias = Callable[[int, Floats], None]
"""Called with the number of rounds that are over and the flat vector after them."""


def train(training: Training) -> TrainingResult:
    """Train, and return the held-out loss over the rounds."""
    torch.set_num_threads(1)
    swarm = ParallelSwarm(training) if training.mode == "parallel" else TrainingSwarm(training)
    rounds, curve = training.size.rounds, []
    shown = {-(-rounds * part // EVALUATIONS) for part in range(1, EVALUATIONS + 1)}

    def watch(round_: int, weights: Floats) -> None:
        if round_ in shown:
            loss = swarm.loss(weights)
            curve.append((round_, loss if math.isfinite(loss) else math.inf))

    swarm.run(watch)
    return TrainingResult(tuple(curve), sum(parameter.numel() for parameter in swarm.stack.model.parameters()))


def spans_of(num_cells: int, fragments: int) -> list[slice]:
    """Return the elements of each fragment: runs of cells, as equal as they can be."""
    bounds = [num_cells * fragment // fragments * CELL for fragment in range(fragments + 1)]
    return [slice(low, high) for low, high in pairwise(bounds)]


class ParallelSwarm:
    """Synchronous data parallel: one model, the mean of all peers' gradients."""

    def __init__(self, training: Training, num_models: int = 1) -> None:
        self.training = training
        self.domains = domains_of(training.peers)
        self.batches = [Batches(training.size, self.domains, index, training.seed) for index in range(training.num_present)]
        self.stack = Stack(training.size, num_models, training.seed, training.device)

    def run(self, watch: Watch) -> None:
        """Train all rounds."""
        size = self.training.size
        for step in range(1, size.rounds * size.steps + 1):
            # The mean over the rows of all peers has the mean of their gradients.
            n = self.batches_a_step(step)
            self.stack.step(drawn(self.batches).flatten(0, 1)[None], step - 1, n, is_step=is_step(step, n, size.steps))
            if step % size.steps == 0:
                watch(step // size.steps, self.stack.weights[0].numpy(force=True))

    def batches_a_step(self, step: int) -> int:
        """Return how many batches make the optimizer step that follows inner step `step`, from 1 on."""
        size = self.training.size
        return batches_a_step(self.training.ramp, 1 + (step - 1) // size.steps, size.rounds)

    def loss(self, weights: Floats) -> float:
        """Return the held-out loss of all domains with a flat vector."""
        self.stack.layout.scatter(weights, self.stack.model)
        return heldout_loss(self.stack.model, self.domains, self.training.size.length, self.training.device)


class Exchange:
    """What the deltas of all peers become in a round: contributions, those of attackers, weights, and outputs."""

    def __init__(self, training: Training) -> None:
        self.codec, self.result = codec_named(training.contribution), codec_named(training.result)
        self.rule, self.attack = rule_named(training.rule), training.attackers.fresh()
        self.num_honest, self.seed = training.num_honest, training.seed
        self.generator = np.random.Generator(np.random.PCG64([training.seed, 1 << 20]))
        self.weightings: list[Weighting] = []
        """The rule's weights of each capture."""
        self.failed = False
        """True once an honest peer, or the rule, had nothing finite."""
        self.contributed: Floats = np.empty((0, 0), np.float32)
        """What the bytes of the last contributions said [n, d]."""

    def averaged(self, deltas: Floats, residuals: Floats) -> Floats:
        """Return the aggregate [d] of deltas [n, d], with error feedback through residuals [n, d], which change."""
        num_cells, honest = deltas.shape[1] // CELL, self.num_honest
        parts = list(pairwise([0, num_cells] if self.rule.blind else split(range(num_cells), [1.0] * len(deltas))))
        data = [self.sent(delta, residual, parts) for delta, residual in zip(deltas, residuals, strict=True)]
        self.failed |= None in data[:honest]
        if honest < len(data):
            with np.errstate(all="ignore"):
                known = deltas[:honest].copy(), deltas[honest:].copy(), len(self.weightings), self.generator
                deltas[honest:] = self.attack(*known)
            data[honest:] = [self.encoded(delta, parts) for delta in deltas[honest:]]
        self.contributed = deltas
        return self.aggregated(data, parts)

    def sent(self, delta: Floats, residual: Floats, parts: Parts) -> list[memoryview] | None:
        """Return a contribution's bytes; `residual` becomes what they do not carry, and `delta` what they do."""
        delta += residual
        data = self.encoded(delta, parts)
        if data is None:
            delta.fill(np.nan)
            return None
        for piece, (low, high) in zip(data, parts, strict=True):
            of_part = slice(low * CELL, high * CELL)
            feedback(delta[of_part], self.codec, piece, residual[of_part])
            self.codec.decode(piece, delta[of_part])
        return data

    def encoded(self, x: Floats, parts: Parts) -> list[memoryview] | None:
        """Return the bytes of a contribution, by part; None where the codec cannot state it: its peer abstains."""
        try:
            return [self.codec.encode(x[low * CELL : high * CELL]) for low, high in parts]
        except LocalError:
            return None

    def aggregated(self, data: Sequence[Sequence[Encoded] | None], parts: Parts) -> Floats:
        """Return the decoded outputs of the owners, one part each."""
        nothing = [self.codec.encode(np.zeros((high - low) * CELL, np.float32)) for low, high in parts]
        pieces = [each or nothing for each in data]
        masses = np.asarray([float(each is not None) for each in data])
        grams: Floats64 = np.zeros((len(parts), len(data), len(data))) if self.rule.blind else self._grams(pieces, parts)
        weighting = self.rule.weights(grams.sum(axis=0), grams, masses)
        self.weightings.append(weighting)
        g: Floats = np.zeros(parts[-1][1] * CELL, np.float32)
        for part, (low, high) in enumerate(parts):
            chunks = self.rule.chunks(self.codec, [row[part] for row in pieces], weighting, part, high - low)
            try:
                self.result.decode(self.result.encode_chunks(chunks, high - low), g[low * CELL : high * CELL])
            except LocalError:  # Only a rule without a defence makes what is not finite.
                self.failed = True
        return g

    def _grams(self, pieces: Sequence[Sequence[Encoded]], parts: Parts) -> Floats64:
        seed = keyed("bench robust", f"{self.seed} {len(self.weightings)}".encode())
        tables = [
            [
                sketch.CountSketch.of_part(self.codec, piece, high - low, seed, low * CELL)
                for piece, (low, high) in zip(row, parts, strict=True)
            ]
            for row in pieces
        ]
        return np.stack([sketch.gram(part) for part in np.asarray(tables).swapaxes(0, 1)])


class TrainingSwarm(ParallelSwarm):
    """All peers of a training and their shared state."""

    def __init__(self, training: Training) -> None:
        super().__init__(training, training.num_present)
        self.weights, self.layout = self.stack.weights.detach(), self.stack.layout
        self.exchange = Exchange(training)
        self.theta: Floats = self.weights[0].numpy(force=True).copy()
        self.momentum = np.zeros_like(self.theta)
        self.spans = spans_of(self.layout.num_cells, training.fragments)
        self.residuals: Floats = np.zeros((training.num_present, self.layout.size), np.float32)
        self.captured = [0] * training.fragments
        """The step after which each fragment was captured last."""
        self.landed = [0] * training.fragments
        """Outer steps that each fragment has made."""

    def run(self, watch: Watch) -> None:
        """Train all rounds."""
        steps = self.training.size.steps
        last = steps * self.training.size.rounds
        for step in range(1, last + 1):
            self.advance(step)
            if step % steps == 0 and step < last:
                watch(step // steps, self.theta)
        for fragment in [fragment for fragment, step in enumerate(self.captured) if step < last]:
            self.exchanged(fragment)
        watch(self.training.size.rounds, self.theta if not self.exchange.failed else np.full_like(self.theta, np.nan))

    def advance(self, step: int) -> None:
        """Make an inner step of all peers, and what is due after it."""
        n, ending = self.batches_a_step(step), list(self.due(step))
        is_due = bool(ending) or is_step(step - max(self.captured), n, self.training.size.steps // len(self.spans))
        flipped = self.training.num_present - self.training.num_honest if self.training.attackers.poisons_labels else 0
        self.stack.step(drawn(self.batches), step - 1, n, is_step=is_due, flipped=flipped)
        for fragment in ending:
            self.exchanged(fragment)
            self.captured[fragment] = step

    def due(self, step: int) -> Iterator[int]:
        """Yield the fragments that are captured after a step."""
        steps, fragments = self.training.size.steps, len(self.spans)
        return (fragment for fragment in range(fragments) if step % steps == fragment * steps // fragments)

    def exchanged(self, fragment: int) -> None:
        """Capture a fragment on every peer, aggregate it, make its outer step, and let every peer go on from there."""
        span = self.spans[fragment]
        g = self.exchange.averaged(self.theta[span] - self.weights[:, span].numpy(force=True), self.residuals[:, span])
        self.outer_step(fragment, g)
        self.weights[:, span] = torch.from_numpy(self.theta[span]).to(self.weights.device)

    def outer_step(self, fragment: int, g: Floats) -> None:
        """Make the outer step of a fragment with an aggregate [d]."""
        span = self.spans[fragment]
        self.landed[fragment] += 1
        with np.errstate(over="ignore", invalid="ignore"):
            outer_step(self.theta[span], self.momentum[span], g, self.training.outer.at(self.landed[fragment]))
