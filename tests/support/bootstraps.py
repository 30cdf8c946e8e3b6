"""Bootstraps as processes, and runs that are published through them."""

import subprocess
import sys
from pathlib import Path

from flockstep.dht.rendezvous import publish_manifest
from flockstep.dht.run.link import JoinLink
from flockstep.dht.run.manifest import Manifest, SignedManifest
from flockstep.peer.config import PeerConfig
from flockstep.peer.identity import Identity
from flockstep.peer.telemetry import Telemetry


class Bootstrap:
    """A `flockstep bootstrap` process; `address` waits until it serves."""

    def __init__(self, home: Path, *options: str, port: int = 0) -> None:
        command = [sys.executable, "-u", "-m", "flockstep", "bootstrap", "--home", str(home), "--host", "127.0.0.1"]
        self._process = subprocess.Popen(
            [*command, "--port", str(port), *options], stdout=subprocess.PIPE, text=True
        )
        self.pid = self._process.pid

    def address(self) -> str:
        """Return its multiaddr."""
        assert self._process.stdout is not None
        return next(word for line in self._process.stdout for word in line.split() if word.startswith("/ip4/"))

    def kill(self) -> None:
        """Send SIGKILL; repeated calls do nothing."""
        assert self._process.stdout is not None
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()


def publish_run(toml: str, via: tuple[str, ...], home: Path) -> str:
    """Publish the run of a `run.toml` text through these bootstraps, and return its link."""
    identity = Identity.generate()
    manifest = Manifest.from_toml(toml, where="run.toml", owner=identity.peer_id)
    signed = SignedManifest.sign(manifest, identity)
    link = JoinLink(signed.run_id, via)
    publish_manifest(signed, link, PeerConfig(home=home, host="127.0.0.1", port=0), Telemetry())
    return str(link)
