"""What a batch says of a token beside its id: whether it is context alone, and whether an example begins with it.

A batch is int64. An id `t` with which an example begins comes as `t | BEGINS`. What is context alone, of which no loss is
computed, comes as the complement, which is below zero. Examples of one sequence must not see each other (packing as in
arXiv:2107.02027).
"""

from torch import Tensor

BEGINS = 1 << 32
"""Above every id: a vocabulary has 2^24 tokens at most."""


def ids_of(tokens: Tensor) -> Tensor:
    """Return the ids of a batch."""
    return tokens.where(tokens >= 0, ~tokens) & (BEGINS - 1)


def numbers_of(tokens: Tensor) -> Tensor:
    """Return for each token of a batch (samples, length) the number of its example in the sequence, from 0 or 1 on."""
    return _begins(tokens).cumsum(-1)


def positions_of(tokens: Tensor) -> Tensor:
    """Return the position of each token of a batch (samples, length) in its example, or in what a sequence holds of it."""
    places = _begins(tokens).new_ones(tokens.shape).cumsum(-1) - 1
    return places - (places * _begins(tokens)).cummax(-1).values


def _begins(tokens: Tensor) -> Tensor:
    return tokens.where(tokens >= 0, ~tokens) >> 32
