"""The append-only log: no kill, full disk or flipped bit costs more than the record that it hits, and an event says so."""

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from flockstep.dht.directory.store import Store
from flockstep.dht.directory.store_file import StoreFile
from flockstep.peer.base.errors import LocalError, MalformedMessage
from flockstep.peer.log import file as log_file
from flockstep.peer.log.file import LOG_HEADER_BYTES, LogFile, LogRecord, read_records
from flockstep.peer.log.telemetry import Event, Telemetry
from flockstep.peer.quota.limits import BootstrapLimits
from support.full_disk import files_up_to
from support.ledgers import open_ledger, rounds_in
from support.recorded import recorded

posix = pytest.mark.skipif(os.name != "posix", reason="Windows has neither SIGKILL nor limits on a file's size")


def open_log(path: Path, *, sync: bool = True) -> tuple[LogFile, list[bytes], list[Event]]:
    """A log, what was in it, and the events that it leaves."""
    telemetry, events = recorded(clock=lambda: 0.0)
    log, found = LogFile(path, telemetry, sync=sync), list[bytes]()
    log.load(lambda record: found.append(record.payload))
    return log, found, events


def payloads(path: Path) -> list[bytes]:
    return [record.payload for record in read_records(path)]


def test_the_bytes_of_a_record_stay_those_that_files_of_today_hold(tmp_path: Path) -> None:
    log, _, _ = open_log(tmp_path / "log")
    log.append(b"payload")
    golden = "46534c3100000007376673a5dd89fc193e8de716508b8e838ac411d71e52ac0a7cd04331427982c47061796c6f6164"
    assert (tmp_path / "log").read_bytes().hex() == golden


def test_what_was_appended_is_read_in_order_and_by_its_place(tmp_path: Path) -> None:
    log, found, events = open_log(tmp_path / "folder" / "log")
    assert (found, events) == ([], [])
    places = [log.append(payload) for payload in (b"one", b"", b"three")]
    assert [log.read(place, 3) for place in places[::2]] == [b"one", b"thr"]
    _, found, events = open_log(log.path)
    assert (found, events) == ([b"one", b"", b"three"], [])


@posix
def test_each_record_is_synced_and_the_folder_of_a_new_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []

    def fsync(fd: int) -> None:
        about = os.fstat(fd)
        synced.append(-1 if stat.S_ISDIR(about.st_mode) else about.st_size)

    monkeypatch.setattr(os, "fsync", fsync)
    log, _, _ = open_log(tmp_path / "log")
    for _ in range(2):
        log.append(b"12345")
    assert synced == [LOG_HEADER_BYTES + 5, -1, 2 * LOG_HEADER_BYTES + 10]
    unsynced, _, _ = open_log(tmp_path / "unsynced", sync=False)
    unsynced.append(b"12345")
    unsynced.rewrite([b"1"])
    assert len(synced) == 3


APPEND = {
    "log": "from flockstep.peer.log.file import LogFile\n"
    "log = LogFile(path, Telemetry())\n"
    "append = lambda number: log.append(bytes([number]) * 1000)\n",
    "ledger": "from support.certificates import grow\n"
    "from support.ledgers import open_ledger\n"
    "chain, ledger = grow(None, 3), open_ledger(path)[0]\n"
    "append = lambda number: ledger.extend([chain[number]])\n",
    "store": "from flockstep.dht.directory.store import Entry, Store\n"
    "from flockstep.dht.directory.store_file import StoreFile\n"
    "from flockstep.peer.quota.limits import BootstrapLimits\n"
    "file, store = StoreFile(path, Telemetry()), Store(BootstrapLimits())\n"
    "file.load(store, 0.0)\n"
    "def append(number):\n"
    "    entry = Entry(bytes([number + 1]), '', bytes(1000), (), '192.0.2.1', 9.0)\n"
    "    store.put(entry)\n"
    "    file.append(entry, store)\n",
}
DIE = """
append(0)
append(1)
system_write = os.write

def write_half_and_die(fd, data):
    system_write(fd, data[: len(data) // 2])
    os.kill(os.getpid(), signal.SIGKILL)

os.write = write_half_and_die
append(2)
"""


def kept_by(owner: str, path: Path) -> tuple[int, list[Event]]:
    """How many of the records an owner finds in its file, and the events of that."""
    if owner == "log":
        _, found, events = open_log(path)
        return len(found), events
    if owner == "ledger":
        ledger, events = open_ledger(path)
        return len(rounds_in(ledger)), [event for event in events if event["event"] != "ledger.opened"]
    events, telemetry, store = [], Telemetry(), Store(BootstrapLimits())
    telemetry.subscribe(events.append)
    StoreFile(path, telemetry).load(store, 0.0)
    return len(store), events


