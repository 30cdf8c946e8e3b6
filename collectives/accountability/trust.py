"""Trust: how much weight a peer has earned, from the chain of certificates alone. Pure.

Theory of operation (DESIGN §9). A certificate's roster says of each member what it had earned before that round (its
`wire.Seat`), its cut who contributed, its result who was flagged by the run's rule. What each has earned after the round
follows: +0.2 (1 − t) for a contribution that was not flagged, half of t for one that was. So the newest certificate with
a peer in its roster tells all about it, every peer that holds the chain computes the same, and a roster that says
something else is refused by whoever knows better (`gather.refusal`). A peer that the last `WINDOW` certificates do not
know begins anew. Who breaks the rules loses nothing of its trust: it is banned, and in no roster at all.

Where a run is open, weight must be earned. A newcomer begins with 0.2, and two caps hold: those who have not contributed
to 20 rounds have at most 20 % of a round's weight together, as long as anybody else is there; and one network prefix has
at most 25 % where four or more take part, as far as that raises nobody's weight by more than a half (else three
strangers with addresses of their own would outweigh a whole laboratory behind one). In a run by invitation or list its
owner vouches for the members: all begin with 1, and no caps hold.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ...peer import wire
from ...peer.digest import DIGEST_BYTES
from ...peer.transport import PeerId
from ..chain.certificate import certificate_hash, check_certificate, token_weights

FIRST_TRUST = 0.2
"""As after one clean round: with 0 a newcomer could never begin, and a run neither."""
GAIN = 0.2
YOUNG_ROUNDS = 20
YOUNG_SHARE = 0.2
PREFIX_SHARE = 0.25
LEAST_SHARE = 1e-9
"""Less is nothing: a ramp or a trust may be any number, and what a cap lifts to a share must not be next to none."""
MOST_GAIN = 1.5
"""By how much the cap of prefixes may raise anybody else's weight."""
WINDOW = 50
"""Rounds: more than twice as long as anybody is young; a newcomer fetches as many certificates in a second."""


@dataclass(frozen=True, slots=True)
class Standing:
    """What a peer has earned: its trust, and to how many rounds it has contributed (at most `YOUNG_ROUNDS` count)."""

    trust: float
    rounds: int


def newcomer(earned: bool) -> Standing:
    """Of whom nothing is known; `earned`: whether weight must be earned in this run."""
    return Standing(FIRST_TRUST if earned else 1.0, 0)


def after(seat: wire.Seat, contributed: bool, flagged: bool) -> Standing:
    """What the holder of a seat has earned after a round."""
    if flagged:
        return Standing(seat.trust / 2, seat.rounds)
    if not contributed:
        return Standing(seat.trust, seat.rounds)
    return Standing(min(1.0, seat.trust + GAIN * (1 - seat.trust)), min(seat.rounds + 1, YOUNG_ROUNDS))


class Trust:
    """What all peers have earned at the end of a chain of certificates."""

    def __init__(self, earned: bool) -> None:
        self._earned = earned
        self._known: dict[PeerId, tuple[int, Standing]] = {}
        self.head = bytes(DIGEST_BYTES)
        """The hash of the newest certificate that was taken."""
        self.first = 1
        """The first round of those that were taken, 1 where none was."""
        self._round = 0

    @property
    def is_complete(self) -> bool:
        """Whether a peer that is not known is a newcomer: nothing that counts is missing before the first certificate."""
        return self.first == 1 or self._round - self.first >= WINDOW

    def take(self, certificate: wire.Certificate) -> None:
        """The next certificate of the chain, checked before."""
        roster, cut, result = check_certificate(certificate, lambda signed: True)
        round_ = roster.slot.round
        if not self._known:
            self.first = round_
        for index, (peer, seat) in enumerate(zip(roster.members, roster.seats, strict=True)):
            standing = after(seat, index in cut.contributors, index in result.flagged)
            self._known[peer] = (round_, standing)
        self._known = {peer: known for peer, known in self._known.items() if round_ - known[0] < WINDOW}
        self.head, self._round = certificate_hash(certificate), round_

    def of(self, peer: PeerId) -> Standing | None:
        """What a peer brings into the next round; None where I cannot know."""
        if peer in self._known:
            return self._known[peer][1]
        return newcomer(self._earned) if self.is_complete else None

    def all(self) -> Mapping[PeerId, Standing]:
        """Of every peer that the last `WINDOW` certificates know, by id."""
        return {peer: self._known[peer][1] for peer in sorted(self._known)}


