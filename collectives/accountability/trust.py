"""Trust: the weight that a peer has earned, from the chain of certificates alone. Pure.

Theory of operation. A certificate's roster states what each member had earned before that round (its
`wire.Seat`), its cut lists the contributors, its result those flagged by the run's rule. The trust t after the round
follows: +0.2 (1 − t) for a contribution that was not flagged, half of t for one that was. So the newest certificate
with a peer in its roster determines its trust, every peer that holds the chain computes the same, and refuses a roster
that states anything else (`round.gather.refusal`). A peer that is in none of the last `TRUST_WINDOW` rosters begins
anew. A peer that breaks the rules loses no trust: it is banned, and in no roster at all.

In an open run weight must be earned. A newcomer begins with 0.2, and a cap holds (Sybil resistance): beside four peers of
tenure, with 20 contributed rounds or more, all others have at most 20 % of a round's weight together. Fewer than four
have no more than their share of heads: one that was there a round before the others would else decide alone, and flag
them for good. Whom the owner has given a vote counts as of tenure at once (`RosterView.seats`). In a run by invitation or
list the owner vouches for the members: all begin with 1, and no cap holds.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, reduce
from itertools import repeat
from operator import add

import numpy as np

from ...dht.run.manifest import Earned
from ...peer import wire
from ...peer.base.digest import DIGEST_BYTES
from ...peer.base.transport import PeerId
from ..chain.certificate import certificate_hash, value_of
from ..robust.gramguard import SHORTEST
from ..robust.rule import middle, quantile

FIRST_TRUST = 0.2
"""The trust after one clean round: with 0 neither a newcomer nor a run could ever begin."""
GAIN = 0.2
YOUNG_ROUNDS = 20
YOUNG_SHARE = 0.2
MANY_OLD = 4
"""So many of tenure outweigh the young: of three or fewer a single liar would be a third or more."""
LEAST_SHARE = 1e-9
"""Smaller shares count as 0: a ramp or a trust may be any number, and a cap must not lift next to nothing to a share."""
MAX_TOKENS_OF_MEDIAN = 1.5
"""No contribution counts more tokens than one and a half times the median, however many it claims. The median is
by trust, under the cap of an open run."""
TRUST_WINDOW = 50
"""Rounds: more than twice `YOUNG_ROUNDS`; a newcomer fetches as many certificates in a second."""


@dataclass(frozen=True, slots=True)
class TrustRecord:
    """What a peer has earned: its trust, and the number of rounds that it contributed to (at most `YOUNG_ROUNDS` count)."""

    trust: float
    rounds: int


@cache
def newcomer_record(earned: bool) -> TrustRecord:
    """Return the record of an unknown peer; `earned`: whether weight must be earned in this run."""
    return TrustRecord(FIRST_TRUST if earned else 1.0, 0)


def of_tenure(seat: wire.Seat) -> wire.Seat:
    """Return the seat of somebody whom the run's owner answers for: it counts as of tenure, at the trust that it has."""
    return replace(seat, rounds=max(seat.rounds, YOUNG_ROUNDS))


def after(seat: wire.Seat, contributed: bool, flagged: bool) -> TrustRecord:
    """Return the record of a seat's holder after a round."""
    if flagged:
        return TrustRecord(seat.trust / 2, seat.rounds)
    if not contributed:
        return TrustRecord(seat.trust, seat.rounds)
    return TrustRecord(min(1.0, seat.trust + GAIN * (1 - seat.trust)), min(seat.rounds + 1, YOUNG_ROUNDS))


class Trust:
    """The trust records of all peers at the end of a chain of certificates."""

    def __init__(self, earned: bool, carried: Iterable[Earned] = ()) -> None:
        """`carried` is what members have earned in the run that this one goes on from, if weight must be earned."""
        self._earned = earned
        self._known: dict[PeerId, tuple[int, TrustRecord]] = {
            it.peer: (0, TrustRecord(it.trust, it.rounds)) for it in carried if earned
        }
        self.head = bytes(DIGEST_BYTES)
        """The hash of the newest certificate that was applied."""
        self.first = 1
        """The first round that was applied; 1 before any."""
        self._round = 0

    def take(self, certificate: wire.Certificate) -> None:
        """Apply the next certificate of the chain, validated before."""
        value = value_of(certificate)
        if not self._round:
            self.first = value.round
            if value.round > 1:  # What was carried counts only as the rounds since have left it.
                self._known = {}
        for index, (peer, seat) in enumerate(zip(value.members, value.seats, strict=True)):
            record = after(seat, index in value.contributors, index in value.flagged)
            self._known[peer] = (value.round, record)
        self._known = {peer: known for peer, known in self._known.items() if value.round - known[0] < TRUST_WINDOW}
        self.head, self._round = certificate_hash(certificate), value.round

    def of(self, peer: PeerId) -> TrustRecord | None:
        """Return the record that a peer brings into the next round; None if I cannot know it."""
        if peer in self._known:
            return self._known[peer][1]
        is_complete = self.first == 1 or self._round - self.first >= TRUST_WINDOW  # No certificate that counts is missing.
        return newcomer_record(self._earned) if is_complete else None

    def last_round(self, peer: PeerId) -> int:
        """Return the last round whose roster names a peer; 0 if none does that still counts."""
        return self._known[peer][0] if peer in self._known else 0

    def all(self) -> Mapping[PeerId, TrustRecord]:
        """Return the records of all peers in the last `TRUST_WINDOW` rosters, sorted by id."""
        return {peer: record for peer in sorted(self._known) if (record := self.of(peer)) is not None}


