"""A roster with its members' messages: owners, deputies, commits, holdings. Pure."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from ...dht.run.admission import Charter
from ...peer import wire
from ...peer.base.transport import PeerId
from ..accountability.trust import YOUNG_ROUNDS, of_tenure
from ..agreement.actions import Note
from ..agreement.electorate import Electorate
from ..chain.certificate import signed_in
from ..robust.checks import columns_of, commitment, num_bytes
from ..vector.partition import num_parts
from .actions import Forward
from .facts import _M, MessageLog
from .words import DEPUTIES, Claims, Seating, claims_in, places_in

MAX_TOKENS = 1 << 50
"""The most that one contribution may claim: 35 years at a million a second. More would overflow the run's `Count`."""


@dataclass(frozen=True, slots=True)
class Word:
    """A holder's word: its name, and what it lists."""

    name: bytes
    claims: Claims


class RosterView:
    """A roster as one member sees it: the owner and deputies of each part, and the contribution of each member."""

    def __init__(
        self,
        signed: wire.Signed,
        roster: wire.Roster,
        me: PeerId,
        electorate: Electorate,
        facts: MessageLog,
        readies: Mapping[PeerId, wire.Ready],
        *,
        is_blind: bool = False,
    ) -> None:
        """`readies` are those of its basis, or without a vote as many as are here.

        `is_blind`: the run's rule needs no sketches, so that the first cut is the last.
        """
        self.signed = signed
        self.roster = roster
        self.slot = roster.slot
        self.members = roster.members
        self.voters = tuple(peer for peer in roster.members if peer in electorate.votes)
        """The voters, which are its first members: they judge what all contribute."""
        self.num_parts = num_parts(roster.members)
        self.hash = signed.hash
        self.me = roster.members.index(me)
        self.owners = frozenset(index for index in range(self.num_parts) if self.cells(index))
        self.receivers = tuple(
            peer for index, peer in enumerate(roster.members) if index < len(self.voters) or index in self.owners
        )
        """Whom contributors commit to: the voters, and the owners of parts."""
        self.places = {peer: index for index, peer in enumerate(roster.members)}
        """The index of each member."""
        self.electorate = electorate
        self.readies = readies
        self.training = places_in(roster.training)
        """The members that train; keepers contribute nothing, and nobody waits for them to."""
        self._facts = facts
        self._is_blind = is_blind
        voters = frozenset(range(len(self.voters)))
        self._deputies = _ring_deputies(self.num_parts, self.owners, len(self.voters))
        old = frozenset(index for index, seat in enumerate(roster.seats) if seat.rounds >= YOUNG_ROUNDS)
        self.seating = Seating(self.owners, voters, self.training, self.training & (voters | old), self._deputies)
        self.deputized = frozenset(part for part in self.owners if self.me in self.deputies(part))
        """The parts that I am a deputy of."""
        self._commits: dict[int, wire.Commit] = {}
        self._commit_names: dict[int, bytes] = {}
        self._words: dict[bytes, dict[int, list[Word]]] = {}
        self._by_name: dict[tuple[bytes, int, bytes], Word] = {}
        self._known_cuts: dict[bytes, tuple[wire.Signed, wire.Cut]] = {}
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

    @property
    def is_voter(self) -> bool:
        """True if I vote: else I contribute, and reduce the part that I own by the weights that voters state."""
        return self.me < len(self.voters)

    def cells(self, part: int) -> int:
        """Return the number of cells of a part."""
        return self.roster.bounds[part + 1] - self.roster.bounds[part]

    def deputies(self, part: int) -> tuple[int, ...]:
        """Return a part's first deputies: the next voters in the ring, owners first."""
        return self._deputies[part][:DEPUTIES]

    def others_with(self, part: int, without: Collection[int]) -> tuple[PeerId, ...]:
        """Return the owner and the deputies of a part, without some members."""
        return tuple(self.members[index] for index in (part, *self.deputies(part)) if index not in without)

    def readers(self) -> tuple[tuple[PeerId, ...], ...]:
        """Return the peers that may fetch each of my parts before outputs are named: its owner and the owner's deputies."""
        return tuple(self.others_with(part, ()) for part in range(self.num_parts))

    def why_not_say(self, peer: PeerId, message: wire.RoundMessage) -> str:
        """Return why no honest member states this under this roster; empty if one may.

        It is not logged: of two statements on one subject the first counts, and this would hide a true one.
        """
        parts, place = self.num_parts, self.places[peer]
        if isinstance(message, wire.Sketch) and len(message.tables) != num_bytes(parts, columns_of(parts)):
            return "sketches of another size"
        if place < len(self.voters) or isinstance(message, wire.Commit | wire.Sketch | wire.Void):
            return ""
        is_holder = isinstance(message, wire.Have | wire.Result) and place in self.owners
        return "" if is_holder else "it has no vote, and no word on what others hold"

    def living(self, part: int, active: Collection[PeerId]) -> list[int]:
        """Return the owner and the deputies of a part that are not lost, in order: the first holds it."""
        return [index for index in self.seating.three(part) if self.members[index] in active]

    def commits(self) -> Mapping[int, wire.Commit]:
        """Return the valid commits by roster index, in the order of arrival: those of members that train."""
        for signed, commit in self._news(wire.Commit):
            index = self.places[signed.sender]
            if self._fits(index, commit):
                self._commits[index] = commit
                self._commit_names[index] = signed.name
        return self._commits

    def commit_name(self, index: int) -> bytes:
        """Return the name of a member's Commit that `commits` has."""
        return self._commit_names[index]

    def commit_named(self, index: int, name: bytes) -> wire.Commit | None:
        """Return a member's valid Commit by its name, be it one that contradicts another one; None if it is not here."""
        if self._commit_names.get(index) == name:
            return self._commits[index]
        _, commit = self._facts.named(wire.Commit, self.members[index], name) or (None, None)
        return commit if commit is not None and commit.slot == self.slot and self._fits(index, commit) else None

    def signed_commit(self, index: int, name: bytes = b"") -> wire.Signed | None:
        """Return a member's signed Commit, the one of this name or the first; None if it is not here."""
        found = self._facts.named(wire.Commit, self.members[index], name or self._commit_names.get(index, b""))
        return None if found is None else found[0]

    def _fits(self, index: int, commit: wire.Commit) -> bool:
        fits = commit.roster == self.hash and len(commit.parts) == self.num_parts
        return fits and commit.tokens <= MAX_TOKENS and index in self.training

    def words(self, before: bytes) -> Mapping[int, Sequence["Word"]]:
        """Return each member's words after a cut (none: on contributions) as they came, without those that cannot count."""
        for signed, have in self._news(wire.Have):
            index = self.places[signed.sender]
            claims = self.claims(index, have)
            if isinstance(claims, str):
                self._notes += [Note("round.refused", signed.sender, "Have", claims)] if claims else []
                continue
            word = Word(signed.name, claims)
            self._words.setdefault(have.cut, {}).setdefault(index, []).append(word)
            self._by_name[have.cut, index, signed.name] = word
        return self._words.get(before, {})

    def claims(self, index: int, have: wire.Have) -> Claims | str:
        """Return what a member's word lists of the parts that it may hold, or why it cannot count: "" if nobody is told."""
        claims = claims_in(have)
        if have.roster != self.hash or claims is None:
            return ""
        if not self._is_committed(self.members[index], have.nonce):
            return "a nonce that it has not committed to"
        mine = {part: it for part, it in claims.items() if part in self.owners and index in self.seating.three(part)}
        return mine or ""

    def word(self, before: bytes, index: int, name: bytes) -> "Word | None":
        """Return a member's word after a cut by its name; None if it is not here."""
        return self._by_name.get((before, index, name))

    def notes(self) -> list[Note]:
        """Return what was refused since the last call."""
        notes, self._notes = self._notes, []
        return notes

    def are_enough_nonces(self, opened: Collection[int]) -> bool:
        """Return True if one of these members' nonces is honest: of more than a third of the owners, or of the votes."""
        votes = self.electorate.votes_of(self.members[index] for index in opened)
        return 3 * len(opened) > len(self.owners) or votes >= self.electorate.third

    def _is_committed(self, peer: PeerId, nonce: bytes) -> bool:
        ready = self.readies.get(peer)
        return ready is None or commitment(nonce) == ready.nonce_hash

    def shown_to(self, sender: PeerId, message: wire.RoundMessage) -> list[Forward]:
        """Forward my roster or my cuts to a member that names another one: that exposes an equivocating proposer."""
        if message.slot != self.slot or sender == self.members[self.me]:
            return []
        if isinstance(message, wire.Commit) and message.roster != self.hash:
            # One honest member that sees both is enough, and a roster is long.
            self._exposed |= {sender} if len(self._exposed) <= len(self.members) // 3 else set()
            return [Forward((sender,), self.signed)] if sender in self._exposed else []
        if isinstance(message, wire.Have | wire.Sketch | wire.Result) and self._contradicts(message):
            return [Forward((sender,), signed) for signed, _ in self._cuts().values()]
        return []

    def _contradicts(self, message: wire.Have | wire.Sketch | wire.Result) -> bool:
        """Return True if a message names another cut than the one that I have in its place: the first, or the last."""
        is_of_last = isinstance(message, wire.Result) or (isinstance(message, wire.Sketch) and bool(message.outputs))
        is_second = is_of_last and not self._is_blind
        mine = [hash_ for hash_, (_, cut) in self._cuts().items() if bool(cut.before) == is_second]
        return bool(message.cut and mine) and message.cut not in self._cuts()

    def has_cut(self, hash_: bytes) -> bool:
        """Return True if a cut has arrived, by its hash."""
        return hash_ in self._cuts()

    def _cuts(self) -> Mapping[bytes, tuple[wire.Signed, wire.Cut]]:
        """Return the cuts that have arrived, by their hash."""
        if self._read[wire.Cut] != self._facts.num_ever(wire.Cut):
            self._read[wire.Cut] = self._facts.num_ever(wire.Cut)
            self._known_cuts = {it[0].hash: it for it in self._facts.every(wire.Cut, self.slot)}
        return self._known_cuts

    def _news(self, kind: type[_M]) -> list[tuple[wire.Signed, _M]]:
        """Return the messages of a kind about this slot that arrived since the last call."""
        if self._read[kind] == self._facts.num_ever(kind):
            return []
        news = self._facts.since(kind, self._read[kind])
        self._read[kind] = self._facts.num_ever(kind)
        return [entry for entry in news if entry[1].slot == self.slot]