def weigh(
    tokens: Sequence[int], ramps: Sequence[float], seats: Sequence[wire.Seat], *, earned: bool
) -> tuple[float, ...]:
    """The weights of a cut, summing to 1: capped tokens, times ramps, times trust, with the caps of an open run.

    All zero where nobody has any tokens.
    """
    shares = list(token_weights(tokens, [ramp * seat.trust for ramp, seat in zip(ramps, seats, strict=True)]))
    if not earned or not any(shares):
        return tuple(shares)
    shares = [share if share >= LEAST_SHARE else 0.0 for share in shares]
    shares = cap_prefixes(shares, [seat.prefix for seat in seats])
    young = [index for index, seat in enumerate(seats) if seat.rounds < YOUNG_ROUNDS]
    return tuple(_limited(shares, young, YOUNG_SHARE))


def cap_prefixes(shares: Sequence[float], prefixes: Sequence[str]) -> list[float]:
    """The shares with no prefix above `PREFIX_SHARE`, as far as that raises nobody by more than `MOST_GAIN`."""
    groups: dict[str, list[int]] = defaultdict(list)
    for index, prefix in enumerate(prefixes):
        groups[prefix].append(index)
    sums = {prefix: sum(shares[index] for index in group) for prefix, group in sorted(groups.items())}
    if len(sums) * PREFIX_SHARE < 1:
        return list(shares)
    # Filling up: what is cut off goes to the others alike, which may lift one of them to the cap in turn.
    capped: set[str] = set()
    gain = 1.0
    while True:
        rest = sum(total for prefix, total in sums.items() if prefix not in capped)
        gain = (1 - PREFIX_SHARE * len(capped)) / rest if rest else 1.0
        over = {prefix for prefix, total in sums.items() if prefix not in capped and total * gain > PREFIX_SHARE}
        if not over or not rest:
            break
        capped |= over
    gain = min(gain, MOST_GAIN)
    # What is left over at that gain goes back to those who were cut, as they stick out.
    excess = {prefix: max(0.0, total * gain - PREFIX_SHARE) for prefix, total in sums.items()}
    surplus = sum(excess.values())
    returned = (1 - gain + surplus) / surplus if surplus else 0.0
    scale = {
        prefix: gain if not excess[prefix] else (PREFIX_SHARE + excess[prefix] * returned) / total
        for prefix, total in sums.items()
    }
    return [share * scale[prefix] for share, prefix in zip(shares, prefixes, strict=True)]


def _limited(shares: Sequence[float], group: Collection[int], most: float) -> list[float]:
    """The shares with those of a group cut to `most` together, the others lifted alike; as they are if there are none."""
    inside = sum(shares[index] for index in group)
    outside = sum(share for index, share in enumerate(shares) if index not in group)
    if inside <= most or not outside:
        return list(shares)
    return [
        share * (most / inside if index in group else (1 - most) / outside) for index, share in enumerate(shares)
    ]


def seat_of(ready: wire.Ready, standing: Standing) -> wire.Seat:
    """What a roster says of a member."""
    return wire.Seat(standing.trust, standing.rounds, ready.prefix, ready.invite)


def misstated(seat: wire.Seat, standing: Standing) -> bool:
    """Whether a roster says something else of a peer than what it has earned."""
    return Standing(seat.trust, seat.rounds) != standing
