"""What a swarm in one process trains: sizes by name, each peer's batches, and the held-out loss.

The peers train the built-in gpt on Python's own text, split into domains. Half of each batch is from the peer's own
domain. Everything is seeded: a peer of a seed draws the same batches whatever the others do.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import torch
from torch import nn

from ....dht.run.manifest import INNER_MOMENTUM, LONE_ADAMW_LR, Inner
from ....optim.packing.listing import stdlib_files

HELDOUT = 0.05
"""The share of each domain, at its end, that is held out for the reported loss."""
HELDOUT_SEQUENCES = 24
"""Held-out sequences of each domain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSize:
    """The size of a training."""

    model: dict[str, int | str] = field(hash=False)
    """Options of the built-in gpt."""
    length: int
    """Tokens of a sequence."""
    batch: int
    """Sequences of an inner step."""
    steps: int
    """Inner steps of a round."""
    rounds: int
    optimizer: str = "muon"
    """The inner optimizer."""
    rate: float = 1.0
    """The inner learning rates, as a multiple of a run's defaults."""

    def inner(self) -> Inner:
        """Return the settings of the inner optimizer."""
        usual = Inner()
        return Inner(
            steps=self.steps,
            optimizer=self.optimizer,
            momentum=INNER_MOMENTUM,
            lr=usual.lr * self.rate,
            adamw_lr=(usual.adamw_lr if self.optimizer == "muon" else LONE_ADAMW_LR) * self.rate,
        )


SIZES = {
    "tiny": TrainingSize(
        model={"layers": 2, "heads": 2, "width": 32, "context": 32},
        length=32,
        batch=4,
        steps=12,
        rounds=24,
        optimizer="adamw",  # On matrices this small Muon's iterations take longer than the rest of a step.
    ),
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


class Batches:
    """The batches of one peer."""

    def __init__(self, size: TrainingSize, domains: Sequence[torch.Tensor], index: int, seed: int) -> None:
        self.size, self.domains, self.index = size, domains, index
        self.generator = np.random.Generator(np.random.PCG64([seed, index]))

    def draw(self) -> torch.Tensor:
        """Draw int64 [batch, length + 1]: half from the own domain, half from any."""
        draw = self.generator.integers
        rows = []
        for row in range(self.size.batch):
            domain = self.domains[self.index if row % 2 else int(draw(len(self.domains)))]
            start = int(draw(int(len(domain) * (1 - HELDOUT)) - self.size.length - 1))
            rows.append(domain[start : start + self.size.length + 1])
        return torch.stack(rows).long()


@torch.no_grad()
def heldout_loss(model: nn.Module, domains: Sequence[torch.Tensor], length: int, device: str) -> float:
    """Return the held-out loss of all domains in nats per token."""
    losses = []
    for domain in domains:
        rest = domain[int(len(domain) * (1 - HELDOUT)) :]
        starts = np.linspace(0, len(rest) - length - 1, HELDOUT_SEQUENCES).astype(int)
        tokens = torch.stack([rest[start : start + length + 1] for start in starts]).long().to(device)
        losses.append(float(model(tokens[:, :-1], tokens[:, 1:])))
    return float(np.mean(losses))


def drawn(batches: Sequence[Batches]) -> torch.Tensor:
    """Draw the next batch of each peer, int64 [peers, rows, length + 1]."""
    return torch.stack([one.draw() for one in batches])


@cache
def domains_of(count: int) -> list[torch.Tensor]:
    """Split Python's own text into `count` runs of neighbouring files, mostly of one package."""
    text = np.frombuffer(b"\n".join(file.read_bytes() for file in stdlib_files()), np.uint8)
    return [torch.from_numpy(piece.copy()) for piece in np.array_split(text, count)]