@lru_cache(maxsize=8)  # In a simulation all members of a roster share one process.
def readies_of(members: tuple[PeerId, ...], readys: tuple[bytes, ...]) -> Mapping[PeerId, wire.Ready]:
    """Return the Ready of each member of a roster, by the bytes that it shows."""
    shown = zip(members, map(signed_in, readys), strict=False)
    return {peer: ready for peer, it in shown if isinstance(ready := wire.opened(it), wire.Ready)}


@lru_cache(maxsize=8)
def _ring_deputies(count: int, owners: frozenset[int], num_voters: int) -> tuple[tuple[int, ...], ...]:
    """Return the other voters of each of `count` parts, as they stand in: the next in their ring, and of these owners first.

    Free keys could be the owner and both deputies of a part, and so prevent every round; voters are not free. The voters
    take turns for the parts of others: one of them alone could neither hold these nor open enough nonces for a cut.
    """
    deputies: list[tuple[int, ...]] = []
    others = 0
    for part in range(count):
        turn = part + 1 if part < num_voters else others
        others += part >= num_voters and part in owners
        ring = [(turn + step) % num_voters for step in range(num_voters)]
        order = [index for index in ring if index != part]
        if part < num_voters:
            order.sort(key=lambda index: index not in owners)
        deputies.append(tuple(order))
    return tuple(deputies)
