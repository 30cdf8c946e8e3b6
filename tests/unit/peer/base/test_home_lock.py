"""The lock on a home folder: one process at a time, and none stays locked behind a killed one."""

import subprocess
import sys
from pathlib import Path

import pytest
from flockstep.peer.base.errors import LocalError
from flockstep.peer.base.home_lock import home_lock

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


def test_a_home_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LocalError, match="cannot write"), home_lock(tmp_path / "file", pid=1):
        pass
