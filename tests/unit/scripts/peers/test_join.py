"""`flockstep join`: what it does before torch is loaded."""

import subprocess
import sys
from pathlib import Path

JOIN = f"""
import gc
import sys
from pathlib import Path


class Found:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            sys.exit(str(gc.isenabled()))


sys.meta_path.insert(0, Found())

from flockstep.peer.base.config import PeerConfig
from flockstep.scripts.peers.join import TrainingOptions, join

join("flockstep://{"a" * 52}?via=/ip4/127.0.0.1/tcp/1/p2p/12D3KooWK99VoVxNE7XzyBwXEzW7xhK7Gpv85r9F3V3fyKSUKPH5",
     PeerConfig(home=Path(sys.argv[1])), print, TrainingOptions(yes=True))
"""


def test_torch_is_loaded_without_collections(tmp_path: Path) -> None:
    command = [sys.executable, "-c", JOIN, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.stderr.splitlines()[-1] == "False"
