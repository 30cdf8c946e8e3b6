"""The state and contributions of simulated peers: a small model.

A contribution is a random Δ that follows from peer and round alone, so that the check can compute the expected average.
A rule can judge it: it is the sum of a direction common to all, one of the peer's own in every round, and noise, in the
proportions of real ones.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

import numpy as np

from ....collectives.accountability.trust import weigh
from ....collectives.allreduce.actions import Outcome
from ....collectives.driver.contribution import Averaged
from ....collectives.robust.checks import columns_of, judge_sketches, masked, seed_of, sketch_parts, without_own
from ....collectives.robust.rule import Rule, Weighting
from ....collectives.state import merkle
from ....collectives.vector.arrays import Floats
from ....collectives.vector.codec import CELL, FlatSum, codec_named
from ....optim.member.apply import keep_rest
from ....optim.step.outer import OuterSettings
from ....peer.base.digest import digest, keyed
from ....peer.wire import MAX_PARTS

NUM_CELLS = MAX_PARTS
"""16,384 parameters, so that each member of a full roster owns a cell."""
OUTER = OuterSettings(lr=0.7, momentum=0.9)
STEP = 1e-3
"""The magnitude of a pseudo-gradient's elements."""

# The differences of honest pseudo-gradients lie between those of the two smaller sizes of `bench robust` (docs/log.md).
COMMON = 0.7
"""Cosine of the common directions of two rounds."""
OWN, NOISE = 0.65, 0.75
"""Norms of a peer's own direction and of its noise, relative to the common direction."""
LENGTHS, ODDITY = 0.15, 0.3
"""Standard deviations among peers of the logarithm of the norm, and of that of the own direction."""


class State:
    """θ and m of one peer, its contributions, and its outer step."""

    def __init__(self, seed: int) -> None:
        self.codec = codec_named("int4")
        self.theta = np.zeros(NUM_CELLS * CELL, np.float32)
        self.momentum = np.zeros_like(self.theta)
        self._seed = seed
        self._residual = np.zeros_like(self.theta)
        self.theta[:] = self._drawn("start")

    @property
    def root(self) -> bytes:
        """The state root."""
        return merkle.state_root(self.theta, self.momentum)

    def contribution(self, peer: str, round_: int) -> Floats:
        """x = Δ + e of a peer in a round."""
        common = COMMON**0.5 * self._drawn("common") + (1 - COMMON) ** 0.5 * self._drawn("common", str(round_))
        longer, odder = self._drawn("size", peer)[:2].tolist()
        own = OWN * math.exp(ODDITY * odder) * self._drawn("own", peer)
        length = STEP * math.exp(LENGTHS * longer)
        x: Floats = length * (common + own + NOISE * self._drawn("noise", peer, str(round_))) + self._residual
        return x

    def keep_rest(self, averaged: Averaged, x: Floats) -> None:
        """Keep what the codec left out of my contribution `x`, which is in the cut."""
        keep_rest(FlatSum([x]), self.codec, averaged.outcome.value.bounds, averaged.mine, self._residual)

    def expected(self, rule: Rule, outcome: Outcome, cut: Sequence[tuple[Floats, int]]) -> tuple[bytes, ...]:
        """Compute the expected hashes of a round's outputs from the contributions (x, tokens) of its cut, part by part.

        The sketches are computed anew from the contributions, so that no lie of a peer enters.
        """
        value, codec, ones = outcome.value, self.codec, [1.0] * len(cut)
        bounds, seats, seed = value.bounds, [value.seats[index] for index in value.contributors], seed_of(value.cut)
        # Voices are by trust, masses by tokens and trust.
        voices, masses = (weigh(each, ones, seats, earned=False) for each in (ones, [tokens for _, tokens in cut]))
        parts = [[codec.encode(x[low * CELL : high * CELL]) for low, high in pairwise(bounds)] for x, _ in cut]
        members = len(bounds) - 1
        counts = [
            [index in outcome.counted.get(part, ()) for part in range(members)] for index in value.contributors
        ]
        rows = np.tile(masses, (members, 1))
        if not rule.blind:
            sketches = [sketch_parts(codec, part, bounds, seed, columns_of(members)) for part in parts]
            seen = [masked(sketch, each) for sketch, each in zip(sketches, counts, strict=True)]
            rows = judge_sketches(rule, seen, voices, masses, members).weights
        contributors = outcome.value.contributors
        own = {part: contributors.index(it) for part, it in outcome.holders.items() if it in contributors}
        kept = without_own(np.where(np.transpose(counts), rows, 0.0), np.array(masses), own)
        weighting = Weighting(weights=kept, flagged={})
        hashes: list[bytes] = []
        for part, (low, high) in enumerate(pairwise(bounds)):
            data = [encoded[part] for encoded in parts]
            chunks = rule.chunks(codec, data, weighting, part, high - low)
            hashes.append(digest(codec.encode_chunks(chunks, high - low)))
        return tuple(hashes)

    def _drawn(self, *names: str) -> Floats:
        return _drawn(self._seed, self.theta.size, names)


@lru_cache(maxsize=512)  # Attackers draw the vectors of the honest peers again.
def _drawn(seed: int, size: int, names: tuple[str, ...]) -> Floats:
    """Draw [size] standard normal numbers that follow from the names."""
    key = keyed("simulated vector", str(seed).encode(), *(name.encode() for name in names))
    return np.random.default_rng(int.from_bytes(key)).standard_normal(size, np.float32)
