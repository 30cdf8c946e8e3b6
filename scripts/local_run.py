"""A run on this computer, for examples and for testing a training loop."""

import contextlib
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ..peer.config import PeerConfig
from ..peer.disk import write_whole
from .processes import Processes
from .run import create_run

ADDRESS = r"/ip4/127\.0\.0\.1/tcp/\d+/p2p/\w+"
LINK = r"flockstep://[^\s']+"
"""Patterns of the address and the link in the output of the commands."""
START_SECONDS = 90.0
"""Seconds for a process to import its libraries while all others do the same on two cores."""


@contextlib.contextmanager
def local_run(toml: str) -> Iterator[str]:
    """Publish the run of a `run.toml` text on loopback, and yield its link; its bootstrap ends with the block.

    Raises `FlockstepError`.
    """
    with tempfile.TemporaryDirectory(prefix="flockstep-") as folder, Processes() as processes:
        home = Path(folder)
        listen = ["--home", str(home / "bootstrap"), "--host", "127.0.0.1", "--port", "0"]
        bootstrap = processes.start("the bootstrap", ["bootstrap", *listen], home / "bootstrap.log")
        address = bootstrap.await_line(ADDRESS, START_SECONDS)
        file = home / "run.toml"
        write_whole(file, toml.encode())
        lines: list[str] = []
        create_run(file, [address], PeerConfig(home=home / "owner", host="127.0.0.1", port=0), lines.append)
        found = re.search(LINK, "\n".join(lines))
        assert found is not None
        yield found.group()
