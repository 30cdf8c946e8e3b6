"""A run on this computer, for examples and for testing a training loop."""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ..peer.disk import write_whole
from .processes import Processes

ADDRESS = r"/ip4/127\.0\.0\.1/tcp/\d+/p2p/\w+"
LINK = r"flockstep://[^\s']+"
"""Patterns of the address and the link in the output of the commands."""
START_SECONDS = 90.0
"""Seconds for a process to import its libraries while all others do the same on two cores."""


@contextlib.contextmanager
def local_run(toml: str, layout: str = "") -> Iterator[str]:
    """Publish the run of a `run.toml` text on loopback, and yield its link.

    `layout` is that of a model of your own (`Swarm.layout_of`), where the text has none.

    Its bootstrap and its owner's process, which keeps the run, end with the block.

    Raises `FlockstepError`.
    """
    here = ["--host", "127.0.0.1", "--port", "0"]
    with tempfile.TemporaryDirectory(prefix="flockstep-") as folder, Processes() as processes:
        home = Path(folder)
        listen = ["--home", str(home / "bootstrap"), *here]
        bootstrap = processes.start("the bootstrap", ["bootstrap", *listen], home / "bootstrap.log")
        address = bootstrap.await_line(ADDRESS, START_SECONDS)
        file = home / "run.toml"
        write_whole(file, (f'layout = "{layout}"\n{toml}' if layout else toml).encode())
        create = ["run", "create", str(file), "--via", address, "--home", str(home / "owner"), *here]
        yield processes.start("flockstep run create", create, home / "owner.log").await_line(LINK, START_SECONDS)