def weigh(
    tokens: Sequence[float],
    ramps: Sequence[float],
    seats: Sequence[wire.Seat],
    *,
    earned: bool,
    most: float = MAX_TOKENS_OF_MEDIAN,
) -> tuple[float, ...]:
    """Compute the weights of a cut, summing to 1: tokens under `most` × median, × ramp × trust, with the cap of an open run.

    All are zero if no contribution has tokens.
    """
    standing = _standing(seats, earned=earned)
    factors = [ramp * seat.trust for ramp, seat in zip(ramps, seats, strict=True)]
    shares = list(token_weights(tokens, factors, standing, most))
    if not earned or not any(shares):
        return tuple(shares)
    return tuple(_earned([share if share >= LEAST_SHARE else 0.0 for share in shares], seats))


def _standing(seats: Sequence[wire.Seat], *, earned: bool) -> list[float]:
    """Return what each contributor counts in the median of tokens: its trust under the cap; all alike if nobody has any."""
    trust = [seat.trust for seat in seats]
    if not any(trust):
        return [1.0] * len(seats)
    return _earned([each / _total(trust) for each in trust], seats) if earned else trust


def _earned(shares: Sequence[float], seats: Sequence[wire.Seat]) -> list[float]:
    """Apply the caps of an open run: of the young together, and of those of tenure where they are few."""
    young = [index for index, seat in enumerate(seats) if seat.rounds < YOUNG_ROUNDS]
    old = [index for index, share in enumerate(shares) if share and seats[index].rounds >= YOUNG_ROUNDS]
    limited = _limited(shares, young, 1 - (1 - YOUNG_SHARE) * min(len(old), MANY_OLD) / MANY_OLD)
    heads = sum(share > 0 for share in shares)
    return limited if len(old) >= MANY_OLD else _limited(limited, old, len(old) / max(1, heads))


def _total(values: Iterable[float]) -> float:
    """Add in order. Python's `sum` of floats has other last bits since 3.12, and all peers must have the same."""
    return reduce(add, values, 0.0)


def _limited(shares: Sequence[float], group: Collection[int], most: float) -> list[float]:
    """Cap a group's shares at `most` together and scale up the others; unchanged if there are no others."""
    inside = _total(shares[index] for index in group)
    outside = _total(share for index, share in enumerate(shares) if index not in group)
    if inside <= most or not outside:
        return list(shares)
    return [
        share * (most / inside if index in group else (1 - most) / outside) for index, share in enumerate(shares)
    ]


def seat_of(ready: wire.Ready, record: TrustRecord) -> wire.Seat:
    """Return the seat that a roster states for a member."""
    return wire.Seat(record.trust, record.rounds, ready.invite, ready.voucher, ready.is_leaving)


def misstated(seat: wire.Seat, record: TrustRecord) -> bool:
    """Return True if a roster's seat does not match what the peer has earned."""
    return TrustRecord(seat.trust, seat.rounds) != record


MAX_ROUND_TOKENS = 1 << 42
"""The most that one round adds to the run's total: 64 peers at a million tokens a second for 19 hours. The total has room
for a million such rounds."""
MAX_PEER_TOKENS = MAX_ROUND_TOKENS // wire.MAX_ROSTER


def credit_of(
    tokens: Sequence[int], seats: Sequence[wire.Seat], counts: Sequence[bool], *, earned: bool
) -> tuple[int, ...]:
    """Return the tokens of each contributor to a cut that count: as many as it states, under the cap of the weights.

    `counts` is False for one that was flagged or does not count. Of an even number the lower median holds, so that of two
    contributors none lifts its own cap. The round's credit is what it adds to the run's total.
    """
    cap = min(int(MAX_TOKENS_OF_MEDIAN * _median(tokens, seats, earned=earned)), MAX_PEER_TOKENS)
    return tuple(min(count, cap) if is_in else 0 for count, is_in in zip(tokens, counts, strict=True))


def idle_of(
    tokens: Sequence[int], seats: Sequence[wire.Seat], short: Mapping[int, float], *, earned: bool
) -> tuple[int, ...]:
    """Return which of the `short` contributions, by their norms relative to the median, are too short for their tokens.

    A phase of few steps is short, and states few tokens: it moves at least by its share of the median's tokens, since
    steps that do not point the same way move less the more there are. Below `SHORTEST` of that it is no work.
    """
    median = _median(tokens, seats, earned=earned)
    shares = {place: min(1.0, tokens[place] / median) if median else 1.0 for place in short}
    return tuple(place for place, norm in sorted(short.items()) if norm <= SHORTEST * shares[place])


def _median(tokens: Sequence[int], seats: Sequence[wire.Seat], *, earned: bool) -> float:
    standing = np.asarray(_standing(seats, earned=earned), np.float64)
    return float(quantile(np.asarray(tokens, np.float64), standing, low=True)[0])


def token_weights(
    tokens: Sequence[float],
    ramps: Sequence[float] | None = None,
    standing: Sequence[float] | None = None,
    most: float = MAX_TOKENS_OF_MEDIAN,
) -> tuple[float, ...]:
    """Compute the weights of a cut, summing to 1: tokens capped at `most` × their median, times the ramps of newcomers.

    `standing` weighs each contributor in the median; without it, or if all of it is zero, all count alike. Otherwise new
    keys that claim any number of tokens would move the cap for somebody else. All are zero if no contribution has tokens.
    """
    counts = np.asarray(standing if standing is not None and any(standing) else [1.0] * len(tokens), np.float64)
    cap = most * float(middle(np.asarray(tokens, np.float64), counts)[0])
    capped = [ramp * min(float(count), cap) for count, ramp in zip(tokens, ramps or repeat(1.0, len(tokens)), strict=True)]
    total = _total(capped)
    return tuple(share / total for share in capped) if total else tuple(capped)
