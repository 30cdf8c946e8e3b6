"""JUDGE: the sketches after the first cut, the holders' words on them, and the weights that follow. Pure.

Every contributor signs sketches of its parts under a seed that nobody knew before (`wire.Sketch`, `robust.checks`). The
holder of a part compares them with the bytes; a false sketch is evidence. Each holder says whose sketches are of the bytes
that it holds, and the proposer names the words that count, as in COLLECT (`stage`). Who is not in by these words, since its
sketches are missing, false or late, weighs nothing; where the holder of a part does not vouch for a sketch, that part of
the contribution counts as zeros. The run's rule weighs the others by their sketches. A rule that is blind to
contributions needs no sketches.
"""

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from ...peer import wire
from ...peer.base.transport import PeerId
from ..accountability.trust import credit_of, idle_of, weigh
from ..agreement.actions import Note
from ..robust.checks import columns_of, masked, num_bytes, seed_of, without_own
from .actions import Action, CompareSketch, Judge, Send, Setup, SketchParts
from .collect import CollectPhase
from .facts import MessageLog
from .roster import RosterView
from .stage import Stage
from .words import Standing


class SketchExchange:
    """One exchange of sketches under one seed: mine, those received, and which of them I have compared with the bytes."""

    def __init__(
        self,
        facts: MessageLog,
        table: RosterView,
        contributors: Collection[int],
        cut: bytes,
        outputs: tuple[bytes, ...] = (),
    ) -> None:
        self.seed = seed_of(cut, outputs)
        self.columns = columns_of(table.num_parts)
        self._cut = cut
        self._outputs = outputs
        self._facts = facts
        self._table = table
        self._contributors = frozenset(contributors)
        self._size = num_bytes(table.num_parts, self.columns)
        self._received: dict[int, tuple[wire.Signed, wire.Sketch]] = {}
        self._asked = False
        self._comparing: set[tuple[int, int]] = set()
        self.true: set[tuple[int, int]] = set()
        """The sketches that are of the bytes that I hold: (part, contributor)."""
        self._read = 0

    def advance(self, pairs: Collection[tuple[int, int]]) -> list[Action]:
        """Make my sketches, and compare those of others on the `pairs` of part and contributor that I hold."""
        table, actions = self._table, list[Action]()
        if not self._asked and table.me in self._contributors:
            self._asked = True
            actions.append(SketchParts(self.seed, self.columns))
        news = self._facts.since(wire.Sketch, self._read)
        self._read += len(news)
        for signed, sketch in news:
            index = table.places[signed.sender]
            is_mine = index in self._contributors and len(sketch.tables) == self._size  # One may have come before the roster.
            if not self.is_of(sketch) or not is_mine:
                continue
            self._received[index] = signed, sketch
        for part, index in pairs:
            if index in self._received and (part, index) not in self._comparing:
                self._comparing.add((part, index))
                actions.append(CompareSketch(self.seed, part, index))
        return actions

    def is_of(self, sketch: wire.Sketch) -> bool:
        """Return True for a sketch after the cut, or the outputs, that this exchange is after."""
        return (sketch.slot, sketch.cut, sketch.outputs) == (self._table.slot, self._cut, self._outputs)

    def sketched(self, tables: bytes) -> list[Action]:
        """Send my finished sketches."""
        to = self._table.voters if self._outputs else self._table.receivers  # Holders compare those after the cut alone.
        return [Send(to, wire.Sketch(self._table.slot, self._cut, self._outputs, tables))]

    def signed(self, contributor: int) -> wire.Signed | None:
        """Return a contributor's signed sketches; None if they have not arrived."""
        return self._received.get(contributor, (None, None))[0]

    def tables_named(self, contributor: int, name: bytes) -> bytes | None:
        """Return a contributor's sketches by their name; None if these are not here."""
        _, sketch = self._facts.named(wire.Sketch, self._table.members[contributor], name) or (None, None)
        return sketch.tables if sketch is not None and len(sketch.tables) == self._size else None

    def tables(self, contributor: int) -> bytes:
        """Return a contributor's sketches, which have arrived."""
        return self._received[contributor][1].tables

    @property
    def missing(self) -> frozenset[int]:
        """The contributors whose sketches have not arrived."""
        return self._contributors - self._received.keys()


