"""A picture as JSON: the rows of a big run, and those that a very long one leaves out."""

import itertools
import json
from dataclasses import replace

import pytest
from flockstep.collectives.picture.figures import MAX_ROWS_SHOWN, figures_of, round_columns
from flockstep.collectives.picture.picture import Picture
from support.pictures import big_picture


@pytest.fixture(scope="module")
def picture() -> Picture:
    return big_picture(64, 400)


def test_a_run_of_64_peers_and_5000_rounds_has_less_than_a_megabyte(picture: Picture) -> None:
    rows = tuple(replace(picture.rounds[-1], round=number) for number in range(1, 5_001))
    figures = figures_of(replace(picture, rounds=rows), "0.1.0")
    assert len(json.dumps(figures)) < 1 << 20
    assert len(figures["recent"]) == 200
    assert len(figures["rounds"]["round"]) == 5_000
    first = figures["recent"][0]
    assert [figures["peers"][place] for place in first["cut"]] == list(picture.recent[0].cut)


def test_a_very_long_run_is_thinned_but_for_its_end(picture: Picture) -> None:
    rows = [replace(picture.rounds[0], round=number) for number in range(1, 20_001)]
    rounds = round_columns(rows)["round"]
    assert len(rounds) <= MAX_ROWS_SHOWN
    assert rounds[0] == 1
    assert rounds[-1_000:] == list(range(19_001, 20_001))


def test_a_thinned_run_grows_at_its_end(picture: Picture) -> None:
    rows = [replace(picture.rounds[0], round=number) for number in range(1, 20_001)]
    columns = [round_columns(rows[:count])["round"] for count in range(19_010, 19_030)]
    assert all(later[:-1] == earlier for earlier, later in itertools.pairwise(columns))

