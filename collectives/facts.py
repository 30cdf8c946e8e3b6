"""What has been said in a round: the first word of each peer in each kind of message, and what it means for a roster."""

from collections.abc import Callable, Collection, Iterable
from typing import TypeVar, cast

from ..peer import wire
from ..peer.schema import encode
from ..peer.transport import PeerId

M = TypeVar("M", bound=wire.RoundMessage)

LATEST_COUNTS = (wire.Ready, wire.Have)
"""These may be said again with newer content; every other second, different word is an equivocation."""
MAX_WORDS = wire.MAX_ROSTER * (wire.MAX_RECUTS + 1)
"""Words of one kind that one peer can have reason to say: a result for each part of each cut."""
DEPUTIES = 2
"""Who stands in for an owner. Two: that an owner and both of its deputies die in one round is worth a void."""


class Facts:
    """Signed messages by kind, sender and subject. Only `add` and `drop` change anything."""

    def __init__(self) -> None:
        self._said: dict[type, dict[tuple[PeerId, object], tuple[wire.Signed, wire.RoundMessage]]] = {}

    def add(self, signed: wire.Signed, message: wire.RoundMessage) -> str:
        """Keep a message; returns `new`, `known`, or `conflict` for a second and different one on the same subject."""
        said = self._said.setdefault(type(message), {})
        key = (signed.sender, _subject(message))
        earlier = said.get(key)
        if earlier is not None and earlier[1].slot == message.slot:
            if earlier[0].payload == signed.payload:
                return "known"
            if not isinstance(message, LATEST_COUNTS):
                return "conflict"
        if earlier is None and sum(sender == signed.sender for sender, _ in said) >= MAX_WORDS:
            return "conflict"
        said[key] = (signed, message)
        return "new"

    def drop(self, kind: type[wire.RoundMessage], peer: PeerId) -> None:
        """Forget a message that was refused."""
        self._said.get(kind, {}).pop((peer, None), None)

    def of(self, kind: type[M], slot: wire.Slot | None = None) -> dict[PeerId, M]:
        """The messages of a kind that a peer says once, by sender, in sorted order; only those of `slot` if given."""
        said = self._said.get(kind, {})
        found = {sender: cast(M, message) for (sender, _), (_, message) in said.items()}
        return {peer: found[peer] for peer in sorted(found) if slot is None or found[peer].slot == slot}

    def every(self, kind: type[M], slot: wire.Slot) -> list[tuple[wire.Signed, M]]:
        """All messages of a kind that a peer may say about several subjects, in the order of their senders."""
        said = [(signed, cast(M, message)) for signed, message in self._said.get(kind, {}).values()]
        return sorted(((s, m) for s, m in said if m.slot == slot), key=lambda word: word[0].sender)

    def signed(self, kind: type[wire.RoundMessage], peer: PeerId) -> wire.Signed:
        """The signed form of a message that is here."""
        return self._said[kind][peer, None][0]

    def count(self, kind: type[M], slot: wire.Slot, matches: Callable[[M], bool]) -> int:
        """How many peers have said a matching message."""
        return len({signed.sender for signed, message in self.every(kind, slot) if matches(message)})


def _subject(message: wire.RoundMessage) -> object:
    """What a peer may say only one thing about."""
    match message:
        case wire.Cut():
            return message.version
        case wire.CutAck():
            return message.cut
        case wire.Result():
            return message.cut, message.part
    return None


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
        self._facts = facts

    def cells(self, part: int) -> int:
        """How many cells a part has."""
        return self.roster.bounds[part + 1] - self.roster.bounds[part]

    def convener(self, active: Collection[PeerId]) -> int | None:
        """Who sequences the attempt: the first living member; None where nobody lives."""
        return next((index for index, peer in enumerate(self.members) if peer in active), None)

    def deputies(self, part: int) -> tuple[int, ...]:
        """Who stands in for a part's owner: the next in the roster's ring, owners before those who own nothing."""
        count = len(self.members)
        ring = [(part + step) % count for step in range(1, count)]
        return tuple(sorted(ring, key=lambda index: index not in self.owners)[:DEPUTIES])

    def holder(self, part: int, active: Collection[PeerId]) -> int | None:
        """Who answers for a part: its owner, else its first living deputy; None where all of them are gone."""
        return next((index for index in (part, *self.deputies(part)) if self.members[index] in active), None)

    def readers(self) -> tuple[tuple[PeerId, ...], ...]:
        """Who may fetch each of my parts before the cut: its owner and the owner's deputies."""
        return tuple(
            tuple(self.members[index] for index in (part, *self.deputies(part))) for part in range(len(self.members))
        )

    def commits(self) -> dict[int, wire.Commit]:
        """The valid commits by roster index."""
        commits = {self.members.index(peer): commit for peer, commit in self._facts.of(wire.Commit, self.slot).items()}
        return {
            index: commit
            for index, commit in sorted(commits.items())
            if commit.roster == self.hash and len(commit.parts) == len(self.members)
        }

    def commits_signed(self, order: Iterable[int]) -> list[wire.Signed]:
        """The signed commits of these members."""
        return [self._facts.signed(wire.Commit, self.members[index]) for index in order]

    def haves(self) -> dict[int, dict[int, frozenset[int]]]:
        """By member: from whom it says that it holds each of its parts."""
        return {
            self.members.index(peer): {part: frozenset(held) for part, held in have.parts}
            for peer, have in self._facts.of(wire.Have, self.slot).items()
            if have.roster == self.hash
        }

    def certificate(self, cut: wire.Signed, acks: Iterable[wire.Signed]) -> wire.Certificate:
        """The round's certificate from its cut and a quorum of equal acknowledgements."""
        return wire.Certificate(self.slot, encode(self.signed), encode(cut), tuple(encode(ack) for ack in acks))

    def flaw_of(self, cut: wire.Cut, least: int) -> str | None:
        """Why a cut does not fit this roster; None if it does."""
        order = cut.contributors
        if cut.roster != self.hash or list(order) != sorted(set(order)) or order[-1] >= len(self.members):
            return "a cut that does not fit its roster"
        if len(order) < least:
            return f"a cut of {len(order)} contributions where {least} are needed"
        return None
