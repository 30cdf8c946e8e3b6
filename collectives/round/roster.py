"""What has been said in a round: the first word of each peer in each kind of message, and what it means for a roster."""

import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import lru_cache
from operator import attrgetter
from typing import Any, TypeVar

from ...peer import wire
from ...peer.transport import PeerId
from ...peer.wire.schema import encode
from ..robust.checks import commitment
from .actions import Forward

M = TypeVar("M", bound=wire.RoundMessage)

LATEST_COUNTS = (wire.Ready, wire.Have)
"""These may be said again with newer content; every other second, different word is an equivocation."""
MAX_WORDS = wire.MAX_ROSTER * (wire.MAX_RECUTS + 1)
"""Words of one kind that one peer can have reason to say: a result for each part of each cut. More are not kept."""
MAX_SKETCHES = 32
"""Of one peer in a round: one after each cut, and one after each set of outputs that somebody has of it. 24 kB each."""
MAX_TOKENS = 1 << 50
"""What one contribution may claim: 35 years at a million a second. Of more, the run's total soon were no `Count` any more."""
SUBJECTS: Mapping[type, Callable[[Any], object]] = {
    wire.Cut: attrgetter("version"),
    wire.CutAck: attrgetter("cut"),
    wire.Sketch: attrgetter("after"),
    wire.Result: attrgetter("cut", "part"),
}
"""What a peer may say only one thing about; of all other kinds it may say one thing."""
DEPUTIES = 2
"""Who stands in for an owner. Two: that an owner and both of its deputies die in one round is worth a void."""


class Facts:
    """Signed messages of one round by kind, sender and subject. Only `add` and `drop` change anything.

    What is asked for after every message is kept ready: a round of 64 asks some thirty thousand times.
    """

    def __init__(self) -> None:
        self._said: dict[type, dict[tuple[PeerId, object], tuple[wire.Signed, Any]]] = defaultdict(dict)
        self._num_words: dict[tuple[type, PeerId], int] = defaultdict(int)
        self._journal: dict[type, list[tuple[wire.Signed, Any]]] = defaultdict(list)
        self._ackers: dict[tuple[type, int, bytes], set[PeerId]] = defaultdict(set)
        """By kind, attempt, and the hash of what is accepted."""
        self._views: dict[type, dict[wire.Slot | None, dict[PeerId, Any]]] = {}

    def add(self, signed: wire.Signed, message: wire.RoundMessage) -> str:
        """Keep a message; returns `new`, `known`, or `conflict` for a second and different one on the same subject."""
        kind, sender, word = type(message), signed.sender, (signed, message)
        said, about = self._said[kind], SUBJECTS.get(kind)
        subject = about(message) if about is not None else None
        earlier = said.get((sender, subject))
        if self._num_words[kind, sender] >= (MAX_SKETCHES if kind is wire.Sketch else MAX_WORDS):
            return "known" if earlier is not None and earlier[0].payload == signed.payload else "conflict"
        if earlier is not None and earlier[1].slot.attempt > message.slot.attempt:
            return "known"  # Late, or repeated by somebody else: what it says now is what counts.
        if earlier is not None and earlier[1].slot == message.slot:
            if earlier[0].payload == signed.payload:
                return "known"
            if not isinstance(message, LATEST_COUNTS):
                return "conflict"
        self._num_words[kind, sender] += 1
        said[sender, subject] = word
        self._journal[kind].append(word)
        if isinstance(message, wire.RosterAck):
            self._ackers[kind, message.slot.attempt, message.roster].add(sender)
        elif isinstance(message, wire.CutAck):
            self._ackers[kind, message.slot.attempt, message.cut].add(sender)
        self._views.pop(kind, None)
        return "new"

    def drop(self, kind: type[wire.RoundMessage], peer: PeerId) -> None:
        """Forget a message that was refused."""
        if self._said[kind].pop((peer, None), None) is not None:
            self._views.pop(kind, None)

    def restrict(self, members: Collection[PeerId]) -> None:
        """Forget the words of everybody else: who is not in the roster has no say in its round."""
        members = frozenset(members)
        for kind, said in self._said.items():
            for key in [key for key in said if key[0] not in members]:
                del said[key]
            self._journal[kind] = [word for word in self._journal[kind] if word[0].sender in members]
        for senders in self._ackers.values():
            senders.intersection_update(members)
        self._views.clear()

    def num(self, kind: type[wire.RoundMessage]) -> int:
        """How many messages of a kind are here."""
        return len(self._said[kind])

    def num_ever(self, kind: type[wire.RoundMessage]) -> int:
        """How many have come, those included that newer ones have replaced."""
        return len(self._journal[kind])

    def of(self, kind: type[M], slot: wire.Slot | None = None) -> Mapping[PeerId, M]:
        """The messages of a kind that a peer says once, by sender, in sorted order; only those of `slot` if given."""
        said = self._said[kind]
        if not said:
            return {}
        views = self._views.setdefault(kind, {})
        view = views.get(slot)
        if view is None:
            found = {sender: message for (sender, _), (_, message) in said.items()}
            view = {peer: found[peer] for peer in sorted(found) if slot is None or found[peer].slot == slot}
            views[slot] = view
        return view

    def every(self, kind: type[M], slot: wire.Slot) -> list[tuple[wire.Signed, M]]:
        """All messages of a kind that a peer may say about several subjects, in the order of their senders."""
        return sorted((word for word in self._said[kind].values() if word[1].slot == slot), key=lambda word: word[0].sender)

    def since(self, kind: type[M], start: int) -> list[tuple[wire.Signed, M]]:
        """What was said of a kind, in the order in which it came, without the first `start`: for who keeps count."""
        return self._journal[kind][start:]

    def signed(self, kind: type[wire.RoundMessage], peer: PeerId) -> wire.Signed:
        """The signed form of a message that is here."""
        return self._said[kind][peer, None][0]

    def acknowledged(self, kind: type[wire.RosterAck] | type[wire.CutAck], slot: wire.Slot, hash_: bytes) -> int:
        """How many peers have accepted the roster or the cut of this hash."""
        return len(self._ackers.get((kind, slot.attempt, hash_), ()))


