"""`gramguard`, the default rule: robust aggregation from the Gram matrix of the contributions. Pure.

A contribution that agrees with the others, and is no copy of another one, counts by its mass: its trust here, and the
tokens that its author claims once all is judged (`checks.weighed`). Medians, quantiles and bounds count mass, not heads:
keys are free, so many light ones must not shift them. The steps:

    1  valid: finite, mass > 0. Of these a norm below 0.1·median norm is short: no weight, and no flag either
    2  sᵢ = min(1, median norm / normᵢ): no contribution is longer than the median
    3  agreement: while the least cosine cᵢ to the centre of the others is below max(0, 0.4·median c), drop its peer, as
       long as less than half of all mass is dropped. The centre is the geometric median, in which copies share one
       weight: with b = 0.5·quantile₀.₂₅(squared distances, by massᵢ·massⱼ) and nᵢⱼ = clip(1 - d²ᵢⱼ/b, 0, 1) a mass counts
       massᵢ·maxⱼ(nᵢⱼ·massⱼ) / Σⱼ nᵢⱼ·massⱼ
    4  collusion: aᵢⱼ = max(0, cᵢⱼ - 0.05)·mᵢⱼ·min(1, shareⱼ/shareᵢ), cᵢⱼ being the cosine of the deviations of i and j from
       the centre, mᵢⱼ = min(1, massⱼ/massᵢ); Kᵢ = (Σⱼ aᵢⱼ)² / Σⱼ (aᵢⱼ²/mᵢⱼ), at most as many accomplices of massᵢ as
       have, with i, less than half of all mass; Sᵢ = Kᵢ·Σⱼ aᵢⱼ;
       shareᵢ = 1 / (1 + (Sᵢ / max(0.9, median S))⁴); three times, from shares of 1 on
    5  length: pᵢ is the component of sᵢxᵢ along the geometric median g of all shares. Where it is below
       min(quantile₀.₇ p, 1.2·median p), what is missing is added along g, in each part without those vetoed there
    6  the result is the mean of sᵢxᵢ by massᵢ·shareᵢ, and what 5 adds: so clipping and 5 make sums of weights other than 1
    7  3 and 4 on each part alone: cᵢ < -0.35 is a veto for that part only, and so is a share of less than half of 4's,
       as far as it is less; there, no contribution is longer than 1.25 times the median part norm

Why 4. In a million dimensions the errors of honest peers are all but orthogonal, so deviations that point the same way
have a common cause. It may be innocent: two peers with data of one domain reach an S of 0.6, and two can push no
further than that. If more agree, though on less, it adds up: so a sum is multiplied by the number K of its equal terms
(the inverse of Simpson's index, a lighter peer being a fraction of a term), up to as many accomplices as a liar can
have. Four that push together are at 6 to 9, k copies of one contribution at (k - 1)². A share falls slowly up to 0.9
and steeply from there on: copies together never count more than one contribution. A contribution with a small share
also contributes less to the S of others, or liars could take with them every peer that looks a little like them. As
long as liars pull the centre, the honest look alike: half of all keep at least half of their share whatever S is, so no
peer between the two groups can become the only one that counts.

Why 5. Groups of two liars, each with coordinates of its own, have orthogonal deviations: 4 sees two at most, and 3 sees
cosines that honest peers of a rare domain have as well. What the groups have in common is that all of them pull back
along the centre, whichever coordinates they use. So this one component is a robust quantile instead of a mean, and a
contribution keeps all that it says about other directions: that costs no honest domain anything.

Why not the weights of the geometric median in 6. They lower the weight of contributions far from the centre, which are
the honest ones with data like nobody else's. The geometric median is needed only as a centre to compare with: a
contribution that passes 3 and 4 cannot be distinguished from honest work, and counts by its mass.
"""

import numpy as np

from .rule import (
    SAME_MASS,
    Floats64,
    Mask,
    Rule,
    Weighting,
    deviations,
    geometric_median,
    lengths_of,
    middle,
    normalized,
    quantile,
    quotient,
    squared_distances,
    total,
    valid,
)

