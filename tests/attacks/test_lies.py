"""The worst lies that a search by hill climbing found, played again: none writes what it likes into the common state.

The first three were found before claims of tokens left the bounds of a rule, the next four before two sketches were compared
by inner products; `harm` in `lies.jsonl` is what each did to one round when it was found.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from flockstep.scripts.lab.training.batches import SIZES
from support.lies import Case, Lie, Moment

KEPT = [
    (Case(**found["case"]), Lie(**found["lie"]))
    for found in map(json.loads, (Path(__file__).parent / "lies.jsonl").read_text().splitlines())
]
MOST_LOST = {1: 0.15, 4: 0.7}
"""Of one round's progress, by the number of liars of ten."""


@pytest.fixture(scope="module")
def moment() -> Moment:
    """The third round of a training with few steps."""
    return Moment(10, replace(SIZES["tiny"], steps=4), 2)


@pytest.mark.parametrize(("case", "lie"), KEPT)
def test_no_lie_that_was_found_makes_the_outer_step_twice_as_long_or_undoes_a_round(
    moment: Moment, case: Case, lie: Lie
) -> None:
    harm = moment.harm(case, lie)
    assert not harm.blamed
    assert harm.longer < 2
    assert harm.lost < MOST_LOST[case.liars]


def test_honest_members_lose_nothing(moment: Moment) -> None:
    harm = moment.harm(Case(codec="int4", liars=4), Lie())
    assert harm.lost < 0.05
    assert 0.95 < harm.longer < 1.05
