"""Lists and numbers as people write them, and the tables that the laboratory prints."""

import pytest
from flockstep.peer.base.errors import UsageError
from flockstep.scripts.lab.table import table_lines, written
from flockstep.scripts.lab.words import count, listed, numbers


@pytest.mark.parametrize(
    ("word", "number"), [("25M", 25_000_000), ("1e6", 1_000_000), ("4", 4), ("1.5k", 1500), ("2b", 2_000_000_000)]
)
def test_counts_as_people_write_them(word: str, number: int) -> None:
    assert numbers([word], "--params", count, 1) == (number,)


@pytest.mark.parametrize("word", ["", "M", "0", "-4", "1.5", "inf", "nan", "4 peers"])
def test_what_is_not_a_count_is_refused(word: str) -> None:
    with pytest.raises(UsageError, match="cannot read --params") as caught:
        numbers([word], "--params", count, 1)
    assert caught.value.remedy


def test_an_option_may_be_repeated_or_be_a_list_within_its_limits() -> None:
    assert listed(["4, 8", "2", ""]) == ["4", "8", "2"]
    assert numbers(["4, 8", "2"], "--peers", int, 2, 8) == (4, 8, 2)
    for wrong in ("9", "1", "nan"):
        with pytest.raises(UsageError, match="--rate"):
            numbers([wrong], "--rate", float, 2, 8)


def test_words_begin_and_numbers_end_at_one_place() -> None:
    rows = [["int4", "0.5", "done", ""], ["a long name", "12.25", "hung", "1"]]
    assert list(table_lines("Title", ("codec", "s", "outcome", "n"), rows)) == [
        "Title",
        "codec            s  outcome  n",
        "int4           0.5  done",
        "a long name  12.25  hung     1",
    ]
    assert (written(None, ".2f"), written(0.5, ".0%")) == ("", "50%")
