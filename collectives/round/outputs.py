"""REDUCE: the outputs of all parts, their providers, retries, and false ones. Pure.

The output of a part is a function of the cut alone (the same bytes, weights and order). So owner and deputy make the
same one, and a peer fetches it from whichever of them it can reach.
"""

from collections.abc import Sequence

from ...peer import wire
from ...peer.transport import PeerId
from ..agreement.actions import Note
from ..chain.certificate import open_value, value_hash
from ..codec import EMPTY
from .actions import Action, FetchOutput, Forward, Setup
from .collect import CollectPhase
from .facts import MessageLog
from .roster import RosterView


class ReducePhase:
    """One member's view of the outputs of one cut."""

    def __init__(self, setup: Setup, facts: MessageLog, table: RosterView, collect_phase: CollectPhase, cut: bytes) -> None:
        self.outputs: dict[int, bytes] = {}
        self.withheld: set[int] = set()
        """Parts whose output a member offered but did not provide, or that timed out."""
        self._setup = setup
        self._facts = facts
        self._table = table
        self._collect_phase = collect_phase
        self._cut = cut
        self._fetching: dict[int, tuple[PeerId, bytes]] = {}
        self._tried: set[tuple[int, PeerId]] = set()
        self._offers: dict[int, dict[int, bytes]] = {}
        """By part, and by the index of the member that made it."""
        self._false: set[bytes] = set()
        self._late: set[int] = set()
        """Parts whose output was not here at the timeout."""
        self._unfetched: set[int] = set()
        """Parts with a new offer, or a failed fetch."""
        self._results_read = 0

    @property
    def is_whole(self) -> bool:
        """True if all outputs are here."""
        return self.outputs.keys() == self._table.owners

    def hashes(self) -> tuple[bytes, ...]:
        """Return one output hash per member; that of an empty part is the hash of no bytes."""
        return tuple(self.outputs.get(index, EMPTY) for index in range(len(self._table.members)))

    def fetched(self, part: int, hash_: bytes) -> bool:
        """Record a well-formed output. Return True if all outputs are here: only then does anything follow."""
        wanted = set(self._offers.get(part, {}).values()) - self._false
        if part in self._fetching:
            wanted.add(self._fetching[part][1])
        if hash_ in wanted:  # Any other is of an earlier cut.
            self._fetching.pop(part, None)
            self.outputs[part] = hash_
        return self.is_whole

    def not_fetched(self, part: int, hash_: bytes, reason: str) -> list[Action]:
        """Record a failed fetch of an output; it fails over to the next member that offers it."""
        if part not in self._fetching or self._fetching[part][1] != hash_:
            return []
        source, _ = self._fetching.pop(part)
        self._do_without(part)
        result = self.result(part, source)  # If it sent others a different one, this exposes the equivocation.
        shown = [Forward(self._table.members, result)] if result is not None else []
        return [*shown, Note("round.output_missing", source, "reduce", reason)]

    def on_timeout(self) -> bool:
        """Fail over at the timeout: deputies make the missing outputs. Return True if any is missing."""
        late = self._table.owners - self.outputs.keys() - self.withheld
        for part in late:
            self._fetching.pop(part, None)
            self._do_without(part)
        self._late |= late
        return bool(late)

    def offered(self, part: int) -> tuple[PeerId, ...]:
        """Return the members that have offered the output of a part which I hold."""
        offers = sorted(self._offers.get(part, {}).items())
        return tuple(self._table.members[index] for index, offer in offers if offer == self.outputs.get(part))

    def refuse(self, part: int) -> list[Action]:
        """Reject a false output; a deputy of its owner makes another one."""
        liars = [*self.offered(part)]
        hash_ = self.outputs.pop(part)
        self._false.add(hash_)
        self._do_without(part)
        reason = f"its output of part {part} is not the sum of the contributions"
        # Nobody may have offered it: that a member accepts a value of it is enough for it to be fetched.
        liars += [peer for peer, value in self._accepted() if hash_ in value.outputs and peer not in liars]
        return [Note("round.output_false", liar, "check", reason) for liar in liars]

    def liars(self) -> tuple[PeerId, ...]:
        """Return the members whose outputs were false."""
        made = (offer for offers in self._offers.values() for offer in offers.items())
        return tuple(sorted({self._table.members[index] for index, output in made if output in self._false}))

    def late(self) -> tuple[PeerId, ...]:
        """Return the owners whose output was not here at the timeout, and was made by a deputy: not for my line alone."""
        made = [part for part in sorted(self._late) if self._offers.get(part, {}).keys() - {part}]
        return tuple(self._table.members[part] for part in made)

    def _do_without(self, part: int) -> None:
        self.withheld.add(part)
        self._unfetched.update({part} & self._offers.keys())
        self._collect_phase.stand_in(part)

    def advance(self, weights: Sequence[tuple[float, ...]]) -> list[Action]:
        """Fetch each output from the members that offer it: the owner before its deputies, one after the other."""
        table = self._table
        actions: list[Action] = []
        self._follow()
        news = self._facts.since(wire.Result, self._results_read)
        self._results_read += len(news)
        for signed, result in news:
            part, index = result.part, table.places[signed.sender]
            if result.slot != table.slot or result.cut != self._cut or part not in table.owners:
                continue
            if index not in (part, *table.deputies(part)):
                continue
            if result.weights != weights[part]:
                # If it is honest, a member has sent it other sketches than me: these expose that one. If not, a deputy
                # makes its part: an attempt must not end because one member says so.
                reason = f"it weighs the contributions to part {part} otherwise than I"
                actions.append(Note("round.refused", signed.sender, "Result", reason))
                shown = self._facts.every(wire.Sketch, table.slot)
                actions += [Forward((signed.sender,), sketch) for sketch, _ in shown]
                if index == part:
                    self._do_without(part)
                continue
            self._offers.setdefault(part, {})[index] = result.output
            self._unfetched.add(part)
        for part in sorted(self.withheld - self._fetching.keys() - self.outputs.keys()):
            # A member that accepts a value holds all outputs, and provides those that their owners withhold.
            for peer, value in self._accepted():
                if value.cut == self._cut and part < len(value.outputs) and self._is_worth(part, peer, value.outputs[part]):
                    actions.append(self._fetch(part, peer, value.outputs[part]))
                    break
        for part in sorted(self._unfetched):
            if part in self._fetching or part in self.outputs:
                continue
            offers = self._offers.get(part, {})
            for index in sorted(offers, key=lambda index: (index != part, index)):
                if self._is_worth(part, table.members[index], offers[index]):
                    actions.append(self._fetch(part, table.members[index], offers[index]))
                    break
        self._unfetched.clear()
        return actions

    def _follow(self) -> None:
        """Leave outputs of mine that are not yet checked for those of the value that the proposer proposes for this cut.

        An owner may give each member another one, and too few may answer my question about mine; about the proposer's
        all do. If the proposer lies, the check refuses its output, as any other.
        """
        proposed = self._facts.of(wire.Propose, self._table.slot).get(self._table.members[0])
        value = open_value(proposed.value) if proposed is not None else None
        if value is None or value.cut != self._cut or len(value.outputs) != len(self._table.members):
            return
        for part, output in [*self.outputs.items()]:
            if output != value.outputs[part] and value.outputs[part] not in self._false:
                del self.outputs[part]
                self._do_without(part)

    def _accepted(self) -> list[tuple[PeerId, wire.Value]]:
        """Return the members that hold all outputs of a proposed value: its proposer, and those that accepted it."""
        slot = self._table.slot
        proposed = {value_hash(message.value): message.value for message in self._facts.of(wire.Propose, slot).values()}
        accepted = {peer: message.value for peer, message in self._facts.of(wire.Prevote, slot).items()}
        return [(peer, open_value(proposed[hash_])) for peer, hash_ in accepted.items() if hash_ in proposed]

    def result(self, part: int, peer: PeerId) -> wire.Signed | None:
        """Return a peer's signed Result of a part under this cut; None if it has sent none."""
        for signed, result in self._facts.every(wire.Result, self._table.slot):
            if (signed.sender, result.cut, result.part) == (peer, self._cut, part):
                return signed
        return None

    def _is_worth(self, part: int, peer: PeerId, hash_: bytes) -> bool:
        return (part, peer) not in self._tried and hash_ not in self._false

    def _fetch(self, part: int, peer: PeerId, output: bytes) -> Action:
        self._tried.add((part, peer))
        self._fetching[part] = (peer, output)
        cells = self._table.cells(part)
        others = self._table.others_with(part, {self._table.me, self._table.places[peer]})
        return FetchOutput(part, peer, output, cells, self._setup.output_bytes(cells), others)
