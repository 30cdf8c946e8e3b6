"""What a peer keeps beside its rounds is old or new after a kill or a full disk at any call that changes its folder."""

import errno
import os
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from flockstep.dht.members.remembered import Remembered
from flockstep.dht.run.statements import OwnerStatement, OwnerStatements
from flockstep.peer.base.errors import LocalError
from flockstep.peer.identity import Identity
from flockstep.peer.log import telemetry
from flockstep.peer.log.file import LogFile
from flockstep.peer.log.telemetry import Telemetry, read_events
from support.killed_lives import Killer

RUN = "a" * 52
ANNA, BERT = (Identity.from_seed(bytes([n]) * 32) for n in (1, 2))
NONE = OwnerStatements(RUN, ANNA.peer_id)
VERBS = ("vouch", "ban", "pardon")


class Killed(BaseException):
    """The end of a process."""


def state(folder: Path, number: int) -> None:
    Remembered(folder, RUN, Telemetry()).append(NONE, ANNA, [OwnerStatement(VERBS[number], BERT.peer_id)])


def stated(folder: Path) -> int:
    heard: list[object] = []
    log = Telemetry()
    log.subscribe(heard.append)
    found = Remembered(folder, RUN, log).statements(NONE)
    assert not heard
    assert [one.verb for one in found.statements] == list(VERBS[: len(found)])
    return len(found)


def log_ban(folder: Path, number: int) -> None:
    LogFile(folder / "bans", Telemetry()).append(bytes([number]) * 100)


def rewrite_bans(folder: Path, number: int) -> None:
    LogFile(folder / "bans", Telemetry()).rewrite([bytes([one]) * 100 for one in range(number + 1)])


def banned(folder: Path) -> int:
    found: list[bytes] = []
    LogFile(folder / "bans", Telemetry()).load(lambda record: found.append(record.payload))
    assert found == [bytes([one]) * 100 for one in range(len(found))]
    return len(found)


def make_key(folder: Path, number: int) -> None:
    Identity.load_or_create(folder / "key")


def keys(folder: Path) -> int:
    is_there = (folder / "key").exists()
    Identity.load_or_create(folder / "key")
    return int(is_there)


def emit(folder: Path, number: int) -> None:
    with closing(Telemetry(folder / "events.jsonl")) as log:
        log.emit("data.epoch", epoch=number)


def emitted(folder: Path) -> int:
    found = [event["epoch"] for _, event in read_events(folder / "events.jsonl") if event["event"] == "data.epoch"]
    assert found == list(range(len(found)))
    return len(found)


Store = tuple[Callable[[Path, int], None], Callable[[Path], int], int]
STORES: dict[str, Store] = {
    "statements": (state, stated, 3),
    "log": (log_ban, banned, 3),
    "log anew": (rewrite_bans, banned, 3),
    "key": (make_key, keys, 1),
    "events": (emit, emitted, 3),
}


CASES = [(store, is_full) for store in STORES for is_full in (False, True)]
CASES.remove(("events", True))  # One that does not fit is lost: test_telemetry.


@pytest.mark.parametrize(("store", "is_full"), CASES)
def test_a_write_cut_anywhere_leaves_the_old_or_the_new(
    store: str, is_full: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(telemetry, "MAX_LOG_BYTES", 120)  # A new file at the third event.
    change, count, changes = STORES[store]
    cuts = 0
    while True:
        cuts += 1
        folder, copy = tmp_path / f"{cuts}", tmp_path / f"{cuts} copy"
        folder.mkdir()
        done = 0

        def cut() -> None:
            if is_full:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            raise Killed

        with Killer(folder, copy, cuts, cut) as killer:
            try:
                for number in range(changes):
                    change(folder, number)
                    done += 1
            except (Killed, LocalError):
                pass
        if not killer.at:
            break
        after = folder if is_full else copy
        assert count(after) in (done, done + 1)
        for number in range(count(after), changes):  # The next life goes on.
            change(after, number)
        assert count(after) == changes
        shutil.rmtree(folder)
    assert cuts > 1
