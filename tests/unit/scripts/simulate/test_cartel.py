"""What votes by work cost a cartel, as docs/trust.md states it."""

import re
import sys
from pathlib import Path

import pytest
from flockstep.peer.errors import UsageError
from flockstep.scripts.cli import main
from flockstep.scripts.simulate.cartel import CartelPrice, price_of

ROOT = Path(__file__).parents[4]


@pytest.mark.parametrize("seats", [24, 32, 48])
def test_the_document_states_what_the_code_computes(seats: int) -> None:
    page = (ROOT / "docs" / "trust.md").read_text(encoding="utf-8")
    (row,) = re.findall(
        rf"^\| {seats} \| (\d+) \| (\d+)(?: rounds)? \|$", page.replace(" rounds |", " |"), re.MULTILINE
    )
    assert price_of(seats) == CartelPrice(seats, int(row[0]), int(row[1]))


def test_a_cartel_of_few_seats_never_holds_a_third() -> None:
    assert price_of(8) == CartelPrice(8, None, None)


def test_a_cartel_of_no_or_of_all_seats_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for seats in (0, 64):
        with pytest.raises(UsageError, match="1 to 63 of 64 seats"):
            price_of(seats)
    monkeypatch.setattr(sys, "argv", ["flockstep", "simulate", "--cartel", "24"])
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == 2
    assert "add --voters work" in capsys.readouterr().err
