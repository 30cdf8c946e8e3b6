"""JUDGE and CHECK of one cut: weights of contributions, verification of outputs. Pure.

A sketch exchange. Every contributor of a cut signs sketches of its parts under a seed that nobody knew before
(`wire.Sketch`, `robust.checks`). The holder of a part compares its sketches with the bytes; a false sketch is evidence,
and its author is soon lost.

JUDGE. All contributors sketch their parts under a seed derived from the cut, the run's rule weighs them by the
sketches, and owners sum.

CHECK. Once all outputs are here, all contributors sketch again, under a seed derived from the outputs; the sum of the
sketches must be that of the output. A member that was given another output than I asks under another seed, and is
answered under that one as well. Otherwise a false output that is shown to one member only would never be exposed to it.
It states the outputs themselves, so that what I sign is about this cut and about outputs, whatever it chose.
A member that is not in the cut, such as a keeper, asks by a `Sketch` without tables.
A contributor is removed from the cut if its sketches do not arrive, or if the two cannot be of one vector. A false
output is made again by a deputy of its owner. A rule that is blind to contributions needs no sketches.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from ...peer import wire
from ...peer.transport import PeerId
from ..accountability.trust import credit_of, weigh
from ..agreement.actions import Note
from ..robust.checks import CHECK_COLUMNS, num_bytes, seed_of, width_of
from .actions import Action, CheckOutputs, CompareSketch, Judge, Send, Setup, SketchParts
from .collect import CollectPhase
from .facts import MessageLog
from .outputs import ReducePhase
from .roster import DEPUTIES, RosterView


class SketchExchange:
    """One exchange of sketches under one seed: mine, those received, and which of them I have verified."""

    def __init__(
        self, facts: MessageLog, table: RosterView, contributors: Sequence[int], cut: bytes, outputs: tuple[bytes, ...] = ()
    ) -> None:
        self.seed = seed_of(cut, outputs)
        self._cut = cut
        self._outputs = outputs
        self._facts = facts
        self._table = table
        self._contributors = contributors
        self._columns = width_of(outputs, len(table.members))
        self._size = num_bytes(len(table.members), self._columns)
        self._received: dict[int, tuple[wire.Signed, wire.Sketch]] = {}
        self._asked = False
        self._comparing: set[tuple[int, int]] = set()
        self._true: set[tuple[int, int]] = set()
        self._read = 0

    def advance(self, duties: Collection[int]) -> list[Action]:
        """Make my sketches, and compare those of others on my `duties`."""
        table, actions = self._table, list[Action]()
        if not self._asked and table.me in self._contributors:
            self._asked = True
            actions.append(SketchParts(self.seed, self._columns))
        news = self._facts.since(wire.Sketch, self._read)
        self._read += len(news)
        for signed, sketch in news:
            index = table.places[signed.sender]
            about = sketch.slot, sketch.cut, sketch.outputs
            if about != (table.slot, self._cut, self._outputs) or index not in self._contributors:
                continue
            if len(sketch.tables) != self._size:
                actions.append(Note("peer.charged", signed.sender, "sketch", "sketches of another size"))
                continue
            self._received[index] = signed, sketch
        for index in sorted(self._received.keys() - {table.me}):
            for part in sorted(duties):
                if (part, index) not in self._comparing:
                    self._comparing.add((part, index))
                    actions.append(CompareSketch(self.seed, part, index))
        return actions

    def ask(self) -> list[Action]:
        """Ask the others to sketch under this seed, once, if I have nothing to sketch myself."""
        if self._asked or self._table.me in self._contributors:
            return []
        self._asked = True
        return self.sketched(b"")

    def sketched(self, tables: bytes) -> list[Action]:
        """Send my finished sketches."""
        return [Send(self._table.members, wire.Sketch(self._table.slot, self._cut, self._outputs, tables))]

    def is_true(self, part: int, contributor: int) -> None:
        """Record that a contributor's sketch of a part matches the bytes."""
        self._true.add((part, contributor))

    def signed(self, contributor: int) -> wire.Signed | None:
        """Return a contributor's signed sketches; None if they have not arrived."""
        return self._received.get(contributor, (None, None))[0]

    @property
    def missing(self) -> frozenset[int]:
        """The contributors whose sketches have not arrived."""
        return frozenset(self._contributors) - self._received.keys()

    @property
    def is_complete(self) -> bool:
        """True if all sketches have arrived, and all that I compare match."""
        return not self.missing and self._comparing == self._true

    @property
    def tables(self) -> tuple[bytes, ...]:
        """The sketches of all contributors, in the order of the cut."""
        return tuple(self._received[index][1].tables for index in self._contributors)

    def silent(self) -> str:
        """Return what this waits for, in one line for a person."""
        peers: list[PeerId] = [self._table.members[index] for index in sorted(self.missing)]
        return f"Sketch from {', '.join(peers)}" if peers else "comparisons of sketches with bytes"


