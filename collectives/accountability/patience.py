"""Who is waited for: a member that was waited for in vain is not in the rounds after it, in ever more of them. Pure.

Nobody loses anything by it that it comes for in time. Each failure doubles the rounds, and each `TRUST_WINDOW` of rounds
without one halves them again: a member can let others wait in vain once in so many rounds, and an honest one that had an
accident is waited for again soon.

Of a part of a contribution that did not come to its holder nobody else knows whose fault that is: one of the two is cut
off, too slow, or lies. `Faults` holds them against each other, over all such pairs of the last rounds.
"""

from collections import deque
from collections.abc import Collection, Iterable

from ...peer.base.transport import PeerId
from .trust import TRUST_WINDOW

MAX_ROUNDS = 640
"""The longest for which a member is not waited for."""


class Patience:
    """For how long each member is not waited for."""

    def __init__(self, first: int) -> None:
        """`first`: in how many rounds after its first failure."""
        self._first = first
        self._failed: dict[PeerId, tuple[int, int]] = {}
        """In which round a member failed last, and for how many more it is not waited for."""

    def awaits(self, peer: PeerId, round_: int) -> bool:
        """Return True if a member is waited for in a round."""
        last, rounds = self._failed.get(peer, (round_, -1))
        return round_ > last + rounds

    def fail(self, peers: Iterable[PeerId], round_: int) -> None:
        """Remember members that were waited for in this round in vain; of the others nobody knows how long they take."""
        now = {peer: self._halved(peer, round_) for peer in peers if self.awaits(peer, round_)}
        kept = {peer: it for peer, it in self._failed.items() if self._halved(peer, round_)}
        self._failed = kept | {peer: (round_, min(max(self._first, 2 * rounds), MAX_ROUNDS)) for peer, rounds in now.items()}

    def _halved(self, peer: PeerId, round_: int) -> int:
        last, rounds = self._failed.get(peer, (round_, 0))
        return rounds >> max(0, round_ - last - rounds) // TRUST_WINDOW


class Faults:
    """Pairs of a contributor and a holder between which a part was missing at the deadline, where the holder is known.

    Known are those that vote or are of many rounds: keys are free, and could frame anybody.
    """

    def __init__(self) -> None:
        self._pairs: deque[tuple[int, PeerId, PeerId]] = deque()
        """By round."""

    def add(
        self, pairs: Iterable[tuple[PeerId, PeerId]], known: Collection[PeerId], round_: int, owners: int
    ) -> tuple[set[PeerId], set[PeerId]]:
        """Add the pairs of a round; return the contributors and the holders that are at fault.

        At fault is who was in pairs with more others that are known than the other one of the pair was, and than a third of
        the known owners: a liar can be in a pair with anybody, but fewer than a third lie.
        """
        pairs = [(contributor, holder) for contributor, holder in pairs if holder in known]
        self._pairs.extend((round_, *pair) for pair in pairs)
        while self._pairs and self._pairs[0][0] <= round_ - TRUST_WINDOW:
            self._pairs.popleft()
        contributors, holders = set[PeerId](), set[PeerId]()
        for contributor, holder in pairs:
            denied = len({other for _, it, other in self._pairs if it == contributor})
            denies = len({it for _, it, other in self._pairs if other == holder and it in known})
            if denied > max(denies, owners // 3):
                contributors.add(contributor)
            elif denies > max(denied, owners // 3):
                holders.add(holder)
        return contributors, holders


class Lapses:
    """Who was late under which proposers: one that lies can make anybody late in its own turns."""

    def __init__(self) -> None:
        self._lapses: deque[tuple[int, PeerId, PeerId]] = deque()
        """By round: who, and under which proposer."""

    def add(self, peers: Collection[PeerId], proposer: PeerId, round_: int, voters: int) -> set[PeerId]:
        """Add those that were late in a round; return who of them was so under more proposers than may lie."""
        self._lapses.extend((round_, peer, proposer) for peer in peers)
        while self._lapses and self._lapses[0][0] <= round_ - TRUST_WINDOW:
            self._lapses.popleft()
        under = {peer: {by for _, it, by in self._lapses if it == peer} for peer in peers}
        return {peer for peer, proposers in under.items() if len(proposers) > (voters - 1) // 3}
