"""`gramguard`, the default rule: who agrees with the others, says something of its own, and something new each round.

    1  valid: finite, norm ≥ 0.1·median norm, mass > 0
    2  sᵢ = min(1, median norm / normᵢ): nobody is longer than the median
    3  copies count once: b = 0.5·quantile₀.₂₅(off-diagonal squared distances), aᵢ = massᵢ / Σⱼ clip(1 - d²ᵢⱼ/b, 0, 1)
    4  loop: w = weights of the geometric median of who is left (Weiszfeld, masses a); cᵢ = cosine to the centre of the
       others, rᵢ = distance to the centre; drop the worst with cᵢ < max(0, 0.25·median c) or rᵢ > 1.7·median r
    5  repetition (`repetition`): whoever departs from the centre as in the last round, round after round, loses its mass
       and is dropped; 4 and 5 together drop at most ⌊(n-1)/2⌋
    6  collusion: Sᵢ = Σⱼ max(0, cosine of the deviations of i and j); aᵢ ← aᵢ / ((1 + Sᵢ)(1 + Sᵢ²)), twice
    7  wᵢ: the geometric median's with those masses, times sᵢ, to a sum of 1
    8  6 and 4 on each part alone, 4 with wider bounds (cosine < -0.2, r > 2.5·median): a veto holds for that part only,
       and so does a share of less than half of 6's; there, nobody is longer than twice the median part norm

Why 6. In a million dimensions the errors of honest peers are all but orthogonal, so deviations that point the same way
share a cause. k equal estimates with pairwise correlation c deserve 1/(1 + (k-1)c) voices each, if the cause is innocent:
that is generalized least squares, and all that happens to honest peers with data of one domain. The other factor is for
when it is not, and near 1 unless many agree on much: four copies are left with a tenth of a voice together.
"""

import numpy as np

from .repetition import repetition
from .verdict import (
    Floats64,
    History,
    Mask,
    Rule,
    Verdict,
    deviations,
    geometric_median,
    lengths_of,
    middle,
    normalized,
    quotient,
    squared_distances,
    total,
    valid,
)

SHORTEST = 0.1
"""Of the median norm: a shorter contribution is next to nothing, and its direction is noise."""
COPY = 0.5
"""Of the lower quartile of squared distances: nearer than that, two contributions share one voice."""
COSINE, FAR = 0.25, 1.7
"""Of the medians, over all parts: honest peers with half of their data from a domain of their own stay within."""
PART_COSINE, PART_FAR, PART_LONGEST = -0.2, 2.5, 2.0
"""Of one part, where honest contributions differ more."""
PART_EVIDENCE = 2.0
"""A part's collusion counts where it is this much stronger than the whole's: shares of parts of honest peers vary."""
REPEATS = 0.25
"""Suspicion from which on a peer is out: two rounds at less than half of the others' renewal, or one at a tenth."""
WEISZFELD_STEPS = 8
"""Among honest peers weights are then exact to 10⁻⁹, with four copies to 5 %: enough for a bound and for a cosine."""
COLLUSION_STEPS = 2
"""The centre of the first step is still pulled by the colluders, which makes them look less alike."""


class GramGuard(Rule):
    """See the head of this file."""

    name = "gramguard"

    def weights(self, gram: Floats64, parts: Floats64, masses: Floats64, history: History | None = None) -> Verdict:
        """Judge contributions by their inner products: `Rule.weights`."""
        n = len(masses)
        alive = valid(gram, parts, masses)
        flagged = {int(i): "not finite, or without a mass" for i in np.flatnonzero(~alive)}
        norms = np.where(alive, lengths_of(gram), 0.0)
        short = alive & ((norms < SHORTEST * middle(norms, alive)) | (norms == 0))
        flagged |= {int(i): f"its norm is below {SHORTEST} of the median" for i in np.flatnonzero(short)}
        alive &= ~short
        if not alive.any():
            return Verdict(weights=np.zeros((len(parts), n)), flagged=flagged, suspicion=np.zeros(n))

        lengths = clipped(norms, alive, 1.0)
        scaled = rescaled(gram, lengths, alive)
        voices = _voices(scaled, np.where(alive, masses, 0.0))
        most = (int(np.count_nonzero(alive)) - 1) // 2
        kept, reasons = _agreeing(scaled[None], voices[None], alive[None], most, 0.0, COSINE, FAR)
        flagged |= reasons[0]
        kept = kept[0]
        suspicion = np.zeros(n)
        if history is not None:
            centre = geometric_median(scaled, np.where(kept, voices, 0.0), WEISZFELD_STEPS)
            suspicion = repetition(scaled, centre, lengths, alive, history)
            for i in np.argsort(-suspicion, kind="stable")[: most - np.count_nonzero(alive & ~kept)]:
                if suspicion[i] > REPEATS and kept[i]:
                    kept[i] = False
                    flagged[int(i)] = "departs from the others as in the round before"
            voices *= 1.0 - suspicion

        voices = np.where(kept, voices, 0.0)
        shares = _own_shares(scaled, voices)
        whole = geometric_median(scaled, voices * shares, WEISZFELD_STEPS)
        heard, reasons = self._by_part(rescaled(parts, lengths, kept), voices, shares, kept)
        for part, found in enumerate(reasons):
            for i, reason in found.items():
                flagged.setdefault(i, f"{reason} in part {part}")
        return Verdict(weights=normalized(whole * heard * lengths), flagged=flagged, suspicion=suspicion)

    def _by_part(
        self, parts: Floats64, voices: Floats64, shares: Floats64, kept: Mask
    ) -> tuple[Floats64, list[dict[int, str]]]:
        """[p, n] what each part leaves of a weight, 0 to 1, and the reasons of the vetoes, from the clipped parts."""
        everyone = np.broadcast_to(kept, parts.shape[:-1])
        shorter = clipped(lengths_of(parts), everyone, PART_LONGEST)
        scaled = rescaled(parts, shorter, everyone)
        own = _own_shares(scaled, np.broadcast_to(voices, everyone.shape))
        most = (int(np.count_nonzero(kept)) - 1) // 2
        here, reasons = _agreeing(scaled, voices * own, everyone, most, PART_COSINE, 0.0, PART_FAR)
        return np.where(here, np.minimum(1.0, PART_EVIDENCE * own / shares) * shorter, 0.0), reasons


