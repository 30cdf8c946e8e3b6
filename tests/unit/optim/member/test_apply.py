"""The outer step of a fragment: the same state and the same root whether it is made, computed beforehand, or hashed anew."""

from itertools import pairwise

import numpy as np
import pytest
from flockstep.collectives.state import merkle
from flockstep.collectives.vector.codec import CELL, codec_named
from flockstep.collectives.vector.partition import fragment_of, split
from flockstep.optim.member.apply import OuterState
from flockstep.optim.step.outer import OuterSettings, outer_step

CELLS = 2 * merkle.LEAF_ELEMENTS // CELL + 100
"""Three leaves, so that fragments begin and end within them."""
OUTER = OuterSettings(lr=0.7, momentum=0.9)


@pytest.mark.parametrize("num_fragments", [1, 2, 5])
def test_rounds_move_their_fragment_alone(num_fragments: int) -> None:
    random, codec = np.random.default_rng(0), codec_named("int8")
    theta, momentum, g = (random.normal(size=CELLS * CELL).astype(np.float32) for _ in range(3))
    expected = theta.copy(), momentum.copy()
    state = OuterState(theta, momentum, OUTER, codec)
    for round_ in range(1, num_fragments + 2):
        cells = fragment_of(round_, CELLS, num_fragments)
        bounds = split(cells, [1.0, 2.0, 0.0])
        outputs = [bytes(codec.encode(g[low * CELL : high * CELL])) for low, high in pairwise(bounds)]
        decoded = np.empty(len(cells) * CELL, np.float32)
        for (low, high), data in zip(pairwise(bounds), outputs, strict=True):
            codec.decode(data, decoded[(low - cells.start) * CELL : (high - cells.start) * CELL])
        before = state.root
        root = state.next_root(bounds, outputs)
        assert root != before == state.root == merkle.state_root(theta, momentum)
        span = slice(cells.start * CELL, cells.stop * CELL)
        outer_step(expected[0][span], expected[1][span], decoded, OUTER)
        state.apply(bounds, outputs)
        np.testing.assert_array_equal(theta, expected[0])
        np.testing.assert_array_equal(momentum, expected[1])
        assert state.root == root == merkle.state_root(theta, momentum)


def test_what_was_changed_from_outside_is_hashed_anew_once_it_is_said() -> None:
    theta, momentum = np.ones(CELL, np.float32), np.zeros(CELL, np.float32)
    state = OuterState(theta, momentum, OUTER, codec_named("int8"))
    before = state.root
    theta[0] = 2
    state.forget()
    assert state.root != before
    assert state.root == merkle.state_root(theta, momentum)
