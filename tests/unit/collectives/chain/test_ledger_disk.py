"""The ledger on disk: crashes, full disks and flipped bits lose no intact record."""

import errno
import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest
from flockstep.collectives.chain import ledger as ledger_module
from flockstep.collectives.chain.chain import NOTHING
from flockstep.collectives.chain.packed import pack_certificate
from flockstep.peer.log.file import LogFile, read_records
from flockstep.peer.log.telemetry import Telemetry
from support.certificates import certify, grow
from support.ledgers import named, open_ledger, rounds_in, write

CHAIN = grow(None, 5)


def test_a_crash_in_mid_write_costs_what_was_not_whole_and_nothing_else(tmp_path: Path) -> None:
    ends = [0, *write(tmp_path / "ledger", CHAIN[:3])]
    whole = (tmp_path / "ledger").read_bytes()
    torn = tmp_path / "torn"
    for size in range(len(whole) + 1):
        torn.write_bytes(whole[:size])
        ledger, events = open_ledger(torn)
        kept = sum(end <= size for end in ends[1:])
        assert rounds_in(ledger) == CHAIN[:kept]
        assert torn.read_bytes() == whole[: ends[kept]]
        assert len(named(events, "file.torn")) == (size != ends[kept])
        if size % 100 == 0:
            ledger.extend([CHAIN[kept]])
            assert rounds_in(open_ledger(torn)[0]) == CHAIN[: kept + 1]


def test_a_flipped_byte_costs_the_record_that_it_is_in(tmp_path: Path) -> None:
    ends = [0, *write(tmp_path / "ledger", CHAIN[:3])]
    whole = (tmp_path / "ledger").read_bytes()
    bad = tmp_path / "bad"
    for position in range(len(whole)):
        bad.write_bytes(whole[:position] + bytes([whole[position] ^ 0x20]) + whole[position + 1 :])
        ledger, events = open_ledger(bad)
        hit = sum(end <= position for end in ends[1:])
        assert rounds_in(ledger) == (CHAIN[:2] if hit == 2 else CHAIN[hit + 1 : 3])
        (said,) = named(events, "file.torn") if hit == 2 else named(events, "file.damaged")
        assert said["bytes"] == ends[hit + 1] - ends[hit]
        assert bad.stat().st_size == (ends[2] if hit == 2 else len(whole))


def test_behind_damage_only_what_is_signed_counts(tmp_path: Path) -> None:
    """A mark that damage lays bare may be one that somebody put into a certificate."""
    path = tmp_path / "ledger"
    signature = CHAIN[1].signatures[0]
    forged = replace(CHAIN[1], signatures=(signature[:-1] + bytes([signature[-1] ^ 1]),))
    item = pack_certificate(forged)
    LogFile(path, Telemetry()).append(len(item).to_bytes(4, "big") + item)
    assert open_ledger(path)[0].head.round == 2
    path.write_bytes(b"damage" + path.read_bytes())
    ledger, events = open_ledger(path)
    assert ledger.head == NOTHING
    (said,) = named(events, "file.damaged")
    assert said["bytes"] == len(b"damage") + 4 + len(item)
    write(tmp_path / "good", CHAIN[:1])
    path.write_bytes(b"damage" + (tmp_path / "good").read_bytes() + path.read_bytes()[len(b"damage") :])
    assert rounds_in(open_ledger(path)[0]) == CHAIN[:1]  # Behind damage all is checked.


def test_a_record_of_another_run_or_of_nothing_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    file = LogFile(path, Telemetry())
    item = pack_certificate(certify(None, 1, run="b" * 52))
    for payload in (len(item).to_bytes(4, "big") + item, b"not a certificate"):
        file.append(payload)
    ledger, events = open_ledger(path)
    assert ledger.head == NOTHING
    (said,) = named(events, "file.damaged")
    assert "another run" in str(said["reason"])
    assert said["bytes"] == 4 + len(item) + len(b"not a certificate")
    ledger.extend([CHAIN[0]])
    assert rounds_in(open_ledger(path)[0]) == CHAIN[:1]