def clipped(norms: Floats64, alive: Mask, longest: float) -> Floats64:
    """[..., n] what each must be multiplied with to be no longer than `longest` times the median."""
    return np.minimum(quotient(longest * middle(norms, alive), norms, 1.0), 1.0)


def rescaled(gram: Floats64, lengths: Floats64, alive: Mask) -> Floats64:
    """[..., n, n] inner products of the contributions times their `lengths`; zeros for who is out."""
    scales = np.where(alive, lengths, 0.0)
    everyone = alive[..., :, None] & alive[..., None, :]
    return np.where(everyone, gram, 0.0) * scales[..., :, None] * scales[..., None, :]


def _voices(gram: Floats64, masses: Floats64) -> Floats64:
    """[n] masses, of which copies share one."""
    distances = squared_distances(gram)
    alive = masses > 0
    pairs = alive[:, None] & alive[None, :] & ~np.eye(len(gram), dtype=bool)
    ascending = np.sort(distances[pairs])
    bound = COPY * float(ascending[ascending.size // 4]) if ascending.size else 0.0
    near = np.where(pairs, np.maximum(1.0 - distances / bound, 0.0), 0.0) if bound > 0 else np.zeros_like(distances)
    return masses / (1.0 + total(near))


def _own_shares(gram: Floats64, masses: Floats64) -> Floats64:
    """[..., n] what is left of each one's mass, 0 to 1, when deviations that point the same way share it."""
    shares = np.ones_like(masses)
    heard = (masses > 0)[..., :, None] & (masses > 0)[..., None, :] & ~np.eye(gram.shape[-1], dtype=bool)
    for _ in range(COLLUSION_STEPS):
        products = deviations(gram, geometric_median(gram, masses * shares, WEISZFELD_STEPS))
        away = lengths_of(products)
        cosines = quotient(products, away[..., :, None] * away[..., None, :])
        alike = total(np.where(heard, np.maximum(cosines, 0.0), 0.0))
        shares = 1.0 / ((1.0 + alike) * (1.0 + alike * alike))
    return shares


def _agreeing(
    gram: Floats64, masses: Floats64, alive: Mask, most: int, least_cosine: float, share: float, far: float
) -> tuple[Mask, list[dict[int, str]]]:
    """[p, n] who is left of each of p sets when the worst is dropped, up to `most` times, and why the others are not.

    The worst has a cosine below `least_cosine` and `share` of the median, or a distance above `far` times the median.
    """
    kept = alive.copy()
    reasons: list[dict[int, str]] = [{} for _ in gram]
    norms = lengths_of(gram)
    for _ in range(most):
        weights = geometric_median(gram, np.where(kept, masses, 0.0), WEISZFELD_STEPS)
        products = total(gram * weights[..., None, :])
        square = total(products * weights)[..., None]
        own = weights * norms
        # Of the centre without i, unscaled: Σⱼ≠ᵢ wⱼxⱼ.
        others = np.sqrt(np.maximum(square - 2 * weights * products + own * own, 0.0))
        cosines = quotient(products - own * norms, others * norms)
        away = np.sqrt(np.maximum(norms * norms - 2 * products + square, 0.0))
        least = np.maximum(least_cosine, share * middle(cosines, kept)) if share else np.asarray(least_cosine)
        excess = np.maximum(least - cosines, quotient(away, far * middle(away, kept)) - 1.0)
        excess = np.where(kept, excess, 0.0)
        worst = np.argmax(excess, axis=-1)
        wrong = np.flatnonzero(excess[np.arange(len(gram)), worst] > 0)
        for one in wrong:
            i = int(worst[one])
            kept[one, i] = False
            turned = cosines[one, i] < np.broadcast_to(least, (len(gram), 1))[one, 0]
            reasons[one][i] = f"cosine {cosines[one, i]:.2f} to the others" if turned else "far from the centre"
        if not wrong.size:
            break
    return kept, reasons
