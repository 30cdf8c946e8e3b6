"""CHECK: the proposer names the outputs of all parts, and sketches after them show whether each is the sum. Pure.

All contributors sketch again, under a seed derived from the named outputs. Where a contributor does not, the proposer names
it silent in the next `Outputs`: its sketches after the cut, for which the holders of its parts have vouched, then say how
long its share of each output may be (`robust.residual`). The proposer and one voter more than may lie make an output again
that does not pass, after the deadline all voters. An output counts, whatever the sketches say, as soon as voters with a third
of the votes have made the same bytes, since one of them is honest; if that is another one the proposer names it. A voter that
lacks bytes of such a part at a second deadline makes zeros: an owner and a contributor that show their bytes to nobody lose
that part of the round. So no member without a vote ends an attempt here.
"""

from collections.abc import Collection, Mapping

from ...peer import wire
from ...peer.base.transport import PeerId
from ..agreement.actions import Note
from ..robust.checks import masked
from ..vector.codec import EMPTY
from .actions import Action, CheckOutputs, Send, Setup, ShowParts
from .collect import CollectPhase
from .facts import MessageLog
from .judge import JudgePhase, SketchExchange
from .outputs import ReducePhase
from .roster import RosterView
from .words import DEPUTIES


class CheckPhase:
    """One member's verification of the outputs of one cut."""

    def __init__(
        self,
        setup: Setup,
        facts: MessageLog,
        table: RosterView,
        phases: tuple[CollectPhase, JudgePhase, ReducePhase],
    ) -> None:
        self.failure = ""
        self.named: wire.Outputs | None = None
        """The proposer's newest outputs."""
        self.is_late = False
        self._may_name = self._is_forced = False
        """This proposer may name the outputs once more, since it has looked or a check has failed; be it without outputs
        that are to come in the place of others."""
        self._setup = setup
        self._facts = facts
        self._table = table
        self._collect_phase, self._judge_phase, self._reduce_phase = phases
        self._cut = self._judge_phase.stage.hash
        self._exchanges: dict[tuple[bytes, ...], SketchExchange] = {}
        self._asked: set[int] = set()
        """The numbers of the outputs whose check I have asked for."""
        self._doubted: dict[tuple[bytes, ...], frozenset[int]] = {}
        """By outputs that are checked: the parts of which the sketches do not show that the output is the sum."""
        self.given_up: frozenset[int] = frozenset()
        """Parts without an output that counts: voters that lack bytes of one make zeros."""

    def close(self) -> None:
        """Wait for no contributor's sketches any more, at the deadline."""
        self.is_late = self._may_name = True

    def give_up_bytes(self) -> bool:
        """Wait no longer for bytes of parts without an output that counts, at a second deadline; True where there are any."""
        is_first, missing = not self.given_up, self._table.owners - self._reduce_phase.outputs.keys()
        self.given_up = self.given_up or frozenset(missing.union(self.open_parts()))
        return is_first and bool(self.given_up)

    def look(self) -> None:
        """Let the proposer name once more: for each change alone it would use up its namings."""
        self._may_name = True

    def press(self) -> None:
        """Let the proposer name once more, be it without outputs that are to come in the place of others."""
        self._may_name = self._is_forced = True

    def advance(self, active: Collection[PeerId]) -> list[Action]:
        """Return all actions that the messages allow."""
        actions = [*self._take(), *self._name(active)]
        self._make_again()
        if self.named is None or not self._is_sketched:
            return actions
        judge = self._judge_phase
        pairs = self._collect_phase.pairs(judge.order)
        actions += judge.sketches.advance(pairs)  # A part that I hold only now may show that one was false.
        for exchange in self._exchanges.values():
            actions += exchange.advance([(part, index) for part, index in pairs if index in judge.counted[part]])
        return actions

    def check(self) -> list[Action]:
        """Verify the named outputs, which are here, once all sketches are."""
        named, judge, reduced = self.named, self._judge_phase, self._reduce_phase
        if named is None or reduced.hashes() != named.outputs or named.number in self._asked or self.missing():
            return []
        if not self._is_sketched:
            return []
        self._asked.add(named.number)
        exchange = self._exchanges[named.outputs]
        silent = tuple(place for place, index in enumerate(judge.order) if index in named.silent)
        second = tuple(
            first if place in silent else masked(exchange.tables(index), judge.parts_of(index))
            for place, (index, first) in enumerate(zip(judge.order, judge.first, strict=True))
        )
        return [CheckOutputs(exchange.seed, dict(reduced.outputs), judge.weights, judge.first, second, silent)]

    def checked(self, action: CheckOutputs, false: Collection[int], unheard: Collection[int]) -> list[Action]:
        """Take the parts whose output the sketches contradict, and those of which too few are here to say anything."""
        named = self.named
        if named is None or {part: named.outputs[part] for part in action.outputs} != dict(action.outputs):
            return []
        doubted, holders, members = frozenset(false) | frozenset(unheard), self._judge_phase.holders, self._table.members
        self._doubted[named.outputs] = self._doubted.get(named.outputs, doubted) & doubted
        self._may_name |= bool(doubted)
        reasons = {part: "the sketches contradict" if part in false else "too few sketch for" for part in sorted(doubted)}
        return [
            Note("round.output_doubted", members[holders[part]], "check", f"{reason} the output of part {part}")
            for part, reason in reasons.items()
        ]

    def is_checked(self, outputs: tuple[bytes, ...]) -> bool:
        """Return True if these outputs are named, and each passes the check, or is what voters have made alike."""
        if self.named is None or self.named.outputs != outputs:
            return False
        return not self._is_sketched or (outputs in self._doubted and not self.open_parts())

    def open_parts(self) -> list[int]:
        """Return the parts whose named output does not pass the check, and was not made alike by enough voters."""
        if self.named is None:
            return []
        outputs, reduced = self.named.outputs, self._reduce_phase
        return [part for part in sorted(self._doubted.get(outputs, ())) if outputs[part] not in reduced.agreed(part)]

    def lacking(self) -> set[int]:
        """Return the voters that make a part again, and whose output of it is not here."""
        reduced = self._reduce_phase
        return {it for part in self.open_parts() for it in self._makers(part) if not reduced.has_offer(part, it)}

    def sketches(self, seed: bytes) -> list[SketchExchange]:
        """Return the exchange under a seed, if there is one."""
        return [exchange for exchange in self._exchanges.values() if exchange.seed == seed]

    def missing(self) -> frozenset[int]:
        """Return the contributors whose sketches have not arrived, without those that are named silent."""
        if self.named is None or not self._is_sketched:
            return frozenset()
        return self._exchanges[self.named.outputs].missing - {*self.named.silent}

    def lacks(self, contributor: int) -> bool:
        """Return True if a contributor's sketches after the named outputs are not here."""
        return self.named is not None and self._is_sketched and contributor in self._exchanges[self.named.outputs].missing

    def waits_for(self) -> str:
        """Return what this waits for, in one line for a person."""
        members = self._table.members
        if self.named is None:
            return f"Outputs from {members[0]}"
        if missing := self.missing():
            return f"Sketch from {', '.join(members[index] for index in sorted(missing))}"
        return f"outputs of parts {', '.join(map(str, self.open_parts()))} that voters have made alike"

    @property
    def _is_sketched(self) -> bool:
        """True if sketches show whether an output is the sum: else nothing is checked."""
        return not self._setup.spec.rule.blind

    def _take(self) -> list[Action]:
        """Take the proposer's newest outputs."""
        table, order, actions = self._table, self._judge_phase.order, list[Action]()
        for signed, outputs in self._facts.every(wire.Outputs, table.slot):
            is_newer = self.named is None or outputs.number > self.named.number
            fits = len(outputs.outputs) == table.num_parts and set(outputs.silent) <= set(order)
            if signed.sender == table.members[0] and outputs.cut == self._cut and is_newer and fits:
                actions += [ShowParts(table.voters)] if self.named is None else []  # They may have to make a part again.
                self.named = outputs
                actions += self._reduce_phase.follow(outputs.outputs)
                if self._is_sketched and outputs.outputs not in self._exchanges:
                    exchange = SketchExchange(self._facts, table, order, self._cut, outputs.outputs)
                    self._exchanges[outputs.outputs] = exchange
        return actions

    def _name(self, active: Collection[PeerId]) -> list[Action]:
        """As the proposer, name the outputs that I hold; again what voters have made otherwise, or without the silent."""
        table, named, reduced = self._table, self.named, self._reduce_phase
        if table.me != 0:
            return []
        if named is None:
            return [self._outputs(0, reduced.outputs, self._without(active))] if reduced.is_whole else []
        before, open_ = {part: named.outputs[part] for part in table.owners}, self.open_parts()
        found = {part: agreed[0] for part in open_ if (agreed := reduced.agreed(part))}
        silent = {*named.silent, *self._without(active), *(self.missing() if self.is_late else ())}
        waits = len(found) < len(open_) and not self._is_forced
        if not self._may_name or (silent == {*named.silent} and (waits or not found)):
            return []
        self._may_name = self._is_forced = False
        if named.number + 1 >= wire.MAX_OUTPUTS:
            self.failure = f"{wire.MAX_OUTPUTS} times naming the outputs were not enough"
            return []
        return [self._outputs(named.number + 1, before | found, silent)]

    def _without(self, active: Collection[PeerId]) -> set[int]:
        """Return the contributors that were lost, banned or are not waited for, and have not sketched after the outputs."""
        members, named = self._table.members, self.named
        if not self._is_sketched:
            return set()
        here = self._exchanges[named.outputs].missing if named is not None else frozenset(self._judge_phase.order)
        banned = {index for index in self._judge_phase.order if members[index] in self._setup.conduct.bans}
        late = {it for it in here if not self._setup.conduct.awaits_sketch(members[it])}
        known = self._table.seating.known & {*self._judge_phase.order}
        late = late if 3 * len(late & known) <= len(known) else set()  # Else it is no single member's fault.
        return banned | late | {it for it in here if members[it] not in active}

    def _outputs(self, number: int, chosen: Mapping[int, bytes], silent: Collection[int]) -> Action:
        table = self._table
        outputs = tuple(chosen.get(part, EMPTY) for part in range(table.num_parts))
        return Send(table.members, wire.Outputs(table.slot, self._cut, number, outputs, tuple(sorted(silent))))

    def _makers(self, part: int) -> tuple[int, ...]:
        """Return who makes a part again: the proposer and one voter more than may lie; after the deadline all voters."""
        deputies, liars = self._table.seating.deputies[part], (len(self._table.electorate.votes) - 1) // 3
        return 0, *deputies[: None if self.is_late or part in self.given_up else max(DEPUTIES, liars + 1)]

    def _make_again(self) -> None:
        for part in self.given_up.union(self.open_parts()):
            self._collect_phase.stand_in(part, self._makers(part))
