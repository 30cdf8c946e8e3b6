"""One round's values with liars in it, by the product's own functions and without messages.

Theory of operation. The last k of n members lie alike (`attacks.values`); each member contributes and owns one part. What
honest members do in a round is called in its order: an encoding is checked, a first sketch is compared with the bytes, the
rule judges, the part of an owner that leaves out others is masked and must stay fit, and an output is checked against
the sketches after it. Who is found loses what it would lose in a run: a contributor with a false sketch or a malformed
part weighs nothing, and a false output is replaced by a deputy's.

Liars cover each other: nobody compares what one of them contributes to the part of another. One alone is compared
everywhere, since a deputy holds what an owner contributes to its own part. Where there are several, that deputy is
one of them, too: the worst case.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, pairwise

import numpy as np

from ....collectives.accountability.trust import YOUNG_ROUNDS, weigh
from ....collectives.allreduce.words import Seating, is_fit
from ....collectives.robust.checks import (
    CHECK_COLUMNS,
    TRUE_WITHIN,
    are_alike,
    columns_of,
    doubtful,
    false_outputs,
    judge_sketches,
    masked,
    seed_of,
    sketch_part,
    sketch_parts,
    tables_of,
)
from ....collectives.robust.rule import Floats64, Weighting
from ....collectives.robust.rules import rule_named
from ....collectives.vector.arrays import Floats
from ....collectives.vector.codec import CELL, Encoded, codec_named
from ....collectives.vector.mixed import codecs_named
from ....peer import wire
from ....peer.base.digest import digest
from ....peer.base.errors import LocalError
from ..attacks.gradients import Attackers
from ..attacks.values import Lie
from .attacked import Training, TrainingSwarm

TOKENS = 1 << 14


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What a run offers, and how many of its members lie."""

    rule: str
    contributions: str
    """The codecs that a contributor may choose from, the usual one first."""
    result: str
    liars: int


