"""An attempt under a roster: COLLECT to CHECK, up to the value that it makes. Pure.

The machine (`machine`) owns it: messages come in from there, `advance` returns the actions that they allow, and
`failure` holds the reason to abandon the round. `collect` does COLLECT, `judge` JUDGE, `outputs` REDUCE and `check` CHECK;
the transitions between them are here.
"""

from collections.abc import Collection, Mapping, Sequence

from ...peer import wire
from ...peer.base.transport import PeerId
from ...peer.wire.schema import encode
from ..agreement.actions import Note
from ..chain.quorum import ranked
from ..chain.voters import absent_after
from ..robust.checks import seed_of
from ..vector.lines import StatedLines, measured_in
from .actions import (
    Action,
    CheckOutputs,
    CompareSketch,
    FetchBytes,
    FetchOutput,
    FetchPart,
    Finalize,
    Forward,
    Phase,
    Reduce,
    Send,
    Setup,
)
from .asking import Asking
from .check import CheckPhase
from .collect import CollectPhase
from .facts import MessageLog
from .judge import JudgePhase, SketchExchange
from .outputs import ReducePhase
from .roster import RosterView
from .stage import Stage
from .words import is_fit


class RosterRound:
    """One member's state of an attempt under one roster."""

    def __init__(self, setup: Setup, facts: MessageLog, table: RosterView, asking: Asking) -> None:
        self.collect_phase = CollectPhase(setup, facts, table)
        self.value: bytes | None = None
        """The encoded `wire.Value` that my outputs and their root make; None before they are checked."""
        self.table = table
        self._setup = setup
        self._facts = facts
        self._judge_phase: JudgePhase | None = None
        self._outputs: tuple[ReducePhase, CheckPhase] | None = None
        self._roots: dict[tuple[bytes, ...], bytes | None] = {}
        """By outputs, the state root that they lead to; None while it is computed."""
        self._valued: tuple[bytes, ...] = ()
        """The outputs that the value has."""
        self._reducing: set[int] = set()
        self._closed: set[Phase] = set()
        self._asking = asking

    @property
    def bounds(self) -> tuple[int, ...]:
        """The cells of each part."""
        return self.table.roster.bounds

    @property
    def my_rate(self) -> int:
        """The bytes/s that others have received from me over one connection each; 0 before they have measured it."""
        table, last = self.table, measured_in(self._setup.before)
        return StatedLines(table.readies, last, table.electorate.frontier).measured(table.members[table.me])

    @property
    def members(self) -> tuple[PeerId, ...]:
        """The members of the roster; its proposer stands first."""
        return self.table.members

    @property
    def phase(self) -> Phase:
        """The current phase."""
        if self.value is not None:
            return Phase.CONFIRM
        if self._judge_phase is None:
            return Phase.COLLECT
        if self._outputs is None:
            return Phase.JUDGE
        return Phase.CHECK if self._outputs[0].is_whole else Phase.REDUCE

    @property
    def step(self) -> tuple[Phase, bool, bool]:
        """The current phase, and how far it is: its deadline begins anew with each step."""
        stage = self._stage
        return self.phase, self.is_cut, stage is not None and stage.is_named

    @property
    def is_timed(self) -> bool:
        """True if the step that I am in has a deadline."""
        return True

    @property
    def is_cut(self) -> bool:
        """True once the first cut is here: others count on my part."""
        return self.collect_phase.stage.standing is not None

    @property
    def cut(self) -> bytes:
        """The hash of the first cut; empty before it is here."""
        return self.collect_phase.stage.hash

    @property
    def counted(self) -> Mapping[int, frozenset[int]]:
        """By part, the members whose contributions count in it; empty before it is known."""
        return self._judge_phase.counted if self._judge_phase is not None else {}

    @property
    def holders(self) -> Mapping[int, int]:
        """By part, the member that reduces it; empty before it is known."""
        return self._judge_phase.holders if self._judge_phase is not None else {}

    @property
    def failure(self) -> str:
        """Why the round must be abandoned; empty while it can go on."""
        judged = self._judge_phase.failure if self._judge_phase is not None else ""
        checked = self._outputs[1].failure if self._outputs is not None else ""
        return self.collect_phase.stage.failure or judged or checked

    @property
    def owners(self) -> frozenset[PeerId]:
        """The members that own a part."""
        return frozenset(self.table.members[part] for part in self.table.owners)

    @property
    def trainers(self) -> frozenset[PeerId]:
        """The members that train."""
        return frozenset(self.table.members[index] for index in self.table.training)

    @property
    def known(self) -> frozenset[PeerId]:
        """The members that vote, or have contributed to many rounds."""
        seating = self.table.seating
        return frozenset(self.table.members[index] for index in seating.voters | seating.known)

    @property
    def wordless(self) -> frozenset[PeerId]:
        """The owners that lost their part to a deputy by their word, on contributions or on sketches, or without one."""
        stages = [self.collect_phase.stage, *([self._judge_phase.stage] if self._judge_phase is not None else [])]
        return frozenset(self.table.members[part] for stage in stages for part in stage.passed_over())

    @property
    def masked(self) -> tuple[tuple[PeerId, PeerId], ...]:
        """The contributors that count as zeros in a part by the first cut, each with the part's holder."""
        found, members = self.collect_phase.stage.standing, self.table.members
        if found is None:
            return ()
        denied = set[tuple[int, int]]()
        for part, counted in found.parts.items():
            holder = found.holders[part]
            if holder != part and not is_fit(self.table.seating, found.names, counted, holder):
                continue  # A proposer that leaves words out gives a part to a deputy that has not spoken of all of it.
            denied |= {(index, holder) for index in found.names.keys() - counted - {holder}}
        return tuple((members[index], members[holder]) for index, holder in sorted(denied))

    @property
    def unsketched(self) -> tuple[PeerId, ...]:
        """The contributors that the proposer has named silent, and I have no sketch of."""
        if self._outputs is None or (named := self._outputs[1].named) is None:
            return ()
        return tuple(sorted(self.table.members[index] for index in named.silent if self._outputs[1].lacks(index)))

    @property
    def withheld(self) -> tuple[PeerId, ...]:
        """Who leaves parts without an output that counts, as far as I know."""
        if self._outputs is None:
            return ()
        reduced, checked = self._outputs
        open_ = checked.open_parts() if reduced.is_whole else self.table.owners - reduced.outputs.keys()
        return tuple(sorted({self.table.members[reduced.standing.holders[part]] for part in open_}))

    @property
    def late(self) -> tuple[PeerId, ...]:
        """The holders whose output did not come in time, and was made by another, or whose part counts as zeros."""
        if self._outputs is None:
            return ()
        reduced, checked = self._outputs
        return tuple(sorted({*reduced.late(), *(reduced.replaced() if checked.named is not None else ())}))

    @property
    def is_weighed(self) -> bool:
        """True once the weights are here: the outputs follow."""
        return self._outputs is not None

    def is_mostly_here(self, phase: Phase) -> bool:
        """Return True if two thirds of a transfer are here: of the contributions to my part, or of the outputs."""
        if phase is Phase.REDUCE:
            return self._outputs is not None and self._outputs[0].is_mostly_here
        table = self.table
        mine = self.collect_phase.contributors(table.me) if table.me in table.owners else frozenset()
        return bool(mine) and is_fit(table.seating, dict.fromkeys(table.training, b""), mine, table.me)

    def has_most(self, here: Collection[PeerId]) -> bool:
        """Return True if two thirds of what the present step waits for have come. The others have as long again.

        Of those that vote or are of many rounds, since keys are free. Where nobody is, of those that are here and did not let
        others wait in vain lately.
        """
        came, of = self._coming()
        members, seating = self.table.members, self.table.seating
        present = {index for index in of if members[index] in here}
        known = present & (seating.voters | seating.known)
        needed = known or {index for index in present if self._setup.conduct.awaits_ready(members[index])} or present
        return 3 * len(needed & {*came}) >= 2 * len(needed)

    def _coming(self) -> tuple[Collection[int], Collection[int]]:
        """Return whose contributions, words, outputs or sketches have come in the present step, and of whom."""
        table, stage = self.table, self._stage
        if stage is not None and stage.has_spoken:
            return stage.words.keys(), table.owners
        if stage is self.collect_phase.stage:
            return self.collect_phase.contributors(table.me), table.training if table.me in table.owners else ()
        judge = self._judge_phase
        if self._outputs is None or judge is None:
            return judge.coming if judge is not None else ((), ())
        reduced, checked = self._outputs
        if not reduced.is_whole:
            return reduced.outputs.keys(), table.owners
        return {*judge.order} - checked.missing() if checked.named is not None else (), judge.order

    def hurry(self) -> None:
        """Wait no longer for those that let others wait in vain lately, and take what is new."""
        if self._stage is not None:
            self._stage.is_hurrying = True
        self.look()

    def look(self) -> None:
        """Take what members without a vote have done since the last look, all of it at once."""
        if self._stage is not None:
            self._stage.look()
        if self._outputs is not None:
            self._outputs[1].look()

    @property
    def providers(self) -> tuple[PeerId, ...]:
        """Whom to ask for certified outputs beside the voters that signed, one after the other."""
        return ()

    def orphans(self, active: Collection[PeerId]) -> list[int]:
        """Return the parts whose output I lack, and whose three are all lost."""
        made = self._outputs[0].outputs.keys() if self._outputs is not None else set[int]()
        return sorted(part for part in self.table.owners - made if not self.table.living(part, active))

    # The driver's reports.

    def reduced(self, cut: bytes, part: int, output: bytes) -> list[Action]:
        """Publish a part's output for a cut: it is encoded and served under this hash."""
        return [Send(self.table.voters, wire.Result(self.table.slot, cut, part, output))]

    def output_fetched(self, part: int, hash_: bytes) -> None:
        """Record a well-formed output."""
        if self._outputs is not None:
            self._outputs[0].fetched(part, hash_)

    def output_not_fetched(self, part: int, source: PeerId, hash_: bytes, reason: str) -> list[Action]:
        """Record a failed fetch of an output."""
        return self._outputs[0].not_fetched(part, source, hash_, reason) if self._outputs is not None else []

    def sketched(self, seed: bytes, tables: bytes) -> list[Action]:
        """Send my finished sketches under a seed."""
        return [action for sketches in self._sketches(seed) for action in sketches.sketched(tables)]

    def compared(self, action: CompareSketch) -> None:
        """Record that a contributor's sketch of its part matches the bytes."""
        for sketches in self._sketches(action.seed):
            sketches.true.add((action.part, action.contributor))

    def judged(
        self, weights: tuple[tuple[float, ...], ...], flagged: Mapping[int, str], short: Mapping[int, float]
    ) -> list[Action]:
        """Take the rule's result: the weights of each part, and who is flagged and who is short, in the order of the cut."""
        return self._judge_phase.judged(weights, flagged, short) if self._judge_phase is not None else []

    def checked(self, action: CheckOutputs, false: Collection[int], unheard: Collection[int]) -> list[Action]:
        """Take the parts whose output the sketches contradict, and those of which too few are here to say anything."""
        return self._outputs[1].checked(action, false, unheard) if self._outputs is not None else []

    def finalized(self, outputs: tuple[bytes, ...], next_root: bytes) -> None:
        """Record the state root that these outputs lead to."""
        self._roots[outputs] = next_root

    # Deadlines.

    def close(self, active: Collection[PeerId]) -> bool:
        """Stop waiting for what has not come in this phase. Return True the first time: that can still change the result."""
        phase = self.phase
        is_first = phase not in self._closed and phase is not Phase.CONFIRM
        self._closed |= {phase} if is_first else set()
        if phase is Phase.COLLECT:
            self.collect_phase.close()
        elif self._judge_phase is not None and phase is Phase.JUDGE:
            self._judge_phase.close()
        elif self._outputs is not None and is_first:
            reduced, checked = self._outputs
            reduced.close()
            checked.look()
            if phase is Phase.CHECK:
                checked.close()
        is_made = phase in (Phase.REDUCE, Phase.CHECK) and self._outputs is not None
        return is_first or (is_made and self._outputs is not None and self._outputs[1].give_up_bytes())

    def has_named(self, signed: wire.Signed, message: wire.RoundMessage) -> bool:
        """Return True if the proposer has named this statement, or what it is a sketch after: others may count on it."""
        stage, place = self._stage, self.table.places.get(signed.sender)
        if place is None:
            return False
        if isinstance(message, wire.Sketch):
            return any(it.is_of(message) for it in self._sketches(seed_of(message.cut, message.outputs)))
        found = self.collect_phase.stage.standing
        is_counted = found is not None and found.names.get(place) == signed.name
        if is_counted or stage is None:
            return is_counted
        return stage.has_named(place, signed) or (isinstance(message, wire.Have) and stage.needs(place, message))

    def take_best(self) -> bool:
        """As the proposer, take the words that there are, fit or not. Return True the first time."""
        stage = self._stage
        if stage is None or self.table.me != 0 or stage.takes_best:
            return False
        stage.takes_best = True
        return True

    def ask(self, active: Collection[PeerId], *, early: bool, again: bool = False) -> list[Action]:
        """Ask others for what members have sent to them, and not to me: two, and `again` the next two.

        At a deadline, or `early` where most have sent theirs: who sends it to all but me then costs none.
        """
        moment, sought = ("early", self.step) if early else self.phase, list[Action]()
        if self._outputs is not None:
            reduced, checked = self._outputs
            sought = [] if again else reduced.seek(active, "early" if early else "late")
            if checked.is_late and not early:
                checked.press()
        return [*sought, *self._ask(self._lacking(active), moment, again=again)]

    def lacks_few(self, active: Collection[PeerId]) -> bool:
        """Return True if I, the proposer, have what most send to me alike, and wait for the rest of it.

        So too if I am another one, and wait for outputs that the proposer has.
        """
        if self.table.me != 0:
            is_proposed = bool(self._facts.of(wire.Propose, self.table.slot))
            return is_proposed and self._outputs is not None and not self._outputs[0].is_whole
        return 0 < 3 * len(self._lacking(active)) <= len(self._coming()[1])

    def _lacking(self, active: Collection[PeerId]) -> Mapping[int, Sequence[PeerId]]:
        """Return the members whose messages the present step waits for, and who may have them."""
        table, stage, missing = self.table, self._stage, {*self._spoken_of()}
        others = table.members[0], *self._voters(active)
        if stage is not None:
            missing |= {*stage.missing()}
            if table.me == 0:
                missing |= {index for each in stage.unheard(active).values() for index in each}
        elif self._outputs is not None:
            missing |= self._outputs[1].missing() | self._outputs[1].lacking()
        elif self._judge_phase is not None:
            missing |= {*self._judge_phase.missing()}
        found = dict[int, Sequence[PeerId]](dict.fromkeys(missing | ({0} if self._awaits_proposer() else set()), others))
        if self._outputs is not None:  # Its deputies have the output of an owner, or make it.
            parts = table.owners - self._outputs[0].outputs.keys()
            found |= {self._outputs[0].maker(part): table.others_with(part, {part}) for part in parts}
        return found

    def _voters(self, active: Collection[PeerId]) -> tuple[PeerId, ...]:
        return ranked(self.table.slot, self.table.electorate.votes.keys() & set(active))

    def _ask(self, missing: Mapping[int, Sequence[PeerId]], moment: object, *, again: bool = False) -> list[Action]:
        """Ask others for the messages of members, by roster index."""
        members = self.table.members
        wanted = {members[index]: others for index, others in missing.items() if index < len(members)}
        return self._asking.ask(wanted, moment, self.phase, again=again)

    def show_words(self) -> list[Action]:
        """Forward the proposer the words of the owners that I stand in for: they may have sent it none, or others."""
        table, names = self.table, self._stage.names if self._stage is not None else {}
        shown = [index for index in names if table.me in table.deputies(index) and index != 0]
        found = [self._facts.named(wire.Have, table.members[index], names[index]) for index in shown]
        return [Forward(table.members[:1], it[0]) for it in found if it is not None]

    def silent(self, active: Collection[PeerId]) -> list[PeerId]:
        """Return the living owners whose word is overdue: I have closed the phase, and a quorum of voters has spoken.

        Nobody if the proposer is one of them: then there will be no cut.
        """
        table, stage = self.table, self._stage
        if stage is None or stage.standing is not None or not stage.is_late:
            return []
        words = stage.words
        stated = {
            index for index in range(table.num_parts) if index in words.get(index, ()) or index not in table.owners
        }
        if not table.electorate.is_quorum(table.members[index] for index in stated):
            return []
        owners = {table.members[part] for part in table.owners - stated - {table.me}}
        return [] if table.members[0] in owners else sorted(owners & set(active))

    def awaits_holders(self, active: Collection[PeerId]) -> bool:
        """Return True if a part's first living holder has not said all of it yet; False if the proposer has not."""
        stage = self._stage
        if stage is None or stage.standing is not None:
            return False
        first = {part: holder for part in self.table.owners for holder in self.table.living(part, active)[:1]}
        open_, words = stage.open_parts(), stage.words
        late = {holder for part, holder in first.items() if part in open_ or part not in words.get(holder, ())}
        return bool(late) and 0 not in late

    def bound_to(self, action: FetchBytes | CompareSketch) -> tuple[wire.Signed, ...]:
        """Return the statements that bind a peer to these bytes, for a claim; empty if they are gone."""
        table = self.table
        match action:
            case FetchPart():
                commit = table.signed_commit(action.contributor)
                return (commit, table.signed) if commit is not None else ()
            case FetchOutput() if self._outputs is not None and self._judge_phase is not None:
                result, cut = self._outputs[0].result(action.part, action.source), self._judge_phase.stage.signed
                return (result, cut, table.signed) if result is not None and cut is not None else ()
            case CompareSketch(seed, _, contributor):
                found = [sketches.signed(contributor) for sketches in self._sketches(seed)]
                commit = table.signed_commit(contributor)
                signed = [sketch for sketch in found if sketch is not None]
                return (*signed, commit, table.signed) if signed and commit is not None else ()
        return ()

    def part_for(self, name: bytes, reader: PeerId) -> FetchPart | None:
        """Return how I fetch the part of a contribution, by its name, for another member; None unless we may both read it."""
        table = self.table
        for part in (table.deputized | self.collect_phase.duties) & table.owners:
            readers = table.voters if self.is_weighed else table.others_with(part, ())
            for index, commit in table.commits().items() if reader in readers else ():
                cells, source = table.cells(part), table.members[index]
                num_bytes, hash_ = self._setup.spec.part_bytes(cells, commit.codec), commit.parts[part]
                found = FetchPart(part, source, hash_, cells, num_bytes or 0, readers, contributor=index)
                if num_bytes is not None and found.name == name and index != table.me:
                    return found
        return None

    def missing(self, living: Collection[PeerId]) -> str:
        """Return the messages that the current phase waits for, in one line for a person."""
        table, stage = self.table, self._stage
        if self.phase is Phase.CONFIRM:
            if not self._facts.of(wire.Propose, table.slot):
                return f"Propose from {table.members[0]}"
            kind = wire.Precommit if self._facts.of(wire.Precommit) else wire.Prevote
            received = self._facts.of(kind, table.slot).keys()
            expected = sorted(set(living) & table.electorate.votes.keys() - received)
            return f"{kind.__name__} from {', '.join(expected) or 'nobody'}"
        if self.phase is Phase.REDUCE and self._outputs is not None:
            owners = [table.members[part] for part in sorted(table.owners - self._outputs[0].outputs.keys())]
            return f"outputs of {', '.join(owners) or 'nobody'}"
        if self._outputs is not None:
            return self._outputs[1].waits_for()
        if self._judge_phase is not None and (mute := self._judge_phase.missing()):
            return f"Sketch from {', '.join(table.members[index] for index in mute)}"
        late = stage.unheard(living).values() if stage is not None else ()
        silent = sorted({table.members[index] for each in late for index in each})
        return f"Have from {', '.join(silent)}" if silent else "the proposer's cut"

    def advance(self, active: Collection[PeerId]) -> list[Action]:
        """Return all actions that the messages allow now."""
        actions = self.collect_phase.advance(active)
        stage = self.collect_phase.stage
        if stage.standing is None and not self.failure:
            actions += [*stage.propose(active), *stage.take()]
            actions += self._left_out()
            if stage.standing is not None:
                actions += self.collect_phase.advance(active)  # Who has not spoken yet does so now.
        actions += self.table.notes()
        if spoken_of := self._spoken_of():
            others = self.table.members[0], *self._voters(active)
            moment = self.step, self.phase in self._closed
            actions += self._ask({index: (*by, *others) for index, by in spoken_of.items()}, moment)
        if ahead := self._left_behind():
            others = *ranked(self.table.slot, ahead), *self._voters(active)
            actions += self._ask({0: others}, ("left behind", self.step, self.table.electorate.is_quorum(ahead)))
        if self._outputs is not None and self._facts.of(wire.Propose, self.table.slot):
            missing = {*self._outputs[1].missing(), *self._outputs[1].lacking()}  # Its proposer has them.
            others = self.table.members[0], *self._voters(active)
            actions += self._ask(dict.fromkeys(missing, others), wire.Propose)
        if stage.standing is not None and self._judge_phase is None and not self._uncommitted():
            self._judge_phase = JudgePhase(self._setup, self._facts, self.table, self.collect_phase, stage)
        judge = self._judge_phase
        if judge is not None and self._outputs is None and not self.failure:
            actions += judge.advance(active)
            if judge.weights and judge.stage.standing is not None and not self.failure:
                standing = judge.stage.standing
                actions += [*self._not_judged(judge.order), *judge.weigh(standing.holders)]
                reduced = ReducePhase(
                    self._setup, self._facts, self.table, self.collect_phase, judge.stage.hash, standing
                )
                phases = self.collect_phase, judge, reduced
                self._outputs = reduced, CheckPhase(self._setup, self._facts, self.table, phases)
        if self._outputs is not None and judge is not None and not self.failure:
            actions += self._reduce(judge, *self._outputs, active)
            actions += self.collect_phase.advance(active)  # A new duty, where an output or a sketch is missing.
        return actions

    @property
    def _stage(self) -> Stage | None:
        """The exchange of words that has no cut yet; None once both have."""
        if not self.is_cut:
            return self.collect_phase.stage
        judge = self._judge_phase
        return judge.stage if judge is not None and judge.stage.standing is None else None

    def _spoken_of(self) -> dict[int, list[PeerId]]:
        """Return the members whose Commit or Sketch others have and I lack, and who says in its word that it has it.

        So too whose word the proposer's cut names: its author may have sent it to the proposer alone, or be banned here.
        Where a cut is here the one that counts: with two different ones, or one that was sent to some, I may have another.
        """
        table, judge, missing = self.table, self._judge_phase, list[int]()
        stage = self.collect_phase.stage if judge is None else judge.stage
        names = stage.standing.names if stage.standing is not None else {}
        if judge is None:
            is_all = len(table.commits()) == len(table.training)
            missing = self._uncommitted() if names else [] if is_all else sorted(table.training - table.commits().keys())
        elif self._outputs is None:
            missing = judge.missing()
        found: dict[int, list[PeerId]] = {}
        words = stage.words if missing else {}
        for index in missing:
            name = names.get(index)
            has = (
                by
                for by, it in words.items()
                if any(index in held and name in (None, held[index]) for held in it.values())
            )
            found[index] = [table.members[by] for by in sorted(has)]
        named = self._stage.missing() if self._stage is not None else []
        return {index: by for index, by in found.items() if by or names} | {index: [] for index in named}

    def _awaits_proposer(self) -> bool:
        """Return True if nothing is missing but what the proposer says."""
        if self.table.me == 0:
            return False
        if (stage := self._stage) is not None:
            return not stage.is_named
        return self._outputs is not None and self._outputs[1].named is None

    def _left_behind(self) -> set[PeerId]:
        """Return the voters that name a cut, or outputs, which the proposer has not sent me: a third of the votes, or nobody.

        Without asking at once I would be late with what I make, and be blamed for it.
        """
        if not self._awaits_proposer():
            return set()
        table = self.table
        sketches = self._facts.every(wire.Sketch, table.slot)
        if self._stage is None:
            ahead = {signed.sender for signed, sketch in sketches if sketch.outputs}
        else:
            results = self._facts.every(wire.Result, table.slot)
            ahead = {signed.sender for signed, sketch in sketches if not table.has_cut(sketch.cut)}
            ahead |= {signed.sender for signed, result in results if not table.has_cut(result.cut)}
        ahead &= table.electorate.votes.keys()
        return ahead if table.electorate.votes_of(ahead) >= table.electorate.third else set()

    def _uncommitted(self) -> list[int]:
        """Return the members that are in, and whose Commit that counts is not here."""
        found = self.collect_phase.stage.standing
        names = found.names if found is not None else {}
        return [index for index, name in names.items() if self.table.commit_named(index, name) is None]

    def _left_out(self) -> list[Action]:
        found, table = self.collect_phase.stage.standing, self.table
        if found is None:
            return []
        notes: list[Action] = []
        for index in sorted(table.training):
            parts = [part for part, counted in found.parts.items() if index not in counted]
            if index not in found.names:
                reason = self.collect_phase.why_left_out(index)
                notes.append(Note("round.left_out", table.members[index], "cut", reason))
            elif parts:
                holders = ", ".join(sorted({table.members[found.holders[part]] for part in parts}))
                reason = f"it counts as zeros in {len(parts)} of {len(found.parts)} parts: those of {holders}"
                notes.append(Note("round.masked", table.members[index], "cut", reason))
        return notes

    def _not_judged(self, order: Collection[int]) -> list[Action]:
        """Note who is in by the first cut, and has no true sketch by the words that the second one names."""
        found, reason = self.collect_phase.stage.standing, "the owners have no true sketch of its contribution"
        lost = sorted(found.names.keys() - {*order}) if found is not None else []
        return [Note("round.left_out", self.table.members[index], "judge", reason) for index in lost]

    def _sketches(self, seed: bytes) -> list[SketchExchange]:
        first = [self._judge_phase.sketches] if self._judge_phase is not None else []
        later = self._outputs[1].sketches(seed) if self._outputs is not None else []
        return [sketches for sketches in (*first, *later) if sketches.seed == seed]

    def _reduce(
        self, judge: JudgePhase, reduced: ReducePhase, checked: CheckPhase, active: Collection[PeerId]
    ) -> list[Action]:
        table, actions, standing = self.table, list[Action](), judge.stage.standing
        assert standing is not None
        mine = {part for part, holder in standing.holders.items() if holder == table.me} | self.collect_phase.duties
        for part in sorted(mine - self._reducing):
            weights = judge.weights[part]
            if self.collect_phase.holds(part, [index for index, it in zip(judge.order, weights, strict=True) if it]):
                self._reducing.add(part)
                actions.append(Reduce(judge.stage.hash, part, judge.order, weights, table.cells(part)))
            elif part in checked.given_up:
                self._reducing.add(part)
                reason = f"it counts as zeros in part {part}, whose bytes did not come"
                actions.append(Note("round.zeros", table.members[standing.holders[part]], "check", reason))
                actions.append(Reduce(judge.stage.hash, part, (), (), table.cells(part)))
        actions += [*reduced.advance(), *checked.advance(active), *reduced.advance()]
        if not reduced.is_whole or self.failure:
            return actions
        outputs = reduced.hashes()
        if outputs not in self._roots:
            self._roots[outputs] = None
            actions.append(Finalize(table.roster.bounds, outputs))
        actions += checked.check()
        root = self._roots[outputs]
        if root is not None and outputs != self._valued and checked.is_checked(outputs):
            self.value, self._valued = encode(self._made_value(outputs, root, judge)), outputs
        return actions

    def _made_value(self, outputs: tuple[bytes, ...], next_root: bytes, judge: JudgePhase) -> wire.Value:
        slot, roster, credit, before = self.table.slot, self.table.roster, judge.credit(), self._setup.before
        return wire.Value(
            slot.run,
            slot.round,
            slot.previous,
            roster.base_root,
            roster.members,
            roster.bounds,
            roster.seats,
            self.cut,
            judge.order,
            outputs,
            next_root,
            min(sum(credit) + (before.tokens if before is not None else 0), wire.MAX_COUNT),
            judge.flagged,
            roster.revision,
            credit,
            absent_after(self.table.electorate, roster.members),
        )
