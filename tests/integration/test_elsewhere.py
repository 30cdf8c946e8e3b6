"""Real peers on a platform that has none of what only Linux has: no call of ours is without its fallback."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
ELSEWHERE = ROOT / "tests" / "support" / "elsewhere"
ASK = (
    "from flockstep.peer.process import shared; from flockstep.peer.libp2p import tcp;"
    "print(tcp.sys.platform, hasattr(shared.os, 'memfd_create'), hasattr(shared.os, 'posix_fallocate'));"
    "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"
)


def test_a_run_is_published_and_trained_without_what_only_linux_has(tmp_path: Path) -> None:
    path = os.pathsep.join([str(ELSEWHERE), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "FLOCKSTEP_HOME": str(tmp_path), "PYTHONPATH": path}
    command = [sys.executable, "-c", ASK, str(ROOT / "examples" / "cnn.py")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split()[:3] == ["darwin", "False", "False"]
    assert "round 6: " in done.stdout