class SketchPhase:
    """One member's view of the sketches after the first cut, and its word on those of what it holds."""

    def __init__(
        self, setup: Setup, facts: MessageLog, table: RosterView, collect_phase: CollectPhase, first: Stage
    ) -> None:
        assert first.standing is not None
        self._setup = setup
        self._table = table
        self._collect_phase = collect_phase
        self.sketches = SketchExchange(facts, table, first.standing.names, first.hash)
        self._among = frozenset(first.standing.names)
        self.stage = first if setup.spec.rule.blind else Stage(facts, table, self._among, setup.nonce, first.hash)
        self._has_closed = False
        """True if I have said at the last deadline whose sketches are true: after it I wait until others are compared."""

    def speak(self, active: Collection[PeerId]) -> list[Action]:
        """Return all actions that the messages allow, up to the second cut."""
        actions = self.sketches.advance(self._collect_phase.pairs(self._among))
        if self.stage.standing is None:
            for part in self.stage.denied(self._table.deputized - self._collect_phase.duties, self._among):
                self._collect_phase.stand_in(part, self._table.seating.three(part))
            actions += self._report(active)
            actions += [*self.stage.propose(active), *self.stage.take()]
            if self.stage.standing is not None and not self.stage.has_spoken:
                actions += self._report(active)  # Else I am taken for silent: the proposer may not have waited for me.
        return actions

    def close(self) -> None:
        """Stop waiting for sketches, at a deadline."""
        self.stage.close()
        self._has_closed = False

    @property
    def coming(self) -> tuple[Collection[int], Collection[int]]:
        """Whose sketches are here, and of whom."""
        return self._among - self.sketches.missing, self._among

    def _report(self, active: Collection[PeerId]) -> list[Action]:
        """Say whose sketches are of the bytes that I hold, once all are here that I can expect."""
        members, sketches = self._table.members, self.sketches
        expected = self._collect_phase.expected(self._among)
        open_ = [(part, index) for part, index in expected if (part, index) not in sketches.true]
        here = {index for index, peer in enumerate(members) if peer in active and peer not in self._setup.conduct.bans}
        first = self._collect_phase.stage.standing
        assert first is not None
        denied = {part for part in self._collect_phase.duties if first.holders[part] != self._table.me}
        awaited = [
            index
            for part, index in open_
            if index in here
            and (not self.stage.is_hurrying or self._setup.conduct.awaits(members[index]))
            and (index in first.parts[part] or part in denied)
        ]  # What does not count by the first words nobody waits for again, but who stands in for their author.
        known = {index for index in self._among if sketches.signed(index) is not None}
        is_comparing = any(index in known and index in here for _, index in open_)
        is_over = self.stage.standing is not None or (self.stage.is_late and (not is_comparing or not self._has_closed))
        if not self._collect_phase.duties or (awaited and not is_over):
            return []
        self._has_closed = self.stage.is_late
        held: dict[int, dict[int, bytes]] = {part: {} for part in self._collect_phase.duties}
        for part, index in sketches.true:
            signed = sketches.signed(index)
            if part in held and signed is not None:
                held[part][index] = signed.name
        return self.stage.say(held)


