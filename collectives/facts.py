"""What has been said in a round: the first word of each peer in each kind of message, and what it means for a roster."""

from collections.abc import Callable, Iterable
from typing import TypeVar, cast

from ..peer import wire
from ..peer.schema import encode
from ..peer.transport import PeerId

M = TypeVar("M", bound=wire.RoundMessage)

LATEST_COUNTS = (wire.Ready, wire.Have)
"""These may be said again with newer content; every other second, different word is an equivocation."""


class Facts:
    """Signed messages by kind and sender. Only `add` changes anything."""

    def __init__(self) -> None:
        self._said: dict[type, dict[PeerId, tuple[wire.Signed, wire.RoundMessage]]] = {}

    def add(self, signed: wire.Signed, message: wire.RoundMessage) -> str:
        """Keep a message; returns `new`, `known`, or `conflict` for a second and different one of the same slot."""
        said = self._said.setdefault(type(message), {})
        earlier = said.get(signed.sender)
        if earlier is not None and earlier[1].slot == message.slot:
            if earlier[0].payload == signed.payload:
                return "known"
            if not isinstance(message, LATEST_COUNTS):
                return "conflict"
        said[signed.sender] = (signed, message)
        return "new"

    def drop(self, kind: type[wire.RoundMessage], peer: PeerId) -> None:
        """Forget a message that was refused."""
        self._said.get(kind, {}).pop(peer, None)

    def of(self, kind: type[M], slot: wire.Slot | None = None) -> dict[PeerId, M]:
        """The messages of one kind by sender, in sorted order; only those of `slot` if one is given."""
        said = self._said.get(kind, {})
        return {peer: cast(M, said[peer][1]) for peer in sorted(said) if slot is None or said[peer][1].slot == slot}

    def signed(self, kind: type[wire.RoundMessage], peer: PeerId) -> wire.Signed:
        """The signed form of a message that is here."""
        return self._said[kind][peer][0]

    def count(self, kind: type[M], slot: wire.Slot, matches: Callable[[M], bool]) -> int:
        """How many peers have said a matching message."""
        return sum(matches(message) for message in self.of(kind, slot).values())


class Table:
    """A certified roster with the commits to it: who owns what, and whose contribution is which."""

    def __init__(self, roster: wire.Roster, hash_: bytes, me: PeerId, facts: Facts) -> None:
        self.roster = roster
        self.slot = roster.slot
        self.members = roster.members
        self.bounds = roster.bounds
        self.hash = hash_
        self._facts = facts
        self.owners = frozenset(index for index in range(len(roster.members)) if self.cells(index))
        self.me = roster.members.index(me)

    @property
    def convener(self) -> PeerId:
        """The member that sequences this attempt."""
        return self.members[0]

    @property
    def owning(self) -> bool:
        """Whether a part is mine."""
        return self.me in self.owners

    def cells(self, index: int) -> int:
        """How many cells member `index` owns."""
        return self.bounds[index + 1] - self.bounds[index]

    def commits(self) -> dict[int, wire.Commit]:
        """The valid commits by roster index."""
        commits = {self.members.index(peer): commit for peer, commit in self._facts.of(wire.Commit, self.slot).items()}
        return {
            index: commit
            for index, commit in sorted(commits.items())
            if commit.roster == self.hash and len(commit.parts) == len(self.members)
        }

    def commits_signed(self, order: tuple[int, ...]) -> list[wire.Signed]:
        """The signed commits of these members."""
        return [self._facts.signed(wire.Commit, self.members[index]) for index in order]

    def haves(self) -> dict[int, frozenset[int]]:
        """What each owner says that it holds."""
        return {
            self.members.index(peer): frozenset(have.held)
            for peer, have in self._facts.of(wire.Have, self.slot).items()
            if have.roster == self.hash
        }

    def certificate(self, acks: Iterable[wire.Signed]) -> wire.Certificate:
        """The round's certificate from a quorum of equal acknowledgements."""
        roster, cut = (encode(self._facts.signed(kind, self.convener)) for kind in (wire.Roster, wire.Cut))
        return wire.Certificate(self.slot, roster, cut, tuple(encode(ack) for ack in acks))

    def flaw_of(self, cut: wire.Cut, least: int) -> str | None:
        """Why a cut does not fit this roster; None if it does."""
        order = cut.contributors
        if cut.roster != self.hash or list(order) != sorted(set(order)) or order[-1] >= len(self.members):
            return "a cut that does not fit its roster"
        if len(order) < least:
            return f"a cut of {len(order)} contributions where {least} are needed"
        return None
