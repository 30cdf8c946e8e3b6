"""A picture as its page fetches it: nothing lost between the newest rounds and the file of those before."""

import gzip
import json
import math
from dataclasses import replace
from typing import Any

import pytest
from flockstep.collectives.picture.figures import MAX_ROWS_SHOWN, WHOLE_ROWS, figures_of, round_columns
from flockstep.collectives.picture.fold import MAX_RECENT, MAX_ROWS
from flockstep.collectives.picture.picture import Picture
from flockstep.scripts.page.shown import NAMED_BEFORE, ROUNDS_APART, Page, PictureSplitter, packed
from support.pictures import big_picture


@pytest.fixture(scope="module")
def picture() -> Picture:
    return big_picture(peers=5, rounds=MAX_RECENT - 1)


def until(picture: Picture, round_: int) -> Picture:
    """The picture as it was after a round."""
    recent = tuple(row for row in picture.recent if round_ - MAX_RECENT < row.round <= round_)
    return replace(picture, rounds=picture.rounds[:round_], recent=recent)


def older_of(page: Page) -> Any:
    return json.loads(gzip.decompress(page.older.body)) if page.older else {"rounds": {}, "peers": [], "recent": []}


def named(figures: Any) -> list[Any]:
    """The last rounds with the ids of peers."""
    peers = figures["peers"]
    return [
        row
        | {name: [peers[at] for at in row[name]] for name in ("roster", "cut", "flagged", "voters")}
        | {"out": [{**out, "peer": peers[out["peer"]]} for out in row["out"]]}
        for row in figures["recent"]
    ]


@pytest.mark.parametrize("round_", [0, 1, ROUNDS_APART, ROUNDS_APART + 1, 2 * ROUNDS_APART, MAX_RECENT - 1])
def test_the_newest_rounds_and_those_before_are_the_whole_picture(picture: Picture, round_: int) -> None:
    shown, whole = until(picture, round_), figures_of(until(picture, round_), "v")
    page = PictureSplitter("v").split(shown)
    older, newest = older_of(page), page.picture["rounds"]
    assert {name: older["rounds"].get(name, []) + column for name, column in newest.items()} == whole["rounds"]
    both = named(page.picture) + named(older)
    assert both == named(whole)[: len(both)]
    assert len(both) == min(round_, NAMED_BEFORE + len(newest["round"]))
    assert len(newest["round"]) <= ROUNDS_APART
    left = ("rounds", "recent", "peers")
    assert {**page.picture, **dict.fromkeys(left)} == {**whole, **dict.fromkeys(left)}


def test_older_rounds_are_a_file_of_another_name_only_where_they_are_others(picture: Picture) -> None:
    splitter = PictureSplitter("v")
    pages = [splitter.split(until(picture, round_)) for round_ in range(ROUNDS_APART, 3 * ROUNDS_APART + 1)]
    assert [page.older is None for page in pages] == [True] + [False] * (2 * ROUNDS_APART)
    names = list(dict.fromkeys(page.older_name for page in pages[1:]))
    assert len(names) == 2
    relisted = replace(picture, rounds=tuple(replace(row, loss=1.0) for row in picture.rounds))
    assert splitter.split(until(relisted, 3 * ROUNDS_APART)).older_name not in names


def test_a_very_long_run_is_thinned_and_its_newest_rounds_are_whole(picture: Picture) -> None:
    rows = tuple(replace(picture.rounds[0], round=number) for number in range(1, 3 * MAX_ROWS_SHOWN))
    page = PictureSplitter("v").split(replace(picture, rounds=rows))
    both = older_of(page)["rounds"]["round"] + page.picture["rounds"]["round"]
    assert both == round_columns(rows)["round"]
    assert both[-WHOLE_ROWS:] == [row.round for row in rows[-WHOLE_ROWS:]]


def test_a_run_of_which_the_oldest_rounds_go_keeps_the_name_of_the_others_for_rounds(picture: Picture) -> None:
    splitter, rows = PictureSplitter("v"), [replace(picture.rounds[0], round=number) for number in range(1, MAX_ROWS + 31)]
    pages = [splitter.split(replace(picture, rounds=tuple(rows[at : at + MAX_ROWS]))) for at in range(30)]
    assert len({page.older_name for page in pages}) <= 8


def test_numbers_that_are_none_become_null_and_half_a_letter_breaks_nothing() -> None:
    asset = packed({"loss": [math.nan, math.inf, 1.5], "reason": "a\n\r\ud800\u2028"})
    assert json.loads(gzip.decompress(asset.body)) == {"loss": [None, None, 1.5], "reason": "a\n\r?\u2028"}
    assert packed({"n": 1}).digest != packed({"n": 2}).digest
