"""One round's values with liars in it, by the product's own functions and without messages.

Theory of operation. The last k of n members lie alike (`Lie`); each member contributes and owns one part. What
honest members do in a round is called in its order: an encoding is checked, a first sketch is compared with the bytes, the
rule judges, the part of an owner that leaves out others is masked and must stay fit, and an output is checked against
the sketches after it. Who is found loses what it would lose in a run: a contributor with a false sketch or a malformed
part weighs nothing, and a false output is replaced by a deputy's.

Liars cover each other: nobody compares what one of them contributes to the part of another. What an owner contributes to
its own part weighs nothing there.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, pairwise

import numpy as np
from flockstep.collectives.accountability.trust import YOUNG_ROUNDS, weigh
from flockstep.collectives.allreduce.words import Seating, is_fit
from flockstep.collectives.robust.checks import (
    TRUE_WITHIN,
    are_alike,
    columns_of,
    judge_sketches,
    masked,
    seed_of,
    sketch_part,
    sketch_parts,
    tables_of,
    without_own,
)
from flockstep.collectives.robust.residual import Verdict, judge_outputs
from flockstep.collectives.robust.rule import Floats64, Weighting
from flockstep.collectives.robust.rules import rule_named
from flockstep.collectives.vector.arrays import Floats
from flockstep.collectives.vector.codec import CELL, Encoded, codec_named
from flockstep.collectives.vector.partition import split
from flockstep.optim.step.outer import OuterSettings
from flockstep.peer import wire
from flockstep.peer.base.digest import digest
from flockstep.peer.base.errors import LocalError
from flockstep.scripts.lab.training.batches import TrainingSize
from flockstep.scripts.lab.training.swarm import Training, TrainingSwarm

SHRUNK, FLIPPED, SPIKES, PUSHED = range(4)
"""How an output is false: shorter, some signs turned, two long elements, or along the liars' own direction."""
TOKENS = 1 << 14


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """The codec of contributions and results, and how many members lie; the rule is `gramguard`."""

    codec: str
    liars: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Lie:
    """What each of the liars does in one round; the defaults are an honest member's."""

    own: float = 1.0
    """Of the own honest work, this multiple is contributed."""
    against: float = 0.0
    """Less this multiple of the honest mean."""
    hidden: float = 0.0
    """And the liars' own direction, relative to the length of the honest mean."""
    groups: float = 1.0
    """The liars take turns in so many groups, each of which lies on elements of its own."""
    reach: float = 1.0
    """The share of parts in which they lie; in the others they contribute their own work."""
    spikes: float = 0.0
    """Of each 256 elements 2⁻ˢ are kept, and the others are zero."""
    length: float = 0.0
    """Decimal logarithm of a factor on the whole contribution."""
    at_home: float = 1.0
    """A factor on what they contribute to parts that they own."""
    tokens: float = 1.0
    """The claim, relative to an honest one's."""
    fudge: float = 0.0
    """How far the first sketches are false, as a share of what the comparison with the bytes lets pass."""
    turned: float = 1.0
    """What they contribute to each other's parts is this multiple, after the outputs, of what they sketched after the cut."""
    shift: float = 0.0
    """The length of the error of the outputs that they own, relative to the output."""
    form: float = SHRUNK
    tries: float = 0.0
    """Binary logarithm of the outputs that each owner tries, of which the first one that passes the checks is sent."""
    denies: float = 0.0
    """How many honest contributors each owner leaves out in its part."""

    def contributed(self, honest: Floats, own: Floats, hidden: Floats, home: Floats) -> Floats:
        """Return what the liars contribute, [k, d], from honest contributions [h, d] and their own work [k, d].

        `hidden` [d] has a length of 1; `home` [d] is True where an element lies in a part of theirs.
        """
        mean = honest.mean(axis=0)
        size, groups = mean.size, int(self.groups)
        lie = np.float32(self.hidden * np.linalg.norm(mean)) * hidden - np.float32(self.against) * mean
        kept = np.arange(size) % 256 * 2.0**self.spikes < 256
        reached = np.arange(size) < self.reach * size
        sent = np.float32(self.own) * own
        for index, row in enumerate(sent):
            of_group = np.arange(size) % groups == index % groups
            row[reached & of_group] += lie[reached & of_group]
            row[reached & ~kept] = 0
            row[~reached] = own[index][~reached]
        sent[:, home] *= np.float32(self.at_home)
        with np.errstate(over="ignore"):
            return np.asarray(sent * np.float32(10.0**self.length), np.float32)

    def output(self, true: Floats, hidden: Floats, draw: np.random.Generator) -> Floats:
        """Return one try of a false output [d], from the true one and the liars' direction there."""
        length = np.linalg.norm(true)
        if self.form == SHRUNK:
            return np.asarray(true * np.float32(1 - self.shift * draw.uniform(0.9, 1.0)), np.float32)
        if self.form == FLIPPED:
            turned = draw.random(true.size) < self.shift**2 / 4
            return np.where(turned, -true, true)
        false = true.copy()
        if self.form == SPIKES:
            places = draw.choice(true.size, 2, replace=False)
            false[places] += np.float32(self.shift * length / 2**0.5) * draw.choice([-1, 1], 2).astype(np.float32)
            return false
        noise = draw.standard_normal(true.size, np.float32) * np.float32(0.01 / true.size**0.5)
        along = hidden / (np.linalg.norm(hidden) + np.float32(1e-30)) + noise
        return np.asarray(false + np.float32(self.shift * length) * along, np.float32)