MAX_SEEDS, SEEDS_OF_ONE = 4, 2
"""Limits of the seeds that I sketch under after one cut, in all and for one asker: a liar may ask for any number.

Free keys may use them up, so the proposer's come on top: whoever lacks an answer goes over to its outputs (`outputs`).
"""
CONVENER_SEEDS = MAX_SEEDS + 1 + DEPUTIES
"""Those of the proposer: its answers to others look like questions, and each output may come from an owner or a deputy."""


class JudgePhase:
    """One member's evaluation of one certified cut."""

    def __init__(
        self, setup: Setup, facts: MessageLog, table: RosterView, collect_phase: CollectPhase, cut: wire.Cut, cut_hash: bytes
    ) -> None:
        self.weights: tuple[tuple[float, ...], ...] = ()
        """The weights of each part, in the order of the cut; empty before the rule's result."""
        self.flagged: tuple[int, ...] = ()
        self.failure = ""
        self._setup = setup
        self._facts = facts
        self._table = table
        self._collect_phase = collect_phase
        self._cut = cut
        self._cut_hash = cut_hash
        self._first = SketchExchange(facts, table, cut.contributors, cut_hash)
        self._second: SketchExchange | None = None
        self._seconds: dict[tuple[bytes, ...], SketchExchange] = {}
        """By the outputs of all parts."""
        self._read = len(facts.since(wire.Sketch, 0))  # Second sketches follow the first ones of all, mine included.
        self._askers: Counter[PeerId] = Counter()
        self._asked: set[bytes] = set()
        self._checked = b""
        if not any(self._masses()):
            self.failure = "no contribution of the cut counts for anything"
        elif setup.rule.blind:
            self.weights = (self._masses(),) * len(table.members)

    def judge(self) -> list[Action]:
        """Weigh each contribution: by its tokens and trust, and then by the run's rule."""
        actions = self._first.advance(self._duties())
        if self._first.is_complete and self._cut_hash not in self._asked:
            self._asked.add(self._cut_hash)
            actions.append(Judge(self._cut_hash, self._masses(), self._first.tables))
        return actions

    def judged(self, weights: tuple[tuple[float, ...], ...], flagged: Mapping[int, str]) -> list[Action]:
        """Take the rule's result: the weights of each part, and the flagged contributors, both in the order of the cut."""
        flagged = {place: flagged[place] for place, mass in enumerate(self._masses()) if mass and place in flagged}
        self.weights = weights
        self.flagged = tuple(self._cut.contributors[place] for place in sorted(flagged))
        if empty := [part for part in self._table.owners if not any(weights[part])]:
            self.failure = f"the rule leaves nothing of part {min(empty)}"
        return [Note("peer.flagged", self._peer(place), "judge", reason) for place, reason in sorted(flagged.items())]

    def credit(self) -> tuple[int, ...]:
        """Return the tokens of each contributor that count, in the order of the cut, once it is judged."""
        order = self._cut.contributors
        tokens = [self._table.commits()[index].tokens for index in order]
        seats = self._table.seats(order, self._setup.charter)
        weighs = [any(row[place] for row in self.weights) for place in range(len(order))]
        counts = [each and index not in self.flagged for each, index in zip(weighs, order, strict=True)]
        return credit_of(tokens, seats, counts, earned=self._setup.charter.earned)

    def check(self, reduce_phase: ReducePhase) -> list[Action]:
        """Verify all outputs; `is_checked` returns True once they have passed."""
        outputs = reduce_phase.hashes()
        if self.is_checked(outputs):
            return []
        second = self._after(outputs)
        tables: tuple[bytes, ...] = ()
        actions: list[Action] = []
        if self._setup.rule.linear:  # Else no sketch can check a sum: its length is held to that of the contributions.
            self._second = second
            actions = [*self.answer(), *second.ask()]
            if not second.is_complete:
                return actions
            tables = second.tables
        if second.seed not in self._asked:
            self._asked.add(second.seed)
            made = dict(reduce_phase.outputs)
            actions.append(CheckOutputs(second.seed, made, self.weights, self._first.tables, tables))
        return actions

    def answer(self) -> list[Action]:
        """Sketch after my outputs and after those that others state for this cut, and compare the sketches received."""
        if self._setup.rule.blind or not self._setup.rule.linear:
            return []
        news = self._facts.since(wire.Sketch, self._read)
        self._read += len(news)
        size = num_bytes(len(self._table.members), CHECK_COLUMNS)
        for signed, sketch in news:
            asker, outputs = signed.sender, sketch.outputs
            mine = sketch.slot == self._table.slot and sketch.cut == self._cut_hash
            asks = mine and len(outputs) == len(self._table.members) and outputs not in self._seconds
            contributes = self._table.places[asker] in self._cut.contributors
            if not asks or len(sketch.tables) != (size if contributes else 0):
                continue
            if self._is_answered(asker):
                self._after(outputs)
        duties = self._duties()
        return [action for sketches in self._seconds.values() for action in sketches.advance(duties)]

    def _is_answered(self, asker: PeerId) -> bool:
        """Count a question; return True if this member is still answered."""
        self._askers[asker] += 1
        proposer = self._table.members[0]
        if asker == proposer:
            return self._askers[asker] <= CONVENER_SEEDS
        asked = sum(min(count, SEEDS_OF_ONE) for peer, count in self._askers.items() if peer != proposer)
        return self._askers[asker] <= SEEDS_OF_ONE and asked <= MAX_SEEDS

    def _after(self, outputs: tuple[bytes, ...]) -> SketchExchange:
        if outputs not in self._seconds:
            order = self._cut.contributors
            self._seconds[outputs] = SketchExchange(self._facts, self._table, order, self._cut_hash, outputs)
        return self._seconds[outputs]

    def checked(self, action: CheckOutputs, false: Collection[int], doubtful: Collection[int]) -> list[Action]:
        """Take the false outputs, by part, and the contributors whose two sketches differ, in the order of the cut."""
        reason = "its sketches after the cut and after the outputs cannot be of one contribution"
        notes = [Note("round.sketches_differ", self._peer(place), "check", reason) for place in doubtful]
        self._collect_phase.refuse([self._cut.contributors[place] for place in doubtful])
        if not false and not doubtful:
            self._checked = action.seed
        return list(notes)

    def is_checked(self, outputs: tuple[bytes, ...]) -> bool:
        """Return True if these outputs need no check, or have passed it."""
        return self._setup.rule.blind or self._checked == seed_of(self._cut_hash, outputs)

    def on_timeout(self) -> bool:
        """Remove contributors whose sketches timed out from the cut. Return True if waiting longer can change the result."""
        return self._collect_phase.refuse(self.current.missing)

    def miss(self, active: Collection[PeerId]) -> None:
        """Remove contributors that were lost before they sent their sketches, or were convicted, from the cut."""
        if self._setup.rule.blind or self._facts.of(wire.Prevote, self._table.slot):
            return  # A member that accepted the value has the missing sketches, and forwards them once the peer is lost.
        members, to_come = self._table.members, self._second is None and self._setup.rule.linear
        for index in self._cut.contributors:
            missing = to_come or index in self.current.missing or self._setup.is_banned(members[index])
            if missing and members[index] not in active:
                self._collect_phase.refuse([index])

    @property
    def second_sketches(self) -> list[wire.Signed]:
        """The signed sketches of all contributors after my outputs, as far as they are here."""
        found = [self._second.signed(index) for index in self._cut.contributors] if self._second is not None else []
        return [signed for signed in found if signed is not None]

    def sketches(self, seed: bytes) -> list[SketchExchange]:
        """Return the exchange under a seed, if there is one."""
        return [known for known in (self._first, *self._seconds.values()) if known.seed == seed]

    @property
    def current(self) -> SketchExchange:
        """The newest exchange of sketches under outputs of mine, or under the cut."""
        return self._second or self._first

    def _duties(self) -> list[int]:
        """Return the parts that I answer for, and hold of all contributors of the cut."""
        return [part for part in self._collect_phase.duties if self._collect_phase.holds(part, self._cut.contributors)]

    def _masses(self) -> tuple[float, ...]:
        order = self._cut.contributors
        commits = [self._table.commits()[index] for index in order]
        seats = self._table.seats(order, self._setup.charter)
        tokens, ramps = [commit.tokens for commit in commits], [commit.ramp for commit in commits]
        return weigh(tokens, ramps, seats, earned=self._setup.charter.earned)

    def _peer(self, place: int) -> PeerId:
        return self._table.members[self._cut.contributors[place]]
