"""The worst lies that `bench adversary` has found, played again: none writes what it likes into the common state.

The first three were found before claims of tokens left the bounds of a rule, the next four before two sketches were compared
by inner products; `harm` in the file is what each did when it was found.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from flockstep.peer.base.errors import UsageError
from flockstep.scripts.lab.attacks.values import Lie
from flockstep.scripts.lab.bench.adversary import AdversaryOptions, Found, run_adversary
from flockstep.scripts.lab.training.attacked import SIZES
from flockstep.scripts.lab.training.lying import Case, Moment

KEPT = [Found.read(line) for line in (Path(__file__).parent / "lies.jsonl").read_text().splitlines()]
MOST_LOST = {1: 0.15, 4: 0.7}
"""Of one round's progress, by the number of liars of ten."""


@pytest.fixture(scope="module")
def moment() -> Iterator[Moment]:
    """The third round of a training with few steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SIZES, "few steps", replace(SIZES["tiny"], steps=4))
        yield Moment(10, "few steps", 0, 2)


@pytest.mark.parametrize(
    "found", KEPT, ids=lambda it: f"{it.case.rule}-{it.case.liars}-{it.case.contributions}-{it.case.result}"
)
def test_no_lie_that_was_found_makes_the_outer_step_twice_as_long_or_undoes_a_round(
    moment: Moment, found: Found
) -> None:
    harm = moment.harm(found.case, found.lie)
    assert not harm.blamed
    assert harm.longer < 2
    assert harm.lost < MOST_LOST[found.case.liars]


def test_honest_members_lose_nothing(moment: Moment) -> None:
    harm = moment.harm(Case(rule="gramguard", contributions="int4", result="int4", liars=4), Lie())
    assert harm.lost < 0.05
    assert 0.95 < harm.longer < 1.05


def test_a_search_ends_with_lies_that_can_be_played_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model: dict[str, int | str] = {"layers": 1, "heads": 1, "width": 8, "context": 16}
    monkeypatch.setitem(SIZES, "smallest", replace(SIZES["tiny"], model=model, length=16, steps=1, rounds=2))
    keep, lines = tmp_path / "kept.jsonl", list[str]()
    options = AdversaryOptions(
        rules=["gramguard"],
        pairs=["int4/int4"],
        peers=5,
        liars=[2],
        tries=3,
        trained=1,
        size="smallest",
        keep=keep,
        as_json=True,
    )
    run_adversary(options, lines.append)
    assert keep.read_text().splitlines() == lines[:1]
    assert Found.read(lines[0]).written() == lines[0]
    assert {"above", "longest"} < json.loads(lines[1]).keys()


@pytest.mark.parametrize("wrong", [{"rules": ["mean"]}, {"size": "huge"}, {"liars": [10]}, {"pairs": ["int5/int4"]}])
def test_what_cannot_be_searched_is_said_in_one_line(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        AdversaryOptions(**wrong)
    assert caught.value.remedy
