"""Events: written whole, read back, and never in the way of training."""

import json
from pathlib import Path

import pytest
from flockstep.peer.errors import LocalError
from flockstep.peer.telemetry import Event, Telemetry, read_events


def test_events_are_read_back_as_they_were_emitted(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "events.jsonl"
    telemetry = Telemetry(path, clock=lambda: 5.0)
    telemetry.emit("peer.lost", peer="P", reason="silent", seconds=3)
    telemetry.emit("step", step="", loss=None)
    telemetry.close()
    events = [event for _, event in read_events(path)]
    assert events == [
        {"time": 5.0, "event": "peer.lost", "peer": "P", "reason": "silent", "seconds": 3},
        {"time": 5.0, "event": "step", "loss": None},
    ]
    assert telemetry.counts["step"] == 1


def test_a_torn_line_is_passed_over_and_a_half_written_one_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    good = json.dumps({"event": "a"})
    path.write_text(f'{good}\n{{"event": "to\n{good}\n{{"event": "half')
    found = list(read_events(path))
    assert [event for _, event in found] == [{"event": "a"}, {"event": "a"}]
    offset = found[-1][0]
    with path.open("a") as file:
        file.write(' way"}\n')
    assert [event["event"] for _, event in read_events(path, offset=offset)] == ["half way"]


def test_a_log_that_cannot_be_written_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LocalError, match="cannot write the event log") as caught:
        Telemetry(tmp_path / "file" / "events.jsonl")
    assert "--home" in caught.value.remedy


def test_a_full_disk_ends_the_log_but_not_the_events(capsys: pytest.CaptureFixture[str]) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full here")
    heard: list[Event] = []
    telemetry = Telemetry(full)
    telemetry.subscribe(heard.append)
    telemetry.emit("first")
    telemetry.emit("second")
    assert [event["event"] for event in heard] == ["first", "second"]
    assert capsys.readouterr().err.count("the event log is lost") == 1
