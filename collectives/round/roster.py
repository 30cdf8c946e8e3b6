"""A roster with its members' messages: owners, deputies, commits, holdings. Pure."""

from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache

from ...dht.run.admission import Charter
from ...peer import wire
from ...peer.transport import PeerId
from ..accountability.trust import of_tenure
from ..agreement.actions import Note
from ..agreement.electorate import Electorate
from ..chain.certificate import signed_in
from ..chain.quorum import quorum
from ..robust.checks import commitment
from .actions import Forward
from .facts import _M, MessageLog

MAX_TOKENS = 1 << 50
"""The most that one contribution may claim: 35 years at a million a second. More would overflow the run's `Count`."""
DEPUTIES = 2
"""Deputies of an owner (failover). Two: the loss of an owner and both of its deputies in one round may void it."""


class RosterView:
    """A roster as one member sees it: the owner and deputies of each part, and the contribution of each member."""

    def __init__(
        self, signed: wire.Signed, roster: wire.Roster, me: PeerId, electorate: Electorate, facts: MessageLog
    ) -> None:
        self.signed = signed
        self.roster = roster
        self.slot = roster.slot
        self.members = roster.members
        self.hash = signed.hash
        self.me = roster.members.index(me)
        self.owners = frozenset(index for index in range(len(roster.members)) if self.cells(index))
        self.places = {peer: index for index, peer in enumerate(roster.members)}
        """The index of each member."""
        self.electorate = electorate
        self.readies = readies_of(roster.members, roster.readys)
        """The Ready of each member."""
        self.training = frozenset(self.places[peer] for peer, ready in self.readies.items() if ready.tokens)
        """The members that train; keepers contribute nothing, and nobody waits for them to."""
        self._training_voters = frozenset(index for index in self.training if self.members[index] in electorate.votes)
        self._facts = facts
        voters = frozenset(index for index, peer in enumerate(roster.members) if peer in electorate.votes)
        self._deputies = _ring_deputies(len(roster.members), self.owners, voters)
        self.deputized = frozenset(part for part in self.owners if self.me in self._deputies[part])
        """The parts that I am a deputy of."""
        self._commits: dict[int, wire.Commit] = {}
        self._haves: dict[int, wire.Have] = {}
        self._held: dict[tuple[int, int], tuple[wire.Have, frozenset[int]]] = {}
        self._known_cuts: dict[bytes, wire.Signed] = {}
        self._read = {wire.Commit: 0, wire.Have: 0, wire.Cut: 0}
        self._exposed: set[PeerId] = set()
        """The members to which I have shown my roster."""
        self._notes: list[Note] = []

    def seats(self, order: Iterable[int], charter: Charter) -> list[wire.Seat]:
        """Return the seats by which these members weigh: where the owner says who votes, voters are of tenure at once."""
        votes = self.electorate.votes if charter.keepers is not None else {}
        return [
            of_tenure(self.roster.seats[index]) if self.members[index] in votes else self.roster.seats[index]
            for index in order
        ]

    def cells(self, part: int) -> int:
        """Return the number of cells of a part."""
        return self.roster.bounds[part + 1] - self.roster.bounds[part]

    def is_enough(self, contributors: Collection[int]) -> bool:
        """Return True if these contributors include a quorum of the voters that train: without them a cut is refused.

        Members without a vote do not count here: as many as like can be Ready, and then contribute nothing.
        """
        voters = self._training_voters
        return bool(contributors) and len(voters & set(contributors)) >= min(quorum(len(voters)), len(voters))

    def deputies(self, part: int) -> tuple[int, ...]:
        """Return a part's deputies: the next voters in the roster's ring, owners first, and then the next other members."""
        return self._deputies[part]

    def others_with(self, part: int, without: Collection[int]) -> tuple[PeerId, ...]:
        """Return the owner and the deputies of a part, without some members."""
        return tuple(self.members[index] for index in (part, *self.deputies(part)) if index not in without)

    def holder(self, part: int, active: Collection[PeerId]) -> int | None:
        """Return the holder of a part: its owner, else its first living deputy (failover); None if all are lost."""
        return next((index for index in (part, *self.deputies(part)) if self.members[index] in active), None)

    def readers(self) -> tuple[tuple[PeerId, ...], ...]:
        """Return the peers that may fetch each of my parts before the cut: its owner and the owner's deputies."""
        return tuple(self.others_with(part, ()) for part in range(len(self.members)))

    def commits(self) -> Mapping[int, wire.Commit]:
        """Return the valid commits by roster index, in the order of arrival: those of members that train."""
        if self._read[wire.Commit] == self._facts.num_ever(wire.Commit):
            return self._commits
        for signed, commit in self._news(wire.Commit):
            index = self.places[signed.sender]
            fits = commit.roster == self.hash and len(commit.parts) == len(self.members)
            if fits and commit.tokens <= MAX_TOKENS and index in self.training:
                self._commits[index] = commit
        return self._commits

    def commits_signed(self, order: Iterable[int]) -> list[wire.Signed]:
        """Return the signed commits of these members."""
        return [self._facts.signed(wire.Commit, self.members[index]) for index in order]

    def haves(self) -> Mapping[int, wire.Have]:
        """Return each member's Have, by roster index, without those whose nonce its member has not committed to.

        A cut with such a nonce is refused, so that a member could void the attempts of all proposers with one.
        """
        if self._read[wire.Have] == self._facts.num_ever(wire.Have):
            return self._haves
        for signed, have in self._news(wire.Have):
            if have.roster != self.hash:
                continue
            if self._is_committed(signed.sender, have.nonce):
                self._haves[self.places[signed.sender]] = have
            else:
                self._notes.append(Note("round.refused", signed.sender, "Have", "a nonce that it has not committed to"))
        return self._haves

    def notes(self) -> list[Note]:
        """Return what was refused since the last call."""
        notes, self._notes = self._notes, []
        return notes

    def _are_enough_nonces(self, opened: Collection[int]) -> bool:
        """Return True if one of these nonces is honest: of more than a third of the owners, or of the votes."""
        votes = self.electorate.votes_of(self.members[index] for index in opened)
        return 3 * len(opened) > len(self.owners) or votes >= self.electorate.third

    def _is_committed(self, peer: PeerId, nonce: bytes) -> bool:
        ready = self.readies.get(peer)
        return ready is None or commitment(nonce) == ready.nonce_hash

    def held(self, index: int, part: int) -> frozenset[int] | None:
        """Return the contributors whose part a member states to hold; None if it has stated nothing about that part."""
        have = self.haves().get(index)
        if have is None:
            return None
        known = self._held.get((index, part))
        if known is None or known[0] is not have:  # Computed lazily: most of it does not concern me.
            found = [frozenset(held) for number, held in have.parts if number == part]
            if not found:
                return None
            known = self._held[index, part] = (have, found[-1])
        return known[1]

    def shown_to(self, sender: PeerId, message: wire.RoundMessage) -> list[Forward]:
        """Forward my roster or my cuts to a member that names another one: that exposes an equivocating proposer."""
        if message.slot != self.slot or sender == self.members[self.me]:
            return []
        if isinstance(message, wire.Commit) and message.roster != self.hash:
            # One honest member that sees both is enough, and a roster is long.
            self._exposed |= {sender} if len(self._exposed) <= len(self.members) // 3 else set()
            return [Forward((sender,), self.signed)] if sender in self._exposed else []
        if isinstance(message, wire.CutAck | wire.Result) and message.cut not in self._cuts():
            return [Forward((sender,), signed) for signed in self._cuts().values()]
        return []

    def _cuts(self) -> Mapping[bytes, wire.Signed]:
        """Return the cuts that have arrived, by their hash."""
        if self._read[wire.Cut] != self._facts.num_ever(wire.Cut):
            self._read[wire.Cut] = self._facts.num_ever(wire.Cut)
            self._known_cuts = {signed.hash: signed for signed, _ in self._facts.every(wire.Cut, self.slot)}
        return self._known_cuts

    def why_not_cut(self, cut: wire.Cut) -> str | None:
        """Return why a cut does not fit this roster; None if it does."""
        order = cut.contributors
        if cut.roster != self.hash or list(order) != sorted(set(order)) or order[-1] >= len(self.members):
            return "a cut that does not fit its roster"
        if not self.is_enough(order):
            return f"a cut of {len(order)} contributions, which leaves out too many of the voters that train"
        opened = dict(cut.nonces)
        if max(opened, default=0) >= len(self.members) or not self._are_enough_nonces(opened):
            return "a cut with the nonces of a third of the owners, or fewer"
        for index, nonce in opened.items():
            if not self._is_committed(self.members[index], nonce):
                return f"a cut with a nonce that {self.members[index]} has not committed to"
        return None

    def _news(self, kind: type[_M]) -> list[tuple[wire.Signed, _M]]:
        """Return the messages of a kind about this slot that arrived since the last call."""
        news = self._facts.since(kind, self._read[kind])
        self._read[kind] = self._facts.num_ever(kind)
        return [entry for entry in news if entry[1].slot == self.slot]


