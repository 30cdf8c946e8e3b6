"""A run on this computer, for examples and for testing a training loop."""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ...peer.base.disk import write_whole
from .processes import Process, Processes

ADDRESS = r"/ip4/127\.0\.0\.1/tcp/\d+/p2p/\w+"
LINK = r"flockstep://[^\s']+"
"""Patterns of the address and the link in the output of the commands."""
HERE = ("--host", "127.0.0.1", "--port", "0")
"""Options of a peer that nobody else reaches."""
START_SECONDS = 90.0
"""Seconds for a process to import its libraries while all others do the same on two cores."""


def open_run(processes: Processes, toml: Path) -> tuple[Process, str]:
    """Start a bootstrap on loopback, and the owner of a `run.toml`, which keeps its run; returns that, and the link.

    Their homes are beside the file. Raises `LocalError`.
    """
    home, owner = toml.with_name("bootstrap"), toml.with_name("owner")
    options = ["--home", str(home), *HERE, "--exempt", "127.0.0.0/8"]  # All peers are on this computer.
    bootstrap = processes.start("the bootstrap", ["bootstrap", *options], home / "log.txt")
    address = bootstrap.await_line(ADDRESS, START_SECONDS)
    create = ["run", "create", str(toml), "--via", address, "--home", str(owner), *HERE]
    keeper = processes.start("flockstep run create", create, owner / "log.txt")
    return keeper, keeper.await_line(LINK, START_SECONDS)


@contextlib.contextmanager
def local_run(toml: str, layout: str = "") -> Iterator[str]:
    """Publish the run of a `run.toml` text on loopback, and yield its link.

    `layout` is that of a model of your own (`Swarm.layout_of`), where the text has none.

    Its bootstrap and its owner's process, which keeps the run, end with the block.

    Raises `FlockstepError`.
    """
    with tempfile.TemporaryDirectory(prefix="flockstep-") as folder, Processes() as processes:
        file = Path(folder) / "run.toml"
        write_whole(file, (f'layout = "{layout}"\n{toml}' if layout else toml).encode())
        yield open_run(processes, file)[1]
