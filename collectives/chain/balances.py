"""Votes earned by work: the balance of a member after a round, and the share of a round's weight that each one earns. Pure.

Every certified round b becomes b + ⌊(s − b)/32⌋ for everybody: s is the share of the round's weight that the run's rule left
a contributor, in units of 2⁻³⁰, and 0 for who was away. Whole numbers alone, so that no two peers count differently. A
certificate states the balances of its roster before the round and the shares of its contributors: it determines the votes
of the next round by itself (`voters`).
"""

from collections.abc import Sequence

from ...peer import wire

GAIN_ROUNDS = 32
"""A balance moves by this part of its distance to the share; it has half of that distance after 22 rounds."""


def balance_after(balance: int, share: int = 0, rounds: int = 1) -> int:
    """Return a balance after a round with this share, and after so many `rounds` in all with the same one."""
    for _ in range(rounds):
        balance += (share - balance) // GAIN_ROUNDS
    return balance


def balances_of(value: wire.Value) -> tuple[int, ...]:
    """Return the balance of each member of a certified roster after its round."""
    shares = dict(zip(value.contributors, value.shares, strict=False))
    return tuple(balance_after(seat.balance, shares.get(index, 0)) for index, seat in enumerate(value.seats))


def shares_of(weights: Sequence[Sequence[float]], bounds: Sequence[int]) -> tuple[int, ...]:
    """Return each contributor's share of a round, in 2⁻³⁰: together at most all of it, and none is negative.

    `weights` [p, n] are those of the rule by part, the same bits at every peer; `bounds` [p + 1] are the parts' cells.
    """
    sums = [0] * len(weights[0])
    for row, low, high in zip(weights, bounds, bounds[1:], strict=False):
        for place, weight in enumerate(row):
            sums[place] += (high - low) * max(0, int(weight * wire.WHOLE_SHARE))
    total = sum(sums)
    return tuple(part * wire.WHOLE_SHARE // total for part in sums) if total else tuple(sums)
