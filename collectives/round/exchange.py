"""An attempt under a roster: COLLECT to CHECK, up to the value that it makes. Pure.

The machine (`machine`) owns it: messages come in from there, `advance` returns the actions that they allow, and
`failure` holds the reason to abandon the round. `collect` does COLLECT, `judge` JUDGE and CHECK, `outputs` REDUCE; the
transitions between them are here.
"""

from collections.abc import Collection, Mapping

from ...peer import wire
from ...peer.transport import PeerId
from ...peer.wire.schema import encode
from ..agreement.actions import Note
from ..chain.certificate import commits_hash
from ..chain.quorum import ranked
from ..lines import StatedLines
from .actions import (
    Action,
    AskFor,
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
from .collect import CollectPhase
from .facts import MessageLog
from .judge import JudgePhase, SketchExchange
from .outputs import ReducePhase
from .roster import RosterView

MAX_WITHHELD, ASKED_OF = 8, 2
"""Contributors whose messages I ask others for after one deadline, and whom I ask: one of the two may lie."""


class RosterRound:
    """One member's state of an attempt under one roster."""

    def __init__(self, setup: Setup, facts: MessageLog, table: RosterView) -> None:
        self.collect_phase = CollectPhase(setup, facts, table)
        self.value: bytes | None = None
        """The encoded `wire.Value` that my outputs and their root make; None before they are checked."""
        self.cut: wire.Cut | None = None
        """The certified cut."""
        self._setup = setup
        self._facts = facts
        self.table = table
        self._failure = ""
        self._newest: tuple[int, tuple[wire.Signed | None, wire.Cut | None]] = 0, (None, None)
        """How many cuts had arrived when I last looked for the proposer's newest, and that one."""
        self._cut_signed: wire.Signed | None = None
        self._cut_hash = b""
        self._acked: set[bytes] = set()
        self._disputed: set[bytes] = set()
        """The cuts that name other commits than those that were sent to me."""
        self._unshared: set[bytes] = set()
        """The cuts that leave out most of the contributions, as far as I know."""
        self._reset()

    def _reset(self) -> None:
        """Start JUDGE and REDUCE, for the first time or after a re-cut."""
        self.reduce_phase = ReducePhase(self._setup, self._facts, self.table, self.collect_phase, self._cut_hash)
        self._judge_phase: JudgePhase | None = None
        if self.cut is not None:
            self._judge_phase = JudgePhase(
                self._setup, self._facts, self.table, self.collect_phase, self.cut, self._cut_hash
            )
        self._roots: dict[tuple[bytes, ...], bytes | None] = {}
        """By outputs, the state root that they lead to; None while it is computed."""
        self._reducing: set[int] = set()
        self._timed_out: set[Phase] = set()

    @property
    def bounds(self) -> tuple[int, ...]:
        """The cells of each part."""
        return self.table.roster.bounds

    @property
    def my_rate(self) -> int:
        """The bytes/s that others have received from me over one connection each; 0 before they have measured it."""
        table = self.table
        return StatedLines(table.readies, self._setup.last, table.electorate.frontier).measured(table.members[table.me])

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
        if not self._judge_phase.weights:
            return Phase.JUDGE
        return Phase.CHECK if self.reduce_phase.is_whole else Phase.REDUCE

    @property
    def cuts(self) -> tuple[bytes, ...]:
        """The hashes of the proposer's cuts."""
        cuts, proposer = self._facts.every(wire.Cut, self.table.slot), self.table.members[0]
        return tuple(signed.hash for signed, _ in cuts if signed.sender == proposer)

    @property
    def is_bound(self) -> bool:
        """True if I have acknowledged a cut."""
        return bool(self._acked)

    @property
    def failure(self) -> str:
        """Why the round must be abandoned; empty while it can go on."""
        judged = self._judge_phase.failure if self._judge_phase is not None else ""
        return self._failure or judged or self.collect_phase.failure

    def reduced(self, cut: bytes, part: int, output: bytes) -> list[Action]:
        """Publish a part's output for a cut: it is encoded and served under this hash."""
        if self._judge_phase is None or cut != self._cut_hash:
            return []
        weights = self._judge_phase.weights[part]
        return [Send(self.table.members, wire.Result(self.table.slot, cut, part, weights, output))]

    def equivocates(self, peer: PeerId, message: wire.RoundMessage) -> None:
        """Leave out a contributor that has sent two commits: keys are free, and each could void an attempt by that."""
        is_judged = not self._setup.rule.blind and self.phase not in (Phase.COLLECT, Phase.JUDGE)
        if not isinstance(message, wire.Commit) or peer not in self.table.places or is_judged:
            return  # Once a quorum has judged one of them, the other one hinders nobody.
        if place := self.table.places[peer]:
            self.collect_phase.refuse([place])
        else:
            self._failure = "the proposer has sent two commits"

    def sketched(self, seed: bytes, tables: bytes) -> list[Action]:
        """Send my finished sketches under a seed."""
        return [action for sketches in self._sketches(seed) for action in sketches.sketched(tables)]

    def compared(self, action: CompareSketch) -> None:
        """Record that a contributor's sketch of its part matches the bytes."""
        for sketches in self._sketches(action.seed):
            sketches.is_true(action.part, action.contributor)

    def judged(self, cut: bytes, weights: tuple[tuple[float, ...], ...], flagged: Mapping[int, str]) -> list[Action]:
        """Take the rule's result: the weights of each part, and the flagged contributors, both in the order of the cut."""
        if self._judge_phase is None or cut != self._cut_hash:
            return []
        return self._judge_phase.judged(weights, flagged)

    def checked(self, action: CheckOutputs, false: Collection[int], doubtful: Collection[int]) -> list[Action]:
        """Take the false outputs, by part, and the contributors whose two sketches differ, in the order of the cut."""
        if self._judge_phase is None or not self._sketches(action.seed) or self.reduce_phase.outputs != action.outputs:
            return []
        actions = self._judge_phase.checked(action, false, doubtful)
        for part in false:
            # Or a contributor has sent me another sketch than to its owner: both together convict that one.
            offered = self.reduce_phase.offered(part)
            actions += [Forward(offered, signed) for signed in self._judge_phase.second_sketches]
            actions += self.reduce_phase.refuse(part)
        return actions

    def finalized(self, outputs: tuple[bytes, ...], next_root: bytes) -> None:
        """Record the state root that these outputs lead to."""
        self._roots[outputs] = next_root

    def on_timeout(self) -> bool:
        """React to a timeout, once per phase. Return True if waiting longer can still change the result."""
        phase = self.phase
        if phase is Phase.REDUCE:
            return self.reduce_phase.on_timeout()
        if phase in self._timed_out or phase not in (Phase.JUDGE, Phase.CHECK) or self._judge_phase is None:
            return False
        self._timed_out.add(phase)
        self._judge_phase.on_timeout()
        return True

    def ask(self, active: Collection[PeerId]) -> list[Action]:
        """Ask others for what members have sent to them, and not to me: Commits, sketches, Results.

        Who withholds one message from a few voters could else waste the attempts of all proposers.
        """
        table, (_, cut) = self.table, self._newest_cut()
        if cut is None:
            return []
        voters = ranked(table.slot, table.electorate.votes.keys() & set(active))
        missing = set(cut.contributors) - table.commits().keys()
        if self._judge_phase is not None and self.phase in (Phase.JUDGE, Phase.CHECK):
            missing |= self._judge_phase.current.missing
        asked = {index: (table.members[0], *voters) for index in missing if index < len(table.members)}
        if self.phase is Phase.REDUCE:  # Its deputies have the output of an owner, or make it.
            parts = table.owners - self.reduce_phase.outputs.keys()
            asked |= {part: table.others_with(part, {part}) for part in parts}
        actions: list[Action] = []
        for index, others in sorted(asked.items())[:MAX_WITHHELD]:
            peer, me = table.members[index], table.members[table.me]
            to = [other for other in dict.fromkeys(others) if other not in (peer, me)]
            actions += [AskFor(tuple(to[:ASKED_OF]), peer)] if peer != me else []
        return actions

    def lost(self, peer: PeerId) -> list[Action]:
        """Forward a lost peer's sketches to all, which need them to keep its contribution in the cut."""
        sketches = self._judge_phase.current.signed(self.table.places[peer]) if self._judge_phase is not None else None
        if sketches is None or self._setup.is_banned(peer):
            return []
        return [Forward(self.table.members, sketches)]

    def show_haves(self) -> list[Action]:
        """Forward the proposer the Haves of the owners that I stand in for: they may have sent it none."""
        table = self.table
        owners = [index for index in table.haves() if table.me in table.deputies(index) and index != 0]
        return [Forward(table.members[:1], self._facts.signed(wire.Have, table.members[index])) for index in owners]

    def silent(self, active: Collection[PeerId]) -> list[PeerId]:
        """Return the living owners whose Have is overdue: I have closed the phase, and a quorum of voters too.

        Nobody if the proposer is one of them: then there will be no cut.
        """
        if not self.collect_phase.is_closed:
            return []
        table, haves = self.table, self.table.haves()
        stated = {index for index in range(len(table.members)) if index in haves or index not in table.owners}
        if not table.electorate.is_quorum(table.members[index] for index in stated):
            return []
        owners = {table.members[part] for part in table.owners - stated - {table.me}}
        return [] if table.members[0] in owners else sorted(owners & set(active))

    def awaits_holders(self, active: Collection[PeerId]) -> bool:
        """Return True if a part's living holder has not stated what it holds of it; False if the proposer has not."""
        table = self.table
        holders = {part: table.holder(part, active) for part in table.owners}
        late = {holder for part, holder in holders.items() if holder is not None and table.held(holder, part) is None}
        return bool(late) and 0 not in late

    def bound_to(self, action: FetchBytes | CompareSketch) -> tuple[wire.Signed, ...]:
        """Return the statements that bind a peer to these bytes, for a claim; empty if they are gone."""
        table = self.table
        match action:
            case FetchPart():
                return (*table.commits_signed([action.contributor]), table.signed)
            case FetchOutput():
                result, cut = self.reduce_phase.result(action.part, action.source), self._cut_signed
                return (result, cut, table.signed) if result is not None and cut is not None else ()
            case CompareSketch(seed, _, contributor):
                found = [sketches.signed(contributor) for sketches in self._sketches(seed)]
                signed = [sketch for sketch in found if sketch is not None]
                return (*signed, *table.commits_signed([contributor]), table.signed) if signed else ()
        return ()

    def part_for(self, name: bytes, reader: PeerId) -> FetchPart | None:
        """Return how I fetch the part of a contribution, by its name, for another member; None unless we may both read it."""
        table = self.table
        for part in (table.deputized | {table.me}) & table.owners:
            readers = table.others_with(part, ())
            for index, commit in table.commits().items() if reader in readers else ():
                cells, source = table.cells(part), table.members[index]
                num_bytes, hash_ = self._setup.part_bytes(cells, commit.codec), commit.parts[part]
                found = FetchPart(part, source, hash_, cells, num_bytes or 0, readers, contributor=index)
                if num_bytes is not None and found.name == name and index != table.me:
                    return found
        return None

    def _sketches(self, seed: bytes) -> list[SketchExchange]:
        return self._judge_phase.sketches(seed) if self._judge_phase is not None else []

    def missing(self, living: Collection[PeerId]) -> str:
        """Return the messages that the current phase waits for, in one line for a person."""
        table = self.table
        match self.phase:
            case Phase.CONFIRM:
                if not self._facts.of(wire.Propose, table.slot):
                    return f"Propose from {table.members[0]}"
                kind = wire.Precommit if self._facts.of(wire.Precommit) else wire.Prevote
                received = self._facts.of(kind, table.slot).keys()
                expected = sorted(set(living) & table.electorate.votes.keys() - received)
                return f"{kind.__name__} from {', '.join(expected) or 'nobody'}"
            case Phase.JUDGE | Phase.CHECK if self._judge_phase is not None:
                return self._judge_phase.current.silent()
            case Phase.REDUCE:
                owners = [table.members[part] for part in sorted(table.owners - self.reduce_phase.outputs.keys())]
                return f"outputs of {', '.join(owners) or 'nobody'}"
        holders = {table.members[part] for part in table.owners} & set(living)
        silent = holders - {table.members[index] for index in table.haves()}
        return f"Have from {', '.join(sorted(silent))}" if silent else "a quorum for the cut"

    def may_change(self, sender: PeerId, message: wire.RoundMessage) -> bool:
        """Return True if a new message can change anything now; if not, it counts with the next one that can."""
        if self.value is not None:
            return isinstance(message, wire.Sketch)
        match message:
            case wire.Have():
                return bool(self._unshared) or self.collect_phase.needs_have_of(sender)
            case wire.CutAck():
                return message.cut != self._cut_hash and self._is_acknowledged(message.cut)
            case wire.Result():
                return message.cut == self._cut_hash
            case wire.Sketch():
                return message.cut == self._cut_hash
            case wire.Prevote():
                return bool(self.reduce_phase.withheld)
        return isinstance(message, (wire.Commit, wire.Cut))

    def advance(self, active: Collection[PeerId]) -> list[Action]:
        """Return all actions that the messages allow now."""
        if self.value is not None and self._judge_phase is not None:
            return self._judge_phase.answer()
        signed, cut = self._newest_cut()
        actions = self._take_cut(signed, cut, active)
        if not self.failure:
            if self._judge_phase is not None:
                self._judge_phase.miss(active)
            actions += self.collect_phase.advance(active, cut)
        actions += self.table.notes()
        judge_phase = self._judge_phase
        if judge_phase is not None and not judge_phase.weights and not self.failure:
            actions += judge_phase.judge()
        if self.cut is not None and judge_phase is not None and judge_phase.weights and not self.failure:
            actions += self._reduce(self.cut, judge_phase)
            actions += self.collect_phase.advance(active, cut)  # A deputy's new duty, if an output was refused.
        return actions

    def _is_acknowledged(self, cut: bytes) -> bool:
        """Return True if a quorum of the voters has acknowledged a cut: nobody can choose another one for its seed now.

        A rule that is blind to contributions takes no sketches, so no seed: it waits for nobody.
        """
        return self._setup.rule.blind or self.table.electorate.is_quorum(self._facts.acknowledged(cut))

    def _newest_cut(self) -> tuple[wire.Signed | None, wire.Cut | None]:
        """Return the proposer's cut of the highest version."""
        if (num_cuts := self._facts.num_ever(wire.Cut)) > self._newest[0]:
            proposer = self.table.members[0]
            cuts = [item for item in self._facts.every(wire.Cut, self.table.slot) if item[0].sender == proposer]
            self._newest = num_cuts, max(cuts, key=lambda item: item[1].version, default=(None, None))
        return self._newest[1]

    def _take_cut(self, signed: wire.Signed | None, cut: wire.Cut | None, active: Collection[PeerId]) -> list[Action]:
        """Prevote the newest cut, and reduce by it once a quorum of the voters has acknowledged it."""
        table = self.table
        if signed is None or cut is None or signed is self._cut_signed or signed.hash == self._cut_hash:
            return []
        actions = [] if signed.hash in self._acked else self._accept(signed, cut, active)
        if signed.hash not in self._acked or self._failure:
            return actions
        if not self._is_acknowledged(signed.hash):
            return actions
        self.cut, self._cut_signed, self._cut_hash = cut, signed, signed.hash
        self._reset()
        for index, peer in enumerate(table.members):
            if index in table.training and index not in cut.contributors:
                actions.append(Note("round.left_out", peer, "cut", self.collect_phase.why_left_out(index)))
        return actions

    def _accept(self, signed: wire.Signed, cut: wire.Cut, active: Collection[PeerId]) -> list[Action]:
        """Prevote and acknowledge a valid cut once I hold its contributions to my own part."""
        table, order = self.table, cut.contributors
        if (flaw := table.why_not_cut(cut)) is not None:
            self._failure = flaw
            return [Note("peer.charged", signed.sender, "cut", flaw), Forward(table.members, signed)]
        # A part that was taken from me I need not hold: the cut opens the nonce of its new holder.
        mine = {table.me} & table.owners & dict(cut.nonces).keys()
        if not set(order) <= table.commits().keys() or not all(self.collect_phase.holds(part, order) for part in mine):
            return []  # What is in flight may still arrive; if not, the deadline ends the wait.
        if cut.commits != commits_hash(table.commits_signed(order)):
            if signed.hash in self._disputed:
                return []
            self._disputed.add(signed.hash)
            # A contributor has equivocated, and the proposer cuts again without it. The commits that I have prove it to
            # the proposer, or to all if it is its own.
            commits = dict(zip(order, table.commits_signed(order), strict=True))
            own = commits.get(table.places[signed.sender])
            spread = [Forward(table.members, own)] if own is not None else []
            # Or the proposer has: who has another cut of this version can prove it.
            return [
                Note("round.refused", signed.sender, "Cut", "it names other commits than those that were sent to me"),
                Forward(table.members, signed),
                *spread,
                *(Forward((signed.sender,), commit) for commit in commits.values()),
            ]
        mute = self._judge_phase.current.missing if self._judge_phase is not None else ()
        if not self.collect_phase.is_shared(order, cut.version, active, mute):
            # A Have that is still on its way may say why. If not, the deadline ends the wait.
            reason = "it leaves out most of the contributions that all holders have"
            is_new = signed.hash not in self._unshared
            self._unshared.add(signed.hash)
            return [Note("round.refused", signed.sender, "Cut", reason)] if is_new else []
        self._unshared.discard(signed.hash)
        self._acked.add(signed.hash)
        return [] if self._setup.rule.blind else [Send(table.members, wire.CutAck(table.slot, signed.hash))]

    def _reduce(self, cut: wire.Cut, judge_phase: JudgePhase) -> list[Action]:
        table, weights = self.table, judge_phase.weights
        actions: list[Action] = []
        duties = self.collect_phase.duties
        for part in sorted(duties - self._reducing) if len(duties) > len(self._reducing) else ():
            if self.collect_phase.holds(part, cut.contributors):
                self._reducing.add(part)
                actions.append(Reduce(self._cut_hash, part, cut.contributors, weights[part], table.cells(part)))
        actions += self.reduce_phase.advance(weights)
        outputs = self.reduce_phase.hashes() if self.reduce_phase.is_whole else ()
        if outputs and outputs not in self._roots:
            self._roots[outputs] = None
            actions.append(Finalize(table.roster.bounds, outputs))
        if not self.failure:
            actions += judge_phase.check(self.reduce_phase) if outputs else judge_phase.answer()
        root = self._roots.get(outputs)
        if root is not None and not self.failure and judge_phase.is_checked(outputs):
            self.value = encode(self._made_value(cut, outputs, root, judge_phase))
        return actions

    def _made_value(
        self, cut: wire.Cut, outputs: tuple[bytes, ...], next_root: bytes, judge_phase: JudgePhase
    ) -> wire.Value:
        slot, roster, credit = self.table.slot, self.table.roster, judge_phase.credit()
        return wire.Value(
            slot.run,
            slot.round,
            slot.previous,
            roster.base_root,
            roster.members,
            roster.bounds,
            roster.seats,
            self._cut_hash,
            cut.contributors,
            outputs,
            next_root,
            min(self._setup.tokens_before + sum(credit), wire.MAX_COUNT),
            judge_phase.flagged,
            roster.revision,
            credit,
        )