@lru_cache(maxsize=8)  # In a simulation all members of a roster share one process.
def readies_of(members: tuple[PeerId, ...], readys: tuple[bytes, ...]) -> Mapping[PeerId, wire.Ready]:
    """Return the Ready of each member of a roster, by the bytes that it shows."""
    shown = zip(members, map(signed_in, readys), strict=False)
    return {peer: ready for peer, it in shown if isinstance(ready := wire.opened(it), wire.Ready)}


@lru_cache(maxsize=8)
def _ring_deputies(count: int, owners: frozenset[int], voters: frozenset[int]) -> tuple[tuple[int, ...], ...]:
    """Return each part's deputies: the next in the ring of `count` members, voters before others, and of these owners.

    Free keys could be the owner and both deputies of a part, and so prevent every round; voters are not free. The voters
    take turns for the parts of others: one of them alone could neither hold these nor open enough nonces for a cut.
    """
    deputies: list[tuple[int, ...]] = []
    others, deciding = sorted(owners - voters), sorted(voters)
    for part in range(count):
        ring = [*range(part + 1, count), *range(part)]
        order = sorted(ring, key=lambda index: (index not in voters, index not in owners))
        if part in others and deciding:
            turn = others.index(part) % len(deciding)
            order = [*deciding[turn:], *deciding[:turn], *order[len(deciding) :]]
        deputies.append(tuple(order[:DEPUTIES]))
    return tuple(deputies)
