"""The lock on a home folder: one process at a time, and none stays locked behind a killed one."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from flockstep.peer.base.errors import LocalError
from flockstep.peer.base.home_lock import append_lock, home_lock, is_locked

HOLD = """
import os
import sys
from pathlib import Path
from flockstep.peer.base.home_lock import home_lock
with home_lock(Path(sys.argv[1]), pid=os.getpid()):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_second_process_is_told_who_holds_it_and_a_killed_one_leaves_nothing(tmp_path: Path) -> None:
    home = tmp_path / "home"
    holder = subprocess.Popen([sys.executable, "-c", HOLD, home], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        line = f"another process .pid {holder.pid}. uses the home folder {home}"
        with pytest.raises(LocalError, match=line), home_lock(home, pid=1):
            pass
    finally:
        holder.kill()
        holder.communicate()
    for _ in range(2):
        with home_lock(home, pid=1):
            pass


@pytest.mark.skipif(sys.platform == "win32", reason="no flock(2)")
@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EACCES, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_locks_is_named_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def flock(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", flock)
    for lock in (home_lock(tmp_path, pid=1), append_lock(tmp_path / "lock")):
        with pytest.raises(LocalError, match=f"cannot lock .*: {os.strerror(number)}") as refused, lock:
            pass
        assert "--home" in refused.value.remedy
    with pytest.raises(LocalError, match="cannot lock"):
        is_locked(tmp_path / "lock")


def test_a_home_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LocalError, match="cannot write"), home_lock(tmp_path / "file", pid=1):
        pass