class JudgePhase(SketchPhase):
    """A voter's evaluation of the first cut."""

    def __init__(
        self, setup: Setup, facts: MessageLog, table: RosterView, collect_phase: CollectPhase, first: Stage
    ) -> None:
        super().__init__(setup, facts, table, collect_phase, first)
        assert first.standing is not None
        self.order: tuple[int, ...] = ()
        """The contributors that count, once the weights are here."""
        self.counted: Mapping[int, frozenset[int]] = {}
        """By part those of them that count in it."""
        self.holders: Mapping[int, int] = {}
        """By part, who reduces it: what it contributes itself is among them, and may weigh nothing (`part_weights`)."""
        self.weights: tuple[tuple[float, ...], ...] = ()
        """The weights of each part, in that order; empty before the rule's result."""
        self.first: tuple[bytes, ...] = ()
        """Their sketches after the cut, with zeros where they do not count."""
        self.flagged: tuple[int, ...] = ()
        self._short: frozenset[int] = frozenset()
        """The places of those that are too short to weigh."""
        self._works: frozenset[int] = frozenset()
        """The places of those that weigh anywhere, be it in their own parts alone, or are too short for it."""
        self.failure = ""
        self._is_judging = False
        if setup.spec.rule.blind:
            self._settle(first.standing)
            if not self.failure:
                self._weigh_parts((self._masses(),) * table.num_parts)

    def advance(self, active: Collection[PeerId]) -> list[Action]:
        """Return all actions that the messages allow, up to the weights."""
        if self.weights or self.failure:
            return []
        actions = self.speak(active)
        self.failure = self.stage.failure
        found = self.stage.standing
        if found is None or self._is_judging or self.failure:
            return actions
        tables = {index: self.sketches.tables_named(index, name) for index, name in found.names.items()}
        here = {index: table for index, table in tables.items() if table is not None}
        if len(here) < len(tables):
            return actions  # On their way, or others have them.
        self._settle(found)
        if self.failure:
            return actions
        self._is_judging = True
        self.first = tuple(masked(here[index], self.parts_of(index)) for index in self.order)
        return [*actions, Judge(self.stage.hash, self._voices(), self._masses(), self.first)]

    def weigh(self, holders: Mapping[int, int]) -> list[Action]:
        """Tell the holders that have no vote what each contribution weighs in their parts."""
        table, actions = self._table, list[Action]()
        for part, holder in sorted(holders.items()):
            if holder >= len(table.voters):
                pairs = zip(self.order, self.weights[part], strict=True)
                weights = tuple((index, weight) for index, weight in pairs if weight)
                actions.append(Send((table.members[holder],), wire.Weigh(table.slot, self.stage.hash, part, weights)))
        return actions

    def judged(
        self, weights: tuple[tuple[float, ...], ...], flagged: Mapping[int, str], short: Mapping[int, float]
    ) -> list[Action]:
        """Take the rule's result: the weights of each part, and who is flagged and who is short, all in order.

        A short contribution counts by its tokens, unless it is too short for them: then it is flagged.
        """
        self._short = frozenset(short)
        seats = self._table.seats(self.order, self._setup.conduct.charter)
        idle = idle_of(self._tokens(), seats, short, earned=self._setup.conduct.charter.earned)
        flagged = {**flagged, **dict.fromkeys(idle, "it is next to nothing for its tokens")}
        flagged = {place: flagged[place] for place, mass in enumerate(self._masses()) if mass and place in flagged}
        self._weigh_parts(weights)
        self.flagged = tuple(self.order[place] for place in sorted(flagged))
        if not any(any(row) for row in self.weights):
            self.failure = "the rule leaves nothing of the contributions"
        peers = [self._table.members[index] for index in self.order]
        return [Note("peer.flagged", peers[place], "judge", reason) for place, reason in sorted(flagged.items())]

    def credit(self) -> tuple[int, ...]:
        """Return the tokens of each contributor that count, in order, once it is judged."""
        seats = self._table.seats(self.order, self._setup.conduct.charter)
        counts = [place in self._works and index not in self.flagged for place, index in enumerate(self.order)]
        return credit_of(self._tokens(), seats, counts, earned=self._setup.conduct.charter.earned)

    def missing(self) -> list[int]:
        """Return whose sketches I lack: those that a cut names, or before it all."""
        found = self.stage.standing
        if found is None:
            return sorted(self.sketches.missing)
        named = found.names.items() if self.stage.signed is not None and not self._setup.spec.rule.blind else ()
        return [index for index, name in named if self.sketches.tables_named(index, name) is None]

    def _settle(self, found: Standing) -> None:
        self.order = tuple(sorted(found.names))
        self.counted = {part: frozenset(counted) for part, counted in found.parts.items()}
        self.holders = found.holders
        if not any(self._masses()):
            self.failure = "no contribution of the cut counts for anything"

    def parts_of(self, index: int) -> list[bool]:
        """Return for each part whether a contribution counts in it."""
        return [index in self.counted.get(part, ()) for part in range(self._table.num_parts)]

    def _weigh_parts(self, rows: Sequence[Sequence[float]]) -> None:
        counts = np.transpose([self.parts_of(index) for index in self.order])
        kept, masses = np.where(counts, np.array(rows, np.float64), 0.0), np.array(self._masses(), np.float64)
        own = {part: self.order.index(holder) for part, holder in self.holders.items() if holder in self.order}
        self.weights = tuple(map(tuple, without_own(kept, masses, own).tolist()))
        self._works = frozenset(np.flatnonzero(kept.any(0)).tolist()) | self._short

    def _masses(self) -> tuple[float, ...]:
        return self._weighed(self._tokens())

    def _voices(self) -> tuple[float, ...]:
        """Return the masses as if all had trained alike: claims of tokens enter no bound of a rule."""
        return self._weighed([min(1, tokens) for tokens in self._tokens()])

    def _weighed(self, tokens: Sequence[int]) -> tuple[float, ...]:
        seats = self._table.seats(self.order, self._setup.conduct.charter)
        ramps = [commit.ramp for commit in self._commits()]
        return weigh(tokens, ramps, seats, earned=self._setup.conduct.charter.earned)

    def _tokens(self) -> list[int]:
        return [commit.tokens for commit in self._commits()]

    def _commits(self) -> list[wire.Commit]:
        standing = self._collect_phase.stage.standing
        assert standing is not None
        found = [self._table.commit_named(index, standing.names[index]) for index in self.order]
        assert None not in found, "the weights of members whose commits are not here"
        return [commit for commit in found if commit is not None]
