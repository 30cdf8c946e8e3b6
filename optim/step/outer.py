"""The outer step of DiLoCo: Nesterov momentum on the averaged pseudo-gradient, bit-exact. Pure.

Source: arXiv:2311.08105. Every product and every sum is rounded on its own, in one order, in float32, on the CPU: NumPy,
eager PyTorch and any processor then agree on every bit. torch.optim.SGD's fused multiply-add differs in 2.8 % of
elements, `lerp_` in 49 %.
"""

from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from ...collectives.vector.arrays import Floats
from ...dht.run.manifest import MAX_OUTER_LR, Manifest
from ...peer.base.errors import UsageError

OUTER_CHUNK = 1 << 16
"""Elements per chunk: 256 KiB each of θ, m, g and the scratch fit into a second-level cache of 1 MiB."""

@dataclass(frozen=True, slots=True, kw_only=True)
class OuterSettings:
    """The outer optimizer of a run. Raises `UsageError` if a value is out of its range."""

    lr: float
    """Outer learning rate; 1 with momentum 0 is plain averaging of parameters."""

    momentum: float
    """Nesterov momentum μ."""

    warmup: int = 0
    """Outer steps of an element over which μ rises linearly from 0; a step along a momentum of one gradient is too long."""

    fragments: int = 1
    """Rounds in which every element makes one outer step."""

    before: int = 0
    """Rounds of the runs that this one goes on from: its warm-up has begun there."""

    def __post_init__(self) -> None:
        if not 0 < self.lr <= MAX_OUTER_LR:
            raise UsageError(f"outer lr {self.lr} is not in (0, {MAX_OUTER_LR:g}]", remedy="0.7 suits most runs")
        if not 0 <= self.momentum < 1:
            raise UsageError(f"outer momentum {self.momentum} is not in [0, 1)", remedy="0.9 suits most runs")
        if self.warmup < 0:
            raise UsageError(f"an outer warm-up of {self.warmup} rounds is negative", remedy="10 suits most runs")

    @classmethod
    def of(cls, manifest: Manifest) -> Self:
        """Those of a run."""
        outer = manifest.outer
        warmup, before = outer.momentum_warmup, manifest.follows.rounds
        return cls(lr=outer.lr, momentum=outer.momentum, warmup=warmup, fragments=outer.fragments, before=before)

    def at(self, round_: int) -> Self:
        """Return those of a certified round, counted from 1: a function of its number, so the same on every peer."""
        steps = (self.before + round_ - 1) // self.fragments
        return replace(self, momentum=self.momentum * min(1.0, steps / self.warmup), warmup=0) if self.warmup else self


def outer_step(theta: Floats, momentum: Floats, g: Floats, settings: OuterSettings) -> None:
    """Update m ← μm + g; θ ← θ - lr·(μm + g), in place. All are flat float32 vectors of one length; `g` is unchanged.

    `settings` are those of the round (`OuterSettings.at`).
    """
    mu, lr = np.float32(settings.momentum), np.float32(settings.lr)
    scratch = np.empty(min(OUTER_CHUNK, theta.size), np.float32)
    for start in range(0, theta.size, OUTER_CHUNK):
        chunk = slice(start, start + OUTER_CHUNK)
        m = momentum[chunk]
        t = scratch[: m.size]
        np.multiply(m, mu, out=m)
        np.add(m, g[chunk], out=m)
        np.multiply(m, mu, out=t)
        np.add(t, g[chunk], out=t)
        np.multiply(t, lr, out=t)
        np.subtract(theta[chunk], t, out=theta[chunk])
