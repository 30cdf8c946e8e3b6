"""`gramguard`, the default rule: who agrees with the others about the direction, weighed by a geometric median.

1  valid: finite, norm ≥ 0.1·median norm, mass > 0
2  sᵢ = min(1, median norm / normᵢ): nobody is longer than the median
3  copies count once: b = 0.5·quantile₀.₂₅(off-diagonal squared distances), aᵢ = massᵢ / Σⱼ clip(1 - d²ᵢⱼ/b, 0, 1)
4  loop: w = weights of the geometric median of who is left (Weiszfeld, masses a); cᵢ = cosine to the centre of the
   others, rᵢ = distance to the centre; drop the worst with cᵢ < max(0, 0.25·median c) or rᵢ > 1.7·median r, until
   there is none, or ⌊(n-1)/2⌋ are out
5  wᵢ ← wᵢsᵢ, to a sum of 1
6  the same loop on each part alone, with wider bounds (cosine < -0.2, r > 2.5·median): a veto for that part only;
   there, nobody is longer than twice the median part norm
"""

import numpy as np

from .verdict import (
    Floats64,
    History,
    Mask,
    Rule,
    Verdict,
    distances_to,
    middle,
    normalized,
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
WEISZFELD_STEPS = 12
"""Weights move by less than 1 % of themselves after these."""


class GramGuard(Rule):
    """See the head of this file."""

    name = "gramguard"

    def weights(self, gram: Floats64, parts: Floats64, masses: Floats64, history: History | None = None) -> Verdict:
        """Judge contributions by their inner products: `Rule.weights`."""
        n = len(masses)
        flagged: dict[int, str] = {}
        alive = valid(gram, parts, masses)
        for i in np.flatnonzero(~alive):
            flagged[int(i)] = "not finite, or without a mass"
        norms = np.sqrt(np.maximum(np.where(alive, np.diagonal(gram), 0.0), 0.0))
        least = SHORTEST * middle(norms[alive])
        for i in np.flatnonzero(alive & ((norms < least) | (norms == 0))):
            flagged[int(i)] = f"its norm is below {SHORTEST} of the median"
        alive &= (norms >= least) & (norms > 0)
        if not alive.any():
            return Verdict(weights=np.zeros((len(parts), n)), flagged=flagged, suspicion=np.zeros(n))
        lengths = _clipped(norms, alive, 1.0)
        scaled = _scaled(gram, lengths, alive)
        voices = _voices(scaled, masses, alive)
        kept = _agreeing(scaled, voices, alive, (n - 1) // 2, 0.0, COSINE, FAR, flagged, "")
        whole = _centre(scaled, np.where(kept, voices, 0.0)) * lengths
        weights = np.zeros((len(parts), n))
        for part, own in enumerate(parts):
            weights[part] = self._of_part(own, lengths, voices, kept, whole, flagged, f" in part {part}")
        return Verdict(weights=weights, flagged=flagged, suspicion=np.zeros(n))

    def _of_part(
        self,
        gram: Floats64,
        lengths: Floats64,
        voices: Floats64,
        kept: Mask,
        whole: Floats64,
        flagged: dict[int, str],
        where: str,
    ) -> Floats64:
        norms = np.sqrt(np.maximum(np.where(kept, np.diagonal(gram), 0.0), 0.0)) * lengths
        shorter = _clipped(norms, kept, PART_LONGEST)
        scaled = _scaled(gram, lengths * shorter, kept)
        most = (int(kept.sum()) - 1) // 2
        here = _agreeing(scaled, voices, kept, most, PART_COSINE, 0.0, PART_FAR, flagged, where)
        return normalized(np.where(here, whole * shorter, 0.0))


def _clipped(norms: Floats64, alive: Mask, longest: float) -> Floats64:
    """[n] what each must be multiplied with to be no longer than `longest` times the median."""
    limit = longest * middle(norms[alive])
    return np.divide(limit, norms, out=np.ones_like(norms), where=norms > limit)


def _scaled(gram: Floats64, lengths: Floats64, alive: Mask) -> Floats64:
    """The Gram matrix of the clipped contributions; zeros for who is out."""
    scales = np.where(alive, lengths, 0.0)
    return np.where(alive[:, None] & alive[None, :], gram, 0.0) * scales[:, None] * scales[None, :]


def _voices(gram: Floats64, masses: Floats64, alive: Mask) -> Floats64:
    """[n] masses in which copies share one."""
    distances = squared_distances(gram)
    pairs = alive[:, None] & alive[None, :] & ~np.eye(len(gram), dtype=bool)
    ascending = np.sort(distances[pairs])
    bound = COPY * float(ascending[ascending.size // 4]) if ascending.size else 0.0
    near = np.maximum(1.0 - distances / bound, 0.0) if bound > 0 else np.zeros_like(distances)
    np.fill_diagonal(near, 1.0)
    return np.where(alive, masses, 0.0) / total(np.where(alive, near, 0.0) + np.where(alive, 0.0, np.eye(len(gram))))


def _centre(gram: Floats64, masses: Floats64) -> Floats64:
    """[n] weights of the geometric median: Weiszfeld's iteration, from the mean on."""
    weights = normalized(masses)
    # A millionth of the size of the contributions: whoever stands in the centre itself does not take it all.
    floor = 1e-6 * np.sqrt(max(float(np.diagonal(gram).max()), 0.0))
    for _ in range(WEISZFELD_STEPS):
        away = np.maximum(distances_to(gram, weights), floor)
        weights = normalized(np.divide(masses, away, out=np.zeros_like(masses), where=away > 0))
    return weights


def _agreeing(
    gram: Floats64,
    masses: Floats64,
    alive: Mask,
    most: int,
    cosine_floor: float,
    cosine_share: float,
    far: float,
    flagged: dict[int, str],
    where: str,
) -> Mask:
    """[n] who is left when the worst has been dropped again and again; the reasons go to `flagged`."""
    kept = alive.copy()
    norms = np.sqrt(np.maximum(np.diagonal(gram), 0.0))
    for _ in range(most):
        weights = _centre(gram, np.where(kept, masses, 0.0))
        products = total(gram * weights)
        square = float(total(products * weights))
        # Of the centre without i, unscaled: Σⱼ≠ᵢ wⱼxⱼ.
        others = np.sqrt(np.maximum(square - 2 * weights * products + (weights * norms) ** 2, 0.0))
        scale = others * norms
        cosines = np.divide(products - weights * norms**2, scale, out=np.zeros_like(scale), where=scale > 0)
        away = np.sqrt(np.maximum(norms**2 - 2 * products + square, 0.0))
        least = max(cosine_floor, cosine_share * middle(cosines[kept])) if cosine_share else cosine_floor
        limit = far * middle(away[kept])
        excess = np.maximum(least - cosines, np.divide(away - limit, limit, out=np.zeros_like(away), where=limit > 0))
        excess = np.where(kept, excess, 0.0)
        worst = int(np.argmax(excess))
        if excess[worst] <= 0:
            break
        kept[worst] = False
        what = f"cosine {cosines[worst]:.2f} to the others" if cosines[worst] < least else "far from the centre"
        flagged.setdefault(worst, what + where)
    return kept
