"""What the simulated peers average: a small model bit by bit, or vectors that weigh nothing on the wire.

A peer's work is a random Δ, known by peer and round alone, so that anybody can tell afterwards what the average had to
be. A rule can judge it: it has a direction common to all, one that is the peer's own in every round, and noise, in the
proportions that real ones have. Without tensors contributions and outputs are encoded to no bytes at all, and every
output decodes to the same constant: the state still moves with each round, but nothing is carried, and nearly nothing
computed.
"""

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import pairwise

import numpy as np

from ...collectives.accountability.trust import weigh
from ...collectives.averager import Averaged
from ...collectives.chain.certificate import result_of, signed_in
from ...collectives.codec import CELL, Codec, Encoded, Floats, codec_named, mean_chunks
from ...collectives.robust.checks import columns_of, judge, sketch_parts
from ...collectives.robust.rule import Rule, Verdict
from ...collectives.round.actions import Outcome
from ...collectives.state import merkle
from ...optim.member.apply import decode_outputs, keep_rest, next_root
from ...optim.outer import OuterSettings, outer_step
from ...peer import wire
from ...peer.digest import digest, keyed
from ...peer.wire import MAX_ROSTER

NUM_CELLS = MAX_ROSTER
"""16,384 parameters: so that each member of a full roster owns a cell."""
OUTER = OuterSettings(lr=0.7, momentum=0.9)
STEP = 1e-3
"""The size of a pseudo-gradient's elements: DESIGN §6 measured about that."""

# How honest pseudo-gradients differ: between what the two smaller sizes of `bench robust` show (docs/log.md).
COMMON = 0.7
"""Cosine of what is common in one round to what is in any other."""
OWN, NOISE = 0.65, 0.75
"""The norm of what is the peer's own in all rounds, and of what is new in each, where the common direction's is 1."""
LENGTHS, ODDITY = 0.15, 0.3
"""Standard deviations, from peer to peer, of the logarithm of all of it and of the peer's own."""


class Weightless(Codec):
    """Cells that take no bytes and no time; all that is decoded is `STEP`."""

    name = "none"
    cell_bytes = 0

    def encode_chunks(self, chunks: Iterable[Floats], num_cells: int) -> memoryview:
        """Nothing; `chunks` are not even looked at."""
        return memoryview(b"")

    def decode_range(
        self, data: Encoded, num_cells: int, first_cell: int, last_cell: int, out: Floats, gain: float = 1.0
    ) -> None:
        """The constant."""
        out.fill(STEP * gain)

    def check(self, data: Encoded, num_cells: int) -> None:
        """Raises `MalformedMessage` for anything but nothing."""
        self._bytes(data, num_cells)

    def _encode(self, x: Floats, encoded: object, num_cells: int, first: int) -> None: ...

    def _decode(self, encoded: object, num_cells: int, first: int, out: Floats, gain: np.float32) -> None: ...

    def _check(self, encoded: object, num_cells: int, first: int, last: int) -> None: ...

    def _rounding(self, encoded: object, num_cells: int, first: int, last: int) -> float:
        return 0.0


class State:
    """θ and m of one peer, and what it makes of a round."""

    def __init__(self, seed: int, *, tensors: bool) -> None:
        self.codec: Codec = codec_named("int4") if tensors else Weightless()
        self.theta = np.zeros(NUM_CELLS * CELL, np.float32)
        self.momentum = np.zeros_like(self.theta)
        self._tensors = tensors
        self._seed = seed
        self._residual = np.zeros_like(self.theta)
        if tensors:
            self.theta[:] = self._drawn("start")

    @property
    def root(self) -> bytes:
        """The state root."""
        return merkle.state_root(self.theta, self.momentum)

    def contribution(self, peer: str, round_: int) -> Floats:
        """x = Δ + e of a peer in a round."""
        if not self._tensors:
            return self._residual
        common = COMMON**0.5 * self._drawn("common") + (1 - COMMON) ** 0.5 * self._drawn("common", str(round_))
        longer, odder = self._drawn("size", peer)[:2].tolist()
        own = OWN * math.exp(ODDITY * odder) * self._drawn("own", peer)
        length = STEP * math.exp(LENGTHS * longer)
        x: Floats = length * (common + own + NOISE * self._drawn("noise", peer, str(round_))) + self._residual
        return x

    def next_root(self, bounds: Sequence[int], outputs: Sequence[Encoded]) -> bytes:
        """The state root that outputs lead to."""
        return next_root(self.theta, self.momentum, OUTER, self.codec, bounds, outputs)

    def apply(self, averaged: Averaged, x: Floats | None) -> None:
        """Take the outer step of a certified round whose cut holds my `x`, or nothing of mine."""
        bounds = averaged.outcome.bounds
        if x is not None and self._tensors:
            keep_rest(x, self.codec, bounds, averaged.mine, self._residual)
        g = np.empty_like(self.theta)
        decode_outputs(self.codec, bounds, averaged.outputs, slice(0, g.size), g)
        outer_step(self.theta, self.momentum, g, OUTER)

    def expected(self, rule: Rule, outcome: Outcome, cut: Sequence[tuple[Floats, int]]) -> tuple[bytes, ...]:
        """The hashes of the outputs that the contributions (x, tokens) of a round's cut must give, part by part.

        Made anew from these alone, with the true sketches of all of them: whoever may have lied, nothing of it is in here.
        """
        bounds, codec = outcome.bounds, self.codec
        if not self._tensors:
            return (digest(b""),) * (len(bounds) - 1)
        masses, after = _agreed(outcome, [tokens for _, tokens in cut])
        parts = [[codec.encode(x[low * CELL : high * CELL]) for low, high in pairwise(bounds)] for x, _ in cut]
        members = len(bounds) - 1
        verdict: Verdict | None = None
        if not rule.blind:
            sketches = [sketch_parts(codec, part, bounds, after, columns_of(members)) for part in parts]
            verdict = judge(rule, sketches, masses, members)
        hashes: list[bytes] = []
        for part, (low, high) in enumerate(pairwise(bounds)):
            data = [encoded[part] for encoded in parts]
            if verdict is None:
                chunks = mean_chunks(codec, data, masses, high - low)
            else:
                chunks = rule.chunks(codec, data, verdict, part, high - low)
            hashes.append(digest(codec.encode_chunks(chunks, high - low)))
        return tuple(hashes)

    def _drawn(self, *names: str) -> Floats:
        return _drawn(self._seed, self.theta.size, names)


def _agreed(outcome: Outcome, tokens: Sequence[int]) -> tuple[tuple[float, ...], bytes]:
    """The masses of a certified cut, by tokens and trust, and what the seed of its sketches was drawn after."""
    assert outcome.certificate is not None
    roster = wire.opened(signed_in(outcome.certificate.roster))
    assert isinstance(roster, wire.Roster)
    seats = [roster.seats[roster.members.index(peer)] for peer in outcome.cut]
    return weigh(tokens, [1.0] * len(seats), seats, earned=False), result_of(outcome.certificate).cut


@lru_cache(maxsize=512)  # Who lies draws again what the honest have drawn.
def _drawn(seed: int, size: int, names: tuple[str, ...]) -> Floats:
    """[size] normally distributed, by name."""
    key = keyed("simulated vector", str(seed).encode(), *(name.encode() for name in names))
    return np.random.default_rng(int.from_bytes(key)).standard_normal(size, np.float32)
