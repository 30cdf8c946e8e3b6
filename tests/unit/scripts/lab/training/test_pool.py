"""Several trainings at a time: in order, and a terminal shows which one is awaited."""

import sys

import pytest
from flockstep.scripts.lab.training.pool import each_trained


@pytest.mark.parametrize("jobs", [1, 2])
def test_rows_come_in_order_on_stdout_and_progress_on_a_terminal_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], jobs: int
) -> None:
    assert list(each_trained(abs, [-3, 2], jobs)) == [(-3, 3), (2, 2)]
    assert capsys.readouterr() == ("", "")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    for row in each_trained(abs, [-3, 2], jobs):
        sys.stdout.write(f"{row}\n")
    shown = capsys.readouterr()
    assert shown.out.splitlines() == ["(-3, 3)", "(2, 2)"]
    assert "training 1 of 2" in shown.err
    assert "training 2 of 2" in shown.err