SHORTEST = 0.1
"""Relative to the median norm: the direction of a shorter contribution is noise. Few steps explain it, so it is no
offence; its weight by tokens would be as small, so the result lacks less than a hundredth of one contribution."""
COPY = 0.5
"""Relative to the lower quartile of squared distances: contributions nearer than that share one weight."""
COSINE = 0.4
"""Relative to the median cosine: honest peers with half of their data from their own domain stay above 0.59 of it."""
ALIKE = 0.05
"""A cosine of two deviations that chance, and the error of a sketch, reach; only the excess counts."""
COLLUSION = 0.9
"""The S at which a share is one half, as long as the median is less."""
PART_COSINE = -0.35
"""The least cosine on one part, where honest contributions differ more: with 4,000 elements they reach -0.2."""
PART_LONGEST = 1.25
"""Relative to the median norm of a part: the 90th percentile of honest ones. A false output may have what its author's
accomplices had in the part, so their length there bounds the lie (`residual`)."""
PART_EVIDENCE = 2.0
"""The factor by which a part's collusion must exceed the whole's to count: shares of parts of honest peers vary."""
ALONG = 0.7
"""The quantile of the components along the centre to which shorter ones are raised. The median itself would be the least
of the honest ones where almost half of the mass pulls back."""
ALONG_MEDIAN = 1.2
"""Relative to the median component: no quantile above that counts, since liars could be longest along the centre."""
WEISZFELD_STEPS = 8
"""Weights of honest peers are then exact to 10⁻⁹, those of four copies to 5 %: enough for a bound and for a cosine."""
COLLUSION_STEPS = 3
"""The first round's centre is still pulled by the colluders, so they look less alike, and the others more."""


class GramGuard(Rule):
    """The rule of this file's theory of operation."""

    name = "gramguard"

    def weights(self, gram: Floats64, parts: Floats64, masses: Floats64) -> Weighting:
        """Weigh contributions by their inner products: `Rule.weights`."""
        alive = valid(gram, parts, masses)
        flagged = {int(i): "not finite, or without a mass" for i in np.flatnonzero(~alive)}
        norms = np.where(alive, lengths_of(gram), 0.0)
        masses = np.where(alive, masses, 0.0)
        median = middle(norms, masses)
        is_short = alive & ((norms < SHORTEST * median) | (norms == 0))
        short = {int(i): float(quotient(norms, median)[i]) for i in np.flatnonzero(is_short)}
        alive &= ~is_short
        if not alive.any():
            return Weighting(weights=np.zeros((len(parts), len(masses))), flagged=flagged, short=short)

        masses = np.where(alive, masses, 0.0)
        lengths = clipped(norms, masses, 1.0)
        scaled = rescaled(gram, lengths, alive)
        (kept,), (reasons,) = _agreeing(scaled[None], _voices(scaled, masses)[None], masses[None], 0.0, COSINE)
        flagged |= reasons

        masses = np.where(kept, masses, 0.0)
        shares = _shares(scaled, masses)
        by_part, shorter, reasons_by_part = self._by_part(rescaled(parts, lengths, kept), masses, shares, kept)
        for part, found in enumerate(reasons_by_part):
            for i, reason in found.items():
                flagged.setdefault(i, f"{reason} in part {part}")
        counts = masses * shares * by_part
        centre, missing = _missing(scaled, masses, masses * shares)
        raised = quotient(total(counts * missing), total(counts))[:, None] * centre * by_part
        # Clipped vectors are averaged: a weight that clipping takes goes to nobody, or long ones would lengthen the output.
        weights = (normalized(counts) + raised) * lengths * shorter
        return Weighting(weights=weights, flagged=flagged, short=short)

    def _by_part(
        self, parts: Floats64, masses: Floats64, shares: Floats64, kept: Mask
    ) -> tuple[Floats64, Floats64, list[dict[int, str]]]:
        """Return [p, n] factors on the weights of each part, and on its length, 0 to 1, and the reasons of the vetoes."""
        everyone = np.broadcast_to(masses, parts.shape[:-1])
        shorter = clipped(lengths_of(parts), everyone, PART_LONGEST)
        scaled = rescaled(parts, shorter, np.broadcast_to(kept, everyone.shape))
        own = _shares(scaled, everyone)
        here, reasons = _agreeing(scaled, masses * own, everyone, PART_COSINE, 0.0)
        return np.where(here, np.minimum(1.0, PART_EVIDENCE * own / shares), 0.0), shorter, reasons


def clipped(norms: Floats64, masses: Floats64, longest: float) -> Floats64:
    """Return [..., n] factors that clip norms to `longest` times the median by mass."""
    return np.minimum(quotient(longest * middle(norms, masses), norms, 1.0), 1.0)


def rescaled(gram: Floats64, lengths: Floats64, alive: Mask) -> Floats64:
    """Return [..., n, n] inner products of the contributions times their `lengths`; zeros for those left out."""
    scales = np.where(alive, lengths, 0.0)
    everyone = alive[..., :, None] & alive[..., None, :]
    return np.where(everyone, gram, 0.0) * scales[..., :, None] * scales[..., None, :]


