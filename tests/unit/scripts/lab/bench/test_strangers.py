"""The bench of strangers' questions: its rows are those of the table in docs/strangers.md."""

import json
import math
from pathlib import Path

import pytest
from flockstep.peer.errors import UsageError
from flockstep.scripts.lab.bench.strangers import (
    HELD,
    QUESTIONS,
    Cost,
    StrangersOptions,
    as_row,
    run_strangers,
    shares,
    table,
)

COST = Cost(
    question="`/nothing/1`",
    host="bootstrap",
    asked=10,
    cpu_us=2000.0,
    read_bytes=160.0,
    sent_bytes=120.0,
    open_kb=25.0,
    cores=(0.064, 0.128, math.inf),
    open_mb=(6.4, 25.6, 51.2),
)


def test_the_bench_has_a_row_for_every_row_of_the_table() -> None:
    page = (Path(__file__).parents[5] / "docs" / "strangers.md").read_text()
    section = page.partition("## Each protocol")[2].partition("\n## ")[0]
    rows = [line.split(" | ")[0].removeprefix("| ") for line in section.splitlines() if line.startswith("| ")]
    assert sorted(question.name for question in QUESTIONS) == sorted(rows[1:])


def test_what_is_held_fits_into_one_connection_and_limits_grow_with_who_shares_them() -> None:
    assert HELD < 128
    assert shares(2.0, 16.0) == (2.0, 8.0, 32.0)
    for question in QUESTIONS:
        for level in (question.rate, question.places):
            assert level is None or level[0] <= level[1] <= level[2], question.name


def test_a_row_for_people_and_one_for_programs() -> None:
    (_, text, _) = table([COST])
    assert " ".join(text.split()) == "/nothing/1 2000 160 120 25.0 6.4 / 13 / ∞ 6.4 / 26 / 51"
    row = json.loads(json.dumps(as_row(COST), allow_nan=False))
    assert (row["cores"], row["open_mb"]) == ([0.064, 0.128, None], [6.4, 25.6, 51.2])


def test_a_question_that_is_none_is_refused() -> None:
    with pytest.raises(UsageError, match="--only 'tea' is in the name of no question"):
        StrangersOptions(only=("tea",))


def test_a_real_host_is_asked_and_its_time_and_bytes_are_counted() -> None:
    lines: list[str] = []
    options = StrangersOptions(only=("dialback",), share=0.2, as_json=True)
    (cost,) = run_strangers(options, lines.append, lambda _: None)
    assert (cost.failure, cost.asked) == ("", 20)
    assert cost.cpu_us > 0
    assert cost.read_bytes > 20
    assert cost.sent_bytes > 20
    assert json.loads(lines[0])[0]["question"] == "`/flockstep/dialback/1`"