class Disk:
    """Stands in for the system calls of a file: `full` takes a few bytes and then no more."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.full = False
        self.stuck = False
        self._write, self._truncate = os.write, os.ftruncate
        monkeypatch.setattr(os, "write", self.write)
        monkeypatch.setattr(os, "ftruncate", self.ftruncate)

    def write(self, fd: int, data: memoryview) -> int:
        if not self.full:
            return self._write(fd, data)
        if len(data) > 60:
            return self._write(fd, data[:60])
        raise OSError(errno.ENOSPC, "No space left on device")

    def ftruncate(self, fd: int, size: int) -> None:
        if self.stuck:
            raise OSError(errno.EIO, "Input/output error")
        self._truncate(fd, size)


@pytest.mark.parametrize("stuck", [False, True])
def test_a_full_disk_leaves_the_file_readable_and_the_run_going(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stuck: bool
) -> None:
    path = tmp_path / "ledger"
    disk = Disk(monkeypatch)
    ledger, events = open_ledger(path)
    ledger.extend([CHAIN[0]])
    before = path.read_bytes()
    disk.full, disk.stuck = True, stuck
    ledger.extend([CHAIN[1]])
    ledger.extend([CHAIN[2]])
    assert [str(event["reason"]).split(" certificates")[0] for event in named(events, "ledger.unwritten")] == ["1", "2"]
    assert "No space left" in str(named(events, "ledger.unwritten")[0]["reason"])
    assert rounds_in(ledger) == CHAIN[:3]
    assert path.read_bytes().startswith(before)
    assert (path.read_bytes() == before) is not stuck
    assert [found.skipped for found in read_records(path)] == [0]
    disk.full = disk.stuck = False
    ledger.extend([CHAIN[3]])
    assert rounds_in(ledger) == CHAIN[:4]
    again, said = open_ledger(path)
    assert rounds_in(again) == CHAIN[:4]
    assert bool(named(said, "file.damaged")) is stuck


def test_a_disk_that_fails_to_sync_is_a_disk_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger, events = open_ledger(tmp_path / "ledger")

    def fsync(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr(os, "fsync", fsync)
        ledger.extend([CHAIN[0]])
    assert len(named(events, "ledger.unwritten")) == 1
    assert (tmp_path / "ledger").read_bytes() == b""
    ledger.extend([CHAIN[1]])
    assert rounds_in(open_ledger(tmp_path / "ledger")[0]) == CHAIN[:2]


def test_every_record_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[os.stat_result] = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.fstat(fd)))
    ends = write(tmp_path / "ledger", CHAIN[:3])
    assert ends == [about.st_size for about in synced if stat.S_ISREG(about.st_mode)]


def test_a_disk_that_stays_full_does_not_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_module, "MAX_WAITING", 2)
    disk = Disk(monkeypatch)
    ledger, _ = open_ledger(tmp_path / "ledger")
    disk.full = True
    for certificate in CHAIN[:4]:
        ledger.extend([certificate])
    assert rounds_in(ledger) == [None, None, *CHAIN[2:4]]
    assert ledger.since(1, 4, max_bytes=1 << 20) == ()
    disk.full = False
    ledger.extend([CHAIN[4]])
    again, _ = open_ledger(tmp_path / "ledger")
    assert (again.first, rounds_in(again)) == (3, CHAIN[2:])


def test_a_ledger_that_cannot_be_opened_is_an_event_and_works_from_memory(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    ledger, events = open_ledger(tmp_path / "file" / "ledger")
    assert len(named(events, "file.unavailable")) == 1
    ledger.extend([CHAIN[0]])
    assert rounds_in(ledger) == CHAIN[:1]
    (tmp_path / "file").unlink()
    ledger.extend([CHAIN[1]])
    assert rounds_in(open_ledger(tmp_path / "file" / "ledger")[0]) == CHAIN[:2]


def test_a_certificate_that_cannot_be_read_any_more_is_an_event(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    write(path, CHAIN[:2])
    ledger, events = open_ledger(path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    assert rounds_in(ledger) == [CHAIN[0], None]
    assert len(named(events, "ledger.unreadable")) == 1
    write(tmp_path / "other", grow(None, 1, mark=b"x"))
    path.write_bytes((tmp_path / "other").read_bytes())
    assert ledger.certificate(1) is None
    assert "another certificate" in str(named(events, "ledger.unreadable")[-1]["reason"])
    path.unlink()
    assert rounds_in(ledger) == [None, None]


def test_a_crash_in_the_middle_of_a_branch_leaves_the_chain_that_was_there(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    ends = write(path, CHAIN[:3])
    ledger, _ = open_ledger(path)
    ledger.follow(grow(CHAIN[0], 3, tokens=500))
    whole = path.read_bytes()
    for size in range(ends[2], len(whole), 7):
        path.write_bytes(whole[:size])
        assert rounds_in(open_ledger(path)[0]) == CHAIN[:3]


def test_what_waits_for_the_disk_does_not_outlive_its_chain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch)
    ledger, _ = open_ledger(tmp_path / "ledger")
    disk.full = True
    ledger.extend([CHAIN[0]])
    ledger.follow(CHAIN[3:4])
    disk.full = False
    ledger.extend([CHAIN[4]])
    assert rounds_in(ledger) == CHAIN[3:] == rounds_in(open_ledger(tmp_path / "ledger")[0])
    disk.full = True
    longer = grow(CHAIN[4], 3)
    for certificate in longer:
        ledger.extend([certificate])
    ledger.follow(longer[:1])
    disk.full = False
    ledger.extend([certify(longer[0], 7)])
    assert rounds_in(ledger)[2:] == [longer[0], certify(longer[0], 7)]
    assert rounds_in(open_ledger(tmp_path / "ledger")[0]) == rounds_in(ledger)
