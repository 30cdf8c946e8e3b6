"""A swarm in one process for `bench robust`: a round's production arithmetic, no network.

Theory of operation. n peers train on n domains (`learner`). A round does what it does in a run: pseudo-gradients with error
feedback through the codec, their sketches under a fresh seed, the rule's weights, a weighted sum for each part through the
codec, the outer step. The last peers attack. The oracle is the mean of the honest peers alone, which also draw from the
attackers' domains.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from ....collectives.robust import sketch
from ....collectives.robust.rule import Weighting
from ....collectives.vector.arrays import Floats
from ....collectives.vector.codec import CELL, Codec, codec_named, feedback
from ....collectives.vector.partition import split
from ....optim.step.flat import FlatLayout
from ....optim.step.outer import OuterSettings, outer_step
from ....peer.base.digest import keyed
from ....peer.base.errors import LocalError
from ..attacks.gradients import Attackers
from ..baselines.rules import rule_named
from .learner import TINY, Learner, TrainingSize, domains_of, heldout_loss

SIZES = {
    "tiny": TINY,
    "small": TrainingSize(
        model={"layers": 3, "heads": 4, "width": 96, "context": 128}, length=128, batch=16, steps=25, rounds=30
    ),
    "1m-short": TrainingSize(model={"size": "1m"}, length=64, batch=8, steps=15, rounds=16),
    "1m": TrainingSize(model={"size": "1m"}, length=128, batch=16, steps=30, rounds=40),
    "10m": TrainingSize(model={"size": "10m"}, length=256, batch=16, steps=30, rounds=40),
}
"""Sizes by name. 10 peers take 15 s of one core (tiny), 5 minutes (1m-short) or 10 (small); the others want a GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """One training to measure."""

    size: str
    rule: str
    attackers: Attackers
    peers: int
    """Honest peers, then attackers."""
    seed: int
    device: str = "cpu"
    codec: str = "int4"
    oracle: bool = False
    """True without the attackers."""

    @property
    def num_honest(self) -> int:
        """The number of honest peers."""
        return self.peers - self.attackers.count

    @property
    def num_present(self) -> int:
        """The number of peers that contribute."""
        return self.num_honest if self.oracle else self.peers


def train_under_attack(training: Training, watch: Callable[[int, Weighting], None] = lambda number, weighting: None) -> float:
    """Train, and return the held-out loss of all domains in nats per token; infinite if it diverged.

    `watch` is called with each round's weighting.
    """
    torch.set_num_threads(1)
    return TrainingSwarm(training).run(watch)


class TrainingPeer(Learner):
    """A peer with error feedback, which may flip its labels."""

    def __init__(self, training: Training, domains: Sequence[torch.Tensor], index: int) -> None:
        super().__init__(SIZES[training.size], domains, index, training.seed, training.device)
        self.residual: Floats | None = None
        self.poisoned = training.attackers.poisons_labels and index >= training.num_honest
        self.trained: list[torch.Tensor] = []
        """The batches of the last inner phase."""

    def phase(self, number: int) -> None:
        """Run one inner phase."""
        self.trained.clear()
        for step in range(self.size.steps):
            self.trained.append(self.batches.draw())
            self.backward(self.trained[-1], 255 - self.trained[-1][:, 1:] if self.poisoned else None)
            self.step(number * self.size.steps + step)


