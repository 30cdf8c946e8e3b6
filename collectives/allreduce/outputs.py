"""REDUCE: the outputs of all parts, their providers, retries, and false ones. Pure.

The output of a part is a function of the last cut alone (the same bytes, weights and order). So its holder and the others of
its three make the same one, and a peer fetches it from whichever of them it can reach. The proposer names one for each part.
"""

from collections.abc import Collection

from ...peer import wire
from ...peer.base.transport import PeerId
from ..agreement.actions import Note
from ..chain.certificate import open_value, value_hash
from ..chain.quorum import ranked
from ..vector.codec import EMPTY
from .actions import Action, FetchOutput, Forward, Setup
from .collect import CollectPhase
from .facts import MessageLog
from .roster import RosterView
from .words import Standing

MAX_SOUGHT = 4
"""Members that are asked for an output that its maker offers and does not send."""


class ReducePhase:
    """One member's view of the outputs of one cut."""

    def __init__(
        self,
        setup: Setup,
        facts: MessageLog,
        table: RosterView,
        collect_phase: CollectPhase,
        cut: bytes,
        standing: Standing,
    ) -> None:
        self.outputs: dict[int, bytes] = {}
        self._here: set[tuple[int, bytes]] = set()
        """All outputs that have arrived, by part: one that was named, and is not, may be named again."""
        self.withheld: set[int] = set()
        """Parts whose output a member offered but did not provide, or that timed out."""
        self._setup = setup
        self._facts = facts
        self._table = table
        self._collect_phase = collect_phase
        self._cut = cut
        self.standing = standing
        self._named: tuple[bytes, ...] = ()
        self._fetching: dict[int, tuple[PeerId, bytes]] = {}
        self._tried: set[tuple[int, PeerId, bytes]] = set()
        self._offers: dict[int, dict[int, bytes]] = {}
        """By part, and by the index of the member that made it."""
        self._sought: set[tuple[str, int, bytes]] = set()
        """Outputs that I have asked others for."""
        self._late: set[int] = set()
        """Parts whose output was not here at the deadline."""
        self._open = set(table.owners)
        """Parts with a new offer, a failed fetch, or another output that is named."""
        self._results_read = 0

    @property
    def is_whole(self) -> bool:
        """True if all outputs are here: those that the proposer has named, where it has."""
        return self.outputs.keys() == self._table.owners and self._named in ((), self.hashes())

    def hashes(self) -> tuple[bytes, ...]:
        """Return one output hash per member; that of an empty part is the hash of no bytes."""
        return tuple(self.outputs.get(index, EMPTY) for index in range(self._table.num_parts))

    def fetched(self, part: int, hash_: bytes) -> None:
        """Record a well-formed output."""
        self._here.add((part, hash_))
        if self._fetching.get(part, ("", b""))[1] == hash_:
            del self._fetching[part]
        if not self._named or self._named[part] == hash_:
            self.outputs[part] = hash_

    @property
    def is_mostly_here(self) -> bool:
        """True if two thirds of the outputs are here, of owners that vote or are of many rounds: keys are free."""
        owners, seating = self._table.owners, self._table.seating
        known = owners & (seating.voters | seating.known) or owners
        return 3 * len(known & self.outputs.keys()) >= 2 * len(known)

    def not_fetched(self, part: int, source: PeerId, hash_: bytes, reason: str) -> list[Action]:
        """Record a failed fetch of an output; it fails over to the next member that offers it."""
        if self._fetching.get(part) != (source, hash_):
            return []
        del self._fetching[part]
        self._open.add(part)
        self.do_without(part)
        result = self.result(part, source)  # If it sent others a different one, this exposes the equivocation.
        shown = [Forward(self._table.voters, result)] if result is not None else []
        return [*shown, Note("round.output_missing", source, "reduce", reason)]

    def close(self) -> None:
        """Fail over at the deadline: deputies make the missing outputs."""
        late = self._table.owners - self.outputs.keys() - self.withheld
        for part in late:
            self._fetching.pop(part, None)
            self.do_without(part)
        self._late |= late
        self._open |= late

    def seek(self, active: Collection[PeerId], moment: str) -> list[Action]:
        """Fetch from others, too, what its maker offers and does not send: it may hang on me alone. Once a moment."""
        table, actions = self._table, list[Action]()
        for part, (maker, output) in sorted(self._fetching.items()):
            without = {table.me, table.places[maker]}
            others = dict.fromkeys((*table.others_with(part, without), *ranked(table.slot, active)))
            to = [peer for peer in others if table.places.get(peer, table.me) not in without][:MAX_SOUGHT]
            if to and (moment, part, output) not in self._sought:
                self._sought.add((moment, part, output))
                cells, size = table.cells(part), self._setup.spec.output.num_bytes(table.cells(part))
                # One after the other; at the deadline from all at once, since several may let it hang, too.
                rows = [to] if moment == "early" else [[peer] for peer in to]
                actions += [
                    FetchOutput(part, row[0], output, cells, size, tuple(row[1:]), is_from_maker=False) for row in rows
                ]
        return actions

    def do_without(self, part: int) -> None:
        """Make the output of a part as a deputy of its owner, if I am one."""
        self.withheld.add(part)
        self._collect_phase.stand_in(part, self._table.seating.three(part))

    def offers(self, part: int) -> list[tuple[int, bytes]]:
        """Return who has made which output of a part: its holder first, then its owner and the owner's deputies."""
        makers = (self.standing.holders[part], part, *self._table.seating.deputies[part])
        offers = self._offers.get(part, {})
        return [(index, offers[index]) for index in dict.fromkeys(makers) if index in offers]

    def has_offer(self, part: int, maker: int) -> bool:
        """Return True if a member has said which output of a part it has made."""
        return maker in self._offers.get(part, {})

    def agreed(self, part: int) -> list[bytes]:
        """Return the outputs of a part that voters with a third of the votes have each made alike.

        They are two at least, where two vote. One of them is honest: it is the sum of the contributions, or zeros where that
        one lacks bytes.
        """
        electorate, by = self._table.electorate, dict[bytes, list[PeerId]]()
        for index, output in self.offers(part):
            if index in self._table.seating.voters:
                by.setdefault(output, []).append(self._table.members[index])
        least = min(2, len(electorate.votes))
        return [it for it, of in by.items() if len(of) >= least and electorate.votes_of(of) >= electorate.third]

    def maker(self, part: int) -> int:
        """Return whose output of a part I wait for."""
        fetching = self._fetching.get(part)
        return self.standing.holders[part] if fetching is None else self._table.places[fetching[0]]

    def follow(self, outputs: tuple[bytes, ...]) -> list[Action]:
        """Take the outputs that the proposer names; show all members who has offered me other ones.

        A member that offered one output to the proposer and another one to me is thereby exposed (equivocation).
        """
        self._named = outputs
        self._open |= self._table.owners
        for part in self._table.owners:
            if (part, outputs[part]) in self._here:
                self.outputs[part] = outputs[part]
            else:
                self.outputs.pop(part, None)
            if part in self._fetching and self._fetching[part][1] != outputs[part]:
                del self._fetching[part]
        members, voters = self._table.members, self._table.voters
        parts = sorted(self._table.owners)
        others = ((part, index) for part in parts for index, made in self.offers(part) if made != outputs[part])
        shown = (self.result(part, members[index]) for part, index in others)
        return [Forward(voters, result) for result in shown if result is not None]

    def replaced(self) -> set[PeerId]:
        """Return the holders that made another output than the named one; who made none is late."""
        holders, named = self.standing.holders, self._named
        parts = (part for part in self._table.owners if self.has_offer(part, holders[part]))
        return {self._table.members[holders[part]] for part in parts if self._offers[part][holders[part]] != named[part]}

    def late(self) -> tuple[PeerId, ...]:
        """Return the holders whose output did not come, or not in time, and was made by another: not for my line alone.

        Who has the earliest deadline makes it, so that most others are never late themselves. Where I had to take few from
        others it is not my line, either: each of these let it hang.
        """
        found, are_few = set[int](), 3 * len(self._late) <= len(self._table.owners)
        for part, holder in self.standing.holders.items():
            makers = self._offers.get(part, {}).keys()
            is_made = bool(makers - {holder})
            if (part in self._late and (is_made or are_few)) or (is_made and holder not in makers):
                found.add(holder)
        return tuple(self._table.members[holder] for holder in sorted(found))

    def advance(self) -> list[Action]:
        """Fetch each output from the members that offer it, one after the other."""
        table = self._table
        news = self._facts.since(wire.Result, self._results_read)
        self._results_read += len(news)
        for signed, result in news:
            part, index = result.part, table.places[signed.sender]
            is_of = result.slot == table.slot and result.cut == self._cut
            if is_of and part in table.owners and (index == part or index in table.seating.voters):
                self._offers.setdefault(part, {})[index] = result.output
                self._open.add(part)
        actions: list[Action] = []
        open_, self._open = self._open, set(self.withheld)  # Who accepts a value may provide it later.
        for part in sorted(open_ - self.outputs.keys() - self._fetching.keys()):
            for peer, output in self._sources(part):
                if (part, peer, output) not in self._tried:
                    actions.append(self._fetch(part, peer, output))
                    break
        return actions

    def _sources(self, part: int) -> list[tuple[PeerId, bytes]]:
        """Return who may provide an output of a part, and which: those that offer it, the proposer, who accepts its value."""
        found = [(self._table.members[index], output) for index, output in self.offers(part)]
        if not self._named:
            return found
        named = self._named[part]
        holders = [self._table.members[0], *(peer for peer, value in self._accepted() if named in value.outputs)]
        me = self._table.members[self._table.me]
        return [*((peer, it) for peer, it in found if it == named), *((peer, named) for peer in holders if peer != me)]

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

    def _fetch(self, part: int, peer: PeerId, output: bytes) -> Action:
        self._tried.add((part, peer, output))
        self._fetching[part] = (peer, output)
        cells = self._table.cells(part)
        others = self._table.others_with(part, {self._table.me, self._table.places[peer]})
        made = self._offers.get(part, {}).get(self._table.places[peer]) == output
        return FetchOutput(part, peer, output, cells, self._setup.spec.output.num_bytes(cells), others, is_from_maker=made)
