"""A run on this computer, for examples and for trying a training loop out before others are asked to join."""

import contextlib
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ..peer.config import PeerConfig
from .processes import Processes
from .run import create_run

ADDRESS = r"/ip4/127\.0\.0\.1/tcp/\d+/p2p/\w+"
LINK = r"flockstep://[^\s']+"
"""What to look for in the words of the commands that are started here."""
START_SECONDS = 90.0
"""For a process that has to import its libraries while all others do the same on two cores."""


@contextlib.contextmanager
def local_run(toml: str) -> Iterator[str]:
    """The link of a run that a `run.toml` text describes, published on loopback; its bootstrap ends with the block.

    Raises `FlockstepError`.
    """
    with tempfile.TemporaryDirectory(prefix="flockstep-") as folder, Processes() as processes:
        home = Path(folder)
        listen = ["--home", str(home / "bootstrap"), "--host", "127.0.0.1", "--port", "0"]
        door = processes.start("the bootstrap", ["bootstrap", *listen], home / "bootstrap.log")
        address = door.await_line(ADDRESS, START_SECONDS)
        file = home / "run.toml"
        file.write_text(toml, encoding="utf-8")
        said: list[str] = []
        create_run(file, [address], PeerConfig(home=home / "owner", host="127.0.0.1", port=0), said.append)
        found = re.search(LINK, "\n".join(said))
        assert found is not None
        yield found.group()