class LyingRound:
    """The contributions and parts of one round, through which lies are played."""

    def __init__(self, case: Case, bounds: Sequence[int], sent: Floats, number: int = 0) -> None:
        """`sent` [n, d] is the work of all members, the liars' too; `number` seeds what is drawn."""
        self.case, self.bounds, self.sent = case, tuple(bounds), sent
        self.rule, self.codec = rule_named("gramguard"), codec_named(case.codec)
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
        rows = judge_sketches(self.rule, first, voices, masses, len(parts)).weights * counted
        weights = without_own(rows, np.array(masses), {part: part for part in range(len(parts))})
        g = np.empty(self.sent.shape[1], np.float32)
        for part, span in enumerate(self.spans):
            self.codec.decode(self._output(lie, part, parts, first, weights[part], draw), g[span])
        return g

    def _contribute(self, lie: Lie) -> list[list[Encoded]]:
        home = np.zeros(self.sent.shape[1], bool)
        home[self.spans[self.num_honest].start :] = True
        rows = lie.contributed(self.sent[: self.num_honest], self.sent[self.num_honest :], self._hidden, home)
        found: list[list[Encoded]] = []
        for row in rows:
            try:
                data: list[Encoded] = [self.codec.encode(row[span]) for span in self.spans]
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
        if is_fit(self._seating, dict.fromkeys(everyone, b""), allowed, self.num_honest):  # Else a deputy holds its part.
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
        if self.case.liars > 1:
            covered[self.num_honest :] = lie.turned
        said = self._reduced(part, held, weights * covered)
        for output in chain(self._false(lie, part, said, draw), [said]):
            if self._passes(part, output, held, first, weights, covered):
                return output
        return true

    def _false(self, lie: Lie, part: int, said: Encoded, draw: np.random.Generator) -> Iterator[Encoded]:
        """Yield the outputs that an owner tries, one after the other."""
        values = np.empty(self.cells[part] * CELL, np.float32)
        self.codec.decode(said, values)
        for _ in range(2 ** int(lie.tries) if lie.shift else 0):
            with suppress(LocalError):  # Beyond what the codec can state.
                yield self.codec.encode(lie.output(values, self._hidden[self.spans[part]], draw))

    def _reduced(self, part: int, held: Sequence[Encoded], weights: Floats64) -> Encoded:
        weighting = Weighting(weights=weights[None], flagged={})
        chunks = self.rule.chunks(self.codec, held, weighting, 0, self.cells[part])
        return self.codec.encode_chunks(chunks, self.cells[part])

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
        for data, factor, one in zip(held, covered, before, strict=True):
            table = np.float32(factor) * sketch_part(self.codec, data, bounds, 0, seed, columns_of(len(self.sent)))
            after.append(masked(table.astype("<f4").tobytes(), [any(one)]))
        verdict = judge_outputs(self.codec, {0: output}, (low, high), weights[None], before, after, (), seed)
        return verdict == Verdict((), ())


@dataclass(frozen=True, slots=True)
class Harm:
    """What a lie does to one round, beside the same round of the honest members alone."""

    lost: float
    """The share of the progress of the held-out loss that is lost: 1 if nothing is learned, more if it grows."""
    longer: float
    """The length of the outer step, relative to the honest one."""
    blamed: tuple[int, ...]
    """The honest owners whose outputs were refused."""


class Moment(TrainingSwarm):
    """One round of an honest training, after which lies are tried: the state and what all members contribute."""

    def __init__(self, peers: int, size: TrainingSize, number: int) -> None:
        """Train `number` rounds, and one more inner phase."""
        outer = OuterSettings(lr=0.8, momentum=0.5)
        super().__init__(Training(size=size, peers=peers, contribution="int4", result="int4", outer=outer))
        for step in range(1, (number + 1) * size.steps + 1):
            self.advance(step)
        self.theta[:], self.momentum[:] = self._state
        self._number = number
        self._before = self.loss(self.theta)
        self._rounds: dict[Case, tuple[LyingRound, float, float]] = {}

    def exchanged(self, fragment: int) -> None:
        """Keep the state before the round."""
        self._state = self.theta.copy(), self.momentum.copy()
        super().exchanged(fragment)

    def harm(self, case: Case, lie: Lie) -> Harm:
        """Play a lie through the round."""
        if case not in self._rounds:
            sent = self.exchange.contributed
            bounds = split(range(self.layout.num_cells), [1.0] * len(sent))
            honest = LyingRound(case, bounds, sent, self._number)
            self._rounds[case] = honest, *self._after(honest.play(None))
        round_, least, usual = self._rounds[case]
        round_.blamed.clear()
        loss, length = self._after(round_.play(lie))
        lost = (loss - least) / (self._before - least)
        return Harm(lost if np.isfinite(lost) else np.inf, length / usual, tuple(sorted(round_.blamed)))

    def _after(self, g: Floats) -> tuple[float, float]:
        """Return the held-out loss after the outer step with an aggregate, and the length of that step."""
        self.outer_step(0, g)
        found = self.loss(self.theta), float(np.linalg.norm(self.theta - self._state[0]))
        self.theta[:], self.momentum[:] = self._state
        return found
