"""Whether rounds fit between each other; the pace and its remedies are tested with the plan (`scripts/runs`)."""

import itertools

from flockstep.optim.train.fit import outlasts


def test_a_round_at_the_edge_is_news_once() -> None:
    took = (1.0, 1.1, 1.2, 1.0, 0.8, 1.2, 0.7, 1.1)
    seen = list(itertools.accumulate(took, lambda did, taken: outlasts(taken, 1.0, did), initial=False))
    assert seen == [False, False, False, True, True, True, True, False, False]
