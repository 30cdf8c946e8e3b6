"""Credit: the tokens of each peer that counted, and in how many rounds, summed over a chain of certificates. Pure.

A certificate lists the tokens of its contributors that count (`trust.credit_of`), and its quorum has computed them. Whoever
folds a chain that it has checked from the run's first round (`chain.packed.checked`) therefore gets the same table as
everybody else. Nobody keeps it.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from ...peer import wire
from ...peer.base.transport import PeerId
from .trust import MAX_TOKENS_OF_MEDIAN, weigh

MAX_SPEED_OF_MEDIAN = 4.0
"""So many times the median one contributor's stated speed counts at most. With one liar among ten contributors the others
are left with 9/13 of the speeds."""

MAX_CONTRIBUTORS = 20_000
"""Contributors whose credit is held: keys are free, and a run may go on for years."""


@dataclass(frozen=True, slots=True)
class PeerCredit:
    """What one peer has contributed to a run."""

    peer: PeerId
    tokens: int
    """Its tokens that counted."""
    rounds: int
    """The rounds in which its contribution was in the outputs, whether it was flagged or not."""


def credits_in(value: wire.Value) -> dict[PeerId, int]:
    """Return the tokens that count in a round, of each peer whose contribution is in its outputs."""
    peers = [value.members[index] for index in value.contributors]
    return dict(zip(peers, value.credit, strict=True))


def shares_in(value: wire.Value, *, earned: bool) -> dict[PeerId, float]:
    """Return each contributor's share of the tokens that count in a round, by trust and under the cap of an open run.

    Keys are free: by tokens alone as many new ones as there are contributors would have more than half.
    """
    return _shares(value, credits_in(value), earned=earned, most=MAX_TOKENS_OF_MEDIAN)


def speeds_in(value: wire.Value, stated: Mapping[PeerId, float], *, earned: bool) -> dict[PeerId, float]:
    """Return the share of each contributor with credit in their `stated` tokens a second, by trust and under the same cap.

    One counts up to `MAX_SPEED_OF_MEDIAN` × the median.
    """
    speeds = {peer: stated.get(peer, 0.0) if tokens else 0.0 for peer, tokens in credits_in(value).items()}
    return _shares(value, speeds, earned=earned, most=MAX_SPEED_OF_MEDIAN)


def _shares(value: wire.Value, counts: Mapping[PeerId, float], *, earned: bool, most: float) -> dict[PeerId, float]:
    if not counts:
        return {}
    places = dict(zip(value.members, value.seats, strict=True))
    seats = [places[peer] for peer in counts]
    return dict(zip(counts, weigh(list(counts.values()), [1.0] * len(seats), seats, earned=earned, most=most), strict=True))


class Credits:
    """The credit of the contributors to a chain's rounds, in any order; of more than `MAX_CONTRIBUTORS` those with most."""

    def __init__(self) -> None:
        self._tokens: Counter[PeerId] = Counter()
        self._rounds: Counter[PeerId] = Counter()

    def take(self, value: wire.Value) -> None:
        """Add the value of a validated certificate."""
        self._rounds.update(value.members[index] for index in value.contributors)
        self._tokens.update(credits_in(value))
        if len(self._rounds) > MAX_CONTRIBUTORS:
            for one in self.all()[MAX_CONTRIBUTORS * 3 // 4 :]:  # More than needed, so that not every round sorts all.
                del self._rounds[one.peer], self._tokens[one.peer]

    def add(self, other: "Credits") -> None:
        """Add the credit in rounds of another chain."""
        self._rounds.update(other._rounds)
        self._tokens.update(other._tokens)

    def all(self) -> tuple[PeerCredit, ...]:
        """Return the credit of each contributor, the most tokens first."""
        found = (PeerCredit(peer, self._tokens[peer], rounds) for peer, rounds in self._rounds.items())
        return tuple(sorted(found, key=lambda each: (-each.tokens, -each.rounds, each.peer)))