@posix
@pytest.mark.parametrize("owner", APPEND)
def test_a_kill_in_the_middle_of_an_append_costs_that_record_alone(tmp_path: Path, owner: str) -> None:
    path = tmp_path / owner
    code = "import os, signal, sys\nfrom pathlib import Path\nfrom flockstep.peer.log.telemetry import Telemetry\n"
    code += "path = Path(sys.argv[1])\n" + APPEND[owner] + DIE
    paths = os.pathsep.join([str(Path(__file__).parents[3]), *filter(None, [os.environ.get("PYTHONPATH")])])
    killed = subprocess.run(
        [sys.executable, "-c", code, str(path)], env={**os.environ, "PYTHONPATH": paths}, check=False, timeout=60
    )
    assert killed.returncode == -signal.SIGKILL
    assert len(payloads(path)) == 2
    assert path.stat().st_size > sum(LOG_HEADER_BYTES + len(payload) for payload in payloads(path))
    count, events = kept_by(owner, path)
    assert count == 2
    (said,) = events
    assert (said["event"], said["name"]) == ("file.torn", owner)
    assert kept_by(owner, path) == (2, [])


@posix
def test_an_append_that_the_disk_refuses_is_taken_back(tmp_path: Path) -> None:
    log, _, _ = open_log(tmp_path / "log")
    log.append(bytes(1000))
    before = log.path.read_bytes()
    with files_up_to(len(before) + 60), pytest.raises(LocalError, match=r"cannot write .*log: File too large"):
        log.append(bytes(1000))
    assert log.path.read_bytes() == before
    log.append(b"more")
    assert open_log(log.path)[1:] == ([bytes(1000), b"more"], [])


def test_a_flipped_byte_costs_the_record_that_it_is_in(tmp_path: Path) -> None:
    log, _, _ = open_log(tmp_path / "log")
    records = [bytes([number]) * 20 for number in range(3)]
    for payload in records:
        log.append(payload)
    whole = log.path.read_bytes()
    for position in range(2 * (LOG_HEADER_BYTES + 20)):
        log.path.write_bytes(whole[:position] + bytes([whole[position] ^ 0x20]) + whole[position + 1 :])
        _, found, events = open_log(log.path)
        assert found == [payload for number, payload in enumerate(records) if number != position // (LOG_HEADER_BYTES + 20)]
        (said,) = events
        assert (said["event"], said["name"], said["bytes"]) == ("file.damaged", "log", LOG_HEADER_BYTES + 20)
        assert log.path.stat().st_size == len(whole)  # Damage in the middle is left where it is.


def test_a_record_that_its_owner_cannot_use_is_told_with_the_reason(tmp_path: Path) -> None:
    log, _, events = open_log(tmp_path / "log")
    for payload in (b"good", b"bad", b"good"):
        log.append(payload)
    taken: list[bytes] = []

    def take(record: LogRecord) -> None:
        if record.payload == b"bad":
            raise MalformedMessage("not what I wrote")
        taken.append(record.payload)

    log.load(take)
    assert taken == [b"good", b"good"]
    (said,) = events
    assert (said["event"], said["reason"], said["bytes"]) == ("file.damaged", "not what I wrote", 3)


def test_a_log_that_cannot_be_read_is_an_event(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    log, found, events = open_log(tmp_path / "log")
    assert (found, [event["event"] for event in events]) == ([], ["file.unavailable"])
    with pytest.raises(LocalError, match="cannot write"):
        log.append(b"payload")


def test_a_mark_across_two_pieces_of_the_search_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, _, _ = open_log(tmp_path / "log")
    log.append(b"payload")
    whole = log.path.read_bytes()
    monkeypatch.setattr(log_file, "SEARCH_BYTES", 8)
    for damage in range(1, 20):
        log.path.write_bytes(bytes(damage) + whole)
        (found,) = read_records(log.path)
        assert (found.payload, found.skipped) == (b"payload", damage)


def test_no_record_is_longer_than_a_reader_takes(tmp_path: Path) -> None:
    log, _, _ = open_log(tmp_path / "log")
    log.append(bytes(101))
    assert not list(read_records(log.path, 100))
    assert list(read_records(log.path, 101))
    short, found = LogFile(log.path, Telemetry(), max_payload=100), list[LogRecord]()
    short.load(found.append)
    assert not found


def test_a_reader_beside_the_writer_sees_whole_records_and_harms_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, _, _ = open_log(tmp_path / "log")
    log.append(b"whole")
    size = log.path.stat().st_size
    seen: list[tuple[int, int]] = []
    system_write: Callable[[int, memoryview], int] = os.write

    def halves(fd: int, data: memoryview) -> int:
        written = system_write(fd, data[: max(1, len(data) // 2)])
        seen.append((len(payloads(log.path)), log.path.stat().st_size))
        return written

    monkeypatch.setattr(os, "write", halves)
    log.append(bytes(1000))
    assert len(seen) > 3
    assert {count for count, _ in seen[:-1]} == {1}
    assert all(now > size for _, now in seen)
    assert len(payloads(log.path)) == 2


def test_a_log_is_written_anew_with_what_is_of_use(tmp_path: Path) -> None:
    log, _, _ = open_log(tmp_path / "log")
    for _ in range(3):
        log.append(b"outdated")
    assert log.rewrite([b"one", b"two"]) == log.path.stat().st_size
    log.append(b"three")
    assert open_log(log.path)[1:] == ([b"one", b"two", b"three"], [])


def test_a_log_whose_file_is_removed_begins_a_new_one(tmp_path: Path) -> None:
    log, _, _ = open_log(tmp_path / "log")
    log.append(b"gone")
    log.path.unlink()
    log.append(b"here")
    assert payloads(log.path) == [b"here"]
