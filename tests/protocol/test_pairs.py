"""Pairs of members that cannot talk to each other, and can talk to all others."""

import itertools
from collections.abc import Sequence

import pytest
import trio
from flockstep.collectives.allreduce.actions import OutcomeKind
from flockstep.peer.memory.network import run_virtual
from support.swarm import SimSwarm, all_at_once, with_swarm

ROUNDS = 3
UNNOTICED = 20.0
"""Seconds until a cut is noticed by who sends nothing but heartbeats."""
PAIRS = list(itertools.combinations(range(8), 2))
DISJOINT = [((a, b), (c, d)) for (a, b), (c, d) in itertools.combinations(PAIRS, 2) if len({a, b, c, d}) == 4]


def rounds_with(
    pairs: Sequence[tuple[int, int]], *, rule: str, seed: int, cut_at: float | None = None
) -> list[list[int]]:
    """Return the number of contributions in each round of each of eight peers; 0 if it did not end certified.

    The pairs are cut before the first round, and have noticed that; or `cut_at` so many seconds after its start.
    """
    counts: list[list[int]] = []

    async def body(swarm: SimSwarm) -> None:
        async def cut(after: float) -> None:
            await trio.sleep(after)
            for one, other in pairs:
                swarm.network.cut_pair(swarm.sims[one].peer, swarm.sims[other].peer)

        if cut_at is None:
            await cut(0.0)
            await trio.sleep(UNNOTICED)
        else:
            swarm.network.nursery.start_soon(cut, cut_at)
        with trio.fail_after(600):
            await all_at_once(swarm.sims, rounds=ROUNDS)
        assert len({sim.root for sim in swarm.sims}) == 1
        counts.extend([len(it.cut) * (it.kind is OutcomeKind.DONE) for it in sim.outcomes] for sim in swarm.sims)

    run_virtual(lambda: with_swarm(8, body, seed=seed, rule=rule, cells=16), seed=seed)
    return counts


@pytest.mark.parametrize(
    "pair", [pytest.param(pair, marks=[pytest.mark.explore] * (number % 14 != 0)) for number, pair in enumerate(PAIRS)]
)
def test_a_pair_that_cannot_talk_costs_no_contribution(pair: tuple[int, int]) -> None:
    rule = ("gramguard", "mean")[sum(pair) % 2]
    assert rounds_with([pair], rule=rule, seed=pair[0]) == [[8] * ROUNDS] * 8


@pytest.mark.parametrize(
    "pairs",
    [pytest.param(pairs, marks=[pytest.mark.explore] * (number % 8 != 0)) for number, pairs in enumerate(DISJOINT[::30])],
)
def test_two_disjoint_pairs_cost_no_contribution(pairs: tuple[tuple[int, int], tuple[int, int]]) -> None:
    assert rounds_with(pairs, rule="gramguard", seed=pairs[0][0]) == [[8] * ROUNDS] * 8


@pytest.mark.parametrize("number", [2, *(pytest.param(number, marks=pytest.mark.explore) for number in (0, 1, 3))])
def test_a_pair_that_is_cut_in_the_middle_of_a_round_costs_no_contribution(number: int) -> None:
    pair = PAIRS[7 * number]
    assert rounds_with([pair], rule="gramguard", seed=number, cut_at=0.05 + 0.2 * number) == [[8] * ROUNDS] * 8