class LyingRound:
    """The contributions and parts of one round, through which lies are played."""

    def __init__(self, case: Case, bounds: Sequence[int], sent: Floats, number: int = 0) -> None:
        """`sent` [n, d] is the work of all members, the liars' too; `number` seeds what is drawn."""
        self.case, self.bounds, self.sent = case, tuple(bounds), sent
        self.rule = rule_named(case.rule)
        self.codec, self.result = codecs_named(case.contributions.split()), codec_named(case.result)
        self.spans = [slice(low * CELL, high * CELL) for low, high in pairwise(bounds)]
        self.cells = [high - low for low, high in pairwise(bounds)]
        self.num_honest = len(sent) - case.liars
        self._cut = digest(f"the cut of round {number}".encode())
        self._seed = [number, case.liars]
        drawn = np.random.default_rng(7).standard_normal(sent.shape[1], np.float32)
        self._hidden: Floats = np.asarray(drawn / np.linalg.norm(drawn), np.float32)
        self.blamed: set[int] = set()
        """The honest owners whose outputs were refused."""
        self._parts = [[self.codec.encode(row[span]) for span in self.spans] for row in sent[: self.num_honest]]
        self._first = [self._sketched(parts) for parts in self._parts]
        everyone = frozenset(range(len(sent)))
        deputies = tuple(((part + 1) % len(sent), (part + 2) % len(sent)) for part in range(len(sent)))
        self._seating = Seating(everyone, everyone, everyone, everyone, deputies)

    def play(self, lie: Lie | None) -> Floats:
        """Return what the round makes of the contributions [d]; without a lie that of the honest members alone."""
        draw = np.random.default_rng(self._seed)
        liars = [] if lie is None else self._contribute(lie)
        parts = [*self._parts, *([self._parts[0]] * self.case.liars if lie is None else liars)]
        first = [*self._first, *([self._first[0]] * self.case.liars if lie is None else self._sketch(lie, liars, draw))]
        counted = self._counted(lie)
        first = [masked(table, counted[:, index].tolist()) for index, table in enumerate(first)]
        voices, masses = self._masses(lie, parts)
        weights = judge_sketches(self.rule, first, voices, masses, len(parts)).weights * counted
        g = np.empty(self.sent.shape[1], np.float32)
        for part, span in enumerate(self.spans):
            self.result.decode(self._output(lie, part, parts, first, weights[part], draw), g[span])
        return g

    def _contribute(self, lie: Lie) -> list[list[Encoded]]:
        home = np.zeros(self.sent.shape[1], bool)
        home[self.spans[self.num_honest].start :] = True
        rows = lie.contributed(self.sent[: self.num_honest], self.sent[self.num_honest :], self._hidden, home)
        codec = self.codec.codecs[int(lie.choice) % len(self.codec.codecs)]
        found: list[list[Encoded]] = []
        for row in rows:
            try:
                data: list[Encoded] = [codec.encode(row[span]) for span in self.spans]
            except LocalError:  # Beyond what the codec can state: it contributes nothing.
                data = []
            for each, cells in zip(data, self.cells, strict=False):
                self.codec.check(each, cells)
            found.append(data)
        return found

    def _sketched(self, parts: Sequence[Encoded]) -> bytes:
        return sketch_parts(self.codec, parts, self.bounds, seed_of(self._cut), columns_of(len(self.sent)))

    def _sketch(self, lie: Lie, liars: Sequence[Sequence[Encoded]], draw: np.random.Generator) -> list[bytes]:
        found: list[bytes] = []
        for parts in liars:
            true = tables_of(self._sketched(parts or self._parts[0]), len(self.spans))
            most = np.abs(true).max(axis=(1, 2), keepdims=True)
            signs = draw.choice([-1.0, 1.0], true.shape)
            false = (true + lie.fudge * TRUE_WITHIN * most * signs).astype("<f4")
            if not all(
                are_alike(one.tobytes(), other.tobytes()) for one, other in zip(true.astype("<f4"), false, strict=True)
            ):
                false = true  # A holder would convict it.
            found.append(false.tobytes())
        return found

    def _counted(self, lie: Lie | None) -> Floats64:
        """Return [p, n] 1 where a contribution counts by the word of a part's holder, and 0 elsewhere."""
        counted = np.ones((len(self.spans), len(self.spans)))
        everyone = range(len(self.spans))
        allowed = {*everyone[int(lie.denies) if lie is not None else 0 :]}
        if is_fit(self._seating, dict.fromkeys(everyone, b""), allowed):  # Else a deputy holds its part.
            counted[self.num_honest :, [index for index in everyone if index not in allowed]] = 0
        return counted

    def _masses(self, lie: Lie | None, parts: Sequence[Sequence[Encoded]]) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return the voices, and the masses."""
        claimed = 0 if lie is None else max(1, int(lie.tokens * TOKENS))
        tokens = [TOKENS if index < self.num_honest else claimed if data else 0 for index, data in enumerate(parts)]
        ramps, seats = [1.0] * len(tokens), [wire.Seat(1.0, YOUNG_ROUNDS)] * len(tokens)
        voices = weigh([min(1, count) for count in tokens], ramps, seats, earned=False)
        return voices, weigh(tokens, ramps, seats, earned=False)

    def _output(
        self,
        lie: Lie | None,
        part: int,
        parts: Sequence[Sequence[Encoded]],
        first: Sequence[bytes],
        weights: Floats64,
        draw: np.random.Generator,
    ) -> Encoded:
        held = [data[part] if data else self._parts[0][part] for data in parts]
        true, honest = self._reduced(part, held, weights), np.ones(len(held))
        if lie is None:
            return true
        if part < self.num_honest:
            if not self._passes(part, true, held, first, weights, honest):
                self.blamed.add(part)
            return true
        covered = honest.copy()
        if self.case.liars > 1 and self.rule.linear:
            covered[self.num_honest :] = lie.turned
        said = self._reduced(part, held, weights * covered)
        for output in chain(self._false(lie, part, said, draw), [said]):
            if self._passes(part, output, held, first, weights, covered):
                return output
        return true

    def _false(self, lie: Lie, part: int, said: Encoded, draw: np.random.Generator) -> Iterator[Encoded]:
        """Yield the outputs that an owner tries, one after the other."""
        values = np.empty(self.cells[part] * CELL, np.float32)
        self.result.decode(said, values)
        for _ in range(2 ** int(lie.tries) if lie.shift else 0):
            with suppress(LocalError):  # Beyond what the codec can state.
                yield self.result.encode(lie.output(values, self._hidden[self.spans[part]], draw))

    def _reduced(self, part: int, held: Sequence[Encoded], weights: Floats64) -> Encoded:
        weighting = Weighting(weights=weights[None], flagged={})
        chunks = self.rule.chunks(self.codec, held, weighting, 0, self.cells[part])
        return self.result.encode_chunks(chunks, self.cells[part])

    def _passes(
        self,
        part: int,
        output: Encoded,
        held: Sequence[Encoded],
        first: Sequence[bytes],
        weights: Floats64,
        covered: Floats64,
    ) -> bool:
        """Return True if honest members accept an output of a part, whose contributions they hear `covered` times."""
        low, high = bounds = self.bounds[part : part + 2]
        seed = seed_of(self._cut, [digest(output)])
        before = [tables_of(table, len(self.spans))[part].astype("<f4").tobytes() for table in first]
        after: list[bytes] = []
        if self.rule.linear:
            for data, factor, one in zip(held, covered, before, strict=True):
                table = np.float32(factor) * sketch_part(self.codec, data, bounds, 0, seed, CHECK_COLUMNS)
                after.append(masked(table.astype("<f4").tobytes(), [any(one)]))
            if doubtful(before, after, 1, weights[None]):
                return False
        return not false_outputs(self.rule, self.result, {0: output}, (low, high), weights[None], before, after, seed)


class LyingSwarm(TrainingSwarm):
    """A training in which the last members lie in each round; without a lie they are away."""

    def __init__(self, case: Case, lie: Lie | None, peers: int, size: str, seed: int) -> None:
        usual = case.contributions.split()[0]
        super().__init__(
            Training(size=size, rule=case.rule, attackers=Attackers("zero", 0), peers=peers, seed=seed, codec=usual)
        )
        self.case, self.lie = case, lie
        self.longest = 0.0
        """The longest outer step, relative to what the honest alone would have made of the same round."""

    def aggregate(self, number: int, sent: Floats, g: Floats) -> Weighting:
        """Write the aggregate of a round into `g`."""
        round_ = LyingRound(self.case, self.bounds, sent, number)
        g[:] = round_.play(self.lie)
        if self.lie is not None:
            self.longest = max(self.longest, self.stride(g) / self.stride(round_.play(None)))
        return Weighting(weights=np.empty((0, 0)), flagged={})

    def stride(self, g: Floats) -> float:
        """Return the length of the outer step that an aggregate makes, from here."""
        theta, momentum = self.theta.copy(), self.momentum.copy()
        self.step(g)
        length = float(np.linalg.norm(self.theta - theta))
        self.theta[:], self.momentum[:] = theta, momentum
        return length


@dataclass(frozen=True, slots=True)
class Harm:
    """What a lie does to one round, beside the same round of the honest members alone."""

    lost: float
    """The share of the progress of the held-out loss that is lost: 1 if nothing is learned, more if it grows."""
    longer: float
    """The length of the outer step, relative to the honest one."""
    blamed: tuple[int, ...]
    """The honest owners whose outputs were refused."""

    @property
    def score(self) -> float:
        """What a search maximizes."""
        return self.lost + max(0.0, self.longer - 1) + 10 * len(self.blamed)


class Moment:
    """One round of an honest training, after which lies are tried: the state and what all members contribute."""

    def __init__(self, peers: int, size: str, seed: int, number: int) -> None:
        """Train `number` rounds, and one more inner phase."""
        training = Training(size=size, rule="mean", attackers=Attackers("zero", 0), peers=peers, seed=seed)
        self._swarm, self._number = TrainingSwarm(training), number
        g = np.empty_like(self._swarm.theta)
        for round_ in range(number):
            self._swarm.aggregate(round_, self._swarm.contributions(round_), g)
            self._swarm.step(g)
        self._sent = self._swarm.contributions(number)
        self._state = self._swarm.theta.copy(), self._swarm.momentum.copy()
        self._before = self._swarm.loss()
        self._rounds: dict[Case, tuple[LyingRound, float, float]] = {}

    def harm(self, case: Case, lie: Lie) -> Harm:
        """Play a lie through the round."""
        if case not in self._rounds:
            honest = LyingRound(case, self._swarm.bounds, self._sent, self._number)
            self._rounds[case] = honest, *self._after(honest.play(None))
        round_, least, usual = self._rounds[case]
        round_.blamed.clear()
        loss, length = self._after(round_.play(lie))
        lost = (loss - least) / (self._before - least)
        return Harm(lost if np.isfinite(lost) else np.inf, length / usual, tuple(sorted(round_.blamed)))

    def _after(self, g: Floats) -> tuple[float, float]:
        """Return the held-out loss after the outer step with an aggregate, and the length of that step."""
        swarm, (theta, momentum) = self._swarm, self._state
        swarm.step(g)
        found = swarm.loss(), float(np.linalg.norm(swarm.theta - theta))
        swarm.theta[:], swarm.momentum[:] = theta, momentum
        return found
