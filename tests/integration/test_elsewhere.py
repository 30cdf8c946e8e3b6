"""Real peers on a platform that has none of what only Linux has: no call of ours is without its fallback."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
ELSEWHERE = ROOT / "tests" / "support" / "elsewhere"
ASK = (
    "from flockstep.peer.process import shared; from flockstep.peer.libp2p import tcp;"
    "print(tcp.sys.platform, hasattr(shared.os, 'memfd_create'), hasattr(shared.os, 'posix_fallocate'))"
)


def started(arguments: list[str], home: Path) -> str:
    path = os.pathsep.join([str(ELSEWHERE), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "FLOCKSTEP_HOME": str(home), "PYTHONPATH": path}
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_run_is_published_and_trained_without_what_only_linux_has(tmp_path: Path) -> None:
    assert started(["-c", ASK], tmp_path).split() == ["darwin", "False", "False"]
    assert "round 6: " in started([str(ROOT / "examples" / "cnn.py")], tmp_path)
