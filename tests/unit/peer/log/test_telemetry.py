"""Events: written atomically, read back, and never an obstacle to training."""

import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from flockstep.peer.base.errors import LocalError
from flockstep.peer.log import telemetry as telemetry_file
from flockstep.peer.log.telemetry import Telemetry, old_log_path, read_events
from flockstep.scripts.watch.story import PeerStory
from support.full_disk import files_up_to
from support.recorded import recorded


def test_events_are_read_back_as_they_were_emitted(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "events.jsonl"
    telemetry = Telemetry(path, clock=lambda: 5.0)
    telemetry.emit("peer.lost", peer="P", reason="silent")
    telemetry.emit("peer.overslept", step="heartbeat", seconds=3)
    telemetry.emit("step", step="", loss=None)
    telemetry.close()
    events = [event for _, event in read_events(path)]
    assert events == [
        {"time": 5.0, "event": "peer.lost", "peer": "P", "reason": "silent"},
        {"time": 5.0, "event": "peer.overslept", "step": "heartbeat", "seconds": 3},
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


def test_a_torn_line_costs_the_next_process_none_of_its_events(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"event": "a"}\n{"event": "to')
    for _ in range(2):
        with closing(Telemetry(path)) as log:
            log.emit("network.died")
    assert [event["event"] for _, event in read_events(path)] == ["a", "network.died", "network.died"]


def test_a_disk_that_fills_up_within_a_line_ends_the_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The system writes what fits, and answers with its length instead of an error."""
    path = tmp_path / "events.jsonl"
    log = Telemetry(path)
    log.emit("network.died")
    with files_up_to(path.stat().st_size + 10):
        log.emit("network.died")
    log.emit("network.failed")  # Space is free again: joined to the torn line it would be lost.
    with closing(Telemetry(path)) as log:
        log.emit("network.failed")
    assert capsys.readouterr().err.count("the event log is lost") == 1
    assert [event["event"] for _, event in read_events(path)] == ["network.died", "network.failed"]


def numbers(path: Path, offset: int = 0) -> list[object]:
    return [event["epoch"] for _, event in read_events(path, offset=offset) if event["event"] == "data.epoch"]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The path of a log whose files are full after ten events or so."""
    monkeypatch.setattr(telemetry_file, "MAX_LOG_BYTES", 600)
    return tmp_path / "events.jsonl"


@contextmanager
def writing(path: Path) -> Iterator[Callable[[Iterable[int]], None]]:
    """What counts into a log."""
    with closing(Telemetry(path)) as telemetry:

        def count(found: Iterable[int]) -> None:
            for number in found:
                telemetry.emit("data.epoch", epoch=number)

        yield count


def test_a_log_takes_two_files_at_most_and_who_follows_it_misses_nothing(small: Path) -> None:
    seen, end = list[object](), 0
    with writing(small) as count:
        for start in range(0, 99, 3):
            count(range(start, start + 3))
            for offset, event in read_events(small, offset=end):
                seen += [event["epoch"]] if event["event"] == "data.epoch" else []
                end = offset
            assert all(file.stat().st_size <= 600 for file in small.parent.iterdir())
    assert seen == list(range(99))
    assert len(list(small.parent.iterdir())) == 2
    kept = numbers(small)
    assert 10 < len(kept) < 30
    assert kept == list(range(99 - len(kept), 99))
    assert numbers(small, end) == []


def test_a_crash_between_the_old_file_and_the_new_one_loses_nothing(small: Path) -> None:
    with writing(small) as count:
        count(range(25))
    *_, (end, _) = read_events(small)
    small.replace(old_log_path(small))
    before = numbers(small)
    assert before[-1] == 24
    assert numbers(small, end) == []
    os.link(old_log_path(small), small)  # As a reader sees it that opens both while one is renamed.
    assert numbers(small) == before
    small.unlink()
    with writing(small) as count:
        count([25])
    assert numbers(small, end) == [25]
    assert numbers(small) == [*before, 25]


def test_another_writer_goes_on_in_the_new_file(small: Path) -> None:
    with writing(small) as first, writing(small) as second:
        for number in range(40):
            (first if number % 2 else second)([number])
        kept = numbers(small)
        assert kept == list(range(40 - len(kept), 40))
        small.unlink()
        first([40])
        assert numbers(small)[-1] == 40


def test_a_log_that_has_lost_its_beginning_still_tells_what_the_peer_is(small: Path) -> None:
    peer = PeerStory("", "")
    with closing(Telemetry(small)) as telemetry:
        telemetry.emit("peer.start", device="cuda")
        for number in range(100):
            telemetry.emit("data.epoch", epoch=number)
    for _, event in read_events(small):
        peer.apply(event)
    assert (peer.state, peer.device) == ("joining", "cuda")


def test_a_log_that_cannot_be_written_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LocalError, match="cannot write the event log") as caught:
        Telemetry(tmp_path / "file" / "events.jsonl")
    assert "--home" in caught.value.remedy


def test_a_full_disk_ends_the_log_but_not_the_events(capsys: pytest.CaptureFixture[str]) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full here")
    telemetry, heard = recorded(full)
    telemetry.emit("network.died")
    telemetry.emit("network.failed")
    assert [event["event"] for event in heard] == ["network.died", "network.failed"]
    assert capsys.readouterr().err.count("the event log is lost") == 1
