"""A round under a certified roster: COLLECT to CONFIRM, up to a quorum of results. Pure.

The machine (`machine`) owns it: messages come in from there, `advance` returns the actions that they allow, and
`failure` holds the reason to abandon the round. `collect` does COLLECT, `judge` JUDGE and CHECK, `outputs` REDUCE; the
transitions between them are here.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace

from ...peer import wire
from ...peer.transport import PeerId
from ...peer.wire.schema import encode
from ..accountability.trust import round_tokens
from ..chain.certificate import commits_hash, result_of
from ..chain.quorum import quorum, suffices
from .actions import (
    Action,
    CheckOutputs,
    CompareSketch,
    FetchOutput,
    FetchPart,
    Finalize,
    Forward,
    Note,
    Outcome,
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


class RosterRound:
    """One member's state of a round under one roster."""

    def __init__(self, setup: Setup, facts: MessageLog, table: RosterView) -> None:
        self.collect_phase = CollectPhase(setup, facts, table)
        self.certificate: wire.Certificate | None = None
        self.cut: wire.Cut | None = None
        """The certified cut."""
        self.next_root: bytes | None = None
        self._setup = setup
        self._facts = facts
        self._table = table
        self._quorum = quorum(len(table.members))
        self._failure = ""
        self._cut_signed: wire.Signed | None = None
        self._cut_hash = b""
        self._mine_encoded = b""
        self._acked: set[bytes] = set()
        self._mine: wire.ResultAck | None = None
        self._agreed: dict[PeerId, wire.Signed] = {}
        self._acks_read = 0
        self._cuts_seen = (0, 0)
        self._newest: tuple[wire.Signed | None, wire.Cut | None] = (None, None)
        """A cache of the newest cut, by the numbers of cuts and of living members, which change in one direction only."""
        self._reset()

    def _reset(self) -> None:
        """Start JUDGE and REDUCE, for the first time or after a re-cut."""
        self.reduce_phase = ReducePhase(self._setup, self._facts, self._table, self.collect_phase, self._cut_hash)
        self._judge_phase: JudgePhase | None = None
        if self.cut is not None:
            self._judge_phase = JudgePhase(
                self._setup, self._facts, self._table, self.collect_phase, self.cut, self._cut_hash
            )
        self.next_root = None
        self._made: dict[int, bytes] = {}
        self._reducing: set[int] = set()
        self._published: set[int] = set()
        self._finalizing: tuple[bytes, ...] = ()
        self._timed_out: set[Phase] = set()

    @property
    def phase(self) -> Phase:
        """The current phase."""
        if self._mine is not None:
            return Phase.CONFIRM
        if self._judge_phase is None:
            return Phase.COLLECT
        if not self._judge_phase.weights:
            return Phase.JUDGE
        return Phase.CHECK if self.reduce_phase.is_whole else Phase.REDUCE

    @property
    def is_bound(self) -> bool:
        """True if I have acknowledged a cut."""
        return bool(self._acked)

    @property
    def failure(self) -> str:
        """Why the round must be abandoned; empty while it can go on."""
        judged = self._judge_phase.failure if self._judge_phase is not None else ""
        return self._failure or judged or self.reduce_phase.failure or self.collect_phase.failure

    def reduced(self, cut: bytes, part: int, output: bytes) -> None:
        """Record that a part's output for a cut is encoded and served under this hash."""
        if cut == self._cut_hash:
            self._made[part] = output

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
            actions += self.reduce_phase.refuse(part)
            self.next_root, self._finalizing = None, ()
        return actions

    def finalized(self, outputs: tuple[bytes, ...], next_root: bytes) -> None:
        """Record the state root that these outputs lead to."""
        if outputs == self.reduce_phase.hashes():
            self.next_root = next_root

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

    def lost(self, peer: PeerId) -> list[Action]:
        """Forward a lost peer's sketches to all, which need them to keep its contribution in the cut."""
        sketches = self._judge_phase.signed(self._table.places[peer]) if self._judge_phase is not None else None
        if sketches is None or self._setup.is_banned(peer):
            return []
        return [Forward(self._table.members, sketches)]

    def bound_to(self, action: FetchPart | FetchOutput | CompareSketch) -> tuple[wire.Signed, ...]:
        """Return the statements that bind a peer to these bytes, for a claim; empty if they are gone."""
        table = self._table
        match action:
            case FetchPart():
                return (*table.commits_signed([action.contributor]), table.signed)
            case FetchOutput():
                result, cut = self.reduce_phase.result(action.part, action.source), self._cut_signed
                return (result, cut, table.signed) if result is not None and cut is not None else ()
        found = [sketches.signed(action.contributor) for sketches in self._sketches(action.seed)]
        signed = [sketch for sketch in found if sketch is not None]
        return (*signed, *table.commits_signed([action.contributor]), table.signed) if signed else ()

    def _sketches(self, seed: bytes) -> list[SketchExchange]:
        return self._judge_phase.sketches(seed) if self._judge_phase is not None else []

    def holds(self, result: wire.ResultAck) -> bool:
        """Return True if I hold all that a result acknowledges."""
        return self.next_root == result.next_root and self.reduce_phase.hashes() == result.outputs

    def certified(self, outcome: Outcome, certificate: wire.Certificate, *, after_all: bool) -> Outcome:
        """Return the outcome of a certified round whose outputs I hold; `after_all`: I had abandoned it."""
        assert self.cut is not None
        return replace(
            outcome,
            cut=tuple(self._table.members[index] for index in self.cut.contributors),
            bounds=self._table.roster.bounds,
            outputs=self.reduce_phase.hashes(),
            root=self.next_root or b"",
            tokens=result_of(certificate).tokens,
            certificate=certificate,
            # Other members that abandoned it may lack the signatures that I have.
            gave_up=self._table.members if after_all else tuple(self._facts.of(wire.Void, self._table.slot)),
            lied=self.reduce_phase.liars(),
        )

    def missing(self, living: Collection[PeerId]) -> str:
        """Return the messages that the current phase waits for, in one line for a person."""
        table = self._table
        match self.phase:
            case Phase.CONFIRM:
                received = set(self._facts.of(wire.ResultAck, table.slot))
                return f"ResultAck from {', '.join(sorted(set(living) - received)) or 'nobody'}"
            case Phase.JUDGE | Phase.CHECK if self._judge_phase is not None:
                return self._judge_phase.silent()
            case Phase.REDUCE:
                owners = [table.members[part] for part in sorted(table.owners - self.reduce_phase.outputs.keys())]
                return f"outputs of {', '.join(owners) or 'nobody'}"
        holders = {table.members[part] for part in table.owners} & set(living)
        silent = holders - {table.members[index] for index in table.haves()}
        return f"Have from {', '.join(sorted(silent))}" if silent else "a quorum for the cut"

    def may_change(self, sender: PeerId, message: wire.RoundMessage, active: Collection[PeerId]) -> bool:
        """Return True if a new message can change anything now; if not, it counts with the next one that can."""
        if self._mine is not None:
            return isinstance(message, wire.ResultAck | wire.Sketch)
        match message:
            case wire.Have():
                return self.collect_phase.needs_have_of(sender, active)
            case wire.CutAck():
                return message.cut != self._cut_hash and self._num_acks(message.cut) >= self._quorum
            case wire.Result():
                return message.cut == self._cut_hash
            case wire.Sketch():
                return message.cut == self._cut_hash
            case wire.ResultAck():
                return bool(self.reduce_phase.withheld)
        return isinstance(message, (wire.Commit, wire.Cut))

    def advance(self, active: Collection[PeerId]) -> list[Action]:
        """Return all actions that the messages allow now."""
        if self._mine is not None and self._judge_phase is not None:
            return [*self._judge_phase.answer(), *self._confirm()]
        signed, cut = self._newest_cut(active)
        actions = self._take_cut(signed, cut)
        if not self.failure:
            if self._judge_phase is not None:
                self._judge_phase.miss(active)
            actions += self.collect_phase.advance(active, cut)
        judge_phase = self._judge_phase
        if judge_phase is not None and not judge_phase.weights and not self.failure:
            actions += judge_phase.judge()
        if self.cut is not None and judge_phase is not None and judge_phase.weights and not self.failure:
            actions += self._reduce(self.cut, judge_phase)
        return actions

    def _num_acks(self, cut: bytes) -> int:
        return self._facts.acknowledged(wire.CutAck, self._table.slot, cut)

    def _newest_cut(self, active: Collection[PeerId]) -> tuple[wire.Signed | None, wire.Cut | None]:
        """Return the cut of the highest version, of the latest convener; a convener counts once all before it are lost."""
        table = self._table
        state = self._facts.num_ever(wire.Cut), len(active)
        if state == self._cuts_seen:
            return self._newest
        best: tuple[wire.Signed | None, wire.Cut | None] = (None, None)
        rank = (-1, -1)
        for signed, cut in self._facts.every(wire.Cut, table.slot):
            index = table.places[signed.sender]
            if (cut.version, index) > rank and not any(peer in active for peer in table.members[:index]):
                best, rank = (signed, cut), (cut.version, index)
        self._cuts_seen, self._newest = state, best
        return best

    def _take_cut(self, signed: wire.Signed | None, cut: wire.Cut | None) -> list[Action]:
        """Acknowledge the newest cut, and reduce by it once a quorum has acknowledged it."""
        table = self._table
        if signed is None or cut is None or signed is self._cut_signed or signed.hash == self._cut_hash:
            return []
        actions = [] if signed.hash in self._acked else self._accept(signed, cut)
        if signed.hash not in self._acked or self._failure:
            return actions
        if self._num_acks(signed.hash) < self._quorum:
            return actions
        self.cut, self._cut_signed, self._cut_hash = cut, signed, signed.hash
        self._reset()
        for index, peer in enumerate(table.members):
            if index not in cut.contributors:
                actions.append(Note("round.left_out", peer, "cut", self.collect_phase.why_left_out(index)))
        return actions

    def _accept(self, signed: wire.Signed, cut: wire.Cut) -> list[Action]:
        """Acknowledge a valid cut once I hold its contributions to my own part."""
        table, order = self._table, cut.contributors
        if (flaw := table.why_not_cut(cut, self._quorum)) is not None:
            self._failure = flaw
            return [Note("peer.charged", signed.sender, "cut", flaw)]
        # A part that was taken from me I need not hold: the cut opens the nonce of its new holder.
        mine = {table.me} & table.owners & dict(cut.nonces).keys()
        if not set(order) <= table.commits().keys() or not all(self.collect_phase.holds(part, order) for part in mine):
            return []  # What is in flight may still arrive; if not, the deadline ends the wait.
        if cut.commits != commits_hash(table.commits_signed(order)):
            self._failure = "the convener cut other commits than those that were sent to me"
            # A contributor has equivocated. The commits that I have prove it to the convener, or to all if it is its own.
            commits = dict(zip(order, table.commits_signed(order), strict=True))
            own = commits.get(table.places[signed.sender])
            spread = [Forward(table.members, own)] if own is not None else []
            return [*spread, *(Forward((signed.sender,), commit) for commit in commits.values())]
        self._acked.add(signed.hash)
        return [Send(table.members, wire.CutAck(table.slot, signed.hash))]

    def _reduce(self, cut: wire.Cut, judge_phase: JudgePhase) -> list[Action]:
        table, weights = self._table, judge_phase.weights
        actions: list[Action] = []
        duties = self.collect_phase.duties
        for part in sorted(duties - self._reducing) if len(duties) > len(self._reducing) else ():
            if self.collect_phase.holds(part, cut.contributors):
                self._reducing.add(part)
                actions.append(Reduce(self._cut_hash, part, cut.contributors, weights[part], table.cells(part)))
        for part in sorted(self._made.keys() - self._published) if len(self._made) > len(self._published) else ():
            self._published.add(part)
            result = wire.Result(table.slot, self._cut_hash, part, weights[part], self._made[part])
            actions.append(Send(table.members, result))
        actions += self.reduce_phase.advance(weights)
        outputs = self.reduce_phase.hashes() if self.reduce_phase.is_whole else ()
        if outputs and outputs != self._finalizing:
            self._finalizing = outputs
            actions.append(Finalize(table.roster.bounds, outputs))
        if not self.failure:
            actions += judge_phase.check(self.reduce_phase) if outputs else judge_phase.answer()
        if outputs and not self.failure and judge_phase.is_checked(outputs) and self.next_root is not None:
            actions += self._acknowledge(cut, outputs, self.next_root, judge_phase.flagged)
        return actions

    def _acknowledge(
        self, cut: wire.Cut, outputs: tuple[bytes, ...], next_root: bytes, flagged: tuple[int, ...]
    ) -> list[Action]:
        table = self._table
        added = round_tokens([table.commits()[index].tokens for index in cut.contributors])
        tokens = min(self._setup.tokens_before + added, wire.MAX_COUNT)
        self._mine = wire.ResultAck(
            table.slot, self._cut_hash, outputs, next_root, self._setup.previous, tokens, flagged
        )
        self._mine_encoded = encode(self._mine)
        return [Send(table.members, self._mine)]

    def _confirm(self) -> list[Action]:
        news = self._facts.since(wire.ResultAck, self._acks_read)
        self._acks_read += len(news)
        odd: dict[PeerId, wire.ResultAck] = {}
        for signed, ack in news:
            if signed.payload == self._mine_encoded:
                self._agreed[signed.sender] = signed
            elif ack.slot == self._table.slot:
                odd[signed.sender] = ack
        if len(self._agreed) >= self._quorum and suffices(self._agreed, self._table.members, self._setup.charter.authority):
            assert self._cut_signed is not None
            acks = [self._agreed[peer] for peer in sorted(self._agreed)]
            self.certificate = self._table.certificate(self._cut_signed, acks)
        actions: list[Action] = []
        for peer in sorted(odd):
            actions.append(Note("round.result_differs", peer, "confirm", "its signed result differs from mine"))
            # An owner may have sent it another Result than me: mine lets it prove the equivocation.
            for part, (theirs, mine) in enumerate(zip(odd[peer].outputs, self.reduce_phase.hashes(), strict=False)):
                results = [self.reduce_phase.result(part, source) for source in self._table.members] if theirs != mine else []
                actions += [Forward((peer,), result) for result in results if result is not None]
        return actions