class TrainingSwarm:
    """All peers of a training and their shared state."""

    def __init__(self, training: Training) -> None:
        self.training, self.size = training, SIZES[training.size]
        self.codec: Codec = codec_named(training.codec)
        self.rule = rule_named(training.rule)
        self.domains = domains_of(training.peers)
        self.peers = [TrainingPeer(training, self.domains, index) for index in range(training.num_present)]
        self.layout = FlatLayout.of(self.peers[0].model)
        self.theta: Floats = np.empty(self.layout.size, np.float32)
        self.layout.gather(self.peers[0].model, self.theta)
        self.momentum = np.zeros_like(self.theta)
        self.bounds = split(range(self.layout.num_cells), [1.0] * training.num_present)
        self.generator = np.random.Generator(np.random.PCG64([training.seed, 1 << 20]))
        self.attack = training.attackers.fresh()

    def run(self, watch: Callable[[int, Weighting], None]) -> float:
        """Train all rounds; see `train_under_attack`."""
        g = np.empty_like(self.theta)
        for number in range(self.size.rounds):
            watch(number, self.aggregate(number, self.contributions(number), g))
            self.step(g)
        loss = self.loss()
        return loss if math.isfinite(loss) else math.inf

    def step(self, g: Floats) -> None:
        """Make the outer step with an aggregate [d]."""
        short = self.size.rounds < 100
        settings = OuterSettings(lr=0.8 if short else 0.7, momentum=0.5 if short else 0.9)
        with np.errstate(over="ignore", invalid="ignore"):
            outer_step(self.theta, self.momentum, g, settings)

    def contributions(self, number: int) -> Floats:
        """Return the decoded contributions [n, d]; a row that cannot be encoded is NaN."""
        sent = np.empty((len(self.peers), self.layout.size), np.float32)
        honest = self.training.num_honest
        for peer, x in zip(self.peers, sent, strict=True):
            self.layout.scatter(self.theta, peer.model)
            peer.phase(number)
            self.layout.pseudo_gradient(self.theta, peer.model, x)
            if peer.residual is None:
                peer.residual = np.zeros_like(x)
            x += peer.residual
            try:
                data = self.codec.encode(x)
            except LocalError:  # A peer that has diverged abstains.
                x.fill(np.nan)
                continue
            feedback(x, self.codec, data, peer.residual)
            self.codec.decode(data, x)
        if honest < len(self.peers):
            with np.errstate(all="ignore"):
                sent[honest:] = self.attack(sent[:honest].copy(), sent[honest:].copy(), number, self.generator)
        return sent

    def aggregate(self, number: int, sent: Floats, g: Floats) -> Weighting:
        """Write the aggregate of a round into `g`, and return its weighting."""
        spans = [slice(first * CELL, last * CELL) for first, last in pairwise(self.bounds)]
        encoded = [self._encoded(row, spans) for row in sent]
        masses = np.asarray([0.0 if data is None else 1.0 for data in encoded])
        blank = [self.codec.encode(np.zeros(span.stop - span.start, np.float32)) for span in spans]
        parts = [data or blank for data in encoded]
        seed = keyed("bench robust", f"{self.training.seed} {number}".encode())
        now = self._tables(parts, seed)
        grams = np.stack([sketch.gram(now[:, part]) for part in range(len(spans))])
        weighting = self.rule.weights(grams.sum(axis=0), grams, masses)
        for part, span in enumerate(spans):
            chunks = self.rule.chunks(
                self.codec, [data[part] for data in parts], weighting, part, (span.stop - span.start) // CELL
            )
            whole = np.concatenate([chunk.copy() for chunk in chunks])
            try:
                self.codec.decode(self.codec.encode(whole), g[span])
            except LocalError:  # Only a rule without a defence gets here.
                g[span] = np.inf
        return weighting

    def _encoded(self, row: Floats, spans: Sequence[slice]) -> list[memoryview] | None:
        try:
            return [self.codec.encode(row[span]) for span in spans]
        except LocalError:
            return None

    def _tables(self, parts: Sequence[Sequence[memoryview]], seed: bytes) -> Floats:
        """Return the sketches [n, p, rows, columns]."""
        cells = [(last - first, first * CELL) for first, last in pairwise(self.bounds)]
        return np.asarray(
            [
                [
                    sketch.CountSketch.of_part(self.codec, data, num_cells, seed, offset)
                    for data, (num_cells, offset) in zip(row, cells, strict=True)
                ]
                for row in parts
            ]
        )

    def loss(self) -> float:
        """Return the held-out loss of all domains."""
        model = self.peers[0].model
        self.layout.scatter(self.theta, model)
        return heldout_loss(model, self.domains, self.size.length, self.training.device)
