"""`flockstep join`: what it does before torch is loaded."""

import os
import subprocess
import sys
from pathlib import Path

from flockstep.scripts.volunteer.control import pause_file
from support.failing_network import REACHED

TESTS = str(Path(__file__).parents[3])
JOIN = f"""
import gc
import sys
import time
from pathlib import Path

import psutil

home, is_free = Path(sys.argv[1]), sys.argv[2] == "free"


class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            until = time.monotonic() + 120
            while is_free and not (home / "{REACHED}").exists() and time.monotonic() < until:
                time.sleep(0.01)
            sys.exit(f"{{len(psutil.Process().children())}}, {{gc.isenabled()}}")


sys.meta_path.insert(0, Slow())

from flockstep.optim.member import opening
from flockstep.peer.base.config import PeerConfig
from flockstep.scripts.peers.join import TrainingOptions, join

opening.ENTRY = "support.failing_network:reach"
join("flockstep://{"a" * 52}?via=/ip4/127.0.0.1/tcp/1/p2p/12D3KooWK99VoVxNE7XzyBwXEzW7xhK7Gpv85r9F3V3fyKSUKPH5",
     PeerConfig(home=home), print, TrainingOptions(yes=True))
"""


def load(home: Path, state: str) -> str:
    """Load torch as `join` does; returns how many network processes there are then, and whether garbage is collected."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((TESTS, os.environ.get("PYTHONPATH", "")))}
    command = [sys.executable, "-c", JOIN, str(home), state]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    return ended.stderr.splitlines()[-1]


def test_the_run_is_reached_while_torch_is_loaded_without_collections(tmp_path: Path) -> None:
    assert load(tmp_path, "free") == "1, False"
    assert (tmp_path / REACHED).exists()


def test_who_is_paused_reaches_no_run_before_it_may_train(tmp_path: Path) -> None:
    pause_file(tmp_path).touch()
    assert load(tmp_path, "paused") == "0, False"
