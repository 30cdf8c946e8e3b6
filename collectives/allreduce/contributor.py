"""An attempt at a member that has no vote: it contributes, and reduces the part that it owns. Pure.

It commits, serves its parts, and sketches under the seeds of the proposer's cut and outputs, as every contributor does. The
owner of a part says, too, whose contributions it holds, and whose sketches are of their bytes, and sums them with the weights
that voters with a third of the votes state alike. What is in and what comes out is for the voters to say: it follows their
certificate. So whatever the proposer tells it alone costs it its place in this attempt and nothing more: it names the cut and
the outputs that it has sketched for, and voters with other ones do not count that. It waits for contributors to its part, and
for nobody else; the voters end the attempt.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

from ...peer import wire
from ...peer.base.transport import PeerId
from ..chain.quorum import ranked
from .actions import Action, FetchOutput, Phase, Reduce, Setup, ShowParts
from .asking import Asking
from .exchange import RosterRound
from .facts import MessageLog
from .judge import SketchExchange, SketchPhase
from .roster import RosterView
from .stage import Stage


class ContributorRound(RosterRound):
    """The state of an attempt of one member that has no vote."""

    def __init__(self, setup: Setup, facts: MessageLog, table: RosterView, asking: Asking) -> None:
        super().__init__(setup, facts, table, asking)
        self._sketch_phase: SketchPhase | None = None
        self._named: wire.Outputs | None = None
        """The newest that the proposer has named."""
        self._made: dict[bytes, SketchExchange] = {}
        """By seed, the sketches after outputs that I have made."""
        self._fetched: set[tuple[int, bytes]] = set()
        """The outputs that I have requested, by part."""
        self._reduced: set[bytes] = set()
        """The cuts that I have reduced my part for."""

    @property
    def phase(self) -> Phase:
        """The current phase, as far as the proposer has said."""
        return Phase.CHECK if self._named is not None else Phase.JUDGE if self.is_cut else Phase.COLLECT

    @property
    def is_timed(self) -> bool:
        """True while I own a part and wait for what others contribute to it, or for their sketches."""
        stage = self._stage
        return self.table.me in self.table.owners and stage is not None and not stage.has_spoken

    @property
    def wordless(self) -> frozenset[PeerId]:
        """Nobody: I am sent no words, and propose nothing."""
        return frozenset()

    def _coming(self) -> tuple[Collection[int], Collection[int]]:
        """Return whose contributions to this member's part, or sketches of these, have come, and of whom."""
        if not self.is_timed:
            return (), ()
        if self._sketch_phase is not None:
            return self._sketch_phase.coming
        return self.collect_phase.contributors(self.table.me), self.table.training

    @property
    def providers(self) -> tuple[PeerId, ...]:
        """Whom to ask for certified outputs, one after the other: voters and owners, each contributor another one first."""
        receivers = self.table.receivers
        turn = self.table.me % len(receivers)
        return (*receivers[turn:], *receivers[:turn])

    def orphans(self, active: Collection[PeerId]) -> list[int]:
        """Return no part: whether its output can still be made voters know."""
        return []

    def close(self, active: Collection[PeerId]) -> bool:
        """Stop waiting for what has not come of my part. Return True the first time in a phase."""
        if self.phase in self._closed or not self.is_timed:
            return False
        self._closed.add(self.phase)
        if self._sketch_phase is None:
            self.collect_phase.close()
        else:
            self._sketch_phase.close()
        return True

    def advance(self, active: Collection[PeerId]) -> list[Action]:
        """Return all actions that the messages allow now."""
        stage, rule = self.collect_phase.stage, self._setup.spec.rule
        actions = [*self.collect_phase.advance(active), *stage.take(), *self._reduce_mine()]
        if ahead := self._left_behind():
            actions += self._ask({0: ranked(self.table.slot, ahead)}, ("left behind", self.step))
        if stage.standing is None:
            return actions
        actions += self.collect_phase.advance(active)  # Who has not spoken yet does so now.
        if self._sketch_phase is None and not rule.blind and self._may_sketch:
            self._sketch_phase = SketchPhase(self._setup, self._facts, self.table, self.collect_phase, stage)
        if self._sketch_phase is not None:
            actions += self._sketch_phase.speak(active)
        return [*actions, *self._follow()]

    def lacks_few(self, active: Collection[PeerId]) -> bool:
        """Return True if most have sent me their Commits, or Sketches, alike, and I wait for the rest of them."""
        return self.is_timed and 0 < 3 * len(self._lacking(active)) <= len(self._coming()[1])

    def _lacking(self, active: Collection[PeerId]) -> Mapping[int, Sequence[PeerId]]:
        """Return the cut that I wait for, or whose Commits, or Sketches, as the owner of a part; voters may have them."""
        table, phase, missing = self.table, self._sketch_phase, {0} if self._awaits_proposer() else set[int]()
        if self.is_timed:
            late = table.training - table.commits().keys() if phase is None else phase.sketches.missing
            missing |= {index for index in late if table.members[index] in active}
        return dict.fromkeys(missing, self._voters(active))

    @property
    def _stage(self) -> Stage | None:
        if not self.is_cut:
            return self.collect_phase.stage
        phase = self._sketch_phase
        return phase.stage if phase is not None and phase.stage.standing is None else None

    @property
    def _may_sketch(self) -> bool:
        """True unless the cut, which a liar may have made before that, names me before I have committed."""
        found = self.collect_phase.stage.standing
        return self.collect_phase.has_committed or (found is not None and self.table.me not in found.names)

    def _reduce_mine(self) -> list[Action]:
        """Reduce my part with the weights that voters with a third of the votes state, one of which is honest."""
        table, said = self.table, defaultdict[wire.Weigh, list[PeerId]](list)
        for signed, weigh in self._facts.every(wire.Weigh, table.slot) if table.me in table.owners else ():
            if weigh.part == table.me and weigh.cut not in self._reduced:
                said[weigh].append(signed.sender)
        for weigh, voters in said.items():
            weights = dict(weigh.weights)
            if table.electorate.votes_of(voters) < table.electorate.third:
                continue
            if self.collect_phase.holds(table.me, weights):
                self._reduced.add(weigh.cut)
                each = tuple(weights), tuple(weights.values())
                return [Reduce(weigh.cut, table.me, *each, table.cells(table.me))]
        return []

    def _follow(self) -> list[Action]:
        """Sketch after the outputs that the proposer names, and fetch them while the voters decide."""
        table, rule = self.table, self._setup.spec.rule
        phase, actions = self._sketch_phase, list[Action]()
        last = self.collect_phase.stage if rule.blind else None if phase is None else phase.stage
        proposer, slot = table.members[0], table.slot
        named = [it for signed, it in self._facts.every(wire.Outputs, slot) if signed.sender == proposer]
        newest = max((it for it in named if last is not None and it.cut == last.hash), key=_number, default=None)
        if newest is None or last is None or last.standing is None or len(newest.outputs) != table.num_parts:
            return []
        actions += [ShowParts(table.voters)] if self._named is None else []  # They may have to make a part again.
        self._named = newest
        for part in sorted(table.owners):
            hash_, holder = newest.outputs[part], last.standing.holders[part]
            if holder != table.me and (part, hash_) not in self._fetched:
                self._fetched.add((part, hash_))
                source, cells = table.members[holder], table.cells(part)
                others = table.others_with(part, {holder, table.me})
                actions.append(FetchOutput(part, source, hash_, cells, self._setup.spec.output.num_bytes(cells), others))
        if rule.blind or not self.collect_phase.has_committed:
            return actions
        for outputs in named:
            exchange = SketchExchange(self._facts, table, {table.me}, outputs.cut, outputs.outputs)
            if outputs.cut == last.hash and exchange.seed not in self._made:
                self._made[exchange.seed] = exchange
                actions += exchange.advance(())
        return actions

    def _sketches(self, seed: bytes) -> list[SketchExchange]:
        first = [self._sketch_phase.sketches] if self._sketch_phase is not None else []
        return [it for it in (*first, *self._made.values()) if it.seed == seed]


def _number(outputs: wire.Outputs) -> int:
    return outputs.number