class Table:
    """A roster with the commits to it: who owns what, who stands in for whom, and whose contribution is which."""

    def __init__(self, signed: wire.Signed, roster: wire.Roster, me: PeerId, facts: Facts) -> None:
        self.signed = signed
        self.roster = roster
        self.slot = roster.slot
        self.members = roster.members
        self.hash = signed.hash
        self.me = roster.members.index(me)
        self.owners = frozenset(index for index in range(len(roster.members)) if self.cells(index))
        self.places = {peer: index for index, peer in enumerate(roster.members)}
        """The index of each member."""
        self._facts = facts
        self._deputies = _stand_ins(len(roster.members), self.owners)
        self.wards = frozenset(part for part in self.owners if self.me in self._deputies[part])
        """The parts for which I stand in."""
        self._commits: dict[int, wire.Commit] = {}
        self._commits_signed: dict[int, wire.Signed] = {}
        self._haves: dict[int, wire.Have] = {}
        self._held: dict[tuple[int, int], tuple[wire.Have, frozenset[int]]] = {}
        self._read = {wire.Commit: 0, wire.Have: 0}

    def cells(self, part: int) -> int:
        """How many cells a part has."""
        return self.roster.bounds[part + 1] - self.roster.bounds[part]

    def convener(self, active: Collection[PeerId]) -> int | None:
        """Who sequences the attempt: the first living member; None where nobody lives."""
        return next((index for index, peer in enumerate(self.members) if peer in active), None)

    def deputies(self, part: int) -> tuple[int, ...]:
        """Who stands in for a part's owner: the next in the roster's ring, owners before those who own nothing."""
        return self._deputies[part]

    def holder(self, part: int, active: Collection[PeerId]) -> int | None:
        """Who answers for a part: its owner, else its first living deputy; None where all of them are gone."""
        return next((index for index in (part, *self.deputies(part)) if self.members[index] in active), None)

    def readers(self) -> tuple[tuple[PeerId, ...], ...]:
        """Who may fetch each of my parts before the cut: its owner and the owner's deputies."""
        return tuple(
            tuple(self.members[index] for index in (part, *self.deputies(part))) for part in range(len(self.members))
        )

    def commits(self) -> Mapping[int, wire.Commit]:
        """The valid commits by roster index, in the order in which they came."""
        if self._read[wire.Commit] == self._facts.num_ever(wire.Commit):
            return self._commits
        for signed, commit in self._news(wire.Commit):
            fits = commit.roster == self.hash and len(commit.parts) == len(self.members)
            if fits and commit.tokens <= MAX_TOKENS:
                index = self.places[signed.sender]
                self._commits[index], self._commits_signed[index] = commit, signed
        return self._commits

    def commits_signed(self, order: Iterable[int]) -> list[wire.Signed]:
        """The signed commits of these members."""
        return [self._commits_signed[index] for index in order]

    def haves(self) -> Mapping[int, wire.Have]:
        """By member: what it says that it holds of its parts."""
        if self._read[wire.Have] == self._facts.num_ever(wire.Have):
            return self._haves
        for signed, have in self._news(wire.Have):
            if have.roster == self.hash:
                self._haves[self.places[signed.sender]] = have
        return self._haves

    def held(self, index: int, part: int) -> frozenset[int] | None:
        """From whom a member says that it holds a part; None where it has not spoken of that part."""
        have = self.haves().get(index)
        if have is None:
            return None
        known = self._held.get((index, part))
        if known is None or known[0] is not have:  # Not before it is asked for: most is of no concern to me.
            found = [frozenset(held) for number, held in have.parts if number == part]
            if not found:
                return None
            known = self._held[index, part] = (have, found[-1])
        return known[1]

    def certificate(self, cut: wire.Signed, acks: Iterable[wire.Signed]) -> wire.Certificate:
        """The round's certificate from its cut and a quorum of equal acknowledgements."""
        return wire.Certificate(self.slot, encode(self.signed), encode(cut), tuple(map(_packed, acks)))

    def shown_to(self, sender: PeerId, message: wire.RoundMessage) -> list[Forward]:
        """My roster or cuts for a member that acknowledges another one: whoever signed both is seen to have done so."""
        if message.slot != self.slot or sender == self.members[self.me]:
            return []
        if isinstance(message, wire.RosterAck) and message.roster != self.hash:
            return [Forward((sender,), self.signed)]
        if isinstance(message, wire.CutAck):
            cuts = [signed for signed, _ in self._facts.every(wire.Cut, self.slot)]
            if all(signed.hash != message.cut for signed in cuts):
                return [Forward((sender,), signed) for signed in cuts]
        return []

    def cut_of(self, result: wire.ResultAck) -> wire.Signed | None:
        """The cut that a result is of, if I have heard it."""
        cuts = (signed for signed, _ in self._facts.every(wire.Cut, self.slot))
        return next((signed for signed in cuts if signed.hash == result.cut), None)

    def flaw_of(self, cut: wire.Cut, least: int) -> str | None:
        """Why a cut does not fit this roster; None if it does."""
        order = cut.contributors
        if cut.roster != self.hash or list(order) != sorted(set(order)) or order[-1] >= len(self.members):
            return "a cut that does not fit its roster"
        if len(order) < least:
            return f"a cut of {len(order)} contributions where {least} are needed"
        opened, readies = dict(cut.nonces), self._facts.of(wire.Ready)
        if 3 * len(opened) <= len(self.owners) or max(opened) >= len(self.members):
            return "a cut with the nonces of a third of the owners, or fewer"
        for index, nonce in opened.items():
            ready = readies.get(self.members[index])
            if ready is not None and ready.slot == self.slot and commitment(nonce) != ready.nonce_hash:
                return f"a cut with a nonce that {self.members[index]} has not committed to"
        return None

    def _news(self, kind: type[M]) -> list[tuple[wire.Signed, M]]:
        """What was said about this roster since I last looked."""
        news = self._facts.since(kind, self._read[kind])
        self._read[kind] += len(news)
        return [word for word in news if word[1].slot == self.slot]


_packed = lru_cache(maxsize=256)(encode)
"""What a round's acknowledgements are in its certificate: in a simulation all members make theirs of the same ones."""


@lru_cache(maxsize=8)  # Of one roster: in a simulation all its members are here.
def _stand_ins(count: int, owners: frozenset[int]) -> tuple[tuple[int, ...], ...]:
    """For each part the next in the ring of `count` members, owners first."""
    deputies: list[tuple[int, ...]] = []
    for part in range(count):
        ring = [*range(part + 1, count), *range(part)]
        owning = itertools.islice((index for index in ring if index in owners), DEPUTIES)
        rest = (index for index in ring if index not in owners)
        deputies.append(tuple(itertools.islice(itertools.chain(owning, rest), DEPUTIES)))
    return tuple(deputies)
