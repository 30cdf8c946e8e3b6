"""Bootstraps and keepers as processes, and runs that are published through them."""

import subprocess
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from flockstep.dht.rendezvous import publish_manifest
from flockstep.dht.run.link import JoinLink
from flockstep.dht.run.manifest import Manifest, SignedManifest
from flockstep.optim.shards.packed import pinned_data
from flockstep.peer.base.config import PeerConfig
from flockstep.peer.identity import Identity
from flockstep.peer.log.telemetry import Telemetry
from support.packed import packed

from .commands import Command

TINY_RUN = """
name = "tiny"
[model]
size = "0.2m"
[data]
source = "text:{stdlib}"
sequence_length = 16
batch_size = 1
[inner]
steps = 5
[outer]
rounds = 100000
checkpoint_every = 2
"""


class Bootstrap:
    """A `flockstep bootstrap` process; `address` waits until it serves.

    Without `--exempt` among its options loopback is exempt from its limits: all peers of a test are on this computer.
    """

    def __init__(self, home: Path, *options: str, port: int = 0) -> None:
        place = ("--home", str(home), "--host", "127.0.0.1", "--port", str(port))
        exempt = () if "--exempt" in options else ("--exempt", "127.0.0.0/8")
        self._process = Command("bootstrap", *place, *exempt, *options)
        self.pid = self._process.pid

    def address(self) -> str:
        """Return its multiaddr."""
        return next(word for line in self._process.stdout for word in line.split() if word.startswith("/ip4/"))

    def kill(self) -> None:
        """Send SIGKILL; repeated calls do nothing."""
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()


def publish_run(toml: str, via: tuple[str, ...], home: Path) -> str:
    """Publish the run of a `run.toml` text through these bootstraps, and return its link.

    The peer with this home folder owns it, so it decides the first round. Where the text does not say who votes, all members
    do from then on: nobody keeps this run.
    """
    identity = Identity.load_or_create(home / "identity.key")
    manifest = Manifest.from_toml(toml, where="run.toml", owner=identity.peer_id)
    if "voters" not in tomllib.loads(toml).get("admission", {}):
        rules = replace(manifest.admission, voters="members")
        manifest = replace(manifest, admission=rules)
    if not manifest.is_own:  # The owner's peer provides a small pack, whatever the text names.
        packed(home / "pack")
        data, _ = pinned_data(replace(manifest.data, source=f"tokens:{home}/pack"), "run.toml", home)
        manifest = replace(manifest, data=data)
    signed = SignedManifest.sign(manifest, identity)
    link = JoinLink(signed.run_id, via)
    publish_manifest(signed, link, PeerConfig(home=home, host="127.0.0.1", port=0), Telemetry())
    return str(link)


@contextmanager
def kept(link: str, home: Path) -> Iterator[None]:
    """A `flockstep keep` process with the home folder of the run's owner."""
    here = ["--home", str(home), "--host", "127.0.0.1", "--port", "0"]
    with Command("keep", link, *here, "--yes", stdout=subprocess.DEVNULL) as process:
        try:
            yield
        finally:
            process.kill()
