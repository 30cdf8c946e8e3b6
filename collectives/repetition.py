"""Who departs from the others in the same way round after round: what one round alone cannot tell.

Data of its own lets an honest peer depart from the centre, in part anew each round; a lie that is to add up has to
point the same way each time. With dᵢ(t) the deviation from the centre of round t, the renewal of a peer is
1 - cos(dᵢ(t), dᵢ(t-1)), relative to the median renewal, since how much honest peers renew themselves depends on the model,
the data and the phase of training: 0.6 early, 0.2 late. Honest peers stay above 0.5 of the median; ALIE (arXiv:1902.06156)
is at 0.2, contributions that are sent again and again are at 0.05.

Both rounds have to be sketched under one seed, drawn after this round's contributions were fixed.
"""

import numpy as np

from .verdict import Floats64, History, Mask, distances_to, lengths_of, middle, quotient, total

SLOW = 0.6
"""Of the median renewal: below it suspicion grows, up to 1 for no renewal at all."""
REPLAY = 0.1
"""Of the median change of the contributions themselves: below it one has been sent before."""
MEMORY = 0.5
"""What a round's suspicion keeps of that of the round before."""
FEWEST = 3
"""Peers with a past, below which a median says nothing."""


def repetition(gram: Floats64, weights: Floats64, lengths: Floats64, alive: Mask, history: History) -> Floats64:
    """[n] suspicion, 0 to 1: that of the last round and this round's slowness, averaged.

    `gram` [n, n] is of the contributions times `lengths`, `weights` [n] the centre of those.
    """
    same = np.asarray(history.same, dtype=np.intp)
    known = alive & (same >= 0)
    slow = np.zeros(len(weights))
    if np.count_nonzero(known) >= FEWEST:
        before = lengths_of(history.gram)
        then = np.ones(len(before), dtype=bool)
        # Of the clipped contributions of both rounds, as the centres are of those.
        clip = np.minimum(quotient(middle(before, then), before, 1.0), 1.0)
        last = history.gram * clip[:, None] * clip[None, :]
        across = history.across * np.where(alive, lengths, 0.0)[:, None] * clip[None, :]
        centre = quotient(history.weights, clip)
        centre = quotient(centre, total(centre)[None])
        cosines, alike = np.zeros((2, len(weights)))
        to_last, to_this = total(across * centre), total(np.ascontiguousarray((across * weights[:, None]).T))
        both = float(total(weights * to_last))
        now, past = distances_to(gram, weights), distances_to(last, centre)
        length_now, length_past = lengths_of(gram), lengths_of(last)
        i, j = np.flatnonzero(known), same[known]
        cosines[i] = quotient(across[i, j] - to_last[i] - to_this[j] + both, now[i] * past[j])
        alike[i] = quotient(across[i, j], length_now[i] * length_past[j])
        slow = np.clip(1.0 - _relative(1.0 - cosines, known) / SLOW, 0.0, 1.0)
        slow[_relative(1.0 - alike, known) < REPLAY] = 1.0
    return np.where(alive, MEMORY * history.suspicion + (1.0 - MEMORY) * slow, history.suspicion)


def _relative(change: Floats64, known: Mask) -> Floats64:
    """[n] change in units of the median; 1 for who has no past."""
    change = np.maximum(change, 0.0)
    return np.where(known, quotient(change, middle(change, known), 1.0), 1.0)
