"""The middle of a round, from a certified roster to a quorum of signed results: COLLECT, JUDGE, REDUCE, CHECK, CONFIRM.

Pure, like `round`, which owns it: facts come in from there, conclusions are drawn by `advance`, and whatever stands in
the way is left in `failure`, for `round` to give up with. `collection` does COLLECT, `judgement` JUDGE and CHECK,
`harvest` fetches the outputs of REDUCE; what leads from one to the next is here.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace

from ...peer import wire
from ...peer.transport import PeerId
from ...peer.wire.schema import encode
from ..chain.certificate import commits_hash, quorum, result_of, suffices
from ..sketches import Sketches
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
from .collect import Collecting
from .judge import Judgement
from .outputs import Harvest
from .roster import Facts, Table


class Exchange:
    """What one member of a roster sends, holds and concludes."""

    def __init__(self, setup: Setup, facts: Facts, table: Table) -> None:
        self.collecting = Collecting(setup, facts, table)
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
        """The newest cut when there were so many cuts, and so many members alive; of these there never come more."""
        self._reset()

    def _reset(self) -> None:
        """Begin to judge and reduce, for the first time or after a re-cut."""
        self.harvest = Harvest(self._setup, self._facts, self._table, self.collecting, self._cut_hash)
        self._judgement: Judgement | None = None
        if self.cut is not None:
            self._judgement = Judgement(
                self._setup, self._facts, self._table, self.collecting, self.cut, self._cut_hash
            )
        self.next_root = None
        self._made: dict[int, bytes] = {}
        self._reducing: set[int] = set()
        self._said: set[int] = set()
        self._finalizing: tuple[bytes, ...] = ()
        self._hastened: set[Phase] = set()

    @property
    def phase(self) -> Phase:
        """Where it stands."""
        if self._mine is not None:
            return Phase.CONFIRM
        if self._judgement is None:
            return Phase.COLLECT
        if not self._judgement.weights:
            return Phase.JUDGE
        return Phase.CHECK if self.harvest.is_whole else Phase.REDUCE

    @property
    def is_bound(self) -> bool:
        """Whether I have acknowledged a cut."""
        return bool(self._acked)

    @property
    def failure(self) -> str:
        """Why it cannot go on; empty while it can."""
        judged = self._judgement.failure if self._judgement is not None else ""
        return self._failure or judged or self.harvest.failure or self.collecting.failure

    def reduced(self, cut: bytes, part: int, output: bytes) -> None:
        """A part's output for that cut is encoded and served under this hash."""
        if cut == self._cut_hash:
            self._made[part] = output

    def sketched(self, after: bytes, tables: bytes) -> list[Action]:
        """My sketches under the seed drawn after `after` are made."""
        return [action for sketches in self._sketches(after) for action in sketches.sketched(tables)]

    def compared(self, action: CompareSketch) -> None:
        """What a contributor says of its part is true."""
        for sketches in self._sketches(action.after):
            sketches.is_true(action.part, action.contributor)

    def judged(self, cut: bytes, weights: tuple[tuple[float, ...], ...], flagged: Mapping[int, str]) -> list[Action]:
        """The rule has spoken: the weights of each part, and who stands out, both in the order of the cut."""
        if self._judgement is None or cut != self._cut_hash:
            return []
        return self._judgement.judged(weights, flagged)

    def checked(self, action: CheckOutputs, false: Collection[int], doubtful: Collection[int]) -> list[Action]:
        """Which outputs are false, by part; and whose two sketches are not of one vector, in the order of the cut."""
        if self._judgement is None or not self._sketches(action.after) or self.harvest.outputs != action.outputs:
            return []
        actions = self._judgement.checked(action, false, doubtful)
        for part in false:
            actions += self.harvest.refuse(part)
            self.next_root, self._finalizing = None, ()
        return actions

    def finalized(self, outputs: tuple[bytes, ...], next_root: bytes) -> None:
        """The state root that these outputs lead to."""
        if outputs == self.harvest.hashes():
            self.next_root = next_root

    def hasten(self) -> bool:
        """Time is up, once in each phase: what can be done without is. Whether that is worth a wait."""
        phase = self.phase
        if phase is Phase.REDUCE:
            return self.harvest.hasten()
        if phase in self._hastened or phase not in (Phase.JUDGE, Phase.CHECK) or self._judgement is None:
            return False
        self._hastened.add(phase)
        self._judgement.hasten()
        return True

    def lost(self, peer: PeerId) -> list[Action]:
        """Somebody is gone: what it said of its contribution, all must have, or the convener cuts again without it."""
        word = self._judgement.word(self._table.places[peer]) if self._judgement is not None else None
        if word is None or self._setup.is_banned(peer):
            return []
        return [Forward(self._table.members, word)]

    def bound_to(self, action: FetchPart | FetchOutput | CompareSketch) -> tuple[wire.Signed, ...]:
        """What binds a peer to the bytes in question, as a claim about them needs it; nothing if that is gone."""
        table = self._table
        match action:
            case FetchPart():
                return (*table.commits_signed([action.contributor]), table.signed)
            case FetchOutput():
                word, cut = self.harvest.result(action.part, action.source), self._cut_signed
                return (word, cut, table.signed) if word is not None and cut is not None else ()
        words = [sketches.word(action.contributor) for sketches in self._sketches(action.after)]
        said = [word for word in words if word is not None]
        return (*said, *table.commits_signed([action.contributor]), table.signed) if said else ()

    def _sketches(self, after: bytes) -> list[Sketches]:
        return self._judgement.sketches(after) if self._judgement is not None else []

    def holds(self, result: wire.ResultAck) -> bool:
        """Whether everything that a result acknowledges is here."""
        return self.next_root == result.next_root and self.harvest.hashes() == result.outputs

    def certified(self, outcome: Outcome, certificate: wire.Certificate, *, after_all: bool) -> Outcome:
        """How a round ends that is certified, and all of which is here; `after_all`: I had given it up."""
        assert self.cut is not None
        return replace(
            outcome,
            cut=tuple(self._table.members[index] for index in self.cut.contributors),
            bounds=self._table.roster.bounds,
            outputs=self.harvest.hashes(),
            root=self.next_root or b"",
            tokens=result_of(certificate).tokens,
            certificate=certificate,
            # What I have seen of the signatures, others who gave up need not have.
            gave_up=self._table.members if after_all else tuple(self._facts.of(wire.Void, self._table.slot)),
            lied=self.harvest.liars(),
        )

    def missing(self, living: Collection[PeerId]) -> str:
        """Whose word the current phase waits for."""
        table = self._table
        match self.phase:
            case Phase.CONFIRM:
                heard = set(self._facts.of(wire.ResultAck, table.slot))
                return f"ResultAck from {', '.join(sorted(set(living) - heard)) or 'nobody'}"
            case Phase.JUDGE | Phase.CHECK if self._judgement is not None:
                return self._judgement.silent()
            case Phase.REDUCE:
                owners = [table.members[part] for part in sorted(table.owners - self.harvest.outputs.keys())]
                return f"outputs of {', '.join(owners) or 'nobody'}"
        holders = {table.members[part] for part in table.owners} & set(living)
        silent = holders - {table.members[index] for index in table.haves()}
        return f"Have from {', '.join(sorted(silent))}" if silent else "a quorum for the cut"

    def heeds(self, sender: PeerId, message: wire.RoundMessage, active: Collection[PeerId]) -> bool:
        """Whether a new word can change anything now; what is not heeded counts as soon as something else is."""
        if self._mine is not None:
            return isinstance(message, wire.ResultAck | wire.Sketch)
        match message:
            case wire.Have():
                return self.collecting.listens_to(sender, active)
            case wire.CutAck():
                return message.cut != self._cut_hash and self._num_acks(message.cut) >= self._quorum
            case wire.Result():
                return message.cut == self._cut_hash
            case wire.Sketch():
                return self.phase in (Phase.REDUCE, Phase.CHECK) or bool(self._sketches(message.after))
            case wire.ResultAck():
                return bool(self.harvest.withheld)
        return isinstance(message, (wire.Commit, wire.Cut))

    def advance(self, active: Collection[PeerId]) -> list[Action]:
        """Everything that the facts allow now."""
        if self._mine is not None and self._judgement is not None:
            return [*self._judgement.answer(), *self._confirm()]
        signed, cut = self._newest_cut(active)
        actions = self._take_cut(signed, cut)
        if not self.failure:
            if self._judgement is not None:
                self._judgement.miss(active)
            actions += self.collecting.advance(active, cut)
        judgement = self._judgement
        if judgement is not None and not judgement.weights and not self.failure:
            actions += judgement.judge()
        if self.cut is not None and judgement is not None and judgement.weights and not self.failure:
            actions += self._reduce(self.cut, judgement)
        return actions

    def _num_acks(self, cut: bytes) -> int:
        return self._facts.acknowledged(wire.CutAck, self._table.slot, cut)

    def _newest_cut(self, active: Collection[PeerId]) -> tuple[wire.Signed | None, wire.Cut | None]:
        """The cut of the highest version, of the latest convener: one counts once all before it are lost, or none is."""
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
        """Acknowledge the newest cut, and reduce by it once a quorum has."""
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
                actions.append(Note("round.left_out", peer, "cut", self.collecting.why_left_out(index)))
        return actions

    def _accept(self, signed: wire.Signed, cut: wire.Cut) -> list[Action]:
        """Acknowledge a cut that fits, once I hold of it what I own."""
        table, order = self._table, cut.contributors
        if (flaw := table.flaw_of(cut, self._quorum)) is not None:
            self._failure = flaw
            return [Note("peer.charged", signed.sender, "cut", flaw)]
        mine = {table.me} & table.owners
        if not set(order) <= table.commits().keys() or not all(self.collecting.holds(part, order) for part in mine):
            return []  # What is on its way may still come; if not, the deadline ends the wait.
        if cut.commits != commits_hash(table.commits_signed(order)):
            self._failure = "the convener cut other commits than those that were sent to me"
            # Somebody has committed to two things. It can prove that with what I was told; against itself, others can.
            commits = dict(zip(order, table.commits_signed(order), strict=True))
            own = commits.get(table.places[signed.sender])
            spread = [Forward(table.members, own)] if own is not None else []
            return [*spread, *(Forward((signed.sender,), commit) for commit in commits.values())]
        self._acked.add(signed.hash)
        return [Send(table.members, wire.CutAck(table.slot, signed.hash))]

    def _reduce(self, cut: wire.Cut, judgement: Judgement) -> list[Action]:
        table, weights = self._table, judgement.weights
        actions: list[Action] = []
        duties = self.collecting.duties
        for part in sorted(duties - self._reducing) if len(duties) > len(self._reducing) else ():
            if self.collecting.holds(part, cut.contributors):
                self._reducing.add(part)
                actions.append(Reduce(self._cut_hash, part, cut.contributors, weights[part], table.cells(part)))
        for part in sorted(self._made.keys() - self._said) if len(self._made) > len(self._said) else ():
            self._said.add(part)
            result = wire.Result(table.slot, self._cut_hash, part, weights[part], self._made[part])
            actions.append(Send(table.members, result))
        actions += self.harvest.advance(weights)
        outputs = self.harvest.hashes() if self.harvest.is_whole else ()
        if outputs and outputs != self._finalizing:
            self._finalizing = outputs
            actions.append(Finalize(table.roster.bounds, outputs))
        if not self.failure:
            actions += judgement.check(self.harvest) if outputs else judgement.answer()
        if outputs and not self.failure and judgement.is_checked(outputs) and self.next_root is not None:
            actions += self._acknowledge(cut, outputs, self.next_root, judgement.flagged)
        return actions

    def _acknowledge(
        self, cut: wire.Cut, outputs: tuple[bytes, ...], next_root: bytes, flagged: tuple[int, ...]
    ) -> list[Action]:
        table = self._table
        tokens = self._setup.tokens_before + sum(table.commits()[index].tokens for index in cut.contributors)
        tokens = min(tokens, wire.MAX_COUNT)
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
            actions.append(Note("round.result_differs", peer, "confirm", "it signed another result than I"))
            # An owner may have said one thing to it and another one to me: then it will know, and prove it.
            for part, (theirs, mine) in enumerate(zip(odd[peer].outputs, self.harvest.hashes(), strict=False)):
                words = [self.harvest.result(part, source) for source in self._table.members] if theirs != mine else []
                actions += [Forward((peer,), word) for word in words if word is not None]
        return actions
