"""What a program with a `Swarm` writes where it takes no events itself."""

import subprocess
import sys

import pytest
from flockstep.optim.train.lines import end_in_a_line, say_event
from flockstep.peer.base.errors import UsageError
from flockstep.peer.log.telemetry import Event

PROGRAM = """
import torch
from flockstep import Swarm
model = torch.nn.Linear(1, 1)
with Swarm("flockstep://nothing", model, torch.optim.SGD(model.parameters())):
    pass
"""


def test_a_wrong_link_is_one_line_without_a_traceback() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    (line,) = ended.stderr.splitlines()
    assert line.startswith("flockstep: ")
    assert "not a whole join link" in line


def test_only_what_flockstep_or_its_user_ends_has_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    end_in_a_line(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert capsys.readouterr().err == ""
    end_in_a_line(UsageError, UsageError("no\x1b link", remedy="copy it"), None)
    assert capsys.readouterr().err == "flockstep: no\\x1b link — copy it\n"
    end_in_a_line(ValueError, ValueError("of the program"), None)
    assert "ValueError: of the program" in capsys.readouterr().err


def test_a_program_that_waits_says_for_whom(capsys: pytest.CaptureFixture[str]) -> None:
    events: list[Event] = [
        {"event": "run.joined", "round": 7, "peers": 2},
        {"event": "round.awaited", "reason": "waits for its owner"},
        {"event": "step", "loss": 1.0},
        {"event": "round.done", "round": 8, "cut": ["a", "b"]},
    ]
    for event in events:
        say_event(event)
    assert capsys.readouterr().err.splitlines() == [
        "flockstep: joined the run at round 7; peers that train in it now: 2",
        "flockstep: waits for its owner",
        "flockstep: round 8: averaged the work of 2 peers",
    ]
