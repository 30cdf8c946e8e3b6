"""Freeloaders, measured: the weight that they get, and a check of leased data that finds them.

    python -m flockstep.scripts.lab.bench.robust_freeloaders [SEED]

A freeloader sends the last round's output with noise of its own, as long as an honest contribution. Two tables:

    weights  of 1 to 8 such keys beside 10 honest peers under the default rule, by the length of the noise
    gaps     for each contribution x, the fall of the loss on the sequences that its author leased for this round, from θ
             to θ - x, less the same fall on sequences of the same sources that it did not train on. Work on the leased
             data makes it positive. A checker runs four forward passes of `sequences` each; training the phase once
             takes three for each of its sequences.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from ....collectives.robust.gramguard import GramGuard
from ....peer.arrays import Floats
from ..attacks.gradients import Attackers, freeloaded
from ..training.attacked import Training, TrainingPeer, TrainingSwarm

KEYS = (1, 2, 4, 8)
NOISES = (0.0, 0.3, 0.6, 1.0)
"""Lengths of the noise relative to the output's."""
LEAST_NOISE = 0.6
"""The noise of the freeloaders whose gap is measured: that of eight keys which the rule does not find."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundOfFreeloaders:
    """What one round measured."""

    weights: dict[tuple[float, int], float]
    """By noise and number of keys: the weight of one freeloader relative to an honest peer's."""
    honest: Floats
    """[n] gaps of the honest peers, in nats."""
    free: Floats
    """[n] gaps of freeloaders, each on the same sequences as the honest peer of its index."""


def measured(training: Training, sequences: int) -> Iterator[RoundOfFreeloaders]:
    """Train without attackers, and yield what freeloaders would have got in each round but the first.

    `sequences` of each kind are evaluated for each contribution.
    """
    torch.set_num_threads(1)
    swarm = TrainingSwarm(training)
    generator = np.random.default_rng(training.seed)
    g, output = np.empty_like(swarm.theta), np.empty_like(swarm.theta)
    for number in range(swarm.size.rounds):
        sent = swarm.contributions(number)
        if number:
            norm = float(np.median(np.linalg.norm(sent, axis=1)))
            weights = {
                (noise, keys): _relative(sent, freeloaded(output, keys, noise, norm, generator))
                for noise in NOISES
                for keys in KEYS
            }
            free = freeloaded(output, len(sent), LEAST_NOISE, norm, generator)
            gaps = [_gaps(swarm, peer, pair, sequences) for peer, *pair in zip(swarm.peers, sent, free, strict=True)]
            honest, others = np.asarray(gaps, np.float32).T
            yield RoundOfFreeloaders(weights=weights, honest=honest, free=others)
        swarm.aggregate(number, sent, g)
        output[:] = g
        swarm.step(g)


def _relative(honest: Floats, free: Floats) -> float:
    """Return the mean weight of [k, d] contributions relative to that of [n, d] honest ones, under the default rule."""
    both = np.concatenate([honest, free]).astype(np.float64)
    gram = both @ both.T
    weights = GramGuard().weights(gram, gram[None], np.ones(len(both))).weights[0]
    return float(weights[len(honest) :].mean() / weights[: len(honest)].mean())


def _gaps(swarm: TrainingSwarm, peer: TrainingPeer, contributions: list[Floats], sequences: int) -> list[float]:
    """Return the gap of each contribution on what one peer trained on in this round."""
    trained = torch.cat(peer.trained)
    leased = trained[torch.linspace(0, len(trained) - 1, min(sequences, len(trained))).long()]
    others = torch.cat([peer.batches.draw() for _ in range(-(-len(leased) // peer.size.batch))])[: len(leased)]
    before = [_loss(swarm, peer, swarm.theta, tokens) for tokens in (leased, others)]
    result: list[float] = []
    for x in contributions:
        after = [_loss(swarm, peer, swarm.theta - x, tokens) for tokens in (leased, others)]
        result.append((before[0] - after[0]) - (before[1] - after[1]))
    return result


@torch.no_grad()
def _loss(swarm: TrainingSwarm, peer: TrainingPeer, theta: Floats, tokens: torch.Tensor) -> float:
    swarm.layout.scatter(theta, peer.model)
    logits = peer.model(tokens[:, :-1].long().to(swarm.training.device))
    return float(functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].long().to(logits.device).flatten()))


def lines(training: Training) -> Iterator[str]:
    """Yield both tables."""
    for sequences in (48, 8):
        rounds = list(measured(training, sequences))
        if sequences == 48:
            yield f"relative weight of one of {KEYS} keys, by noise"
            for noise in NOISES:
                row = [np.mean([one.weights[noise, keys] for one in rounds]) for keys in KEYS]
                yield f"{noise}: " + ", ".join(f"{weight:.2f}" for weight in row)
        yield f"gaps by {sequences} sequences of each kind, mean ± deviation"
        spans = np.array_split(np.arange(len(rounds)), 3)
        for span in (*spans, np.arange(len(rounds))):
            honest = np.asarray([rounds[index].honest for index in span])
            free = np.asarray([rounds[index].free for index in span])
            above = np.mean(honest.mean(axis=0) > free.mean(axis=0).max())
            yield (
                f"rounds {span[0] + 2} to {span[-1] + 2}: honest {honest.mean():.4f} ± {honest.std():.4f}, "
                f"freeloaders {free.mean():.4f} ± {free.std():.4f}; "
                f"honest whose mean is above every freeloader's: {above:.0%}"
            )


if __name__ == "__main__":
    seed = int(sys.argv[1]) if len(sys.argv) > 1 else 0
    chosen = Training(size="tiny", rule="gramguard", attackers=Attackers("zero", 0), peers=10, seed=seed)
    for line in lines(chosen):
        sys.stdout.write(line + "\n")
