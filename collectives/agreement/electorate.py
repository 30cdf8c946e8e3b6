"""Voters and their votes: quorum, proposer, and the slot that enough of them have reached. Pure.

Of four voters and more a quorum has more than two thirds: two quorums share more than a third, so at least one honest
voter while liars are less than a third. Fewer voters stand no liar, so more than a half decides: two quorums share a
voter, which signs once.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType

from ...peer.base.errors import LocalError
from ...peer.base.plain import SHORT_ID
from ...peer.base.transport import PeerId

LIAR_PROOF = 4
"""Voters from which on one of them may lie."""
MAX_AWAITED = 4
"""Voters that a line names, so that it stays a line."""


@dataclass(frozen=True)
class Electorate:
    """The voters of one decision with their votes. Equal mappings in any order are equal electorates."""

    votes: Mapping[PeerId, int]
    missed: Mapping[PeerId, int] = field(default_factory=dict)
    """The voters that were not in the last certified rosters, and how many of these each has missed."""

    def __post_init__(self) -> None:
        if not self.votes or min(self.votes.values()) < 1:
            raise LocalError("an electorate needs a voter, and each voter at least one vote")
        object.__setattr__(self, "votes", MappingProxyType(dict(sorted(self.votes.items()))))

    def __hash__(self) -> int:
        return hash(tuple(self.votes.items()))

    @cached_property
    def voters(self) -> tuple[PeerId, ...]:
        """The voters by id."""
        return tuple(self.votes)

    @cached_property
    def total(self) -> int:
        """All votes, of present and absent voters alike."""
        return sum(self.votes.values())

    @property
    def quorum(self) -> int:
        """The least number of votes that decides: more than 2/3 of all; of fewer than four voters more than 1/2."""
        return self.total // 2 + 1 if len(self.votes) < LIAR_PROOF else 2 * self.total // 3 + 1

    @property
    def third(self) -> int:
        """The least number of votes that is more than 1/3 of all: two quorums of four voters or more share so many."""
        return self.total // 3 + 1

    @cached_property
    def fewest(self) -> int:
        """The least number of voters that can be a quorum."""
        greatest = sorted(self.votes.values(), reverse=True)
        return next(count for count in range(1, len(greatest) + 1) if sum(greatest[:count]) >= self.quorum)

    def votes_of(self, voters: Iterable[PeerId]) -> int:
        """Return the votes of these peers; others than voters count nothing, and nobody counts twice."""
        return sum(self.votes.get(voter, 0) for voter in set(voters))

    def is_quorum(self, voters: Iterable[PeerId]) -> bool:
        """Return True if these peers together hold a quorum."""
        return self.votes_of(voters) >= self.quorum

    def awaits(self, here: Collection[PeerId], owner: PeerId = "", more: str = "") -> str:
        """Return in words for whom a decision waits while these are no quorum, `more` about them, and the votes."""
        away = sorted((voter for voter in self.voters if voter not in here), key=lambda voter: voter != owner)
        names = ["its owner" if voter == owner else voter[-SHORT_ID:] for voter in away[:MAX_AWAITED]]
        names += [f"{len(away) - MAX_AWAITED} more"] if len(away) > MAX_AWAITED else []
        votes = f"{self.votes_of(here)} of {self.total} votes are here, {self.quorum} needed"
        return f"waits for {', '.join(names)}{more}: {votes}"

    def proposer(self, round_: int, attempt: int) -> PeerId:
        """Return the proposer of an attempt: voters take turns by id, so that nobody can choose its turn.

        The turns of those that missed the last roster are given to the others; that shifts nobody else's.
        """
        turn = round_ + attempt
        voter, here = self.voters[turn % len(self.voters)], [it for it in self.voters if it not in self.missed]
        return here[turn % len(here)] if voter in self.missed and here else voter

    @property
    def blocking(self) -> int:
        """The least number of votes that liars do not hold: 1/3 of all, rounded up. Without them four have no quorum."""
        return -(-self.total // 3)

    def frontier(self, positions: Mapping[PeerId, int], least: int | None = None) -> int | None:
        """Return the greatest position that voters with `least` votes (None: more than 1/3) are at or beyond, if any."""
        reached, least = 0, self.third if least is None else least
        for position, voter in sorted(((at, voter) for voter, at in positions.items()), reverse=True):
            reached += self.votes.get(voter, 0)
            if reached >= least:
                return position
        return None


NOBODY = Electorate({"": 1})
"""An electorate that never decides: of rules that name no founders."""