def _voices(gram: Floats64, masses: Floats64) -> Floats64:
    """Return [n] masses; copies share the largest of theirs."""
    distances = squared_distances(gram)
    pairs = np.where(np.eye(len(gram), dtype=bool), 0.0, masses[:, None] * masses[None, :])
    bound = COPY * float(quantile(distances.reshape(-1), pairs.reshape(-1), 0.25)[0])
    near = np.where(pairs > 0, np.maximum(1.0 - distances / bound, 0.0), 0.0) if bound > 0 else np.zeros_like(distances)
    near[np.diag_indices(len(gram))] = 1.0
    copies = near * masses
    return masses * quotient(copies.max(axis=-1), total(copies))


def _shares(gram: Floats64, masses: Floats64) -> Floats64:
    """Return [..., n] shares of the masses, 0 to 1, after deviations that point the same way have divided theirs."""
    shares = np.ones_like(masses)
    with np.errstate(over="ignore"):  # A mass may be any number above 0.
        # The most accomplices that a liar can have: of its own mass each, and with it less than half of all mass.
        rivals = quotient(total(masses)[..., None] - masses, 2 * masses)
        fellows = np.maximum(np.floor(rivals * (1 + SAME_MASS)) - 1.0, 1.0)
        # A lighter one is a fraction of an accomplice.
        fractions = np.minimum(quotient(masses[..., None, :], masses[..., :, None]), 1.0)
    others = ~np.eye(gram.shape[-1], dtype=bool)
    for _ in range(COLLUSION_STEPS):
        voices = masses * shares
        products = deviations(gram, geometric_median(gram, voices, WEISZFELD_STEPS))
        away = lengths_of(products)
        alike = np.maximum(quotient(products, away[..., :, None] * away[..., None, :]) - ALIKE, 0.0)
        # By shares and masses apart: a light one stays a fraction of a fellow when my share falls.
        less = fractions * np.minimum(quotient(shares[..., None, :], shares[..., :, None]), 1.0)
        alike = np.where(others, alike * less, 0.0)
        sums = total(alike)
        strength = sums * np.minimum(quotient(sums * sums, total(quotient(alike * alike, fractions))), fellows)
        strength = strength / np.maximum(middle(strength, masses), COLLUSION)
        square = strength * strength
        shares = 1.0 / (1.0 + square * square)
    return shares


def _missing(gram: Floats64, masses: Floats64, voices: Floats64) -> tuple[Floats64, Floats64]:
    """Return [n] weights of the centre, and [n] multiples of it by which contributions are too short along it."""
    centre = geometric_median(gram, voices, WEISZFELD_STEPS)
    along = total(gram * centre)
    least = np.minimum(quantile(along, masses, ALONG), ALONG_MEDIAN * middle(along, masses))
    return centre, quotient(np.maximum(least - along, 0.0), total(along * centre))


def _agreeing(
    gram: Floats64, voices: Floats64, masses: Floats64, least: float, share: float
) -> tuple[Mask, list[dict[int, str]]]:
    """Return [p, n] the kept ones of each of p sets after dropping the worst repeatedly, and the others' reasons.

    The worst has the least cosine to the centre of the others by `voices`, below `least` or `share` of the median. Less
    than half of the mass is dropped.
    """
    kept = masses > 0
    most = total(masses)[..., None] / 2 * (1 - SAME_MASS)
    reasons: list[dict[int, str]] = [{} for _ in gram]
    norms = lengths_of(gram)
    while True:
        weights = geometric_median(gram, np.where(kept, voices, 0.0), WEISZFELD_STEPS)
        products = total(gram * weights[..., None, :])
        square = total(products * weights)[..., None]
        own = weights * norms
        # The centre without i, unscaled: Σⱼ≠ᵢ wⱼxⱼ.
        others = np.sqrt(np.maximum(square - 2 * weights * products + own * own, 0.0))
        cosines = np.where(kept, quotient(products - own * norms, others * norms), np.inf)
        left = np.where(kept, masses, 0.0)
        bound = np.maximum(least, share * middle(cosines, left))[..., 0] if share else np.full(len(gram), least)
        dropped = total(np.where(kept, 0.0, masses))[..., None]
        cosines = np.where(dropped + masses < most, cosines, np.inf)
        worst = np.argmin(cosines, axis=-1)
        wrong = np.flatnonzero(cosines[np.arange(len(gram)), worst] < bound)
        for one in wrong:
            i = int(worst[one])
            kept[one, i] = False
            reasons[one][i] = f"cosine {cosines[one, i]:.2f} to the others"
        if not wrong.size:
            return kept, reasons
