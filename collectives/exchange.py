"""The middle of a round, from a certified roster to a quorum of signed results: COLLECT, REDUCE, CONFIRM.

Pure, like `round`, which owns it: facts come in from there, conclusions are drawn by `advance`, and whatever stands in
the way is left in `failure`, for `round` to give up with. `collection` does COLLECT; what follows is here. The output
of a part is a function of the cut alone (the same bytes, weights and order), so owner and deputy make the same one, and
a peer takes it from whichever of them it can reach.
"""

from collections.abc import Collection
from dataclasses import replace

from ..peer import wire
from ..peer.schema import encode
from ..peer.transport import PeerId
from .agenda import EMPTY, Action, FetchOutput, FetchPart, Finalize, Forward, Note, Outcome, Phase, Reduce, Send, Setup
from .collection import Collecting
from .facts import Facts, Table
from .quorum import commits_hash, quorum, result_of, suffices
from .trust import weigh


class Exchange:
    """What one member of a roster sends, holds and concludes."""

    def __init__(self, setup: Setup, facts: Facts, table: Table) -> None:
        self.collecting = Collecting(setup, facts, table)
        self.certificate: wire.Certificate | None = None
        self.cut: wire.Cut | None = None
        """The certified cut."""
        self.outputs: dict[int, bytes] = {}
        self.next_root: bytes | None = None
        self._setup = setup
        self._facts = facts
        self._table = table
        self._quorum = quorum(len(table.members))
        self._failure = ""
        self._cut_signed: wire.Signed | None = None
        self._cut_hash = b""
        self._mine_encoded = b""
        self._weights: tuple[float, ...] = ()
        self._acked: set[bytes] = set()
        self._mine: wire.ResultAck | None = None
        self._agreed: dict[PeerId, wire.Signed] = {}
        self._acks_read = 0
        self._cuts_seen = (0, 0)
        self._newest: tuple[wire.Signed | None, wire.Cut | None] = (None, None)
        """The newest cut when there were so many cuts, and so many members alive; of these there never come more."""
        self._reset()

    def _reset(self) -> None:
        """Begin to reduce, for the first time or after a re-cut."""
        self.outputs.clear()
        self.next_root = None
        self._made: dict[int, bytes] = {}
        self._reducing: set[int] = set()
        self._said: set[int] = set()
        self._fetching: dict[int, tuple[PeerId, bytes]] = {}
        self._tried: set[tuple[int, PeerId]] = set()
        self._offers: dict[int, dict[int, bytes]] = {}
        """By part, and by the index of who has made it."""
        self._withheld: set[int] = set()
        """Parts whose output somebody who says that it has it did not give me."""
        self._unfetched: set[int] = set()
        """Parts for which there is somebody new to ask, or somebody has failed."""
        self._results_read = 0
        self._finalizing = False

    @property
    def phase(self) -> Phase:
        """Where it stands."""
        if self._mine is not None:
            return Phase.CONFIRM
        return Phase.COLLECT if self.cut is None else Phase.REDUCE

    @property
    def failure(self) -> str:
        """Why it cannot go on; empty while it can."""
        return self._failure or self.collecting.failure

    def reduced(self, cut: bytes, part: int, output: bytes) -> None:
        """A part's output for that cut is encoded and served under this hash."""
        if cut == self._cut_hash:
            self._made[part] = output

    def output_fetched(self, part: int, hash_: bytes) -> bool:
        """An output is here and well-formed. Whether they all are: only then does anything follow."""
        wanted = set(self._offers.get(part, {}).values())
        if part in self._fetching:
            wanted.add(self._fetching[part][1])
        if hash_ in wanted:  # Another one is from before a re-cut.
            self._fetching.pop(part, None)
            self.outputs[part] = hash_
        return len(self.outputs) == len(self._table.owners)

    def hasten(self) -> bool:
        """Time is up: an output that has not come is made by who stands in for its owner. Whether that is worth a wait."""
        late = self._table.owners - self.outputs.keys() - self._withheld if self.phase is Phase.REDUCE else set()
        for part in late:
            self._fetching.pop(part, None)
            self._withheld.add(part)
            self._unfetched.update({part} & self._offers.keys())
            self.collecting.stand_in(part)
        return bool(late)

    def output_not_fetched(self, part: int, hash_: bytes, reason: str) -> list[Action]:
        """An output cannot be had from whom it was asked; who else says that it has it is asked next."""
        if part not in self._fetching or self._fetching[part][1] != hash_:
            return []
        source, _ = self._fetching.pop(part)
        self._unfetched.add(part)
        self._withheld.add(part)
        self.collecting.stand_in(part)
        word = self._result(part, source)  # It may have told others something else: then they will know.
        shown = [Forward(self._table.members, word)] if word is not None else []
        return [*shown, Note("round.output_missing", source, "reduce", reason)]

    def bound_to(self, action: FetchPart | FetchOutput) -> tuple[wire.Signed, ...]:
        """What binds a peer to the bytes that are fetched, as a claim about them needs it; nothing if that is gone."""
        table = self._table
        if isinstance(action, FetchPart):
            return (*table.commits_signed([action.contributor]), table.signed)
        word = self._result(action.part, action.source)
        return (word, self._cut_signed, table.signed) if word is not None and self._cut_signed is not None else ()

    def finalized(self, outputs: tuple[bytes, ...], next_root: bytes) -> None:
        """The state root that these outputs lead to."""
        if outputs == self.output_hashes():
            self.next_root = next_root

    def holds(self, result: wire.ResultAck) -> bool:
        """Whether everything that a result acknowledges is here."""
        return self.next_root == result.next_root and self.output_hashes() == result.outputs

    def output_hashes(self) -> tuple[bytes, ...]:
        """One hash a member; an empty part's is that of nothing."""
        return tuple(self.outputs.get(index, EMPTY) for index in range(len(self._table.members)))

    def certified(self, outcome: Outcome, certificate: wire.Certificate) -> Outcome:
        """How a round ends that is certified, and all of which is here."""
        assert self.cut is not None
        return replace(
            outcome,
            cut=tuple(self._table.members[index] for index in self.cut.contributors),
            bounds=self._table.roster.bounds,
            outputs=self.output_hashes(),
            root=self.next_root or b"",
            tokens=result_of(certificate).tokens,
            certificate=certificate,
            gave_up=tuple(self._facts.of(wire.Void, self._table.slot)),
        )

    def missing(self, living: Collection[PeerId]) -> str:
        """Whose word the current phase waits for."""
        table = self._table
        if self.phase is Phase.CONFIRM:
            heard = set(self._facts.of(wire.ResultAck, table.slot))
            return f"ResultAck from {', '.join(sorted(set(living) - heard)) or 'nobody'}"
        if self.phase is Phase.REDUCE:
            owners = [table.members[part] for part in sorted(table.owners - self.outputs.keys())]
            return f"outputs of {', '.join(owners) or 'nobody'}"
        holders = {table.members[part] for part in table.owners} & set(living)
        silent = holders - {table.members[index] for index in table.haves()}
        return f"Have from {', '.join(sorted(silent))}" if silent else "a quorum for the cut"

    def heeds(self, sender: PeerId, message: wire.RoundMessage, active: Collection[PeerId]) -> bool:
        """Whether a new word can change anything now; what is not heeded counts as soon as something else is."""
        if self._mine is not None:
            return isinstance(message, wire.ResultAck)
        match message:
            case wire.Have():
                return self.collecting.listens_to(sender, active)
            case wire.CutAck():
                return message.cut != self._cut_hash and self._num_acks(message.cut) >= self._quorum
            case wire.Result():
                return message.cut == self._cut_hash
            case wire.ResultAck():
                return bool(self._withheld)
        return isinstance(message, (wire.Commit, wire.Cut))

    def advance(self, active: Collection[PeerId]) -> list[Action]:
        """Everything that the facts allow now."""
        if self._mine is not None:
            return self._confirm()
        signed, cut = self._newest_cut(active)
        actions = self._take_cut(signed, cut)
        if not self.failure:
            actions += self.collecting.advance(active, cut)
        if self.cut is not None and not self.failure:
            actions += self._reduce(self.cut)
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
        commits = [table.commits()[index] for index in cut.contributors]
        seats = [table.roster.seats[index] for index in cut.contributors]
        tokens, ramps = [commit.tokens for commit in commits], [commit.ramp for commit in commits]
        self._weights = weigh(tokens, ramps, seats, earned=self._setup.charter.earned)
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

    def _reduce(self, cut: wire.Cut) -> list[Action]:
        table, weights = self._table, self._weights
        actions: list[Action] = []
        duties = self.collecting.duties
        for part in sorted(duties - self._reducing) if len(duties) > len(self._reducing) else ():
            if self.collecting.holds(part, cut.contributors):
                self._reducing.add(part)
                actions.append(Reduce(self._cut_hash, part, cut.contributors, weights, table.cells(part)))
        for part in sorted(self._made.keys() - self._said) if len(self._made) > len(self._said) else ():
            self._said.add(part)
            result = wire.Result(table.slot, self._cut_hash, part, weights, self._made[part])
            actions.append(Send(table.members, result))
        actions += self._fetch_outputs()
        if not self._finalizing and self.outputs.keys() == table.owners:
            self._finalizing = True
            actions.append(Finalize(table.roster.bounds, self.output_hashes()))
        if self.next_root is not None and not self._failure:
            tokens = sum(table.commits()[index].tokens for index in cut.contributors)
            self._mine = wire.ResultAck(
                table.slot,
                self._cut_hash,
                self.output_hashes(),
                self.next_root,
                self._setup.previous,
                self._setup.tokens_before + tokens,
            )
            self._mine_encoded = encode(self._mine)
            actions.append(Send(table.members, self._mine))
        return actions

    def _fetch_outputs(self) -> list[Action]:
        """Ask for each output whoever says that it has made it: the owner before its deputies, one after the other."""
        table = self._table
        news = self._facts.since(wire.Result, self._results_read)
        self._results_read += len(news)
        for signed, result in news:
            part, index = result.part, table.places[signed.sender]
            if result.slot != table.slot or result.cut != self._cut_hash or part not in table.owners:
                continue
            if index not in (part, *table.deputies(part)):
                continue
            if result.weights != self._weights:
                self._failure = f"{signed.sender} weighs the contributions otherwise than by tokens and trust"
                return []
            self._offers.setdefault(part, {})[index] = result.output
            self._unfetched.add(part)
        actions: list[Action] = []
        for part in sorted(self._withheld - self._fetching.keys() - self.outputs.keys()):
            # Who acknowledges the result holds all outputs, and gives them to whom their owners do not.
            for peer, ack in self._facts.of(wire.ResultAck, table.slot).items():
                if ack.cut == self._cut_hash and part < len(ack.outputs) and (part, peer) not in self._tried:
                    actions.append(self._fetch(part, peer, ack.outputs[part]))
                    break
        if not self._unfetched:
            return actions
        for part in sorted(self._unfetched):
            if part in self._fetching or part in self.outputs:
                continue
            offers = self._offers[part]
            for index in sorted(offers, key=lambda index: (index != part, index)):
                if (part, table.members[index]) not in self._tried:
                    actions.append(self._fetch(part, table.members[index], offers[index]))
                    break
        self._unfetched.clear()
        return actions

    def _result(self, part: int, peer: PeerId) -> wire.Signed | None:
        """What a peer has said that a part's output of this cut is."""
        for signed, result in self._facts.every(wire.Result, self._table.slot):
            if (signed.sender, result.cut, result.part) == (peer, self._cut_hash, part):
                return signed
        return None

    def _fetch(self, part: int, peer: PeerId, output: bytes) -> Action:
        self._tried.add((part, peer))
        self._fetching[part] = (peer, output)
        cells = self._table.cells(part)
        return FetchOutput(part, peer, output, cells, self._setup.output_bytes(cells))

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
            for part, (theirs, mine) in enumerate(zip(odd[peer].outputs, self.output_hashes(), strict=False)):
                words = [self._result(part, source) for source in self._table.members] if theirs != mine else []
                actions += [Forward((peer,), word) for word in words if word is not None]
        return actions
